"""Weights in 8 or 4 bits: how far they are from the floats, and how they are kept.

Blocks of Q4_0 and Q8_0 are also what other readers of these formats read.
"""

import dataclasses

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jspec.common.errors import InputError
from jspec.kernels import PackedKernel
from jspec.kernels.packed import as_in_file, unpack
from jspec.models import PRESETS, QuantizedKernel
from jspec.weights.gguf import load_gguf
from jspec.weights.hf import load_hf, save_hf
from jspec.weights.orbax_checkpoint import load_orbax, save_orbax
from jspec.weights.quantize import (
    INTEGERS,
    KINDS,
    check_kind,
    dequantize,
    quantize,
    quantize_blocks,
)
from jspec.weights.random_weights import random_params
from jspec.weights.tensor_names import parameter_table
from tests.tiny_models import CONFIG as TINY
from tests.tiny_models import peaked_params
from tests.weights.toys import (
    CONFIGS,
    GGUF_CONFIG,
    quantize_params,
    random_tensors,
    write_gguf,
)

_KERNELS = ("embedding", "head", "qkv", "out", "gate_up", "down")


def _random_kernel(shape, num_inputs, seed=0):
    """Returns weights whose outputs, and groups of 32 inputs, differ in size."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(np.prod(shape) // num_inputs, num_inputs))
    weights *= np.exp(rng.normal(size=(len(weights), 1)))
    weights[:, : num_inputs // 2] *= 0.3
    return jnp.asarray(weights.reshape(shape), jnp.float32)


def test_experts_stay_floats():
    """Guards against a model called int8 most of whose weights are floats."""
    sparse = {"num_experts": 2, "num_experts_per_token": 1, "expert_dim": 8}
    config = dataclasses.replace(TINY, family="mixtral", **sparse)
    check_kind(config, None)
    for kind in (*KINDS, "packed"):
        with pytest.raises(InputError, match=f"'{kind}' expects a model without experts"):
            check_kind(config, kind)
    with pytest.raises(InputError, match=r"'packed' expects a \.gguf file"):
        check_kind(TINY, "packed")


def test_an_int8_weight_is_at_most_half_a_step_off():
    """Guards against a scale over the wrong axis: each output has its own step."""
    kernel = _random_kernel((3, 5, 96), 96)
    rounded = dequantize(quantize(kernel, ("qkv",), "int8", "float32"))
    step = jnp.max(jnp.abs(kernel), axis=-1, keepdims=True) / 127
    assert jnp.all(jnp.abs(rounded - kernel) <= step * 0.5001)
    assert jnp.max(jnp.abs(rounded - kernel) / step) > 0.4  # the bound is tight


def test_an_int4_weight_is_at_most_half_a_step_of_its_group_off():
    """Guards against groups of other inputs, and a multiplier rounded down, which would clip."""
    kernel = _random_kernel((7, 192), 192)
    quantized = quantize(kernel, ("out",), "int4", "float32")
    rounded = dequantize(quantized)
    assert rounded.shape == kernel.shape
    groups = np.asarray(kernel).reshape(7, 6, 32)
    rows = np.abs(groups).max(axis=(1, 2)) / 126
    steps = rows[:, None] * np.ceil(np.abs(groups).max(axis=2) / 7 / rows[:, None] - 1e-5)
    errors = np.abs(np.asarray(rounded).reshape(groups.shape) - groups)
    assert np.all(errors <= steps[:, :, None] * 0.5001)
    assert quantized.multipliers is not None
    assert len(np.unique(quantized.multipliers)) > 3  # small groups have small steps


@pytest.mark.parametrize("kind", INTEGERS)
def test_zeros_stay_zeros(kind):
    """Guards against 0 / 0 in an output, or a group of inputs, without weights."""
    kernel = _random_kernel((6, 64), 64).at[2].set(0.0).at[:, 32:].set(0.0)
    rounded = dequantize(quantize(kernel, ("down",), kind, "float32"))
    assert jnp.all(rounded[kernel == 0] == 0)
    assert jnp.any(rounded[0] != 0)


@pytest.mark.parametrize("kind", INTEGERS)
def test_every_kernel_is_quantised_and_nothing_else(kind):
    """Guards against a rounded norm or bias, and a kernel left in floats."""
    config = dataclasses.replace(GGUF_CONFIG, qkv_bias=True, out_bias=True, mlp_bias=True)
    params = random_params(config, 0, "bfloat16")
    quantized = flatten_dict(quantize_params(params, config, kind))
    for path, leaf in flatten_dict(params).items():
        result = quantized[path]
        assert (result.shape, result.dtype) == (leaf.shape, leaf.dtype)
        assert isinstance(result, QuantizedKernel) == (path[-1] in _KERNELS)
        if not isinstance(result, QuantizedKernel):
            np.testing.assert_array_equal(result, leaf)
        else:
            packed = kind == "int4" and path[-1] not in ("embedding", "head")
            assert result.values.nbytes == leaf.size // (2 if packed else 1)


def test_int4_refuses_inputs_that_do_not_divide():
    """Guards against a group that reaches into the next output."""
    config = CONFIGS["grouped"]
    with pytest.raises(InputError, match=r"layers_0/attention/qkv: .* groups of 32, got 24"):
        random_params(config, 0, "float32", "int4")
    with pytest.raises(InputError, match="q4_0, packed, packed_a8; got 'int3'"):
        random_params(config, 0, "float32", "int3")


@pytest.mark.parametrize(("save", "load"), [(save_hf, load_hf), (save_orbax, load_orbax)])
def test_folders_are_quantised_as_they_are_read(tmp_path, save, load):
    """Guards against another tree than quantising afterwards; integers are not saved."""
    params = peaked_params(TINY)
    save(tmp_path / "m", TINY, params)
    expected = quantize_params(params, TINY, "int8")
    jax.tree.map(
        np.testing.assert_array_equal, load(tmp_path / "m", "float32", "int8")[1], expected
    )
    with pytest.raises(InputError, match="expected float weights to write"):
        save(tmp_path / "other", TINY, expected)
    assert not (tmp_path / "other").exists()


def test_float_weights_are_rounded_once(tmp_path):
    """Guards against a bfloat16 model whose integers come from weights rounded to bfloat16."""
    save_hf(tmp_path / "m", TINY, peaked_params(TINY))
    loaded = [load_hf(tmp_path / "m", dtype, "int8")[1] for dtype in ("float32", "bfloat16")]
    down = [params["layers_1"]["mlp"]["down"] for params in loaded]
    np.testing.assert_array_equal(down[0].values, down[1].values)
    assert [kernel.dtype.name for kernel in down] == ["float32", "bfloat16"]
    assert loaded[1]["final_norm"]["scale"].dtype == jnp.bfloat16


def _q8_tensors(shares_scale):
    """Returns tensors that Q8_0 holds exactly, rows of one scale or blocks of several."""
    rng = np.random.default_rng(0)
    tensors = random_tensors(GGUF_CONFIG)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            blocks = rng.integers(-126, 127, (tensor.size // 32, 32)).astype(np.float32)
            blocks[:, 0] = 127  # of every block, so that gguf finds the same scale again
            scales = np.full([len(blocks), 1], 2**-9, np.float32)
            if not shares_scale:
                scales *= 2.0 ** rng.integers(-3, 1, scales.shape)
            tensors[name] = (blocks * scales).astype(np.float32).reshape(tensor.shape)
    return tensors


@pytest.mark.parametrize("shares_scale", [True, False])
def test_q8_0_files_become_int8_at_no_or_half_a_step_of_loss(tmp_path, shares_scale):
    """Guards against a lossy way through another type: what one scale can say is kept exactly."""
    kinds = {"weight": gguf.GGMLQuantizationType.Q8_0}
    write_gguf(tmp_path / "m.gguf", GGUF_CONFIG, _q8_tensors(shares_scale), kinds)
    exact = flatten_dict(load_gguf(tmp_path / "m.gguf", "float32")[1])
    loaded = flatten_dict(load_gguf(tmp_path / "m.gguf", "bfloat16", "int8")[1])
    for rule in parameter_table(GGUF_CONFIG):
        if rule.path[-1] in _KERNELS:
            weights = np.asarray(exact[rule.path]).reshape(loaded[rule.path].values.shape)
            integers = np.asarray(dequantize(loaded[rule.path])).reshape(weights.shape)
            step = np.abs(weights).max(axis=1, keepdims=True) / 127
            assert np.all(np.abs(integers - weights) <= step * (1e-4 if shares_scale else 0.5001))
            assert shares_scale or np.any(integers != weights)


@pytest.mark.parametrize(("kind", "share"), [("int8", 0.5), ("int4", 0.295)])
def test_bytes_of_a_real_model(kind, share):
    """Guards against values or scales kept in a wider type: int8 is half of bfloat16. No arrays."""
    config = PRESETS["llama3.2-3b"]
    leaves = {rule.path: jax.ShapeDtypeStruct(rule.shape, jnp.bfloat16)
              for rule in parameter_table(config)}  # fmt: skip
    quantized = jax.eval_shape(
        lambda params: quantize_params(params, config, kind), unflatten_dict(leaves)
    )
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(quantized))
    num_params = sum(leaf.size for leaf in leaves.values())
    assert num_bytes / (2 * num_params) == pytest.approx(share, abs=0.005)


_TYPES = gguf.GGMLQuantizationType
_FORMATS = {"q4_0": _TYPES.Q4_0, "q8_0": _TYPES.Q8_0}


def _weights(shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp(rng.normal(size=(shape[0], 1)))).astype(np.float32)


def _rounded(weights, kind):
    """Returns the weights [o i] of a kernel rounded to blocks."""
    kernel = quantize_blocks(jnp.asarray(weights), kind, "float32")
    return np.asarray(unpack(kernel.strips, kind))[: len(weights)], kernel


@pytest.mark.parametrize("kind", _FORMATS)
def test_gguf_reads_the_same_weights(kind):
    """Guards against halves of a block swapped, codes without their offset, a scale's two bytes."""
    weights = _weights((21, 96))
    weights[1], weights[:, 64:] = 0, 0  # blocks without weights: no 0 / 0
    rounded, kernel = _rounded(weights, kind)
    assert np.all(rounded[weights == 0] == 0)
    blocks = np.asarray(as_in_file(kernel.strips, kind)).reshape(32, -1)[:21]
    np.testing.assert_array_equal(gguf.quants.dequantize(blocks, _FORMATS[kind]), rounded)
    assert (kernel.shape, kernel.kind, kernel.dtype) == ((21, 96), kind, jnp.float32)


