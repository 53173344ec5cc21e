"""Drafters by name."""

import jax.numpy as jnp
import pytest

from jspec.drafters import (
    DRAFTERS,
    Drafter,
    DrafterOptions,
    DrafterSpec,
    ModelDrafter,
    PromptLookupDrafter,
    make_drafter,
)
from jspec.errors import InputError
from jspec.weights.byte_tokenizer import ByteTokenizer
from tests.tiny import CONFIG

SPEC = DrafterSpec(
    3, CONFIG, 61, CONFIG, jnp.float32,
    options=DrafterOptions(draft_layers=(0,), pattern="ab|c"), tokenizer=ByteTokenizer(61),
)  # fmt: skip


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_name_builds_a_drafter(name):
    """`none` is plain decoding: no drafter at all."""
    drafter = make_drafter(name, SPEC).drafter
    if name == "none":
        assert drafter is None
    else:
        assert isinstance(drafter, Drafter)
        assert drafter.num_draft_tokens == 3


def test_names_mean_what_they_say():
    """Two lines of a registry are easily swapped."""
    assert isinstance(make_drafter("model", SPEC).drafter, ModelDrafter)
    assert isinstance(make_drafter("prompt_lookup", SPEC).drafter, PromptLookupDrafter)


def test_a_missing_draft_model_is_named():
    """Not an attribute error of None later on."""
    with pytest.raises(InputError, match="draft model"):
        make_drafter("model", SPEC._replace(draft_config=None))


def test_an_unknown_drafter_is_named():
    """The message lists what there is."""
    with pytest.raises(InputError, match=r"prompt_lookup.*'zebra'"):
        make_drafter("zebra", SPEC)
