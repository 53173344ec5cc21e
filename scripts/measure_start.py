"""Times starts by stage: from a process's first moment to the last token of its first answer.

`python scripts/measure_start.py --output_json=start.jsonl`

Every start is a process of its own. The first one finds no compiled program ("cold"), the others
those that it left ("warm"); C++ and model are there already. Times are seconds since the process
began; the memory is the most that it has had by then, beside that of its arrays: weights, caches
and what decoding remembers.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import flags

from jspec.common import cli
from jspec.common.errors import InputError, check_range
from jspec.common.json_lines import JsonLinesWriter
from jspec.generation import provenance
from jspec.generation.generator import DEFAULT_TARGET

_TARGET = flags.DEFINE_string("target", DEFAULT_TARGET, "The model.")
_DRAFTER = flags.DEFINE_string("drafter", None, "Default: what jspec.generate drafts with.")
_PROMPT = flags.DEFINE_string("prompt", "Why is the sky blue?", "The prompt.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Tokens the answer may have.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Warm starts.")
_OUTPUT_JSON = flags.DEFINE_string("output_json", None, "Write everything measured to this file.")

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


def main() -> None:
    """Starts one process after the other, prints a table, writes JSON."""
    check_range("repeats", _REPEATS.value, 1, 1000)
    output = JsonLinesWriter(_OUTPUT_JSON.value) if _OUTPUT_JSON.value else None
    with tempfile.TemporaryDirectory() as folder:
        starts = [start(folder) for _ in range(1 + _REPEATS.value)]
    cold, warm = starts[0], starts[1:]
    print(f"{'seconds since the beginning':<30}   cold   warm  peak memory (warm)")
    for stage in cold["stages"]:
        warm_seconds = statistics.median(one["stages"][stage]["seconds"] for one in warm)
        peak = statistics.median(one["stages"][stage]["peak_bytes"] for one in warm)
        seconds = cold["stages"][stage]["seconds"]
        print(f"{stage:<30}{seconds:7.2f}{warm_seconds:7.2f}{peak / 1e6:13.0f} MB")
    for stage in cold["compile_seconds"]:
        warm_seconds = statistics.median(one["compile_seconds"][stage] for one in warm)
        print(f"{f'compiling, by the {stage}':<30}{cold['compile_seconds'][stage]:7.2f}"
              f"{warm_seconds:7.2f}")  # fmt: skip
    print(f"arrays at the first token: {warm[0]['array_bytes'] / 1e6:.0f} MB")
    if output is not None:
        with output:
            output.write(provenance.environment() | {"cold": cold, "warm": warm})


def start(cache: str) -> dict[str, Any]:
    """Returns what one process says of its start.

    Args:
      cache: folder of compiled programs.

    Raises:
      InputError: it failed; its last word.
    """
    options = {flag.name: flag.value for flag in (_TARGET, _DRAFTER, _PROMPT, _MAX_NEW_TOKENS)}
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


if __name__ == "__main__":
    cli.run_main(main)
