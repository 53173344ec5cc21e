"""The head that comes with jspec: it is there, small, whole, and taken by default."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.drafters import (
    DrafterOptions,
    DrafterSpec,
    choose_drafter,
    make_drafter,
    with_shipped_head,
)
from jspec.drafters.eagle_head import default_feature_layers, load_eagle
from jspec.drafters.spec import find_head, shipped_head
from jspec.kernels.quantized import QuantizedKernel
from jspec.models.config import PRESETS
from jspec.weights.published import SMOLLM2
from jspec.weights.quantize import dequantize

_TARGET = PRESETS["smollm2-135m"]


@pytest.fixture(scope="module")
def folder():
    """Returns the folder of the default target's head."""
    name = shipped_head("eagle", SMOLLM2)
    assert name is not None
    return find_head(name)


def test_it_is_small_and_has_a_card(folder):
    """At most 12 MB; the card says what it is."""
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 12e6
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert SMOLLM2 in card
    assert "python -m jspec.train" in card


def test_it_fits_the_target(folder):
    """Whole, of the target's shape, with no number that is none."""
    head = load_eagle(folder, _TARGET, jnp.bfloat16)
    assert head.config.feature_layers == default_feature_layers(_TARGET.num_layers)
    assert head.config.layer.embed_dim == _TARGET.embed_dim
    kernels = head.params["fc"], head.params["head"]["head"]
    assert all(isinstance(kernel, QuantizedKernel) for kernel in kernels)
    for kernel in map(dequantize, kernels):
        assert np.isfinite(kernel).all()
        assert kernel.std() > 0


def test_it_is_the_default_of_its_target_alone():
    """Not with a draft model, not for other targets."""
    assert choose_drafter(None, has_draft=False, target=SMOLLM2) == ("prompt_lookup+eagle")
    assert choose_drafter(None, has_draft=True, target=SMOLLM2) == "prompt_lookup+model"
    assert choose_drafter(None, has_draft=False, target="random:smollm2-135m") == "prompt_lookup"
    assert shipped_head("medusa", SMOLLM2) is None


def _make(name, target_name, **options):
    spec = DrafterSpec(
        num_draft_tokens=2,
        target_config=_TARGET,
        vocab_size=_TARGET.vocab_size,
        draft_config=None,
        dtype=jnp.bfloat16,
        options=with_shipped_head(name, DrafterOptions(**options), target_name),
    )
    return make_drafter(name, spec)


def test_eagle_takes_it_where_none_is_named():
    """Another target has none, and a folder that is named goes first."""
    named = f"shipped:{SMOLLM2}"
    assert _make("eagle", SMOLLM2).params is not None
    assert _make("eagle", "random:smollm2-135m", draft_head=named).params is not None
    assert with_shipped_head("prompt_lookup+eagle", DrafterOptions(), SMOLLM2) == (
        DrafterOptions(draft_head=named)
    )
    with pytest.raises(InputError, match="'eagle' expects draft_head"):
        _make("eagle", "random:smollm2-135m")
    with pytest.raises(InputError, match="'medusa' expects draft_head"):
        _make("medusa", SMOLLM2)
    with pytest.raises(InputError, match="not-there"):
        _make("eagle", SMOLLM2, draft_head="not-there")
    with pytest.raises(InputError, match="comes with jspec, shipped:smol"):
        _make("eagle", SMOLLM2, draft_head="shipped:llama")
