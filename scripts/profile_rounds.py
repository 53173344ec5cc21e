"""Shows where an answer's time goes, operation by operation, from one profiler trace.

`python scripts/profile_rounds.py --target=random:llama3.2-1b --drafter=prompt_lookup`

An operation's own time is its time without those within it; operations whose names differ by
numbers only are added up. On a GPU a line is one of its streams, whose idle share is what launching
and the host cost; on a CPU it is a thread. The profiler slows down what it watches: shares count,
not times. --trace_folder keeps the trace, for a viewer such as XProf.
"""

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
from absl import flags

from jspec.common import cli
from jspec.common.errors import InputError, check_range
from jspec.common.json_lines import JsonLinesWriter
from jspec.drafters import choose_drafter
from jspec.evaluation.benchmarking.profile import read_trace, summarise_line
from jspec.generation import drafter_flags, provenance
from jspec.generation.drafter_flags import read_drafter
from jspec.generation.flag_values import parse_num_draft_tokens
from jspec.generation.generator import DEFAULT_TARGET, Generator
from jspec.generation.request import Request, Settings
from jspec.weights.resolver import load_model

flags.adopt_module_key_flags(drafter_flags)  # so that --help lists them
_TARGET = flags.DEFINE_string("target", DEFAULT_TARGET, "The model.")
_DRAFT = flags.DEFINE_string("draft", None, "A draft model.")
_NUM_DRAFT_TOKENS = flags.DEFINE_string("num_draft_tokens", "5", "Drafts a round.")
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 128, "Length of the prompt, one token over.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Tokens the answer may have.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 takes the most likely token.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of the weights.")
_TOP = flags.DEFINE_integer("top", 12, "Operations to show of each line.")
_TRACE_FOLDER = flags.DEFINE_string("trace_folder", None, "Keep the trace here.")
_OUTPUT_JSON = flags.DEFINE_string("output_json", None, "Write the summary to this file.")


def main() -> None:
    """Answers once to compile and once under the profiler; prints and writes the summary."""
    check_range("prompt_tokens", _PROMPT_TOKENS.value, 1, 2**20)
    check_range("top", _TOP.value, 1, 1000)
    settings = Settings(max_new_tokens=_MAX_NEW_TOKENS.value, temperature=_TEMPERATURE.value)
    name, options = read_drafter()
    drafter = choose_drafter(
        name, has_draft=_DRAFT.value is not None, target=_TARGET.value, options=options
    )
    number = parse_num_draft_tokens(_NUM_DRAFT_TOKENS.value)
    output = JsonLinesWriter(_OUTPUT_JSON.value) if _OUTPUT_JSON.value else None
    generator = Generator(
        load_model(_TARGET.value, dtype=_DTYPE.value),
        load_model(_DRAFT.value, dtype=_DTYPE.value) if _DRAFT.value else None,
        drafter=drafter,
        drafter_options=options,
        num_draft_tokens=number,
    )
    request = Request([1] * _PROMPT_TOKENS.value, settings)
    generator.generate(request)
    with _folder(_TRACE_FOLDER.value) as folder:
        with jax.profiler.trace(str(folder)):
            stats = generator.generate(request).stats
        lines = [summarise_line(*line) for line in read_trace(folder)]
    if not lines:
        raise InputError("expected operations in the profiler's trace, got none")
    print(
        f"{stats.num_rounds} rounds after the prompt, {stats.decode_seconds:.3f} s, in the profiler"
    )
    for line in sorted(lines, key=lambda line: -line["busy_seconds"]):
        _print_line(line, _TOP.value)
    if output is not None:
        record = {
            "drafter": drafter,
            "num_draft_tokens": number,
            "temperature": settings.temperature,
            "num_rounds": stats.num_rounds,
            "decode_seconds": stats.decode_seconds,
            "lines": lines,
        }
        with output:
            output.write(provenance.environment() | record)


@contextlib.contextmanager
def _folder(kept: str | None) -> Iterator[pathlib.Path]:
    if kept is not None:
        yield pathlib.Path(kept)
        return
    with tempfile.TemporaryDirectory() as name:
        yield pathlib.Path(name)


def _print_line(line: dict[str, Any], top: int) -> None:
    busy, span = line["busy_seconds"], line["span_seconds"]
    share = busy / span if span else 1.0
    print(f"\n{line['line']}: busy {1e3 * busy:.1f} of {1e3 * span:.1f} ms ({share:.0%})")
    for operation in line["operations"][:top]:
        seconds = operation["own_seconds"]
        print(f"  {1e3 * seconds:9.2f} ms {operation['runs']:7d} x  {operation['name'][:80]}")
    if rest := line["operations"][top:]:
        seconds = sum(operation["own_seconds"] for operation in rest)
        print(f"  {1e3 * seconds:9.2f} ms in {len(rest)} others")


if __name__ == "__main__":
    cli.run_main(main)
