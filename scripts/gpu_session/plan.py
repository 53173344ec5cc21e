"""The plan of a session: what is run, in which order, and for how long."""

from scripts.gpu_session import aims, audits, drafts, products, race, seeds, speeds, torch_step
from scripts.gpu_session.session import Step

ALL_SECONDS = 900  # that there are, the start of the machine included
CALL_SECONDS = 600  # of one call at most
START_SECONDS = 90  # of the machine

STEPS = (
    Step("race", 1, 30, race.run),
    Step("seeds", 1, 120, seeds.run),
    Step("audit", 1, 60, audits.run),
    Step("products", 1, 105, products.run, needs_right_rounds=True),
    Step("why", 1, 0, seeds.explain),
    Step("torch starts", 2, 5, torch_step.start, needs_right_rounds=True),
    Step("models", 2, 205, speeds.run, needs_right_rounds=True),
    Step("drafts", 2, 120, drafts.run, needs_right_rounds=True),
    Step("torch", 2, 110, torch_step.run, needs_right_rounds=True),
    Step("aims", 2, 10, aims.run),
)


def steps_of(part: int | None) -> tuple[Step, ...]:
    """Returns the steps of a part; None: of both, which have to be run in one call then."""
    return tuple(step for step in STEPS if part in (None, step.part))
