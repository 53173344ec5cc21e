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
from jspec.lab.benchmarking.measurement import Measurement, Outcome

_START = """
import json, resource, sys, time
begin, (target, drafter, dtype, max_new_tokens) = float(sys.argv[1]), sys.argv[2:]
stages = {}

def mark(stage):
    seconds = time.time() - begin
    try:  # getrusage would count the parent's peak as well
        with open("/proc/self/status") as file:
            (line,) = [line for line in file if line.startswith("VmHWM")]
        peak_bytes = 1024 * int(line.split()[1])
    except OSError:  # macOS
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stages[stage] = {"seconds": seconds, "peak_bytes": peak_bytes}

mark("Python")
import jax
mark("import jax")
import jspec
from jspec.common.timing import compile_clock
mark("import jspec")
clock = compile_clock()
generator = jspec.Generator.load(target, drafter=drafter, dtype=dtype)
mark("weights and tokenizer")
settings = jspec.SamplingParams(max_new_tokens=int(max_new_tokens))
chunks = generator.stream("Why is the sky blue?", settings)
chunk = next(chunks)
mark("first token")
compile_seconds = {"first token": clock.seconds}
array_bytes = sum(array.nbytes for array in jax.live_arrays())
*_, chunk = chunks
mark("answer")
compile_seconds["answer"] = clock.seconds
print(json.dumps({
    "stages": stages, "compile_seconds": compile_seconds, "array_bytes": array_bytes,
    "num_tokens": len(chunk.result.token_ids),
}))
"""


def measure_start(asked: Measurement) -> Iterator[Outcome]:
    """Starts one process after the other; yields after each warm one.

    Raises:
      InputError: a start failed; its last word.
    """
    (method,) = asked.methods.values()
    arguments = [asked.target, method.drafter, asked.dtype, str(asked.max_new_tokens)]
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = _start(cache, arguments), []
        for _ in range(asked.repeats):
            warm.append(_start(cache, arguments))
            yield Outcome({"cold": cold, "warm": warm}, _format(cold, warm))


def _start(cache: str, arguments: list[str]) -> dict[str, Any]:
    """Returns what one process says of its start; compiled programs are in the folder `cache`."""
    own = {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # as jspec's own cache has it
    }
    command = [sys.executable, "-c", _START, repr(time.time()), *arguments]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    if done.returncode:
        *_, last = ["no message", *done.stderr.strip().splitlines()]
        raise InputError(f"a start failed with status {done.returncode}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def _format(cold: dict[str, Any], warm: list[dict[str, Any]]) -> str:
    """Returns a table of the seconds since the beginning, and the most memory by then."""
    rows = []
    for stage, one in cold["stages"].items():
        seconds, peak = (statistics.median(other["stages"][stage][key] for other in warm)
                         for key in ("seconds", "peak_bytes"))  # fmt: skip
        rows.append([stage, f"{one['seconds']:.2f}", f"{seconds:.2f}", f"{peak / 1e6:.0f}"])
    for stage, one in cold["compile_seconds"].items():
        seconds = statistics.median(other["compile_seconds"][stage] for other in warm)
        rows.append([f"compiling, by the {stage}", f"{one:.2f}", f"{seconds:.2f}", NOTHING])
    arrays = f"{warm[0]['array_bytes'] / 1e6:.0f}"
    rows.append(["arrays at the first token", NOTHING, NOTHING, arrays])
    return format_table(["seconds since the beginning", "cold", "warm", "peak MB, warm"], rows)
