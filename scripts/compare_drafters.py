"""Compares drafters on the same prompts: acceptance, tokens per call and speed, by category.

`python scripts/compare_drafters.py --prompts_file=PROMPTS.jsonl --per_category=5 \
  --drafters=none,prompt_lookup:1,prompt_lookup:3,prompt_lookup:7,prompt_lookup:auto`

Every way answers every prompt in turn, repeat after repeat, after a warm-up; the first one is the
base of the ratios. Times are those of decoding: a prefill costs all ways the same. Answers are cut
at --max_new_tokens and may end earlier; at temperature 0 all ways say the same.
"""

import collections
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from absl import flags

from jspec.common import cli
from jspec.common.errors import InputError, check_range
from jspec.common.json_lines import JsonLinesWriter
from jspec.drafters import (
    DEFAULT_NUM_DRAFT_TOKENS,
    DrafterOptions,
    needs_draft_model,
    without_unread,
)
from jspec.evaluation.analysis.ratios import speed_ratio
from jspec.evaluation.benchmarking.methods import Method, check_methods, parse_methods
from jspec.generation import drafter_flags, provenance
from jspec.generation.auto import MOST_DRAFT_TOKENS
from jspec.generation.capacity import capacity_for
from jspec.generation.drafter_flags import read_options
from jspec.generation.engine import NARROW_PROMPT
from jspec.generation.flag_values import QUANTIZATIONS, parse_quantization
from jspec.generation.generator import DEFAULT_TARGET, Generator
from jspec.generation.prompts import Prompt, read_prompts
from jspec.generation.request import Request, Settings
from jspec.generation.stats import Stats, acceptance_rate
from jspec.weights.resolver import LoadedModel, load_model

