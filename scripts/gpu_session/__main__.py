"""Checks jspec on a machine with a GPU, and measures its speed there, in a quarter of an hour.

    python -m scripts.gpu_session --part=1    correctness, products and layers: 5 min 15 s
    python -m scripts.gpu_session --part=2    models, drafts, torch, the table of aims: 7 min 30 s
    python -m scripts.gpu_session --rehearse  every step with tiny models, on any machine: 5 min

A part is made of steps. A step ends when its seconds (s) are over; what it does not use, later
steps may.

| step | s | what it does |
|---|---|---|
| race | 25 | runs the smallest program in which a loop of a CUDA graph may start too early, with a carried and with a computed condition: in a graph, without a graph, in a serialised graph, without early launches |
| seeds | 120 | compares answers of a draft model in float32, by the rules `coupled` and `rejection`, made in four processes at once: without a graph, in a graph, with the old loops in a graph, in a graph without early launches |
| audit | 75 | checks the distribution of `rejection` with a draft model over 4,096 rows, the caches, and the greedy answers of SmolLM2 with its head |
| products | 95 | times layers of 1B and 3B with each choice of `JSPEC_KERNELS`, and their products by XLA, by XLA with rows padded to 16, and by CUDA C++ |
| why | 0 | where rounds are wrong, and time was saved: tries what may be the cause |
| torch starts | 5 | starts the process in which torch compiles |
| models | 205 | times 1B and 3B with the best kernels in CUDA C++ and the best by XLA: calls on 1, 6 and 16 tokens, rounds without drafts, 8 and 16 rounds a visit, 8 and 32 rows, the host |
| drafts | 120 | times 3B with a quantised 1B (4 drafts) at given rates of acceptance, with a head of EAGLE's shape, and with a lookup |
| torch | 110 | times one step of transformers' Llama, compiled by torch, on a static cache, while nothing else runs |
| aims | 10 | prints each aim beside what was measured |

What follows from the results:

- Old loops wrong in a graph, new loops right: the fault is known and mended ("settled"). The same
  holds where old loops do not give all answers in time, as they can run for ever, if the step
  `race` has shown a carried condition to be wrong in a graph and a computed one to be right.
- Old loops without all answers, and nothing shown by `race`: new loops are right, and of the old
  ones nothing is known ("old loops unknown").
- All loops right, the old ones too: the fault did not show ("not reproduced").
- New loops wrong, or without all answers, in a graph only: later steps run without a graph (`JSPEC_ONE_GRAPH=0`), and the
  step `why` looks for the part of a graph that causes it.
- New loops wrong without a graph, too: no speed is measured, and the step `why` takes the time.
- The kernels in CUDA C++ are chosen where they are 3 % faster than XLA's.

Every result is a line of session.jsonl, written at once, in the folder that --results names. Run
the same command again to go on after an interruption: steps that are done are not run again. A
line of the kind "call" holds commit, date, versions, hardware and command. The exit status is 0 if
all steps are done, and 1 if not; the last line says which are not, and why.

The machine needs no network. It needs Python 3.11 or newer; jax for its GPU, flax, and the other
packages that jspec imports; torch and transformers for the steps on torch. jspec need not be
installed. A large file of a model can be brought in parts: `split -b 40M -d FILE FILE.` makes
FILE.00, FILE.01 and so on, and --models=FOLDER joins them.
"""  # noqa: E501

import datetime
import os
import pathlib
import sys
import threading
from collections.abc import Mapping

if __name__ == "__main__":  # before JAX is imported
    # A part of the GPU's memory is left to the processes beside it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is asked of a hub, nor waited for
    os.environ.setdefault("JSPEC_CACHE", str(pathlib.Path.home() / ".cache" / "jspec"))
    if any(word.lstrip("-").startswith("rehearse") for word in sys.argv[1:]):
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # compiling takes longest
        os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import jax
from absl import flags

from jspec.cli import program as cli
from jspec.common.errors import InputError
from jspec.common.journal import Journal
from jspec.common.user_cache import use_compile_cache
from jspec.generation.provenance import git_state
from jspec.kernels import environment, library
from scripts.gpu_session import BEGIN, aims, correctness, products, speeds, torch_step
from scripts.gpu_session.session import ROOT, Session, Step, run_steps
from scripts.gpu_session.subjects import check_backend, check_models, join_models

ALL_SECONDS = 900  # that there are, the start of the machine included
CALL_SECONDS = 600  # of one call at most
START_SECONDS = 90  # of the machine

STEPS = (
    Step("race", 1, 25, correctness.run_race),
    Step("seeds", 1, 120, correctness.run_seeds),
    Step("audit", 1, 75, correctness.run_audit),
    Step("products", 1, 95, products.run, needs_right_rounds=True),
    Step("why", 1, 0, correctness.explain),
    Step("torch starts", 2, 5, torch_step.start, needs_right_rounds=True),
    Step("models", 2, 205, speeds.measure_models, needs_right_rounds=True),
    Step("drafts", 2, 120, speeds.measure_drafts, needs_right_rounds=True),
    Step("torch", 2, 110, torch_step.run, needs_right_rounds=True),
    Step("aims", 2, 10, aims.run),
)

