"""GGUF files of every family are the model of the checkpoint that they were made of."""

import dataclasses
import functools

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax.traverse_util import flatten_dict

from jspec.common.errors import InputError
from jspec.kernels import PackedKernel
from jspec.models import init_cache, make_apply
from jspec.models.families import FAMILIES as KNOWN
from jspec.models.families.hf_config import find_family
from jspec.models.layers import rope_cos_sin
from jspec.weights.gguf import GgufFile, find_gguf_family, load_gguf, read_gguf_config
from jspec.weights.hf import load_hf, save_hf
from jspec.weights.orbax_checkpoint import load_orbax, save_orbax
from tests.models.family_checkpoints import FAMILIES, ROPE, make_checkpoint
from tests.weights.family_gguf import write_family
from tests.weights.toys import write_gguf_file

# What a GGUF file cannot say: windows but Gemma's and Phi-3's, and what llama.cpp hard-codes.
_WITHOUT_WINDOW = {"sliding_window": None}
_CHANGES = {
    "qwen2 with a window": {"use_sliding_window": False},
    "mistral": _WITHOUT_WINDOW,
    "mixtral": _WITHOUT_WINDOW,
    "gemma2": {"query_pre_attn_scalar": 10},
    "gemma3": {
        "query_pre_attn_scalar": 10,
        "num_hidden_layers": 7,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    },
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "qwen3 moe": {"mlp_only_layers": [], "norm_topk_prob": True},
}


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path, monkeypatch):
    kind, fields = FAMILIES[request.param]
    monkeypatch.setitem(FAMILIES, request.param, (kind, fields | _CHANGES.get(request.param, {})))
    make_checkpoint(request.param, tmp_path)
    path = tmp_path / "model.gguf"
    write_family(path, tmp_path)
    return tmp_path, path


def _logits(config, params, tokens):
    cache = init_cache(config, batch_size=len(tokens), capacity=32, dtype=jnp.float32)
    return np.asarray(make_apply(config)(params, jnp.asarray(tokens), cache)[0])


def test_weights_and_config_are_those_of_the_checkpoint(family):
    """Guards against q and k left interleaved, norms with 1 twice, experts in another order.

    The logits of such weights are compared with transformers' in `test_families`.
    """
    folder, path = family
    config, params, _ = load_gguf(path, "float32")
    hf_config, expected, *_ = load_hf(folder, "float32")
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6), params, expected)
    positions = jnp.arange(60)[None]
    angles, hf_angles = (rope_cos_sin(c, positions) for c in (config, hf_config))
    np.testing.assert_allclose(angles, hf_angles, rtol=0, atol=1e-5)
    # The config is the same, but for what a file leaves to the tokenizer.
    # A file of a Mistral says that it is a Llama.
    assert config.family == hf_config.family.replace("mistral", "llama")
    names = "family", "eos_ids", "rope_scaling", "normalize_expert_weights"
    kept = {name: getattr(hf_config, name) for name in names}
    rounded = {name: getattr(hf_config, name) for name in ("attention_scale", "logits_scale")}
    assert dataclasses.replace(config, **kept, **rounded) == hf_config
    for name, value in rounded.items():
        own = getattr(config, name)
        assert own == value or own == pytest.approx(value, rel=1e-6)


def test_the_list_of_families_agrees_with_their_files():
    """Guards against a line that names another family's file, or another GGUF architecture."""
    for model_type, family in KNOWN.items():
        assert family.model_type == model_type
        assert find_family([family.architecture], model_type) is family
        if (form := family.gguf) is not None:
            assert find_gguf_family(form.architecture, form.has_experts) == (family, form)


def test_every_family_that_llama_cpp_has_is_written_here():
    """Guards against a family whose GGUF form nobody has tried."""
    forms = {name for name, family in KNOWN.items() if family.gguf is not None}
    assert forms == set(KNOWN) - {"mistral", "mimo", "t5", "whisper"}


@pytest.fixture(scope="module")
def file_of(tmp_path_factory):
    """Returns a function that returns the file of a family, the same one at every call."""

    @functools.cache
    def write(name):
        folder = tmp_path_factory.mktemp("family")
        make_checkpoint(name, folder)
        write_family(folder / "m.gguf", folder)
        return folder / "m.gguf"

    return write


def _read(path):
    return read_gguf_config(GgufFile(path))[0]


def _rewritten(path, tensors=(), **changes):
    """Returns a copy of a file with other metadata and tensors; None removes a key."""
    reader, copy = gguf.GGUFReader(path), path.with_name("changed.gguf")
    fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    fields |= changes
    arrays = {tensor.name: tensor.data for tensor in reader.tensors} | dict(tensors)
    write_gguf_file(copy, fields.pop("general.architecture"), fields, arrays)
    return copy


@pytest.mark.parametrize(
    ("name", "changes", "fields"),
    [
        ("gemma3", {"gemma3.attention.sliding_window_pattern": 2}, {"windowed_layers": (0, 2)}),
        (
            "gemma3",
            {"gemma3.attention.sliding_window_pattern": [True, True, False, True]},
            {"windowed_layers": (0, 1, 3)},
        ),
        ("gemma3", {"gemma3.attention.sliding_window": None}, {"windowed_layers": ()}),
        ("gemma3", {"gemma3.rope.freq_base_swa": None}, {"local_rope_theta": 10_000.0}),
        ("gemma2", {"gemma2.rope.freq_base": None}, {"rope_theta": 10_000.0}),
        ("gemma2", {"gemma2.attn_logit_softcapping": None}, {"attention_softcap": 50.0}),
        ("phi3", {"phi3.attention.sliding_window": 0}, {"window": None}),
        ("llama", {"llama.rope.scale_linear": 2.0}, {"rope_theta": ROPE["rope_theta"]}),
    ],
)
def test_what_files_leave_out_is_as_llama_cpp_has_it(name, changes, fields, file_of):
    """Guards against defaults of transformers where llama.cpp's loader has others."""
    config = _read(_rewritten(file_of(name), **changes))
    assert {key: getattr(config, key) for key in fields} == fields


