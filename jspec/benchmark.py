"""Times jspec's drafters against jspec plain and transformers, on the same prompts, in one process.

`python -m jspec.benchmark --prompts_file=configs/prompts.jsonl --output_json=results.json`

Every way of generating answers every prompt in turn, repeat after repeat, after one round of
warm-up: a machine that slows down slows all of them. Decoding is greedy. A time is that of a whole
answer, prefill included, compilation excluded because everything has been compiled in the warm-up.
"""

import dataclasses
import resource
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from jspec import cli, drafter_flags, generator, provenance
from jspec.analysis.ratios import speed_ratio
from jspec.drafter_flags import read_options
from jspec.drafters import DrafterOptions, needs_draft_model, without_unread
from jspec.errors import InputError
from jspec.generator import Generator
from jspec.json_lines import JsonLinesWriter
from jspec.peers import GenerateFn, has_transformers, transformers_generators
from jspec.prompts import read_prompts
from jspec.request import Request, Settings
from jspec.ways import Way, check_ways, parse_ways
from jspec.weights.resolver import LoadedModel, load_model

flags.adopt_module_key_flags(drafter_flags)  # so that --help lists them
_PEER_DRAFT_TOKENS = 5
_TARGET = flags.DEFINE_string("target", generator.DEFAULT_TARGET, "The model.")
_DRAFT = flags.DEFINE_string("draft", None, "A draft model, for the drafter `model`.")
_DRAFTERS = flags.DEFINE_list(
    "drafters",
    ["none", "prompt_lookup"],
    "What to measure; DRAFTER:NUMBER gives one a number of drafts of its own, or auto.",
)
_NUM_DRAFT_TOKENS = flags.DEFINE_string(
    "num_draft_tokens", str(generator.DEFAULT_NUM_DRAFT_TOKENS), "Drafts a round."
)
_PROMPTS_FILE = flags.DEFINE_string(
    "prompts_file", "configs/prompts.jsonl", "JSONL with `prompt` or Spec-Bench's `turns` a line."
)
_NUM_PROMPTS = flags.DEFINE_integer(
    "num_prompts", 13, "Take so many prompts, evenly spaced over the file."
)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Tokens an answer may have.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "How often each answer is timed.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of the weights.")
_TARGET_QUANTIZATION = flags.DEFINE_enum(
    "target_quantization", "none", cli.QUANTIZATIONS, "Rounds the target's weights: another model."
)
_DRAFT_QUANTIZATION = flags.DEFINE_enum(
    "draft_quantization", "none", cli.QUANTIZATIONS, "Rounds the draft's weights."
)
_TRANSFORMERS = flags.DEFINE_bool(
    "transformers", None, "Measure transformers too. Default: if torch is installed."
)
_OUTPUT_JSON = flags.DEFINE_string("output_json", None, "Write everything measured to this file.")


class Timings(NamedTuple):
    """What one way of generating took.

    Attributes:
      seconds: [repeats, prompts].
      tokens: [repeats, prompts], how many.
      token_ids: the answer to each prompt.
    """

    seconds: np.ndarray
    tokens: np.ndarray
    token_ids: list[list[int]]


def main() -> None:
    """Reads the flags, measures, prints a table, writes JSON."""
    own_ways = parse_ways(_DRAFTERS.value, _NUM_DRAFT_TOKENS.value)
    if _DRAFT_QUANTIZATION.value != "none" and not _DRAFT.value:
        raise InputError("expected --draft with --draft_quantization")
    drafter_options = read_options()
    check_ways(own_ways, drafter_options, has_draft=bool(_DRAFT.value))
    if _REPEATS.value < 1 or _NUM_PROMPTS.value < 1:
        raise InputError("expected at least one repeat and one prompt")
    Settings(max_new_tokens=_MAX_NEW_TOKENS.value)  # refuses a bad number before anything is loaded
    texts = _spread([one.text for one in read_prompts(_PROMPTS_FILE.value)], _NUM_PROMPTS.value)
    if not texts:
        raise InputError(f"expected at least one prompt in {_PROMPTS_FILE.value}, got none")
    output = None if _OUTPUT_JSON.value is None else JsonLinesWriter(_OUTPUT_JSON.value)
    target = _load(_TARGET.value, _TARGET_QUANTIZATION.value)
    draft = _load(_DRAFT.value, _DRAFT_QUANTIZATION.value) if _DRAFT.value else None
    ways = jspec_generators(target, draft, own_ways, drafter_options)
    prompts = [Generator(target, drafter="none").encode_prompt(text) for text in texts]
    _warm_up(ways, prompts, _MAX_NEW_TOKENS.value)
    peak_bytes = _peak_bytes()
    if has_transformers() if _TRANSFORMERS.value is None else _TRANSFORMERS.value:
        peers = transformers_generators(target, _PEER_DRAFT_TOKENS)
        _warm_up(peers, prompts[:1], _MAX_NEW_TOKENS.value)
        ways |= peers
    timings = measure(ways, prompts, _MAX_NEW_TOKENS.value, _REPEATS.value)
    report = summarise(timings, base=next(iter(ways)))
    print(format_table(report))
    print(f"peak memory of jspec, before transformers was loaded: {peak_bytes / 1e9:.2f} GB")
    if output is not None:
        with output:
            output.write(
                provenance.environment()
                | {
                    "flags": _flag_values(),
                    "drafter_options": dataclasses.asdict(drafter_options),
                    "peak_bytes": peak_bytes,
                    "ways": report,
                    "timings": _plain(timings),
                }
            )


