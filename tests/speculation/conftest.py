"""Engines over the tiny pair, compiled once a session."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.hierarchical import HierarchicalDrafter, HierarchicalParams
from jspec.drafters.model import ModelDrafter
from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.drafters.recycle import RecycleDrafter
from jspec.drafters.suffix import SuffixDrafter
from tests import tiny
from tests.speculation.drive import QUICK, Engine
from tests.speculation.fresh import padded
from tests.tiny_heads import MODULES

VOCAB = tiny.CONFIG.vocab_size


@pytest.fixture(scope="session")
def prompts():
    """Returns four prompts of different lengths, one of a single token, one that repeats itself."""
    rng = np.random.default_rng(3)
    return [[7], *(rng.integers(0, VOCAB, n).tolist() for n in (5, 12)), [4, 9, 23, 4] * 3]


@pytest.fixture(scope="session")
def model_drafter(tiny_pair):
    """Returns a function from a number of drafts to the drafter over the tiny Llama."""
    return lambda width: ModelDrafter(
        width, VOCAB, VOCAB, apply=tiny_pair.apply, init_cache=tiny.empty_cache
    )


@pytest.fixture(scope="session")
def make_engine(tiny_pair, model_drafter):
    """Returns a cached function: (drafter's name, drafts a round) -> Engine."""

    @functools.cache
    def build(name, width):
        if name == "self":
            return build("model", width).with_params(tiny_pair.target, tiny_pair.target)
        if name in MODULES:
            drafter, draft = MODULES[name].drafter(width), MODULES[name].params_for(tiny_pair)
        else:
            drafter = {
                "plain": lambda: None,
                "model": lambda: model_drafter(width),
                "prompt_lookup": lambda: PromptLookupDrafter(width, min_match=1),
                "suffix": lambda: SuffixDrafter(width),
                "recycle": lambda: RecycleDrafter(width, VOCAB),
                "hierarchical": lambda: HierarchicalDrafter(
                    model_drafter(width), PromptLookupDrafter(max(width - 1, 1))
                ),
            }[name]()
            drafts = {"model": tiny_pair.draft, "hierarchical": HierarchicalParams(tiny_pair.draft)}
            draft = drafts.get(name)
        params = tiny_pair.target, draft
        return Engine(tiny_pair.apply, tiny.empty_cache, params, drafter)

    return lambda name, width=0: build(name, width)  # one entry, with a width or without


@pytest.fixture(scope="session")
def fresh_cache(tiny_pair):
    """Returns a function (params, texts) -> the cache of one prefill of the texts."""
    call = jax.jit(tiny_pair.apply, compiler_options=QUICK)

    def prefill(params, texts):
        tokens = padded(texts, 96)
        return call(params, jnp.asarray(tokens), tiny.empty_cache(*tokens.shape))[2]

    return prefill
