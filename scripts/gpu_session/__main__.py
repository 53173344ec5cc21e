"""Checks and measures jspec on a machine with a GPU, no network and a quarter of an hour.

    python -m scripts.gpu_session --part=1    correctness, then products and layers; 5 min 15 s
    python -m scripts.gpu_session --part=2    models, drafts, torch, the table of aims; 7 min 30 s
    python -m scripts.gpu_session --rehearse  all of it with tiny models, on any machine

| step | s | what |
|---|---|---|
| race | 30 | the smallest program in which a loop of a CUDA graph may start too early: a carried and a computed condition; with a graph, without, serialised, without early launches |
| seeds | 120 | `coupled` and `rejection` with a draft model in float32, four processes at once: no graph, a graph, the old loops in a graph, a graph without early launches; the failing token's index |
| audit | 60 | `rejection` with a draft model, float32, 4,096 rows; greedy parity of SmolLM2 with its head |
| products | 105 | layers of 1B and 3B by each choice of `JSPEC_KERNELS`; products by XLA, padded to 16 rows, and by CUDA C++ |
| why | 0 | further arms where rounds are wrong, in what the other steps have saved |
| torch starts | 5 | the process of the step torch begins to compile |
| models | 205 | 1B and 3B by the best two choices: calls on 1, 6 and 16 tokens, plain rounds, 8 and 16 rounds a visit, 8 and 32 rows, the host |
| drafts | 120 | 3B with a quantised 1B at given acceptance (4 drafts); EAGLE's shape; a lookup |
| torch | 110 | a step of transformers' Llama that torch has compiled, on a static cache, timed alone |
| aims | 10 | what was aimed at, beside what was measured |

What the results decide:

- The old loops are wrong in a graph, and the new ones right: that was the fault, and it is settled.
- The new loops are wrong, in a graph only: the graph stays off (`JSPEC_ONE_GRAPH=0`) for all later
  steps, and the step `why` looks for the part of a graph that it takes.
- They are wrong without a graph, too: no figure of speed is worth its time, and the rest goes to
  `why`.
- CUDA C++ is chosen where it is 3 % faster than XLA.

The machine needs Python 3.11 or newer with jax for its GPU, flax and what jspec imports, and torch
with transformers for the peer; jspec need not be installed. Each line of SESSION.jsonl, in the
folder of --results, is on the disk as soon as it is known, and a call goes on where an earlier one
has ended: a step that is done is not run again. The lines of kind "call" hold commit, date,
versions, hardware and command.

SmolLM2's file may be larger than what can be carried at once: `split -b 40M -d FILE FILE.` makes
FILE.00, FILE.01 and so on, and --models joins them.
"""  # noqa: E501

import datetime
import os
import pathlib
import sys
import threading

if __name__ == "__main__":  # before JAX is imported
    # A part of the GPU's memory is left to the processes beside this one.
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
from jspec.generation.provenance import environment, git_state
from scripts.gpu_session import BEGIN
from scripts.gpu_session.children import ROOT
from scripts.gpu_session.plan import CALL_SECONDS, steps_of
from scripts.gpu_session.products import has_cuda
from scripts.gpu_session.session import Session, leave, run_steps
from scripts.gpu_session.subjects import join_models

FILE = "session.jsonl"
_MARGIN = 15  # seconds of a call that are left for what comes after the program
_PATIENCE = 4  # a rehearsal's steps may take as many times as long

_PART = flags.DEFINE_integer("part", None, "The part to run: 1 or 2; by default both.", 1, 2)
_UNTIL = flags.DEFINE_integer(
    "until", None, "Seconds after its start when the last step has to end; by default those of a "
    "call.", 5, 3600,
)  # fmt: skip
_REHEARSE = flags.DEFINE_boolean("rehearse", False, "Tiny models; figures mean nothing.")
_RESULTS = flags.DEFINE_string(
    "results", None, "The folder of session.jsonl, a new one or that of an earlier call; by "
    "default benchmarks/results/DATE-BACKEND in the repository.",
)  # fmt: skip
_MODELS = flags.DEFINE_string(
    "models", None, "A folder with files of published models, whole or in parts."
)
_COMMIT = flags.DEFINE_string(
    "commit", None, "The commit that is measured, where the checkout has no history to tell it."
)


def main() -> None:
    """Runs the steps of the flags; the exit status is 1 if one has failed or was ended."""
    backend = jax.default_backend()
    if backend != "gpu" and not _REHEARSE.value:
        raise InputError(
            f"expected a GPU that JAX can use, or --rehearse; its backend is {backend}"
        )
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
    threading.Thread(target=has_cuda, daemon=True).start()
    status = run_steps(session, steps_of(_PART.value), until=until, scale=scale)
    session.write("end", f"the call ends with status {status}", status=status,
                  seconds=round(session.elapsed(), 1))  # fmt: skip
    session.close()
    leave(status)


def _journal_path(backend: str) -> pathlib.Path:
    """Returns the journal's path; makes its folder.

    Raises:
      InputError: it cannot be made, or holds something else than a journal.
    """
    suffix = "-rehearsal" if _REHEARSE.value else ""
    usual = ROOT / "benchmarks" / "results" / f"{datetime.date.today()}-{backend}{suffix}"
    folder = usual if _RESULTS.value is None else pathlib.Path(_RESULTS.value)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise InputError(
            f"expected a folder in --results, got {folder}: {error.strerror}"
        ) from None
    if others and FILE not in others:
        raise InputError(f"expected an empty folder or one with {FILE} in --results, got {folder}")
    return folder / FILE


def _begin_call(session: Session) -> None:
    """Writes what the figures of this call are of.

    Raises:
      InputError: the journal is one of a rehearsal and this call is none, or the reverse.
    """
    before = [one for one in session.records if one["kind"] == "call"]
    if any(one["is_rehearsal"] != session.is_rehearsal for one in before):
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