flags.adopt_module_key_flags(drafter_flags)  # so that --help lists them
_TARGET = flags.DEFINE_string("target", DEFAULT_TARGET, "The target.")
_DRAFT = flags.DEFINE_string("draft", None, "A draft model.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of the weights.")
_TARGET_QUANTIZATION = flags.DEFINE_enum(
    "target_quantization", "none", QUANTIZATIONS, "Rounds the target's weights: another model."
)
_DRAFT_QUANTIZATION = flags.DEFINE_enum(
    "draft_quantization", "none", QUANTIZATIONS, "Rounds the draft's weights."
)
_DRAFTERS = flags.DEFINE_list("drafters", ["none", "prompt_lookup:auto"], "DRAFTER:NUMBER each.")
_PROMPTS_FILE = flags.DEFINE_string("prompts_file", "configs/prompts.jsonl", "JSONL.")
_PER_CATEGORY = flags.DEFINE_integer("per_category", 5, "Prompts of each category.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 32, "Tokens of an answer.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Prompt k of repeat r has seed 1000 r + k.")
_ACCEPTANCE = flags.DEFINE_string(
    "acceptance", "rejection", "The rule; under coupled all ways say the same at any temperature."
)
_REPEATS = flags.DEFINE_integer("repeats", 5, "How often each answer is timed.")
_MAX_SEQ_LEN = flags.DEFINE_integer(
    "max_seq_len", None, "Tokens of prompt and answer. Default: 2048, or a smaller context."
)
_USUAL_SEQ_LEN = 2048
_OUTPUT_JSON = flags.DEFINE_string("output_json", None, "Write everything measured to this file.")


class Measured(NamedTuple):
    """One way's answers.

    Attributes:
      seconds: of decoding, [repeats prompts].
      tokens: emitted by rounds, likewise.
      stats: of every answer, [repeats][prompts].
    """

    seconds: np.ndarray
    tokens: np.ndarray
    stats: list[list[Stats]]

    def first(self, repeats: int) -> Self:
        """Returns what the first repeats have given."""
        return self._make(leaf[:repeats] for leaf in self)


def main() -> None:
    """Measures, prints two tables, writes JSON."""
    check_range("repeats", _REPEATS.value, 1, 1000)
    check_range("per_category", _PER_CATEGORY.value, 1, 1000)
    inputs = (_PROMPTS_FILE.value,)
    output = JsonLinesWriter(_OUTPUT_JSON.value, *inputs) if _OUTPUT_JSON.value else None
    methods = parse_methods(_DRAFTERS.value, str(DEFAULT_NUM_DRAFT_TOKENS))
    options = read_options()
    check_methods(methods, options, has_draft=bool(_DRAFT.value))
    if _DRAFT_QUANTIZATION.value != "none" and not _DRAFT.value:
        raise InputError("expected --draft with --draft_quantization")
    prompts = choose_prompts(_PROMPTS_FILE.value, _PER_CATEGORY.value)
    target = _load(_TARGET.value, _TARGET_QUANTIZATION.value)
    draft = _load(_DRAFT.value, _DRAFT_QUANTIZATION.value) if _DRAFT.value else None
    generators = {
        name: make_generator(target, draft, method, options) for name, method in methods.items()
    }
    common = provenance.environment() | {
        "flags": {flag.name: flag.value for flag in _RECORDED},
        "drafter_options": dataclasses.asdict(options),
        "described": {name: loaded.describe() for name, loaded in generators.items()},
    }
    report = {}
    for repeat, measured in enumerate(measure(generators, prompts), 1):
        report = {name: summarise(name, measured, prompts) for name in measured}
        if output is not None:
            output.rewrite(common | {"methods": report}, is_complete=repeat == _REPEATS.value)
    print_tables(report)


def _load(name: str, quantization: str) -> LoadedModel:
    kind = parse_quantization(quantization)
    return load_model(name, dtype=_DTYPE.value, quantization=kind)


def choose_prompts(path: str, per_category: int) -> list[Prompt]:
    """Returns the first prompts of each category of a file.

    Raises:
      InputError: there are none.
    """
    chosen: dict[str | None, list[Prompt]] = collections.defaultdict(list)
    for prompt in read_prompts(path):
        if len(chosen[prompt.category]) < per_category:
            chosen[prompt.category].append(prompt)
    if not chosen:
        raise InputError(f"expected at least one prompt in {path}, got none")
    return [prompt for prompts in chosen.values() for prompt in prompts]


def make_generator(
    target: LoadedModel, draft: LoadedModel | None, method: Method, options: DrafterOptions
) -> Generator:
    """Returns the Generator of one way."""
    return Generator(
        target,
        draft if needs_draft_model(method.drafter) else None,
        drafter=method.drafter,
        num_draft_tokens=method.num_draft_tokens,
        acceptance=_ACCEPTANCE.value,
        drafter_options=without_unread(method.drafter, options),
        max_seq_len=_MAX_SEQ_LEN.value or min(_USUAL_SEQ_LEN, target.config.max_seq_len),
    )


def measure(
    generators: Mapping[str, Generator], prompts: Sequence[Prompt]
) -> Iterator[dict[str, Measured]]:
    """Answers every prompt in every way, alternating, once all programs are compiled.

    Yields after each repeat what has been measured by then.
    """
    shape = _REPEATS.value, len(prompts)
    measured = {
        name: Measured(np.zeros(shape), np.zeros(shape), [[] for _ in range(shape[0])])
        for name in generators
    }
    warm_up(generators, prompts)
    for repeat in range(_REPEATS.value):
        print(f"repeat {repeat + 1} of {_REPEATS.value}", file=sys.stderr, flush=True)
        for index, prompt in enumerate(prompts):
            settings = make_settings(seed=1000 * repeat + index)
            for name, generator in generators.items():
                stats = generator.generate(Request(prompt.text, settings)).stats
                measured[name].seconds[repeat, index] = stats.decode_seconds
                measured[name].tokens[repeat, index] = stats.num_round_tokens
                measured[name].stats[repeat].append(stats)
        yield {name: own.first(repeat + 1) for name, own in measured.items()}


def make_settings(seed: int) -> Settings:
    """Returns how an answer is drawn."""
    return Settings(max_new_tokens=_MAX_NEW_TOKENS.value, temperature=_TEMPERATURE.value, seed=seed)


def warm_up(generators: Mapping[str, Generator], prompts: Sequence[Prompt]) -> None:
    """Compiles every program: one answer for each size of the cache and width of a chunk."""
    some = next(iter(generators.values()))
    by_size = {}
    for prompt in prompts:
        length = len(some.encode_prompt(prompt.text))
        capacity = capacity_for(length + _MAX_NEW_TOKENS.value, MOST_DRAFT_TOKENS + 1)
        by_size[capacity, length > NARROW_PROMPT] = prompt
    for name, generator in generators.items():
        print(f"warming up {name}", file=sys.stderr, flush=True)
        for prompt in by_size.values():
            generator.generate(Request(prompt.text, make_settings(seed=0)))


def summarise(
    name: str, measured: Mapping[str, Measured], prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Returns one way's numbers over all prompts, and for each category."""
    categories = np.array([prompt.category or "all" for prompt in prompts])
    everything = np.ones(len(prompts), bool)
    groups = {"all": everything} | {
        category: categories == category for category in dict.fromkeys(categories.tolist())
    }
    base = next(iter(measured.values()))
    report = {}
    for group, is_in in groups.items():
        own = measured[name]
        stats = [s for row in own.stats for s, wanted in zip(row, is_in, strict=True) if wanted]
        num_calls = sum(s.num_target_calls for s in stats)
        picked = [leaf[:, is_in] for leaf in (own.seconds, own.tokens, base.seconds, base.tokens)]
        report[group] = {
            "tokens_per_second": float(np.median(picked[1].sum(1) / picked[0].sum(1))),
            "acceptance_rate": acceptance_rate([r for s in stats for r in s.rounds]),
            "tokens_per_target_call": float(picked[1].sum()) / max(num_calls, 1),
            "speedup": speed_ratio(*picked)._asdict(),
        }
    return report


def print_tables(report: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints a line a way, and then a line a category with each way's speed-up."""
    width = max(map(len, report))
    print(f"{'':<{width}}  tokens/s  accepted  per call  speed-up")
    for name, groups in report.items():
        row = groups["all"]
        rate = row["acceptance_rate"]
        accepted = "-" if rate is None else f"{rate:.1%}"
        print(
            f"{name:<{width}}  {row['tokens_per_second']:8.1f}  {accepted:>8}  "
            f"{row['tokens_per_target_call']:8.2f}  "
            + "{median:.2f} [{low:.2f}, {high:.2f}]".format(**row["speedup"])
        )
    names = [name.removeprefix("jspec ") for name in report]
    print("\n" + " " * 20 + "".join(f"  {name:>24}" for name in names))
    for group in next(iter(report.values())):
        cells = [
            "{median:.2f} [{low:.2f}, {high:.2f}]".format(**groups[group]["speedup"])
            for groups in report.values()
        ]
        print(f"{group:<20}" + "".join(f"  {cell:>24}" for cell in cells))


_RECORDED = (_TARGET, _TARGET_QUANTIZATION, _DRAFT, _DRAFT_QUANTIZATION, _DTYPE, _DRAFTERS,
             _PROMPTS_FILE, _PER_CATEGORY, _MAX_NEW_TOKENS, _TEMPERATURE, _ACCEPTANCE, _REPEATS,
             _MAX_SEQ_LEN)  # fmt: skip


if __name__ == "__main__":
    cli.run_main(main)
