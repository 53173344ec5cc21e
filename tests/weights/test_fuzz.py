"""Altered headers of weight files, and altered configs of every family: one clear line each."""

import copy
import json
import pathlib
import re
import struct
import tempfile
import time
import tracemalloc

import numpy as np
import pytest
import safetensors.numpy

from jspec.common.errors import InputError
from jspec.models.families.hf_config import from_hf_config
from jspec.weights.gguf import load_gguf
from jspec.weights.hf import load_hf, read_config, save_hf
from jspec.weights.parameter import tensor_shapes
from jspec.weights.tensor_names import parameter_table
from jspec.weights.tokenizers.gguf_tokenizer import build_tokenizer
from tests.cases import slow_unless
from tests.models.family_checkpoints import FAMILIES, make_config
from tests.weights.toys import GGUF_CONFIG, byte_level_vocabulary, random_tensors, write_gguf

_MAX_SECONDS = 5.0
# Python's own objects for a header: a name, a list, a dict.
_MAX_EXTRA_BYTES = 4 << 20
_HUGE = (2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


def write_files(folder):
    """Returns a small GGUF file and a safetensors file, each with the length of its header."""
    tokens = {
        "ggml.model": "gpt2", "ggml.pre": "smollm", "ggml.merges": ["! #"],
        "ggml.tokens": ["<s>", "</s>", "<unk>", *byte_level_vocabulary()[:36], "!#"],
        "ggml.token_type": [3, 3, 3, *[1] * 37],
    }  # fmt: skip
    path, model = folder / "model.gguf", folder / "model"
    write_gguf(path, GGUF_CONFIG, random_tensors(GGUF_CONFIG), tokens=tokens)
    config, params, file = load_gguf(path, "float32")
    first = min(tensor.blocks.ctypes.data for tensor in file.tensors.values())
    begin = first - np.frombuffer(file._map, np.uint8).ctypes.data
    save_hf(model, config, params)
    weights = model / "model.safetensors"
    header = 8 + struct.unpack("<Q", weights.read_bytes()[:8])[0]
    return {path: begin, weights: header}


def alter_header(content, header, rng):
    """Returns the file with one thing in its header changed, or cut somewhere."""
    changed = bytearray(content)
    place = int(rng.integers(0, header))
    kind = rng.integers(0, 6)
    if kind == 0:
        changed[place] = int(rng.integers(0, 256))
    elif kind == 1:
        changed[place] ^= 1 << int(rng.integers(0, 8))
    elif kind == 2:
        return bytes(changed[:place])
    elif kind == 3:
        changed[place : place + 8] = struct.pack("<Q", int(rng.choice(np.uint64(_HUGE))))
    elif kind == 4:
        end = place + int(rng.integers(1, 40))
        changed[place:end] = rng.bytes(min(end, header) - place)
    else:
        del changed[place : place + int(rng.integers(1, 9))]
    return bytes(changed)


def load(path):
    if path.suffix != ".gguf":
        load_hf(path.parent, "float32")
        return
    _, _, file = load_gguf(path, "float32")
    build_tokenizer(file)


def fuzz_headers(num, seed=0):
    """Returns how many of `num` altered files were refused; raises for a wrong kind of failure."""
    rng, num_refused = np.random.default_rng(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(pathlib.Path(folder))
        contents = {path: path.read_bytes() for path in files}
        for path in files:
            load(path)  # whatever is made once
        for number in range(num):
            path = list(files)[number % len(files)]
            altered = alter_header(contents[path], files[path], rng)
            path.write_bytes(altered)
            num_refused += refusal(path, len(altered)) is not None
            path.write_bytes(contents[path])
    return num_refused


def refusal(path, size):
    """Returns the line with which a file is refused, or None; raises for a wrong kind of failure.

    `size` is that of what is read, in bytes.
    """
    tracemalloc.start()
    begin, message = time.perf_counter(), None
    try:
        load(path)
    except InputError as error:
        message = str(error)
    finally:
        seconds, peak = time.perf_counter() - begin, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert seconds < _MAX_SECONDS, f"{path}: {seconds:.1f} s"
        assert peak < 3 * size + _MAX_EXTRA_BYTES, f"{path}: {peak} bytes for {size}"
    if message is not None:
        assert str(path.parent) in message, message
        assert "\n" not in message, message
    return message


# Of another type, negative, huge, not a number; whatever a file of JSON may hold.
_VALUES = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, -(2**63), 10**400, 0.5, -0.5, 1e-300, 1e308,
    float("nan"), float("inf"), "", "x", "2", "0.5", [], [0], [-1], ["x"], [None] * 4, [2**40] * 4,
    [0.0] * 3, [1.0] * 3, [1.0] * 4, [[1.0]], {}, {"x": 1}, {"rope_type": "yarn"},
)  # fmt: skip
ROPES = (
    {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3},
    {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0], "long_factor": [2.0] * 3,
     "original_max_position_embeddings": 64},
    {"type": "su", "short_factor": 1.0, "long_factor": [2.0] * 3},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 32.0},
    {"rope_type": "yarn", "factor": 0.0, "original_max_position_embeddings": 64},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "linear", "factor": -2.0},
)  # fmt: skip
# What Python says of a value that nobody has checked.
_UNCHECKED = re.compile(
    r"object (is|has|cannot)|not supported between|unsupported operand|'\w+' obj|too large to"
)


