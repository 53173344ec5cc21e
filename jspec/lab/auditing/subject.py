"""What is audited, and the outcome of one check."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec.drafters import DrafterOptions, needs_draft_model, without_unread
from jspec.generation.generator import Generator
from jspec.generation.options import DRAFTER_DEFAULTS, RULE_DEFAULTS
from jspec.generation.request import SamplingParams
from jspec.models import CompactKernel
from jspec.speculation.acceptance import RuleOptions, get_rule
from jspec.speculation.types import AcceptanceRule
from jspec.weights.resolver import LoadedModel

# A check that says nothing of the distribution when it fails, and what to do then.
INCONCLUSIVE = {
    "drafts": "no draft was accepted, so that the rule was not put to the test",
    "negative control": "too few rows to tell: try --num_rows={more_rows}",
    "tree control": "too few rows to tell: try --num_rows={more_rows}",
}


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the audit: what was checked, and the outcome, in words and in numbers."""

    name: str
    has_passed: bool
    detail: str
    data: dict[str, Any]

    @property
    def kind(self) -> str:
        """Its name without details."""
        return self.name.partition(",")[0]


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is audited: models, and the options of `Generator`.

    Distribution and caches are checked with the models as they are; `generator` casts them.
    """

    target: LoadedModel
    draft: LoadedModel | None
    drafter: str
    num_draft_tokens: int | str
    acceptance: str
    settings: SamplingParams
    rule_options: RuleOptions = RULE_DEFAULTS
    drafter_options: DrafterOptions = DRAFTER_DEFAULTS

    @property
    def dtype(self) -> str:
        """Name of the type of the target's floats."""
        return self.target.params["embedding"].dtype.name

    @property
    def rule(self) -> AcceptanceRule:
        """The acceptance rule."""
        return get_rule(self.acceptance, self.rule_options)

    @property
    def has_tree(self) -> bool:
        """Whether the drafter is asked for trees."""
        return self.drafter_options.tree_depth > 0

    def generator(self, dtype: str = "float32", **changes: Any) -> Generator:
        """Returns a Generator of the subject; `changes` replace its options."""
        drafter = changes.get("drafter", self.drafter)
        read = without_unread(drafter, self.drafter_options)
        options: dict[str, Any] = {"acceptance": self.acceptance, "drafter_options": read}
        if drafter != "none":  # which reads neither
            options["num_draft_tokens"] = self.num_draft_tokens
            options["rule_options"] = self.rule_options
        draft = None
        if self.draft is not None and needs_draft_model(drafter):
            draft = cast(self.draft, dtype)
        options |= changes | {"drafter": drafter}
        return Generator(cast(self.target, dtype), draft, **options)


def cast(model: LoadedModel, dtype: str) -> LoadedModel:
    """Returns the model with its weights in another dtype."""
    if model.params["embedding"].dtype == jnp.dtype(dtype):
        return model
    params = jax.tree.map(
        lambda leaf: leaf.astype(jnp.dtype(dtype)),
        model.params,
        is_leaf=lambda leaf: isinstance(leaf, CompactKernel),
    )
    return dataclasses.replace(model, params=params)
