"""What a command line of `python -m jspec.benchmark` asks for, checked before models are loaded."""

import collections
import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from jspec.common.errors import InputError
from jspec.common.json_lines import title_of
from jspec.drafters import DrafterOptions, choose_drafter
from jspec.evaluation.benchmarking.by_task import tasks_of
from jspec.evaluation.benchmarking.measure_flags import WITH_OPTIONS, is_given
from jspec.evaluation.benchmarking.methods import (
    Method,
    check_methods,
    make_generators,
    parse_methods,
)
from jspec.evaluation.benchmarking.transformers_baseline import has_transformers
from jspec.generation.flag_values import parse_quantization
from jspec.generation.generator import Generator
from jspec.generation.prompts import Prompt, read_prompts
from jspec.weights.resolver import LoadedModel, load_model

_CONTEXTS = {"drafting": [512, 1024, 2048, 4096, 8192], "quantization": [256], "profile": [128]}


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What the command line asks for.

    Attributes:
      values: of the flags that the mode reads.
      options: of the drafters.
      methods: to measure.
      with_transformers: whether transformers is measured.
    """

    values: Mapping[str, Any]
    options: DrafterOptions
    methods: Mapping[str, Method]
    with_transformers: bool

    def __getattr__(self, name: str) -> Any:
        """Returns the value of a flag."""
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    def load(self, role: str, *, is_rounded: bool = True) -> LoadedModel | None:
        """Returns the model "target" or "draft"; None where there is none."""
        name, kind = self.values.get(role), self.values.get(f"{role}_quantization", "none")
        if not name:
            return None
        quantization = parse_quantization(kind if is_rounded else "none")
        return load_model(name, dtype=self.dtype, quantization=quantization)

    def target_model(self) -> LoadedModel:
        """Returns the target."""
        target = self.load("target")
        assert target is not None
        return target

    def generators(
        self, **others: Any
    ) -> tuple[LoadedModel, LoadedModel | None, dict[str, Generator]]:
        """Returns target, draft and a Generator for each method."""
        target, draft = self.target_model(), self.load("draft")
        return target, draft, make_generators(target, draft, self.methods, self.options, **others)

    def contexts(self) -> list[int]:
        """Returns the tokens before what is timed."""
        return self.context or _CONTEXTS[self.measure]


def methods_asked_for(values: Mapping[str, Any], options: DrafterOptions) -> dict[str, Method]:
    """Returns jspec's methods; refuses what can be refused before anything is loaded."""
    mode, has_draft = values["measure"], bool(values.get("draft"))
    if mode not in WITH_OPTIONS and options != DrafterOptions():
        raise InputError(f"expected options of drafters without --measure={mode}, which reads none")
    if "drafters" not in values:
        return {}
    usual = choose_drafter(None, has_draft=has_draft, target=values["target"])
    default = {"sampling": ["none"], "start": [usual], "profile": [usual],
               "acceptance": ["unigram", "bigram", "random"]}  # fmt: skip
    several = list(dict.fromkeys(["none", "prompt_lookup", usual]))
    drafters = values["drafters"]
    if drafters is None:
        drafters = default.get(mode, several)
    methods = parse_methods(drafters, values.get("num_draft_tokens", "1"))
    check_methods(methods, options, has_draft=has_draft)
    if mode in ("start", "sampling", "profile") and len(methods) > 1:
        raise InputError(f"expected one drafter with --measure={mode}, got {len(methods)}")
    return methods


def wants_transformers(values: Mapping[str, Any]) -> bool:
    """Returns whether transformers is to be measured, and refuses it where it cannot be."""
    wanted = values.get("transformers", False)
    obstacles = {
        "--target_quantization: it cannot load rounded weights": (
            values.get("target_quantization", "none") != "none"
        ),
        "--temperature: its answers are greedy": values.get("temperature", 0.0) > 0,
        "--decoding: its times are those of whole answers": values.get("decoding", False),
    }
    found = next((what for what, is_there in obstacles.items() if is_there), None)
    if wanted is None and not has_transformers():
        note = "note: transformers is not measured: torch is not installed (pip install torch)"
        print(note, file=sys.stderr, flush=True)
    if wanted and found:
        raise InputError(f"expected --transformers without {found}")
    if wanted and not has_transformers():
        raise InputError("expected torch and transformers to be installed, with --transformers")
    is_measured = wanted or (wanted is None and has_transformers() and found is None)
    if values.get("compiled") and not is_measured:
        raise InputError(
            "expected --compiled where transformers is measured, whose step it compiles"
        )
    return is_measured


def choose_prompts(asked: Measurement) -> tuple[list[Prompt], list[str | None]]:
    """Returns prompts, of each category or evenly spaced over the file, and their tasks."""
    path, count = asked.prompts_file, asked.num_prompts
    read = list(read_prompts(path))
    if not read:
        raise InputError(f"expected at least one prompt in {title_of(path)}, got none")
    tasks = tasks_of([one.category for one in read])
    if is_given("num_prompts") and len(read) < count:
        print(f"note: {title_of(path)} has {len(read)} of {count} prompts", file=sys.stderr)
    if asked.values.get("per_category") is not None:
        seen: dict[str | None, list[int]] = collections.defaultdict(list)
        for index, one in enumerate(read):
            seen[one.category].append(index)
        places = [index for own in seen.values() for index in own[: asked.per_category]]
    else:
        count = min(count, len(read))
        places = [index * len(read) // count for index in range(count)]
    return [read[place] for place in places], [tasks[place] for place in places]