def test_yarns_attention_factor_is_multiplied(file_of):
    """Guards against a factor that stands for that of yarn, as config.json has it."""
    plain = _read(file_of("yarn"))
    changes = {"qwen2.rope.scaling.attn_factor": 0.5, "qwen2.rope.scaling.yarn_attn_factor": 4.0}
    multiplied = _read(_rewritten(file_of("yarn"), **changes))
    factor = 1 + 0.1 * np.log(plain.rope_scaling.factor)
    assert plain.rope_scaling.attention_factor == pytest.approx(factor)
    assert multiplied.rope_scaling.attention_factor == pytest.approx(2 * factor)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_experts_of_one_dimension_are_named(name, file_of):
    """Guards against a traceback where a tensor is called as those of all experts are."""
    stranger = "blk.0.ffn_gate_exps.weight"
    flat = _rewritten(file_of(name), tensors={stranger: np.ones(32, np.float32)})
    with pytest.raises(InputError, match=f"unknown tensors: {stranger}") as error:
        load_gguf(flat, "float32")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("linear rope", {"llama.rope.scaling.attn_factor": 2.0}, "attn_factor to be 1.0 here"),
        ("olmo2", {"olmo2.attention.sliding_window": 8}, "unknown keys olmo2.attention.sliding"),
        ("qwen3 moe", {"qwen3moe.expert_count": None}, "got 'qwen3moe' without experts"),
        ("qwen3", {"qwen3.expert_count": 4}, "got 'qwen3' with experts"),
        ("granite", {"granite.rope.scaling.yarn_ext_factor": 0.5}, "ext_factor to be 1.0, got 0.5"),
        ("phi3", {"phi3.rope.dimension_count": 4}, "dimension_count to be 6, got 4"),
        ("gemma2", {"gemma2.attention.key_length": 8}, "value_length to be 8, got 10"),
        ("llama", {"general.architecture": "gemma3"}, "the file lacks 'gemma3.block_count'"),
    ],
)
def test_what_cannot_be_honoured_is_named(name, changes, message, file_of):
    """Guards against a file that loads and computes something else."""
    with pytest.raises(InputError, match=message) as error:
        _read(_rewritten(file_of(name), **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["mixtral", "phi3"])
def test_packed_weights_of_a_family(name, tmp_path, monkeypatch):
    """Guards against fused tensors and experts that are packed as if they were one matrix."""
    kind, fields = FAMILIES[name]
    wide = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 1}
    monkeypatch.setitem(FAMILIES, name, (kind, fields | wide))
    make_checkpoint(name, tmp_path)
    write_family(tmp_path / "m.gguf", tmp_path, gguf.GGMLQuantizationType.Q8_0)
    tokens = np.arange(3, 12)[None]
    config, params, _ = load_gguf(tmp_path / "m.gguf", "float32")
    expected = _logits(config, params, tokens)
    config, params, _ = load_gguf(tmp_path / "m.gguf", "float32", "packed")
    assert isinstance(params["layers_0"]["attention"]["out"], PackedKernel)
    # Sums in another order: 1.5e-4 of logits up to 10 on a processor without AVX-512.
    np.testing.assert_allclose(_logits(config, params, tokens), expected, atol=1e-3)


def _norms(params):
    return {path: leaf for path, leaf in flatten_dict(params).items() if path[-1] == "scale"}


def test_norms_are_the_same_from_every_kind_of_checkpoint(tmp_path, monkeypatch):
    """Gemma's are float32 in bfloat16. Guards against a 1 that is added in bfloat16 in some."""
    make_checkpoint("gemma2", tmp_path)
    write_family(tmp_path / "m.gguf", tmp_path)
    config, params = load_hf(tmp_path, "bfloat16")
    save_orbax(tmp_path / "orbax", config, params)
    monkeypatch.setattr("jspec.weights.hf._MAX_FILE_BYTES", 3_000)
    save_hf(tmp_path / "copy", config, params)
    expected = _norms(params)
    others = {
        "copy": load_hf(tmp_path / "copy", "bfloat16")[1],
        "gguf": load_gguf(tmp_path / "m.gguf", "bfloat16")[1],
        "packed": load_gguf(tmp_path / "m.gguf", "bfloat16", "packed")[1],
        "orbax": load_orbax(tmp_path / "orbax", "bfloat16")[1],
    }
    for kind, other in others.items():
        assert {leaf.dtype for leaf in _norms(other).values()} == {jnp.dtype("float32")}, kind
        for path, leaf in _norms(other).items():
            np.testing.assert_array_equal(leaf, expected[path], err_msg=kind)
    # Files are cut where they are full, by the bytes that each tensor takes.
    for path in (tmp_path / "copy").glob("*.safetensors"):
        tensors = safetensors.numpy.load_file(path).values()
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors) <= 3_000
