"""Drafters by name."""

from jspec.drafters.registry import (
    DRAFTERS,
    WITH_DRAFT_MODEL,
    DrafterOptions,
    check_options,
    choose_drafter,
    draws_from_distribution,
    make_drafter,
    member_names,
    needs_draft_model,
    options_read,
    with_shipped_head,
    without_unread,
)
from jspec.drafters.spec import DEFAULT_NUM_DRAFT_TOKENS, BuiltDrafter, DrafterSpec

__all__ = [
    "DEFAULT_NUM_DRAFT_TOKENS",
    "DRAFTERS",
    "WITH_DRAFT_MODEL",
    "BuiltDrafter",
    "DrafterOptions",
    "DrafterSpec",
    "check_options",
    "choose_drafter",
    "draws_from_distribution",
    "make_drafter",
    "member_names",
    "needs_draft_model",
    "options_read",
    "with_shipped_head",
    "without_unread",
]
