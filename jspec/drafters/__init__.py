"""Drafters by name."""

from jspec.drafters.options import DrafterOptions
from jspec.drafters.registry import (
    DRAFTERS,
    check_options,
    choose_drafter,
    drafters_needing,
    draws_from_distribution,
    entries_of,
    make_drafter,
    member_names,
    name_of,
    needs_draft_model,
    options_read,
    read_options,
    register_drafter,
    with_shipped_head,
    without_unread,
)
from jspec.drafters.spec import DEFAULT_NUM_DRAFT_TOKENS, BuiltDrafter, DrafterEntry, DrafterSpec

__all__ = [
    "DEFAULT_NUM_DRAFT_TOKENS",
    "DRAFTERS",
    "BuiltDrafter",
    "DrafterEntry",
    "DrafterOptions",
    "DrafterSpec",
    "check_options",
    "choose_drafter",
    "drafters_needing",
    "draws_from_distribution",
    "entries_of",
    "make_drafter",
    "member_names",
    "name_of",
    "needs_draft_model",
    "options_read",
    "read_options",
    "register_drafter",
    "with_shipped_head",
    "without_unread",
]