FILE = "session.jsonl"
_MARGIN = 15  # seconds of a call that are left for what comes after the program
_PATIENCE = 4  # a rehearsal's steps may take as many times as long

_PART = flags.DEFINE_integer("part", None, "Which steps to run: part 1 or 2; by default all.", 1, 2)
_UNTIL = flags.DEFINE_integer(
    "until", None, "Stop this many seconds after the start; by default after 585, and in a "
    "rehearsal after 2340. Steps for which no time is left are named at the end.", 5, 3600,
)  # fmt: skip
_REHEARSE = flags.DEFINE_boolean(
    "rehearse",
    False,
    "Run every step with tiny models, to test the program; the figures mean nothing.",
)
_RESULTS = flags.DEFINE_string(
    "results", None, "The folder to write session.jsonl to, a new one or that of a call to be "
    "continued; by default benchmarks/results/DATE-BACKEND in the repository.",
)  # fmt: skip
_MODELS = flags.DEFINE_string(
    "models", None, "A folder with files of published models, whole or in parts, such as SmolLM2's."
)
_COMMIT = flags.DEFINE_string(
    "commit", None, "The commit to record, where the folder is no git checkout."
)


def main() -> None:
    """Runs the steps of the flags; the exit status is 1 if one has failed or was ended."""
    if _RESULTS.value is not None:
        check_results(pathlib.Path(_RESULTS.value))
    if _MODELS.value is not None:
        check_models(_MODELS.value)
    backend = check_backend(is_rehearsal=_REHEARSE.value)
    is_rehearsal, scale = _REHEARSE.value, _PATIENCE if _REHEARSE.value else 1
    usual = (CALL_SECONDS - _MARGIN) * scale
    until = usual if _UNTIL.value is None else _UNTIL.value
    lines = [] if _MODELS.value is None else join_models(pathlib.Path(_MODELS.value))
    session = Session(Journal(_journal_path(backend)), BEGIN, is_rehearsal=is_rehearsal)
    use_compile_cache()
    _begin_call(session)
    for line in lines:
        session.write("model", line, said=line)
    # nvcc takes a while: it compiles beside the first steps, which do not need it.
    threading.Thread(target=library.is_cuda_available, daemon=True).start()
    problems = run_steps(session, steps_of(_PART.value), until=until, scale=scale)
    _end_call(session, problems, until)
    os._exit(int(bool(problems)))  # whatever abandoned threads are still doing


def _end_call(session: Session, problems: Mapping[str, str], until: float) -> None:
    line = "all steps are done"
    if problems:
        by_reason: dict[str, list[str]] = {}
        for name, reason in problems.items():
            by_reason.setdefault(reason, []).append(name)
        listed = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())
        line = f"status 1, not done in {until:.0f} s: {listed}; the same command goes on there"
    seconds = round(session.elapsed(), 1)
    session.write("end", line, status=int(bool(problems)), seconds=seconds, problems=dict(problems))
    session.close()


def steps_of(part: int | None) -> tuple[Step, ...]:
    """Returns the steps of a part; None: of both parts, which one call has to run then."""
    return tuple(step for step in STEPS if part in (None, step.part))


def _journal_path(backend: str) -> pathlib.Path:
    """Returns the journal's path; makes its folder.

    Raises:
      InputError: it cannot be made, or holds something else than a journal.
    """
    suffix = "-rehearsal" if _REHEARSE.value else ""
    usual = ROOT / "benchmarks" / "results" / f"{datetime.date.today()}-{backend}{suffix}"
    folder = usual if _RESULTS.value is None else pathlib.Path(_RESULTS.value)
    check_results(folder, makes=True)
    return folder / FILE


def check_results(folder: pathlib.Path, *, makes: bool = False) -> None:
    """Refuses a folder for results that is a file, or that holds files but no journal."""
    try:
        if makes:
            folder.mkdir(parents=True, exist_ok=True)
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
    except OSError as error:
        expected = "expected a folder in --results"
        raise InputError(f"{expected}, got {folder}: {error.strerror}") from None
    if names and FILE not in names:
        raise InputError(f"expected an empty folder or one with {FILE} in --results, got {folder}")


def _begin_call(session: Session) -> None:
    """Writes what the figures of this call are of.

    Raises:
      InputError: the journal is one of a rehearsal and this call is none, or the reverse.
    """
    before = [call for call in session.records if call["kind"] == "call"]
    if any(call["is_rehearsal"] != session.is_rehearsal for call in before):
        kinds = ("of a rehearsal", "of a measurement")
        expected, got = kinds if session.is_rehearsal else reversed(kinds)
        raise InputError(f"expected a journal {expected} in --results, got one {got}")
    git = git_state()
    commit = _COMMIT.value or (git and git["commit"])
    values = environment() | {
        "commit": commit, "is_dirty": git and git["is_dirty"],
        "command": ["python", "-m", "scripts.gpu_session", *sys.argv[1:]],
        "is_rehearsal": session.is_rehearsal,
    }  # fmt: skip
    known = f"commit {commit or 'unknown: say --commit'}, {values['device']}"
    session.write("call", f"begins: {known}, jax {jax.__version__}", **values)


if __name__ == "__main__":
    cli.run_main(main)
