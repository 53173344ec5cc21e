"""jspec's methods of generating that are compared, as the command line names them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jspec.common.errors import InputError
from jspec.drafters import (
    DEFAULT_NUM_DRAFT_TOKENS,
    WITH_DRAFT_MODEL,
    DrafterOptions,
    check_options,
    member_names,
    needs_draft_model,
    without_unread,
)
from jspec.evaluation.benchmarking.answers import Generated, GenerateFn
from jspec.generation.auto import MOST_DRAFT_TOKENS
from jspec.generation.capacity import capacity_for
from jspec.generation.engine import NARROW_PROMPT
from jspec.generation.flag_values import parse_num_draft_tokens
from jspec.generation.generator import Generator
from jspec.generation.request import Request, Settings
from jspec.generation.validate_options import check_num_draft_tokens
from jspec.weights.resolver import LoadedModel

JSPEC_PLAIN = "jspec plain"


class Method(NamedTuple):
    """One of jspec's methods of generating.

    Attributes:
      drafter: its name.
      num_draft_tokens: a round, or "auto".
    """

    drafter: str
    num_draft_tokens: int | str


def parse_methods(drafters: Sequence[str], num_draft_tokens: str) -> dict[str, Method]:
    """Returns the methods by the names that the tables give them.

    Args:
      drafters: DRAFTER or DRAFTER:NUMBER each.
      num_draft_tokens: the number for drafters that are named without one.

    Raises:
      InputError: none at all, one twice, no such drafter, or a number of drafts for "none".
    """
    if not drafters or len(set(drafters)) < len(drafters):
        raise InputError(f"expected each drafter once, got {','.join(drafters) or 'none'}")
    methods = {}
    for text in drafters:
        drafter, _, number = text.partition(":")
        member_names(drafter)
        name = JSPEC_PLAIN if drafter == "none" else f"jspec {text}"
        if name in methods:
            raise InputError(f"expected each drafter once, got {','.join(drafters)}")
        usual = str(DEFAULT_NUM_DRAFT_TOKENS) if drafter == "none" else num_draft_tokens
        methods[name] = Method(drafter, parse_num_draft_tokens(number or usual))
        check_num_draft_tokens(methods[name].num_draft_tokens, drafter)
    return methods


def check_methods(
    methods: Mapping[str, Method], options: DrafterOptions, *, has_draft: bool
) -> None:
    """Checks that some method reads the draft model and each option.

    Args:
      methods: what will be compared.
      options: of all drafters; each is given those that it reads.
      has_draft: whether there is a draft model, which is given to those that draft with it.

    Raises:
      InputError: a draft model or an option that no method reads, or a draft model that one lacks.
    """
    drafters = [method.drafter for method in methods.values()]
    if any(map(needs_draft_model, drafters)) != has_draft:
        names = ", ".join(WITH_DRAFT_MODEL)
        raise InputError(f"expected --draft with a drafter among {names}, and only with one")
    check_options(drafters, options)


def make_generators(
    target: LoadedModel,
    draft: LoadedModel | None,
    methods: Mapping[str, Method],
    options: DrafterOptions,
    **others: Any,
) -> dict[str, Generator]:
    """Returns a Generator for each method; `others` are options of all Generators."""
    return {
        name: Generator(
            target,
            draft if needs_draft_model(method.drafter) else None,
            drafter=method.drafter,
            drafter_options=without_unread(method.drafter, options),
            num_draft_tokens=method.num_draft_tokens,
            **others,
        )
        for name, method in methods.items()
    }


def answer_with(
    generator: Generator, max_new_tokens: int, *, temperature: float = 0.0, decoding: bool = False
) -> GenerateFn:
    """Returns generation by a Generator.

    Args:
      generator: what answers.
      max_new_tokens: of an answer.
      temperature: of the target.
      decoding: count the time of decoding alone: without the prompt, and without the first token.
    """

    def generate(prompt: list[int], seed: int) -> Generated:
        settings = Settings(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
        result = generator.generate(Request(prompt, settings))
        stats = result.stats
        counts = stats.num_round_tokens, stats.num_rounds, stats.num_proposed
        own = (stats.decode_seconds, stats.num_round_tokens) if decoding else (None, None)
        return Generated(result.token_ids, *counts, stats.num_accepted, *own)

    return generate


def representative(prompts: Sequence[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Returns one prompt for each set of programs: each size of the cache and width of a chunk."""
    by_size = {}
    for prompt in prompts:
        capacity = capacity_for(len(prompt) + max_new_tokens, MOST_DRAFT_TOKENS + 1)
        by_size[capacity, len(prompt) > NARROW_PROMPT] = prompt
    return list(by_size.values())
