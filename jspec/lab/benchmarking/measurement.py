"""What a command line of `python -m jspec.benchmark` asks for, checked before models are loaded."""

import collections
import functools
import hashlib
import json
import pathlib
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jspec.common.errors import InputError, say
from jspec.common.json_lines import read_json, title_of
from jspec.drafters import (
    DEFAULT_NUM_DRAFT_TOKENS,
    DrafterOptions,
    check_options,
    choose_drafter,
    drafters_needing,
    member_names,
    needs_draft_model,
    without_unread,
)
from jspec.generation.auto import parse_num_draft_tokens
from jspec.generation.draft_weights import with_fast_weights
from jspec.generation.generator import Generator
from jspec.generation.layout import place_model
from jspec.generation.options import RULE_DEFAULTS, check_num_draft_tokens
from jspec.generation.prompts import Prompt, read_prompts
from jspec.generation.request import SamplingParams
from jspec.lab.benchmarking.answers import JSPEC_PLAIN, tasks_of
from jspec.lab.benchmarking.baselines import has_transformers
from jspec.models.sharding import make_mesh
from jspec.speculation.acceptance import RuleOptions
from jspec.weights.quantize import KINDS, PACKED_A8
from jspec.weights.resolver import LoadedModel, has_mtp_layer, load_model

_NUM_PROMPTS = 13
SUITES = ("open",)


class Method(NamedTuple):
    """One of jspec's methods of generating: a drafter's name, and drafts a round or "auto"."""

    drafter: str
    num_draft_tokens: int | str


class Outcome(NamedTuple):
    """What a mode has measured so far: plain values for the record, and a table to print."""

    record: dict[str, Any]
    text: str = ""
    is_complete: bool = True  # of the last: whether the same command has nothing to go on with


class Measurement(types.SimpleNamespace):
    """The values of the flags that the mode reads, and what follows from them.

    Attributes:
      options: of the drafters.
      methods: to measure.
      with_transformers: whether transformers is measured.
      begun: the record of a run that was broken off; empty without any.
    """

    def load(self, role: str, *, is_rounded: bool = True) -> LoadedModel | None:
        """Returns the model "target" or "draft"; None where there is none."""
        name = getattr(self, role, None)
        kind = getattr(self, f"{role}_quantization", "auto") if is_rounded else "none"
        if not name:
            return None
        mesh = make_mesh(self.mesh) if getattr(self, "mesh", None) else None
        load = functools.partial(load_model, name, dtype=self.dtype)
        if role == "target":
            return load(quantization=kind, mesh=mesh)
        draft = load(quantization=kind)
        if kind == "auto" and mesh is None:
            draft = with_fast_weights(draft, getattr(self, "acceptance", "rejection"), load)
        return place_model(draft, mesh)

    def models(self) -> tuple[LoadedModel, LoadedModel | None]:
        """Returns the target, and the draft model or None.

        Raises:
          InputError: see `load_model`; or the target does not read texts, which the prompts are.
        """
        target = self.load("target")
        assert target is not None
        if (encoder := target.config.encoder) is not None and encoder.is_audio:
            raise InputError(f"expected a target that reads texts; {target.name} hears")
        return target, self.load("draft")

    def generators(
        self,
        target: LoadedModel,
        draft: LoadedModel | None,
        *names: str,
        rule_options: RuleOptions = RULE_DEFAULTS,
        **others: Any,
    ) -> dict[str, Generator]:
        """Returns Generators of all methods, or of those named; `others` are their options."""
        return {
            name: Generator(
                target,
                draft if needs_draft_model(method.drafter) else None,
                drafter=method.drafter,
                drafter_options=without_unread(method.drafter, self.options),
                num_draft_tokens=method.num_draft_tokens,
                # Plain decoding has no drafts to accept.
                rule_options=RULE_DEFAULTS if method.drafter == "none" else rule_options,
                **others,
            )
            for name, method in self.methods.items()
            if name in (names or self.methods)
        }

    def settings(self) -> SamplingParams:
        """Returns the settings of answers."""
        return SamplingParams(self.max_new_tokens, getattr(self, "temperature", 0.0))


def parse_methods(drafters: Sequence[str], num_draft_tokens: str) -> dict[str, Method]:
    """Returns the methods by the names that the tables give them; each is DRAFTER[:NUMBER].

    Raises:
      InputError: none at all, one twice, no such drafter, or a number of drafts for "none".
    """
    methods = {}
    for text in drafters:
        drafter, _, number = text.partition(":")
        member_names(drafter)  # refuses one that is not there
        usual = DEFAULT_NUM_DRAFT_TOKENS if drafter == "none" else num_draft_tokens
        method = Method(drafter, parse_num_draft_tokens(number or usual))
        check_num_draft_tokens(method.num_draft_tokens, drafter)
        methods[JSPEC_PLAIN if drafter == "none" else f"jspec {text}"] = method
    if not drafters or len(methods) < len(drafters):
        raise InputError(f"expected each drafter once, got {','.join(drafters) or 'no drafter'}")
    return methods


