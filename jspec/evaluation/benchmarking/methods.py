"""Drafters and numbers of drafts to compare, as the command line names them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jspec.common.errors import InputError
from jspec.drafters import (
    DEFAULT_NUM_DRAFT_TOKENS,
    WITH_DRAFT_MODEL,
    DrafterOptions,
    check_options,
    member_names,
    needs_draft_model,
)
from jspec.generation.flag_values import parse_num_draft_tokens
from jspec.generation.validate_options import check_num_draft_tokens


class Method(NamedTuple):
    """One of jspec's methods of generating.

    Attributes:
      drafter: its name.
      num_draft_tokens: a round, or "auto".
    """

    drafter: str
    num_draft_tokens: int | str


def parse_methods(drafters: Sequence[str], num_draft_tokens: str) -> dict[str, Method]:
    """Returns the ways by the names that the table gives them.

    Args:
      drafters: DRAFTER or DRAFTER:NUMBER each.
      num_draft_tokens: the number for those without one that draft.

    Raises:
      InputError: none at all, one twice, no such drafter, or a number of drafts for "none".
    """
    if not drafters or len(set(drafters)) < len(drafters):
        raise InputError(f"expected each drafter once, got {','.join(drafters) or 'none'}")
    methods = {}
    for text in drafters:
        drafter, _, number = text.partition(":")
        member_names(drafter)
        name = "jspec plain" if drafter == "none" else f"jspec {text}"
        if name in methods:
            raise InputError(f"expected each drafter once, got {','.join(drafters)}")
        usual = str(DEFAULT_NUM_DRAFT_TOKENS) if drafter == "none" else num_draft_tokens
        methods[name] = Method(drafter, parse_num_draft_tokens(number or usual))
        check_num_draft_tokens(methods[name].num_draft_tokens, drafter)
    return methods


def check_methods(
    methods: Mapping[str, Method], options: DrafterOptions, *, has_draft: bool
) -> None:
    """Checks that a draft model and options are there for somebody.

    Args:
      methods: what will be compared.
      options: of all drafters; each is given those that it reads.
      has_draft: whether there is a draft model, which is given to those that draft with it.

    Raises:
      InputError: a draft model or an option that no way reads, or a draft model that one lacks.
    """
    drafters = [method.drafter for method in methods.values()]
    if any(map(needs_draft_model, drafters)) != has_draft:
        names = ", ".join(WITH_DRAFT_MODEL)
        raise InputError(f"expected --draft with a drafter among {names}, and only with one")
    check_options(drafters, options)
