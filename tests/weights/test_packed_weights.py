"""Models whose weights stay packed as in a GGUF file: the same model as the file's in floats."""

import dataclasses
import functools
import subprocess
import sys
import types

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jspec.common.errors import InputError
from jspec.common.memory import tree_bytes
from jspec.kernels import JoinedKernel, PackedKernel, library
from jspec.models import init_cache, make_apply
from jspec.weights import gguf as gguf_files
from jspec.weights import load_model, resolver
from jspec.weights.gguf import load_gguf
from jspec.weights.tokenizers import gguf_tokenizer
from tests.weights.toys import GGUF_CONFIG, random_tensors, write_gguf

_KINDS = gguf.GGMLQuantizationType
# Queries and keys of one format, values of another; gate and up of two; a head of floats.
_MIXED = {
    "attn_v": _KINDS.Q8_0, "attn_output": _KINDS.Q5_0, "ffn_up": _KINDS.Q5_1,
    "ffn_gate": _KINDS.F16, "output.": _KINDS.F16, "token_embd": _KINDS.Q8_0, "": _KINDS.Q4_1,
}  # fmt: skip


def _write(path, kinds, config=GGUF_CONFIG):
    write_gguf(path, config, random_tensors(config), kinds=kinds)
    return path


@functools.cache
def _compiled(config):
    return jax.jit(make_apply(config))


def _logits(config, params, tokens, width):
    apply = _compiled(config)
    cache = init_cache(config, batch_size=1, capacity=64, dtype=params["embedding"].dtype)
    chunks = []
    for begin in range(0, tokens.shape[1], width):
        logits, _, cache = apply(params, tokens[:, begin : begin + width], cache)
        cache = cache.replace(length=cache.length + width)
        chunks.append(logits)
    return np.concatenate(chunks, axis=1)


@pytest.fixture(params=["C++", "XLA"])
def _method(request, monkeypatch):
    if request.param == "XLA":
        monkeypatch.setattr(library, "host_function", lambda name: None)
        monkeypatch.setattr(library, "has_packed", lambda: False)
        jax.clear_caches()  # compiled layers know how the others multiply
        yield
        return jax.clear_caches()
    if not library.has_packed():
        pytest.skip("no C++ for packed kernels on this processor")
    yield None


@pytest.mark.usefixtures("_method")
@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_is_the_files_in_floats(tmp_path, tied):
    """Guards against rows in another order: fused tensors, heads rotated by llama.cpp's order."""
    config = dataclasses.replace(GGUF_CONFIG, tie_embeddings=tied, num_layers=1)
    path = _write(tmp_path / "m.gguf", _MIXED, config)
    config, floats, _ = load_gguf(path, "float32")
    _, packed, _ = load_gguf(path, "float32", "packed")
    layer = packed["layers_0"]
    assert isinstance(layer["attention"]["qkv"], JoinedKernel)
    assert len(layer["attention"]["qkv"].parts) == 2
    assert isinstance(layer["attention"]["out"], PackedKernel)
    assert isinstance(packed.get("head", jnp.zeros([])), jax.Array)
    assert {k: v.shape for k, v in flatten_dict(packed).items()} == {
        k: v.shape for k, v in flatten_dict(floats).items()
    }
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 40, (1, 24)), jnp.int32)
    expected, actual = (_logits(config, params, tokens, 24) for params in (floats, packed))
    assert np.std(expected) > 0
    np.testing.assert_allclose(actual, expected, atol=1e-4 * np.std(expected))


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "packed"), ("float32", "packed_a8")])
def test_a_token_has_the_same_logits_in_a_wide_call(tmp_path, dtype, kind):
    """Guards against a verify call that differs from plain decoding, bit for bit."""
    if not library.has_packed():
        pytest.skip("no C++ for packed kernels on this processor")
    path = _write(tmp_path / "m.gguf", _MIXED)
    config, params, _ = load_gguf(path, dtype, kind)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 40, (1, 24)), jnp.int32)
    single = _logits(config, params, tokens, 1)
    for width in (6, 12):
        np.testing.assert_array_equal(_logits(config, params, tokens, width), single)


def test_inputs_are_rounded_where_that_is_asked_for(tmp_path):
    """Guards against a mode that changes nothing, a part of a joined kernel that it misses, too."""
    path = _write(tmp_path / "m.gguf", _MIXED)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 40, (1, 24)), jnp.int32)
    config, exact, _ = load_gguf(path, "float32", "packed")
    _, rounded, _ = load_gguf(path, "float32", "packed_a8")
    assert all(part.takes_bytes for part in rounded["layers_1"]["attention"]["qkv"].parts)
    expected, actual = (_logits(config, params, tokens, 24) for params in (exact, rounded))
    error = np.sqrt(np.mean((actual - expected) ** 2)) / np.std(expected)
    assert 1e-4 < error < 0.2


