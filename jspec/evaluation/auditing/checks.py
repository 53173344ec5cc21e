"""All checks of an audit, in their order."""

from collections.abc import Iterator

from jspec.evaluation.auditing.caches import check_caches
from jspec.evaluation.auditing.check import Check
from jspec.evaluation.auditing.distribution import NUM_TOKENS, check_distribution
from jspec.evaluation.auditing.edges import check_edges
from jspec.evaluation.auditing.parity import check_parity
from jspec.evaluation.auditing.rows import Rows, choose_context
from jspec.evaluation.auditing.seeds import check_seeds
from jspec.evaluation.auditing.subject import Subject
from jspec.generation.encode_prompt import encode_prompt
from jspec.speculation.acceptance.types import Temperatures

_TEXTS = (
    "Why is the sky blue?",
    "Name three rivers and three mountains, then name the three rivers again.",
    "Write a Python function that adds two numbers.",
    "1 2 3 4 1 2 3 4 1 2 3",
)


def run_checks(subject: Subject, *, num_rows: int, max_new_tokens: int) -> Iterator[Check]:
    """Yields the outcome of every check, the cheap ones first.

    Args:
      subject: what is audited.
      num_rows: independent rows of the test of the distribution.
      max_new_tokens: of an answer, for parity and seeds.
    """
    yield check_edges(subject.rule)
    prompts = [encode_prompt(subject.target, text, chat=None, system=None) for text in _TEXTS]
    if subject.rule.temperatures is not Temperatures.POSITIVE:
        for dtype in ("float32", "bfloat16"):
            yield check_parity(subject, dtype, prompts, max_new_tokens)
    yield check_seeds(subject, prompts, max_new_tokens)
    context = choose_context(subject.target, subject.settings)
    rows = Rows(subject, context, NUM_TOKENS)
    yield check_caches(subject, rows, context)
    yield from check_distribution(subject, rows, context, num_rows)
    if subject.drafter != "none":
        yield check_drafts(rows)


def check_drafts(rows: Rows) -> Check:
    """Checks that the rows so far had any drafts; without them their distribution says nothing of a
    drafter.

    Args:
      rows: compiled rounds that have run.
    """
    return Check(
        "drafts",
        rows.num_proposed > 0,
        f"{rows.num_accepted} of {rows.num_proposed} were kept in the rounds of these rows",
        {"num_proposed": rows.num_proposed, "num_accepted": rows.num_accepted},
    )