def test_the_best_of_several_scales_beats_the_usual_one():
    """Guards against a search that does nothing; gguf's scale is the one that clips no weight."""
    weights = _weights((64, 256))
    usual = gguf.quants.dequantize(gguf.quants.quantize(weights, _TYPES.Q4_0), _TYPES.Q4_0)
    error, usual_error = (
        np.mean((x - weights) ** 2) for x in (_rounded(weights, "q4_0")[0], usual)
    )
    assert 0.8 * usual_error < error < 0.92 * usual_error


def test_a_weight_of_q8_0_is_at_most_half_a_step_off():
    """Guards against a scale over the wrong inputs."""
    weights = _weights((9, 64))
    steps = np.abs(weights).reshape(9, 2, 32).max(axis=2).repeat(32, axis=1) / 127
    errors = np.abs(_rounded(weights, "q8_0")[0] - weights)
    assert np.all(errors <= 0.57 * steps)  # the scale itself is rounded: 127 steps · 2^-11
    assert np.max(errors / steps) > 0.4


def test_a_file_is_rounded_only_where_that_saves_bits(tmp_path):
    """Guards against a second rounding of 4-bit weights, and an embedding that grows."""
    kinds = {"ffn": _TYPES.Q4_0, "token_embd": _TYPES.Q5_0, "": _TYPES.Q8_0}
    path = tmp_path / "m.gguf"
    write_gguf(path, GGUF_CONFIG, random_tensors(GGUF_CONFIG), kinds=kinds)
    kept, rounded = (flatten_dict(load_gguf(path, "bfloat16", q)[1]) for q in ("packed", "q4_0"))
    for key, kernel in kept.items():
        if not isinstance(kernel, PackedKernel):
            np.testing.assert_array_equal(rounded[key], kernel)
            continue
        leaf = rounded[key]
        assert (leaf.shape, leaf.dtype) == (kernel.shape, kernel.dtype)
        assert leaf.takes_bytes
        is_rounded = key[-1] in ("qkv", "out", "head")
        assert leaf.kind == ("q4_0" if is_rounded else kernel.kind)
        if not is_rounded:
            np.testing.assert_array_equal(leaf.strips, kernel.strips)
            continue
        weights, exact = (unpack(packed.strips, packed.kind) for packed in (leaf, kernel))
        assert 0.003 < np.mean((weights - exact) ** 2) / np.mean(exact**2) < 0.01
