"""GGUF files: the container, the config in it, the tensors."""

import dataclasses
import struct

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.models.config import RopeScaling
from jspec.weights.gguf import load_gguf
from tests.weights.toys import GGUF_CONFIG, gguf_name, random_tensors, unpack, write_gguf

_KINDS = gguf.GGMLQuantizationType
_QUANTISED = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


def _load(path, dtype="float32"):
    config, params, _ = load_gguf(path, dtype)
    return config, unpack(config, params)


def _write(path, **settings):
    write_gguf(path, GGUF_CONFIG, random_tensors(GGUF_CONFIG), **settings)
    return path


def _uninterleave(rows, head_dim):
    """Undoes llama.cpp's order one row at a time: its row 2i is row i, 2i + 1 is i + H/2."""
    out = np.empty_like(rows)
    for row in range(len(rows)):
        head, i = divmod(row, head_dim)
        out[head * head_dim + i // 2 + (i % 2) * (head_dim // 2)] = rows[row]
    return out


def test_unquantised_file_is_the_model(tmp_path):
    """Guards against the interleaved RoPE order of query and key rows being left in place."""
    config, tensors = _load(_write(tmp_path / "m.gguf"))
    assert config == dataclasses.replace(GGUF_CONFIG, eos_ids=())  # the tokenizer has the ends
    for name, tensor in random_tensors(GGUF_CONFIG).items():
        np.testing.assert_array_equal(tensors[name], tensor)


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, "float32") for kind in _QUANTISED), ("Q4_1", "bfloat16")]
)
def test_tensors_equal_the_librarys_dequantisation(tmp_path, kind, dtype):
    """Guards against blocks cut or ordered differently by the chunked reading."""
    path = _write(tmp_path / "m.gguf", kinds={"": _KINDS[kind]})
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, actual in _load(path, dtype)[1].items():
        tensor = stored[gguf_name(name)]
        assert tensor.tensor_type.name == (kind if len(tensor.shape) > 1 else "F32")
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if "q_proj" in name or "k_proj" in name:
            values = _uninterleave(values, GGUF_CONFIG.head_dim)
        np.testing.assert_array_equal(actual, values.astype(jnp.dtype(dtype)))


def test_long_tensors_are_read_in_chunks(tmp_path, monkeypatch):
    """Guards against an off-by-one at the seams: one chunk a few blocks, the last one short."""
    path = _write(tmp_path / "m.gguf", kinds={"": _KINDS.Q4_1})
    whole = _load(path)[1]
    monkeypatch.setattr("jspec.weights.gguf._CHUNK_BLOCKS", 7)
    for name, tensor in _load(path)[1].items():
        np.testing.assert_array_equal(tensor, whole[name])


def test_metadata_equals_the_librarys(tmp_path):
    """Guards against misreading a value type and with it everything that follows."""
    tokens = {"ggml.tokens": ["a", "é", ""], "ggml.scores": [0.5, -1.0, 2.0], "ggml.flag": True}
    path = _write(tmp_path / "m.gguf", tokens=tokens)
    _, _, file = load_gguf(path, "float32")
    fields = gguf.GGUFReader(path).fields
    expected = {k: f.contents() for k, f in fields.items() if not k.startswith("GGUF.")}
    assert file.metadata == expected


