"""CTranslate2's layout of a Whisper: the same parameters as from Hugging Face's, and bad files."""

import json
import struct

import jax
import numpy as np
import pytest
import safetensors.numpy

from jspec.common.errors import InputError
from jspec.weights.ctranslate2 import _tensor_names
from jspec.weights.hf import load_hf
from jspec.weights.resolver import load_model
from tests.audio.test_audio import make_tokenizer
from tests.models.encoder_decoder_checkpoints import make_checkpoint

_TYPES = {"float32": 0, "int16": 2, "float16": 4, "int8": 1}


def write_model(path, variables, *, version=6, kind="WhisperSpec"):
    def name(text):
        data = text.encode() + b"\0"
        return struct.pack("<H", len(data)) + data

    parts = [struct.pack("<I", version), name(kind), struct.pack("<II", 3, len(variables))]
    for key, array in variables.items():
        parts += [name(key), struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)]
        parts += [struct.pack("<BI", _TYPES[array.dtype.name], array.nbytes), array.tobytes()]
    alias = struct.pack("<I", 1) + name("decoder/projection/weight")
    path.write_bytes(b"".join([*parts, alias, name("decoder/embeddings/weight")]))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    make_checkpoint("whisper", folder)
    config, params = load_hf(folder, "float32")
    tensors, parts = safetensors.numpy.load_file(folder / "model.safetensors"), {}
    for name, rows in _tensor_names(config).items():
        parts.setdefault(rows.name, [None] * rows.parts)[rows.part] = tensors[name]
    for variable, arrays in parts.items():  # keys have no bias
        shape = next(array.shape for array in arrays if array is not None)
        filled = [np.zeros(shape, np.float32) if array is None else array for array in arrays]
        parts[variable] = np.concatenate(filled)
    heads = {"encoder/num_heads": 3, "decoder/num_heads": 4}
    return config, params, parts | {key: np.array(n, np.int16) for key, n in heads.items()}


@pytest.fixture
def folder(tmp_path):
    make_tokenizer().save(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    suppressed = {"suppress_ids": [5], "suppress_ids_begin": [6], "lang_ids": [29, 30]}
    (tmp_path / "config.json").write_text(json.dumps(suppressed))
    return tmp_path


def test_parameters_are_those_of_the_other_layout(checkpoint, folder):
    """Each tensor is its own rows of a variable, in float16, too."""
    config, params, variables = checkpoint
    write_model(folder / "model.bin", variables)
    model = load_model(folder, dtype="float32")
    assert model.config == _without_bos(config)
    jax.tree.map(np.testing.assert_array_equal, model.params, params)
    half = {k: v.astype(np.float16) if v.ndim else v for k, v in variables.items()}
    write_model(folder / "model.bin", half)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3),
        load_model(folder, dtype="float32").params, params,
    )  # fmt: skip


def _without_bos(config):
    import dataclasses

    return dataclasses.replace(config, bos_id=None)


def test_bad_files_are_refused(checkpoint, folder):
    """Another format, another model, integers, missing or damaged variables: a line for each."""
    _, _, variables = checkpoint
    path = folder / "model.bin"
    rounded = variables | {"decoder/embeddings/weight": np.zeros([61, 24], np.int8)}
    lacking = {k: v for k, v in variables.items() if k != "decoder/layer_1/ffn/linear_1/bias"}
    for content, options, message in (
        (variables, {"version": 7}, "expected CTranslate2's format 6, got 7"),
        (variables, {"kind": "TransformerSpec"}, "expected a WhisperSpec, got 'TransformerSpec'"),
        (rounded, {}, "expected weights of floats, got decoder/embeddings/weight of integers"),
        (lacking, {}, "lacks the variable decoder/layer_1/ffn/linear_1/bias"),
        (variables | {"decoder/num_heads": np.array(5, np.int16)}, {}, "heads that divide 24"),
    ):
        write_model(path, content, **options)
        with pytest.raises(InputError, match=message):
            load_model(folder, dtype="float32")
    write_model(path, variables)
    whole = path.read_bytes()
    for length in (3, 100, len(whole) // 2):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"damaged|expected a whole file|format 6"):
            load_model(folder, dtype="float32")
