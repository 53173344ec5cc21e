"""Drafters by name."""

from jspec.drafters.blockwise import BlockwiseDrafter
from jspec.drafters.cascade import CascadeDrafter
from jspec.drafters.eagle import EagleDrafter
from jspec.drafters.hierarchical import HierarchicalDrafter, HierarchicalParams
from jspec.drafters.layer_skip import FirstLayersDrafter, LayerSubsetDrafter
from jspec.drafters.lookahead import LookaheadDrafter
from jspec.drafters.medusa import MedusaDrafter
from jspec.drafters.model import ModelDrafter
from jspec.drafters.ngram import NgramDrafter
from jspec.drafters.pattern import PatternDrafter
from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.drafters.registry import (
    DRAFTERS,
    REGISTRY,
    WITH_DRAFT_MODEL,
    DrafterOptions,
    check_options,
    choose_drafter,
    drafters_table,
    draws_from_distribution,
    make_drafter,
    member_names,
    needs_draft_model,
    options_read,
    with_shipped_head,
    without_unread,
)
from jspec.drafters.spec import (
    DEFAULT_NUM_DRAFT_TOKENS,
    BuiltDrafter,
    DrafterEntry,
    DrafterSpec,
)
from jspec.drafters.tables import TableDrafter
from jspec.speculation.types import Drafter

__all__ = [
    "DEFAULT_NUM_DRAFT_TOKENS",
    "DRAFTERS",
    "REGISTRY",
    "WITH_DRAFT_MODEL",
    "BlockwiseDrafter",
    "BuiltDrafter",
    "CascadeDrafter",
    "Drafter",
    "DrafterEntry",
    "DrafterOptions",
    "DrafterSpec",
    "EagleDrafter",
    "FirstLayersDrafter",
    "HierarchicalDrafter",
    "HierarchicalParams",
    "LayerSubsetDrafter",
    "LookaheadDrafter",
    "MedusaDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "PatternDrafter",
    "PromptLookupDrafter",
    "TableDrafter",
    "check_options",
    "choose_drafter",
    "drafters_table",
    "draws_from_distribution",
    "make_drafter",
    "member_names",
    "needs_draft_model",
    "options_read",
    "with_shipped_head",
    "without_unread",
]
