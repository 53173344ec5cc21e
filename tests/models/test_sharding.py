"""How a model is split: configs of a device, the mesh that a text names, and what is refused."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jspec.common.errors import InputError
from jspec.kernels.split import SplitKernel
from jspec.models import PRESETS
from jspec.models.sharding import (
    join_products,
    make_mesh,
    shard_config,
    split_axis,
    spread_config,
)
from jspec.weights.quantize import quantize
from jspec.weights.tensor_names import parameter_table
from tests.tiny_models import CONFIG

_70B = PRESETS["llama3.1-70b"]


@pytest.mark.parametrize(("count", "kv_heads", "groups"), [(2, 4, 8), (8, 1, 8), (16, 1, 4)])
def test_a_device_has_its_share(count, kv_heads, groups):
    """With 16 devices each of the 8 key/value heads is on two of them."""
    shard = shard_config(spread_config(_70B, count), count)
    assert (shard.num_kv_heads, shard.num_groups) == (kv_heads, groups)
    assert shard.hidden_dim * count == _70B.hidden_dim
    assert (shard.embed_dim, shard.vocab_size) == (_70B.embed_dim, _70B.vocab_size)


def test_nearly_all_of_a_model_is_split():
    """Norms alone are on every device, and a vocabulary of an odd number of tokens."""
    table = parameter_table(_70B)
    whole = [p.path[-1] for p in table if split_axis(p.path[-1], p.shape, 8) is None]
    assert set(whole) == {"scale"}
    assert split_axis("embedding", (49_155, 64), 2) is None


@pytest.mark.parametrize(
    ("changes", "count", "said"),
    [
        ({"num_heads": 9, "num_kv_heads": 3}, 2, "the target's 9 query heads, got model:2"),
        ({"num_heads": 6, "num_kv_heads": 3}, 2, "3 key/value heads, got model:2"),
        ({"num_heads": 8, "hidden_dim": 42}, 4, "42 hidden units, got model:4"),
        ({"qk_norm": "full"}, 2, "norms all heads together"),
    ],
)
def test_devices_that_cannot_share_evenly(changes, count, said):
    with pytest.raises(InputError, match=said):
        spread_config(dataclasses.replace(CONFIG, **changes), count)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model", "a mesh such as data:2,model:4, got 'model'"),
        ("pipe:2", "a mesh such as"),
        ("data:2,model:3", "divides the 8 devices that are there, got data:2,model:3"),
        ("model:16", "divides the 8 devices that are there, got model:16"),
    ],
)
def test_a_mesh_that_does_not_fit(text, said):
    with pytest.raises(InputError, match=said):
        make_mesh(text, [object()] * 8)


def test_a_mesh_takes_the_first_devices():
    device = jax.devices()[0]
    assert make_mesh("model:1", [device, device]).shape == {"data": 1, "model": 1}
    assert np.shape(make_mesh("data:1", [device]).devices) == (1, 1)


def test_rounded_weights_that_lie_whole_stay_whole():
    """As of a draft model whose heads the devices do not divide."""
    kernel = quantize(np.ones([8, 64], np.float32), ("down",), "int8", "float32")
    for axis, is_split in ((None, False), (1, True)):
        rows = PartitionSpec(None, "model") if axis else PartitionSpec()
        specs = {"down": kernel.replace(values=rows, scales=PartitionSpec(), multipliers=None)}
        actual = join_products({"down": kernel}, specs, 2)["down"]
        assert isinstance(actual, SplitKernel) == is_split
        assert is_split or actual.shape == kernel.shape