def write_folders(parent, names=tuple(FAMILIES)):
    """Writes a folder of zeros for each family; returns the configs by the paths of their files."""
    configs = {}
    for name in names:
        raw = json.loads(make_config(name).to_json_string(use_diff=False))
        folder = parent / name.replace(" ", "_")
        folder.mkdir()
        shapes = tensor_shapes(parameter_table(from_hf_config(raw)))
        tensors = {key: np.zeros(shape, np.float32) for key, shape in shapes.items()}
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        configs[folder / "config.json"] = raw
    return configs


def _places(value, path=()):
    """Yields the path of every value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from _places(inner, (*path, key))


def alter_config(raw, rng):
    """Returns a config with one to three of its values changed, removed or renamed."""
    raw = copy.deepcopy(raw)
    for _ in range(int(rng.integers(1, 4))):
        if not (places := list(_places(raw))):
            break
        *path, key = places[int(rng.integers(len(places)))]
        owner = raw
        for step in path:
            owner = owner[step]
        kind = rng.integers(0, 8)
        if kind == 0:
            del owner[key]
        elif kind == 1 and isinstance(owner, dict):
            owner[f"{key}s"] = owner.pop(key)
        elif kind == 2:
            name = ("rope_scaling", "rope_parameters")[int(rng.integers(2))]
            raw[name] = copy.deepcopy(ROPES[int(rng.integers(len(ROPES)))])
        elif kind == 3 and isinstance(owner[key], int):
            owner[key] = owner[key] * int(rng.choice([-1, 2, 3, 10**6]))
        else:
            owner[key] = copy.deepcopy(_VALUES[int(rng.integers(len(_VALUES)))])
    return raw


def fuzz_configs(num, seed=0):
    """Returns how many of `num` altered configs were refused; see `refusal` for what is raised."""
    rng, num_refused = np.random.default_rng(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        files = write_folders(pathlib.Path(folder))
        for path, raw in files.items():
            path.write_text(json.dumps(raw))
            load_hf(path.parent, "float32")  # whatever is made once
        for number in range(num):
            path = list(files)[number % len(files)]
            path.write_text(json.dumps(alter_config(files[path], rng)))
            size = sum(file.stat().st_size for file in path.parent.iterdir())
            message = refusal(path, size)
            num_refused += message is not None
            assert not _UNCHECKED.search(message or ""), message
    return num_refused


@pytest.mark.parametrize("num", [100, slow_unless(False, 10_000)])
def test_altered_headers_give_one_line_each(num):
    """Guards against tracebacks, hangs, and memory taken for lengths that a file only claims.

    A few changes leave a file that loads: another epsilon, a name in another case.
    """
    num_refused = fuzz_headers(num, seed=1)
    assert 0.75 < num_refused / num < 1


@pytest.mark.parametrize("num", [80, slow_unless(False, 10_000)])
def test_altered_configs_give_one_line_each(num):
    """Guards against tracebacks, Python's own words, and tables of billions of experts.

    Some changes leave a config that loads: of keys that say nothing, or numbers within bounds.
    """
    assert 0.5 < fuzz_configs(num, seed=1) / num < 0.94


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_local_experts": 10**7}, "a tensor for each of 4 layers and 10000000 experts, found"),
        ({"num_experts_per_tok": 6}, "at least one of the experts, got 6 of 5"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step to be a finite number above 0, got 0"),
        ({"mlp_only_layers": 1}, "expected mlp_only_layers to be a list, got 1"),
        ({"hidden_size": True}, "hidden_size to be a whole number from 1 to 16777216, got True"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x"}}, "factor to be .* got 'x'"),
        ({"rope_parameters": ROPES[2]}, "short_factor of longrope to be a list, got"),
    ],
)
def test_a_wrong_value_of_a_config_is_named(tmp_path, change, message):
    """Guards against Python's own words, which do not say where the value stands."""
    ((path, raw),) = write_folders(tmp_path, ["qwen3 moe"]).items()
    path.write_text(json.dumps(raw | change))
    with pytest.raises(InputError, match=message):
        load(path)


def test_a_null_is_as_good_as_a_missing_number(tmp_path):
    """Guards against arithmetic with None: Gemma's scale of scores is 256 where nothing says it."""
    ((path, raw),) = write_folders(tmp_path, ["gemma3"]).items()
    raw |= {"query_pre_attn_scalar": None, "_sliding_window_pattern": None}
    path.write_text(json.dumps(raw))
    assert read_config(path.parent).attention_scale == 256**-0.5


def test_a_traceback_would_be_noticed(tmp_path, monkeypatch):
    """The negative control: a reader that fails in its own words is not taken for a refusal."""

    def load(path):
        np.frombuffer(path.read_bytes()[:3], np.uint64)

    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setitem(globals(), "load", load)
    with pytest.raises(ValueError, match="buffer size"):
        refusal(path, 4)
