"""Times starts by stage: from a process's first moment to the last token of its first answer.

Every start is a process of its own. The first one finds no compiled program ("cold"), the others
those that it left ("warm"); the C++ library and the model are there already.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from jspec.common.errors import InputError
from jspec.common.text_table import NOTHING, format_table
from jspec.evaluation.benchmarking.outcome import Outcome

_PROMPT = "Why is the sky blue?"
_START = """
import json, resource, sys, time

begin, options = float(sys.argv[1]), json.loads(sys.argv[2])
stages = {}

def peak_bytes():
    try:  # getrusage would count the parent's peak as well
        with open("/proc/self/status") as file:
            (line,) = [line for line in file if line.startswith("VmHWM")]
        return 1024 * int(line.split()[1])
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak

def mark(stage):
    stages[stage] = {"seconds": time.time() - begin, "peak_bytes": peak_bytes()}

mark("Python")
import jax
mark("import jax")
import jspec
from jspec.common.compile_clock import compile_clock
mark("import jspec")
clock = compile_clock()
generator = jspec.Generator.load(options["target"], drafter=options["drafter"])
mark("weights and tokenizer")
settings = jspec.Settings(max_new_tokens=options["max_new_tokens"])
pieces = generator.stream(options["prompt"], settings)
piece = next(pieces)
mark("first token")
first = clock.seconds
array_bytes = sum(array.nbytes for array in jax.live_arrays())
for piece in pieces:
    pass
mark("answer")
print(json.dumps({
    "stages": stages,
    "compile_seconds": {"first token": first, "answer": clock.seconds},
    "array_bytes": array_bytes,
    "num_tokens": len(piece.result.token_ids),
}))
"""


def measure_start(
    target: str, drafter: str, max_new_tokens: int, repeats: int
) -> Iterator[Outcome]:
    """Starts one process after the other; yields after each warm one.

    Args:
      target: the model's name.
      drafter: its name.
      max_new_tokens: of the answer.
      repeats: warm starts.

    Raises:
      InputError: a start failed; its last word.
    """
    options = {"target": target, "drafter": drafter, "prompt": _PROMPT,
               "max_new_tokens": max_new_tokens}  # fmt: skip
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = _start(cache, options), []
        for _ in range(repeats):
            warm.append(_start(cache, options))
            yield Outcome({"cold": cold, "warm": warm}, _format(cold, warm))


def _start(cache: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns what one process says of its start; compiled programs are in the folder `cache`."""
    done = subprocess.run(
        [sys.executable, "-c", _START, repr(time.time()), json.dumps(options)],
        env=os.environ
        | {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # as jspec's own cache has it
        },
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        *_, last = ["no message", *done.stderr.strip().splitlines()]
        raise InputError(f"a start failed with status {done.returncode}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def _format(cold: dict[str, Any], warm: list[dict[str, Any]]) -> str:
    """Returns a table of the seconds since the beginning, and the most memory by then."""
    rows = []
    for stage, one in cold["stages"].items():
        seconds = statistics.median(w["stages"][stage]["seconds"] for w in warm)
        peak = statistics.median(w["stages"][stage]["peak_bytes"] for w in warm)
        rows.append([stage, f"{one['seconds']:.2f}", f"{seconds:.2f}", f"{peak / 1e6:.0f}"])
    for stage, one in cold["compile_seconds"].items():
        seconds = statistics.median(w["compile_seconds"][stage] for w in warm)
        rows.append([f"compiling, by the {stage}", f"{one:.2f}", f"{seconds:.2f}", NOTHING])
    arrays = f"{warm[0]['array_bytes'] / 1e6:.0f}"
    rows.append(["arrays at the first token", NOTHING, NOTHING, arrays])
    return format_table(["seconds since the beginning", "cold", "warm", "peak MB, warm"], rows)