@pytest.mark.filterwarnings("ignore")
def test_precomputed_rope_factors_are_recognised(tmp_path):
    """Guards against Llama 3.x files, which carry no scaling keys, running with plain RoPE.

    The factors are transformers', as llama.cpp's converter computes them by the same formula.
    """
    pytest.importorskip("torch")
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theta, head_dim = GGUF_CONFIG.rope_theta, GGUF_CONFIG.head_dim
    parameters = {"rope_type": "llama3", "rope_theta": theta, "factor": 8.0,
                  "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                  "original_max_position_embeddings": 8192}  # fmt: skip
    theirs = transformers.LlamaConfig(head_dim=head_dim, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    factors = theta ** -(np.arange(0, head_dim, 2) / head_dim) / scaled.numpy()
    extra = {"rope_freqs.weight": factors.astype(np.float32)}
    config, _ = _load(_write(tmp_path / "m.gguf", extra=extra))
    assert config.rope_scaling == RopeScaling(8.0)


def test_rope_factors_of_one_mean_no_scaling_and_others_are_refused(tmp_path):
    """Guards against long-context factors of another recipe taken for Llama 3's."""
    extra = {"rope_freqs.weight": np.ones(8, np.float32)}
    assert _load(_write(tmp_path / "m.gguf", extra=extra))[0].rope_scaling is None
    extra = {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
    with pytest.raises(InputError, match=r"expected rope_freqs\.weight to hold Llama 3's"):
        _load(_write(tmp_path / "m.gguf", extra=extra))


_REFUSED = {
    "architecture": (
        {"general.architecture": "qwen2moe"},
        "architecture among gemma2, .*got 'qwen2moe', to which qwen3moe is the nearest",
    ),
    "keys of another": ({"general.architecture": "qwen2"}, "the file lacks 'qwen2.block_count'"),
    "missing key": ({"llama.block_count": None}, "lacks 'llama.block_count'"),
    "unknown key": ({"llama.logit_scale": 2.0}, r"unknown keys llama\.logit_scale"),
    "rope scaling": ({"llama.rope.scaling.type": "yarn"}, "lacks 'rope.scaling.factor'"),
    "unknown scaling": (
        {"llama.rope.scaling.type": "new", "llama.rope.scaling.factor": 2.0},
        "expected a rope type among .*got 'new'",
    ),
    "experts": (
        {"llama.expert_count": 8, "llama.expert_used_count": 2},
        "missing tensors: model.layers.0.block_sparse_moe.experts.0.w1",
    ),
    "partial rotation": ({"llama.rope.dimension_count": 8}, "dimension_count to be 16, got 8"),
    "layers differ": ({"llama.feed_forward_length": [96, 64]}, "differs between layers"),
    "one layer less": ({"llama.block_count": 1}, "unknown tensors: blk\\.1"),
    "another width": ({"llama.feed_forward_length": 128}, "expected shape"),
    "billions of layers": (
        {"llama.block_count": 2**31},
        "block_count to be at most 1024, got 2147",
    ),
    "a name of two lines": (
        {"llama.odd\nkey": 1},
        r"expected a name of value 16 of 16, got 'llama\.odd\\nkey'",
    ),
    "no heads": (
        {"llama.attention.head_count": 0, "llama.attention.key_length": None},
        "head_count to be a whole number of at least 1, got 0",
    ),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_what_cannot_be_honoured_is_named(tmp_path, case):
    """Guards against a model that loads and computes something else."""
    metadata, message = _REFUSED[case]
    with pytest.raises(InputError, match=message) as error:
        _load(_write(tmp_path / "m.gguf", metadata=metadata))
    assert "\n" not in str(error.value)


def test_every_truncation_is_refused(tmp_path):
    """Guards against a partial download that loads, or that ends in a traceback."""
    content = _write(tmp_path / "m.gguf").read_bytes()
    broken = tmp_path / "broken.gguf"
    for size in [0, 3, 4, 8, 20, 100, 400, 900, len(content) // 2, len(content) - 64]:
        broken.write_bytes(content[:size])
        with pytest.raises(InputError, match=r"broken\.gguf: .*GGUF") as error:
            _load(broken)
        assert "buffer" not in str(error.value)  # struct's and numpy's own words
        assert ("ends inside its header" in str(error.value)) == (4 <= size <= 900)


_NAME, _ALIGNMENT = b"blk.1.attn_q.weight", struct.pack("<Q", 17) + b"general.alignment"


def _header(num_tensors, num_pairs, rest):
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_pairs) + rest


def _one_axis(count):
    return _header(1, 0, struct.pack("<Q", 1) + b"a" + struct.pack("<I", count))


def _poke(content, place, form, by):
    """Returns the file with the number at a place increased."""
    changed, (number,) = bytearray(content), struct.unpack_from(form, content, place)
    struct.pack_into(form, changed, place, number + by)
    return bytes(changed)


def _poke_tensor(content, place, form, by):
    """Does so behind a matrix's name: its number of axes, two lengths, its type and offset."""
    return _poke(content, content.index(_NAME) + len(_NAME) + place, form, by)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda _: _header(0, 1, struct.pack("<Q", 2**64 - 1)), "ends inside its header"),
        (lambda _: _header(0, 1, _ALIGNMENT + struct.pack("<I", 13)), "unknown value type 13"),
        (lambda _: _header(0, 1, _ALIGNMENT + struct.pack("<IIQ", 9, 4, 2**63)), "ends inside its"),
        (lambda _: _header(0, 1, _ALIGNMENT + struct.pack("<II", 4, 0)), "at least 1, got 0"),
        (lambda _: _header(0, 1, _ALIGNMENT + struct.pack("<IQ", 8, 1) + b"x"), "1, got 'x'"),
        (lambda _: _one_axis(0), "a has 0 axes, expected 1 to 4"),
        (lambda _: _one_axis(5), "a has 5 axes, expected 1 to 4"),
        (lambda content: b"GGML" + content[4:], "not a GGUF file"),
        (lambda content: content[:4] + b"\x01" + content[5:], "version 2 or 3, got 1"),
        # A tensor, or a setting, would silently replace another.
        (
            lambda content: content.replace(_NAME, b"blk.0.attn_q.weight"),
            "name blk.0.attn_q.* twice",
        ),
        (lambda content: content.replace(b"ggml.eot_", b"ggml.eos_"), "name tokenizer.* twice"),
        # Weights were read at another place, which gave NaN or nonsense and no error.
        (
            lambda content: _poke_tensor(content, 24, "<Q", 32),
            r"attn_q\.weight begins at byte \d+ ",
        ),
        # A name of gigabytes, read where the header went wrong.
        (lambda content: _poke(content, 8, "<Q", 1), r"a name of tensor (\d+) of \1, got ''"),
        (lambda content: _poke_tensor(content, 0, "<I", -1), "a text of at most 1000 bytes, got"),
    ],
)
def test_damage_is_named(tmp_path, monkeypatch, damage, message):
    """Guards against tracebacks, and lengths that a file only claims."""
    path = _write(tmp_path / "m.gguf")
    path.write_bytes(damage(path.read_bytes()))
    monkeypatch.setattr("jspec.weights.gguf._MAX_NAME_BYTES", 1000)
    with pytest.raises(InputError, match=message):
        _load(path)


def test_lists_have_a_bounded_length(tmp_path, monkeypatch):
    """Guards against a list of every byte of a large file, ten times as large in memory."""
    tokens = {"ggml.token_type": [1] * 50}
    path = _write(tmp_path / "m.gguf", tokens=tokens)
    monkeypatch.setattr("jspec.weights.gguf._MAX_VALUES", 49)
    with pytest.raises(InputError, match="a list of at most 49 values, got 50"):
        _load(path)


@pytest.mark.parametrize("options", [{}, {"small_first_shard": True}], ids=["", "first without"])
def test_parts_are_the_whole_whichever_is_named(tmp_path, options):
    """As llama.cpp splits a file; the first part may have no tensors."""
    _write(tmp_path / "whole.gguf")
    whole, expected = _load(tmp_path / "whole.gguf")
    write_gguf(tmp_path / "part.gguf", GGUF_CONFIG, random_tensors(GGUF_CONFIG),
               split_max_tensors=8, **options)  # fmt: skip
    parts = sorted(tmp_path.glob("part-*"))
    assert len(parts) >= 3
    for path in (parts[0], parts[-1]):
        config, tensors = _load(path)
        assert (config, tensors.keys()) == (whole, expected.keys())
        for name, tensor in expected.items():
            np.testing.assert_array_equal(tensors[name], tensor)


def test_parts_that_are_missing_or_of_another_file_are_named(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, GGUF_CONFIG, random_tensors(GGUF_CONFIG), split_max_tensors=8)
    parts, others = sorted(tmp_path.glob("a-*")), sorted(tmp_path.glob("b-*"))
    content = parts[1].read_bytes()
    parts[1].unlink()
    with pytest.raises(InputError, match=rf"one of {len(parts)} parts: expected {parts[1].name} b"):
        _load(parts[0])
    parts[1].write_bytes(others[2].read_bytes())
    with pytest.raises(InputError, match=r"part 2 \(from 0\) of \d: expected a name such as"):
        _load(parts[0])
    parts[1].write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match=rf"{parts[1].name}: truncated"):
        _load(parts[2])
    renamed = tmp_path / "c.gguf"
    renamed.write_bytes(parts[0].read_bytes())
    with pytest.raises(InputError, match=rf"part 0 \(from 0\) of {len(parts)}"):
        _load(renamed)
