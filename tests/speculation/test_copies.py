"""No branch of a round carries a cache: `lax.cond` would copy it. Nor is one used again."""

import dataclasses
import functools
import os
import re

import jax
import jax.numpy as jnp
import pytest

from jspec.drafters import DrafterOptions, DrafterSpec, make_drafter
from jspec.drafters.cascade import CascadeDrafter
from jspec.drafters.hierarchical import HierarchicalDrafter, HierarchicalParams
from jspec.drafters.lookahead import LookaheadDrafter
from jspec.drafters.model import ModelDrafter
from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.drafters.recycle import RecycleDrafter
from jspec.models import init_cache, make_apply
from jspec.sampling.settings import SamplingSettings
from jspec.speculation import round
from jspec.speculation.acceptance import get_rule
from jspec.speculation.control import Control
from jspec.speculation.round import speculative_step
from jspec.speculation.types import ModelParams, SpecState
from tests import tiny_lookahead
from tests.cases import slow_unless
from tests.tiny import CONFIG, empty_cache, random_params
from tests.tiny_heads import MODULES

_CAPACITY = 44


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


KINDS = ("model", "prompt_lookup", "recycle", "first layers", "other layers", "hierarchical",
         "cascade", *MODULES)  # fmt: skip
QUICK = "first layers", "cascade", "eagle"


def make_state(drafter, control=None):
    """Returns a state of two rows, of which one draws."""
    zeros, ones = jnp.zeros([2], jnp.int32), jnp.ones([2], jnp.float32)
    settings = SamplingSettings(ones, zeros, ones, 0 * ones)
    return SpecState(
        empty_cache(2, _CAPACITY), drafter.init(2, _CAPACITY), zeros, zeros.astype(jnp.uint32),
        settings, ones, zeros[:, None] - 1, zeros + 30, zeros > 0, control,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [slow_unless(kind in QUICK, kind) for kind in KINDS])
def test_no_branch_carries_a_cache(tiny_pair, kind):
    """Guards against 22 ms a round of copying at batch 8: loops of 0 or 1 trips copy nothing."""
    size = CONFIG.vocab_size
    drafters = {
        "model": ModelDrafter(3, size, size, apply=tiny_pair.apply, init_cache=empty_cache),
        "prompt_lookup": PromptLookupDrafter(3),
        "recycle": RecycleDrafter(3, size),
        "first layers": _layer_skip(0),
        "other layers": _layer_skip(1),
    }
    model, lookup = drafters["model"], drafters["prompt_lookup"]
    drafters["hierarchical"] = HierarchicalDrafter(model, lookup)
    drafters["cascade"] = CascadeDrafter((lookup, model))
    drafters |= {name: module.drafter(3) for name, module in MODULES.items()}
    draft = {
        "hierarchical": HierarchicalParams(tiny_pair.draft),
        "cascade": (None, tiny_pair.draft),
    } | {name: module.params() for name, module in MODULES.items()}
    draft = draft.get(kind, tiny_pair.draft)
    control = Control.init(2, kinds=drafters[kind].kinds, numbers=(0, 1, 3))
    state = make_state(drafters[kind], control)
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
    lengths = {_CAPACITY, state.target_cache.keys[0].shape[2]}  # of features, of keys and values
    shapes = {var.aval.shape for invars in operands for var in invars}
    if kind == "recycle":
        assert state.draft.shape not in shapes
    assert not any(len(shape) > 2 and lengths & set(shape) for shape in shapes)


class Forgetful(LookaheadDrafter):
    """The natural but wrong member: it keeps the cache of its call for itself."""

    def propose(self, *args, **options):
        proposal, state = super().propose(*args, **options)
        return proposal.replace(prefix=None), state


def num_copies(pair, drafter, params):
    """Returns how often a round of two rows copies an array of the target's cache, always."""
    step = functools.partial(
        speculative_step, target=pair.apply, drafter=drafter, rule=get_rule("rejection")
    )
    state = make_state(drafter)
    run = jax.jit(step, donate_argnums=1).lower(ModelParams(pair.target, params), state)
    entry = re.search(r"^ENTRY .*?^}", run.compile().as_text(), re.DOTALL | re.MULTILINE)[0]
    shape = ",".join(map(str, state.target_cache.keys[0].shape))
    return len(re.findall(rf"= f32\[{shape}\]\S* copy\(", entry))


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads the program of a CPU")
def test_a_member_that_looks_ahead_hands_the_cache_on(tiny_pair):
    """Guards against a copy of the target's cache in every round, drafts wanted or not.

    A member that keeps its cache for itself is the negative control.
    """
    lookup, params = PromptLookupDrafter(3), (None, tiny_lookahead.params())
    size = CONFIG.vocab_size
    copies = [
        num_copies(tiny_pair, CascadeDrafter((lookup, kind(3, size, size))), params)
        for kind in (LookaheadDrafter, Forgetful)
    ]
    assert copies == [0, 2 * CONFIG.num_layers]


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads the program of a CPU")
def test_a_table_is_written_in_place(tiny_pair):
    """Guards against a copy of V times k numbers in every round, whatever the call's width.

    Without donation, the negative control, the table that came is copied once.
    """
    drafter = RecycleDrafter(3, CONFIG.vocab_size, 2)
    step = functools.partial(
        speculative_step, target=tiny_pair.apply, drafter=drafter, rule=get_rule("rejection"),
        widths=(0,),
    )  # fmt: skip
    copies, state = [], make_state(drafter)
    shape = ",".join(map(str, state.draft.shape))
    for donated in (1, ()):
        run = jax.jit(step, donate_argnums=donated)
        text = run.lower(ModelParams(tiny_pair.target), state).compile().as_text()
        copies.append(len(re.findall(rf"= s32\[{shape}\]\S* copy\(", text)))
    assert copies == [0, 1]


@pytest.mark.usefixtures("library")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads the program of a CPU")
def test_logits_stay_as_the_product_leaves_them(monkeypatch):
    """Guards against a copy of all logits in every greedy round, for a branch that is not taken.

    Without the layout, the negative control, calls on one token copy them.
    """
    config = dataclasses.replace(CONFIG, num_layers=1)
    apply, params = make_apply(config), ModelParams(random_params(config, seed=0, std=0.4))
    drafter, shape, copies = PromptLookupDrafter(3), f"2,1,{CONFIG.vocab_size}", []
    cache = init_cache(config, batch_size=2, capacity=_CAPACITY, dtype=jnp.float32)
    state = make_state(drafter).replace(target_cache=cache)
    # As users compile it: the tests switch this off, where it is an option at all.
    name = "xla_cpu_use_fusion_emitters"
    options = {name: True} if name in os.environ.get("XLA_FLAGS", "") else None
    for layout in (round.row_major, lambda logits: logits):
        monkeypatch.setattr(round, "row_major", layout)
        step = functools.partial(
            speculative_step, target=apply, drafter=drafter, rule=get_rule("rejection"),
            widths=(0,),
        )  # fmt: skip
        run = jax.jit(step, donate_argnums=1).lower(params, state)
        # Fused with a sampler's work they cost nothing: those are not of a parameter.
        text = run.compile(options).as_text()
        copies.append(len(re.findall(rf"= f32\[{shape}\]\S* copy\(%param", text)))
    assert copies[0] == 0 < copies[1]
