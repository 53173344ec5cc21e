"""A tiny target of three layers with opinions, some of whose layers agree with it now and then."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jspec.drafters import DrafterOptions, DrafterSpec, make_drafter
from jspec.models import init_cache, make_apply
from tests import tiny

CONFIG = dataclasses.replace(tiny.CONFIG, num_layers=3, num_mtp_layers=1)
FIRST, SUBSET, ALL = (0, 1), (0, 2), (0, 1, 2)

apply = tiny.one_program(make_apply(CONFIG))


@functools.cache
def params():
    """Returns the target's parameters; its layer `mtp` says little, of which some is kept."""
    target = tiny.random_params(CONFIG, seed=0, std=0.4)
    norm = jax.tree.map(lambda leaf: 0.3 * leaf, target["mtp"]["final_norm"])
    return target | {"mtp": target["mtp"] | {"final_norm": norm}}


def empty_cache(batch_size, capacity, layers=ALL):
    """Returns an empty float32 cache of some of the layers."""
    config = dataclasses.replace(CONFIG, num_layers=len(layers))
    return init_cache(config, batch_size=batch_size, capacity=capacity, dtype=jnp.float32)


def build(layers, width, *, name="layer_skip", vocab_size=61, is_member=False, **options):
    """Returns the drafter of those layers."""
    spec = DrafterSpec(
        width, CONFIG, vocab_size, None, jnp.float32, is_member=is_member,
        options=DrafterOptions(draft_layers=layers, **options),
    )  # fmt: skip
    return make_drafter(name, spec).drafter