def test_a_file_of_floats_stays_floats(tmp_path):
    """Guards against a model that is called packed, and whose weights cannot be written."""
    path = _write(tmp_path / "m.gguf", {"attn": _KINDS.F16})
    _, params, _ = load_gguf(path, "bfloat16", "packed")
    assert all(isinstance(leaf, jax.Array) for leaf in flatten_dict(params).values())


@pytest.mark.parametrize("kinds", [_MIXED, {"": _KINDS.Q8_0}])
def test_the_memory_asked_for_is_that_taken(tmp_path, monkeypatch, kinds):
    """Guards against a model refused where it fits, or loaded where it does not."""
    asked = {}
    monkeypatch.setattr("jspec.weights.assemble.check_memory", lambda needs, _: asked.update(needs))
    _, params, _ = load_gguf(_write(tmp_path / "m.gguf", kinds), "bfloat16", "packed")
    joined = [k for k in flatten_dict(params).values() if isinstance(k, JoinedKernel)]
    assert asked["weights"] == tree_bytes(params) - sum(kernel.order.nbytes for kernel in joined)


_PEAK = """
import pathlib, sys
from jspec.weights.gguf import load_gguf

def status(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

small, large = map(pathlib.Path, sys.argv[1:])
load_gguf(small, "bfloat16", "packed")  # what the first model needs besides: libraries, threads
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = status("VmRSS")
kept = load_gguf(large, "bfloat16", "packed")
print(1024 * (status("VmHWM") - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of the peak")
def test_loading_takes_little_more_memory_than_the_file(tmp_path):
    """Guards against floats on the way, twice or four times the file, and against its own pages."""
    small = _write(tmp_path / "small.gguf", {"": _KINDS.Q8_0})
    config = dataclasses.replace(GGUF_CONFIG, vocab_size=40_000, embed_dim=1024)
    config = dataclasses.replace(config, tie_embeddings=True)
    large = _write(tmp_path / "large.gguf", {"": _KINDS.Q8_0}, config)
    command = [sys.executable, "-c", _PEAK, str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 0.9 < int(done.stdout) / large.stat().st_size < 1.15


def test_gguf_files_stay_packed_unless_floats_are_asked_for(tmp_path, monkeypatch):
    """Guards against a default that is slow where there is no C++ for packed kernels."""
    monkeypatch.setattr(gguf_tokenizer, "build_tokenizer", lambda file: _Ends())
    path = _write(tmp_path / "m.gguf", {"": _KINDS.Q8_0})
    for fast in (True, False):
        monkeypatch.setattr(resolver, "has_fast_packed_products", lambda fast=fast: fast)
        assert load_model(path).quantization == ("packed" if fast else None)
        assert load_model(path, quantization="auto").quantization == ("packed" if fast else None)
    assert load_model(path, quantization="packed").quantization == "packed"
    assert load_model(path, quantization="none").quantization is None


def test_a_file_of_experts_becomes_floats(tmp_path, monkeypatch, capsys):
    """Guards against a model that is said to be packed, most of whose weights are floats."""
    path = _write(tmp_path / "m.gguf", {"": _KINDS.Q8_0})
    sparse = types.SimpleNamespace(num_experts=4)
    monkeypatch.setattr(gguf_tokenizer, "build_tokenizer", lambda file: _Ends())
    monkeypatch.setattr(resolver, "has_fast_packed_products", lambda: True)
    # As the choice of a kind reads the file, and then, between the two, as it is loaded.
    dense = gguf_files.read_gguf_config(gguf_files.GgufFile(path))
    told = iter([(sparse, None), dense, (sparse, None)])
    monkeypatch.setattr(gguf_files, "read_gguf_config", lambda file: next(told))
    assert load_model(path).quantization is None
    assert "m.gguf has experts: its weights become floats" in capsys.readouterr().err
    with pytest.raises(InputError, match="'packed' expects a model without experts"):
        load_model(path, quantization="packed")


class _Ends:
    eos_ids = ()


def test_a_damaged_tensor_is_named(tmp_path):
    """Guards against a traceback, and against blocks that straddle two rows."""
    path = _write(tmp_path / "m.gguf", {"": _KINDS.Q8_0})
    content, name = bytearray(path.read_bytes()), b"blk.1.attn_v.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8  # number of axes, two lengths
    for kind, message in (
        (99, "expected blk.1.attn_v.weight in one of F32, .*; got the unknown type 99"),
        (14, "attn_v.weight in Q6_K has rows of 64 weights, expected a multiple of 256"),
    ):
        content[place : place + 4] = kind.to_bytes(4, "little")
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            load_gguf(path, "float32", "packed")
