"""A trained head on the target's features proposes (EAGLE-3, arXiv 2503.01840): see `pairs`."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jspec.common.typing import Params, Tokens
from jspec.drafters.eagle_head import EagleConfig, apply_head, fuse, load_eagle
from jspec.drafters.pairs import PairDrafter, PairTreeDrafter
from jspec.drafters.spec import (
    BuiltDrafter,
    DrafterEntry,
    DrafterSpec,
    DrawnHeadOptions,
    TreeOptions,
    tree_shape,
    with_at_most_a_tree,
)
from jspec.models.cache import KVCache
from jspec.models.layers import look_up
from jspec.speculation.types import Kind, RoundInputs


@dataclasses.dataclass(frozen=True)
class EagleDrafter(PairDrafter):
    """Proposes a chain sampled from a head.

    Attributes:
      config: the head's.
    """

    config: EagleConfig = dataclasses.field(kw_only=True)
    kind = Kind("eagle", 0.6, 0.6, is_certain=True)

    def ids(self, params: Params) -> Int32[Array, "u"]:
        """Returns the target's ids of the tokens that the head can propose."""
        return params["ids"]

    def fuse(self, params: Params, hidden: Float[Array, "b t l d"]) -> Float32[Array, "b t d"]:
        """Returns one feature a token of the target's outputs."""
        return fuse(params, hidden, self.config.layer.norm_epsilon)

    def feed(
        self,
        params: Params,
        inputs: RoundInputs,
        tokens: Tokens,
        features: Float[Array, "b t d"],
        cache: KVCache,
        **options: Any,
    ) -> tuple[Float32[Array, "b l u"], Float32[Array, "b t d"], KVCache]:
        """Runs the head, see `apply_head`; ids that are not really used have no probability."""
        embedded = look_up(inputs.view.params["embedding"], tokens)
        logits, hidden, cache = apply_head(
            self.config, params, embedded, features, cache, **options
        )
        if self.vocab_size < self.target_vocab_size:
            logits = jnp.where(params["ids"] < self.vocab_size, logits, -jnp.inf)
        return logits, hidden, cache


@dataclasses.dataclass(frozen=True)
class EagleTreeDrafter(PairTreeDrafter, EagleDrafter):
    """Proposes a tree."""


@dataclasses.dataclass(frozen=True)
class EagleOptions(DrawnHeadOptions, TreeOptions):
    """Of `eagle`."""


def make_eagle_drafter(spec: DrafterSpec, config: EagleConfig) -> EagleDrafter:
    """Returns the drafter over a head, of chains or of trees."""

    spec = with_at_most_a_tree(spec)
    shape = tree_shape(spec)
    fields = {"config": config, "dtype": spec.dtype, **spec.chain_fields}
    return EagleDrafter(**fields) if shape is None else EagleTreeDrafter(shape=shape, **fields)


def _build(spec: DrafterSpec) -> BuiltDrafter:
    head = load_eagle(spec.head_folder("eagle"), spec.target_config, spec.dtype)
    return BuiltDrafter(make_eagle_drafter(spec, head.config), head.params)


ENTRY = DrafterEntry(
    name="eagle",
    build=_build,
    proposes="what a trained head draws from the target's hidden states; "
    "jspec has one for `smollm2-135m-instruct`",
    source="2503.01840",
    options=EagleOptions,
    needs="draft_head",
)
