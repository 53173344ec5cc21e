"""No branch of a round carries a cache: `lax.cond` would copy it."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jspec.drafters import (
    CascadeDrafter,
    DrafterOptions,
    DrafterSpec,
    HierarchicalDrafter,
    HierarchicalParams,
    ModelDrafter,
    PromptLookupDrafter,
    make_drafter,
)
from jspec.sampling import SamplingSettings
from jspec.speculation.acceptance import get_rule
from jspec.speculation.control import Control
from jspec.speculation.step import speculative_step
from jspec.speculation.types import ModelParams, SpecState
from tests.tiny import CONFIG, empty_cache

_CAPACITY = 40


def _conds(jaxpr):
    """Yields the operands of every `cond` of a program, however deep."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "cond":
            yield equation.invars
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _conds(inner)


def _layer_skip(*layers):
    options = DrafterOptions(draft_layers=layers)
    spec = DrafterSpec(3, CONFIG, CONFIG.vocab_size, None, jnp.float32, options=options)
    return make_drafter("layer_skip", spec).drafter


KINDS = ("model", "prompt_lookup", "first layers", "other layers", "hierarchical", "cascade")


@pytest.mark.parametrize("kind", KINDS)
def test_no_branch_carries_a_cache(tiny_pair, kind):
    """Guards against 22 ms a round of copying at batch 8: loops of 0 or 1 trips copy nothing."""
    size = CONFIG.vocab_size
    drafters = {
        "model": ModelDrafter(tiny_pair.apply, empty_cache, 3, size, size),
        "prompt_lookup": PromptLookupDrafter(3),
        "first layers": _layer_skip(0),
        "other layers": _layer_skip(1),
    }
    model, lookup = drafters["model"], drafters["prompt_lookup"]
    drafters["hierarchical"] = HierarchicalDrafter(model, lookup)
    drafters["cascade"] = CascadeDrafter((lookup, model))
    draft = {
        "hierarchical": HierarchicalParams(tiny_pair.draft),
        "cascade": (None, tiny_pair.draft),
    }.get(kind, tiny_pair.draft)
    zeros, ones = jnp.zeros([2], jnp.int32), jnp.ones([2], jnp.float32)
    settings = SamplingSettings(ones, zeros, ones, 0 * ones)
    state = SpecState(
        empty_cache(2, _CAPACITY), drafters[kind].init(2, _CAPACITY), zeros,
        zeros.astype(jnp.uint32), settings, ones, zeros[:, None] - 1, zeros + 30, zeros > 0,
        Control.init(2, kinds=drafters[kind].kinds, numbers=(0, 1, 3)),
    )  # fmt: skip
    step = functools.partial(
        speculative_step,
        target=tiny_pair.apply,
        drafter=drafters[kind],
        rule=get_rule("rejection"),
        widths=(0, 1),
    )
    program = jax.make_jaxpr(step)(ModelParams(tiny_pair.target, draft), state)
    operands = list(_conds(program.jaxpr))
    assert operands, "the sampling work at least is behind a cond"
    length = state.target_cache.keys[0].shape[2]
    shapes = {var.aval.shape for invars in operands for var in invars}
    assert not any(len(shape) == 4 and shape[2] == length for shape in shapes)