def _load(name: str, quantization: str) -> LoadedModel:
    kind = cli.parse_quantization(quantization)
    return load_model(name, dtype=_DTYPE.value, quantization=kind)


def jspec_generators(
    target: LoadedModel,
    draft: LoadedModel | None,
    ways: Mapping[str, Way],
    options: DrafterOptions,
) -> dict[str, GenerateFn]:
    """Returns greedy generation by jspec in each way; see `peers.GenerateFn`."""

    def make(way: Way) -> GenerateFn:
        loaded = Generator(
            target,
            draft if needs_draft_model(way.drafter) else None,
            drafter=way.drafter,
            drafter_options=without_unread(way.drafter, options),
            num_draft_tokens=way.num_draft_tokens,
        )

        def generate(prompt: list[int], max_new_tokens: int) -> list[int]:
            request = Request(prompt, Settings(max_new_tokens=max_new_tokens))
            return loaded.generate(request).token_ids

        return generate

    return {name: make(way) for name, way in ways.items()}


def _warm_up(ways: Mapping[str, GenerateFn], prompts: list[list[int]], max_new_tokens: int) -> None:
    for name, generate in ways.items():
        print(f"warming up {name}", file=sys.stderr, flush=True)
        for prompt in prompts:
            generate(prompt, max_new_tokens)


def measure(
    ways: Mapping[str, GenerateFn], prompts: list[list[int]], max_new_tokens: int, repeats: int
) -> dict[str, Timings]:
    """Times every way on every prompt, alternating, `repeats` times."""
    timings = {
        name: Timings(
            np.zeros([repeats, len(prompts)]),
            np.zeros([repeats, len(prompts)]),
            [[] for _ in prompts],
        )
        for name in ways
    }
    for repeat in range(repeats):
        print(f"repeat {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
        for index, prompt in enumerate(prompts):
            for name, generate in ways.items():
                begin = time.perf_counter()
                token_ids = generate(prompt, max_new_tokens)
                timings[name].seconds[repeat, index] = time.perf_counter() - begin
                timings[name].tokens[repeat, index] = len(token_ids)
                timings[name].token_ids[index] = token_ids
    return timings


def summarise(timings: Mapping[str, Timings], *, base: str) -> dict[str, dict[str, Any]]:
    """Returns, for each way, its median tokens a second, ratios to every other, and agreement.

    Args:
      timings: what was measured.
      base: the way whose tokens the others are compared with.
    """
    report: dict[str, dict[str, Any]] = {}
    for name, own in timings.items():
        speed = own.tokens.sum(axis=1) / own.seconds.sum(axis=1)
        ratios = {
            other: speed_ratio(own.seconds, own.tokens, theirs.seconds, theirs.tokens)._asdict()
            for other, theirs in timings.items()
            if other != name
        }
        pairs = zip(own.token_ids, timings[base].token_ids, strict=True)
        agreeing = [ours == theirs for ours, theirs in pairs]
        report[name] = {
            "tokens_per_second": float(np.median(speed)),
            "same_answers": sum(agreeing),
            "num_prompts": len(agreeing),
            "ratio_to": ratios,
        }
    return report


def format_table(report: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the summary as a table: a line a way, a column of ratios a way."""
    names = list(report)
    width = max(len(name) for name in names)
    lines = [" " * width + "  tokens/s  same  " + "".join(f"  / {name}" for name in names)]
    for name in names:
        row = report[name]
        line = f"{name:<{width}}  {row['tokens_per_second']:8.1f}  "
        line += f"{row['same_answers']:>2}/{row['num_prompts']:<2} "
        for other in names:
            ratio = row["ratio_to"].get(other)
            cell = "-" if ratio is None else "{median:.2f} [{low:.2f}, {high:.2f}]".format(**ratio)
            line += f"  {cell:>{len(other) + 2}}"
        lines.append(line)
    return "\n".join(lines)


def _peak_bytes() -> int:
    """Returns the most memory that this process has had; macOS counts bytes, Linux kilobytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _spread(texts: list[str], count: int) -> list[str]:
    if len(texts) <= count:
        return texts
    return [texts[index * len(texts) // count] for index in range(count)]


def _plain(timings: Mapping[str, Timings]) -> dict[str, dict[str, Any]]:
    return {
        name: {"seconds": timing.seconds.tolist(), "tokens": timing.tokens.tolist()}
        for name, timing in timings.items()
    }


def _flag_values() -> dict[str, Any]:
    own = (_TARGET, _TARGET_QUANTIZATION, _DRAFT, _DRAFT_QUANTIZATION, _DRAFTERS,
           _NUM_DRAFT_TOKENS, _PROMPTS_FILE, _NUM_PROMPTS, _MAX_NEW_TOKENS, _REPEATS,
           _DTYPE)  # fmt: skip
    return {flag.name: flag.value for flag in own}


if __name__ == "__main__":
    cli.run_main(main)