def check_methods(
    methods: Mapping[str, Method], options: DrafterOptions, *, has_draft: bool
) -> None:
    """Raises an `InputError` unless some method reads each option, and a draft model if any."""
    drafters = [method.drafter for method in methods.values()]
    if any(map(needs_draft_model, drafters)) != has_draft:
        names = ", ".join(drafters_needing("draft"))
        raise InputError(f"expected --draft with a drafter among {names}, and only with one")
    check_options(drafters, options)


def methods_asked_for(values: Mapping[str, Any], options: DrafterOptions) -> dict[str, Method]:
    """Returns jspec's methods; refuses what can be refused before anything is loaded."""
    if values["measure"] == "suite":
        return {}  # which depend on what fits the loaded models
    if "drafters" not in values:
        if options != DrafterOptions():
            mode = values["measure"]
            raise InputError(f"expected --measure={mode} without options of drafters")
        return {}
    has_draft = bool(values["draft"])
    target = values["target"]
    has_mtp = not has_draft and has_mtp_layer(target)
    usual = choose_drafter(None, has_draft=has_draft, target=target, has_mtp=has_mtp)
    several = list(dict.fromkeys(["none", "prompt_lookup", usual]))
    drafters = several if values["drafters"] is None else values["drafters"]
    methods = parse_methods(drafters, values["num_draft_tokens"])
    check_methods(methods, options, has_draft=has_draft)
    return methods


def wants_transformers(values: Mapping[str, Any]) -> bool:
    """Returns whether transformers is to be measured; refuses it where it cannot be."""
    wanted, is_there = values.get("transformers", False), has_transformers()
    reasons = []
    if values.get("target_quantization") in (*KINDS, PACKED_A8):
        reasons.append("--target_quantization: it cannot round as that does")
    if values.get("coordinator") is not None:
        reasons.append("--coordinator: it is one process")
    if wanted is None and not is_there:
        say("note: transformers is not measured: torch is not installed (pip install torch)")
    if wanted and reasons:
        raise InputError(f"expected --transformers without {reasons[0]}")
    if wanted and not is_there:
        raise InputError("expected torch and transformers to be installed, with --transformers")
    is_measured = wanted or (wanted is None and is_there and not reasons)
    if values.get("compiled") and not is_measured:
        raise InputError("expected --compiled where transformers is measured, whose step it is")
    return is_measured


def begun_record(values: Mapping[str, Any], recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a run that was broken off has left in --output_json; empty without any.

    Only whole answers, or rows of a suite, are gone on with. `recorded` are the flags as this run
    records them.

    Raises:
      InputError: that run had other flags.
    """
    path = values["output_json"]
    part = {"methods": "answers", "suite": "rows"}.get(values["measure"])
    if part is None or path is None or not pathlib.Path(path).is_file():
        return {}
    try:
        record = read_json(pathlib.Path(path))
    except InputError:  # something else, which is written anew
        return {}
    if record.get("is_complete", True) or part not in record:
        return {}
    current = json.loads(json.dumps(recorded)) | {"output_json": None}
    before = record["flags"] | {"output_json": None}
    if wrong := [name for name in {**current, **before} if current.get(name) != before.get(name)]:
        raise InputError(
            f"expected --{wrong[0]}={before.get(wrong[0])}, with which {path} was begun, got "
            f"{current.get(wrong[0])}; another --output_json begins anew"
        )
    return record


def digest_of_prompts(asked: Measurement, ids: Sequence[list[int]]) -> str:
    """Returns a digest of the prompts' ids; refuses others than those of a run to go on with."""
    digest = hashlib.sha256(repr(ids).encode()).hexdigest()[:16]
    if asked.begun and asked.begun["prompts_digest"] != digest:
        where = asked.output_json
        raise InputError(f"expected the prompts that {where} was begun with, got others")
    return digest


def choose_prompts(asked: Measurement) -> tuple[list[Prompt], list[str | None]]:
    """Returns prompts, of each category or evenly spaced over the file, and their tasks."""
    path, count = asked.prompts_file, asked.num_prompts or _NUM_PROMPTS
    read = list(read_prompts(path))
    if not read:
        raise InputError(f"expected at least one prompt in {title_of(path)}, got none")
    tasks = tasks_of([prompt.category for prompt in read])
    if asked.num_prompts is not None and len(read) < count:
        say(f"note: {title_of(path)} has {len(read)} of {count} prompts")
    if per_category := asked.per_category:
        seen: dict[str | None, list[int]] = collections.defaultdict(list)
        for index, prompt in enumerate(read):
            seen[prompt.category].append(index)
        places = [index for indices in seen.values() for index in indices[:per_category]]
    else:
        count = min(count, len(read))
        places = [index * len(read) // count for index in range(count)]
    return [read[place] for place in places], [tasks[place] for place in places]
