"""Whispers in CTranslate2's layout, as faster-whisper uses them: `model.bin` and a tokenizer.

    version, name of the model's kind, revision, number of variables
    each variable: name, rank, sizes, type, bytes, data
    number of aliases
    each alias: name, the variable's name

Numbers are little-endian; a name is its length in 16 bits and its bytes, of which the last is 0.
Products of one input are one matrix there: queries, keys and values; of a cross-attention keys and
values. Each Hugging Face tensor is some of its rows.
"""

import pathlib
import re
import struct
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jspec.common.errors import InputError
from jspec.common.json_lines import read_json
from jspec.common.typing import Params
from jspec.models.config import DecoderConfig, EncoderConfig
from jspec.weights.assemble import TensorSource, load_params
from jspec.weights.parameter import Shape
from jspec.weights.tokenizers.tokenizer import load_tokenizer

FILE = "model.bin"
_VERSION, _KIND, _MAX_COUNT, _MAX_RANK = 6, "WhisperSpec", 100_000, 4
_TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16, 5: jnp.bfloat16}
_FLOATS = (0, 4, 5)


class _Variable(NamedTuple):
    shape: Shape
    kind: int
    offset: int
    num_bytes: int


class _Rows(NamedTuple):
    """A variable's rows that are a tensor; of all its rows, `count` of `parts` equal parts."""

    name: str
    part: int = 0
    parts: int = 1


def load_ctranslate2(
    folder: pathlib.Path, dtype: Any, quantization: str | None = None
) -> tuple[DecoderConfig, Params]:
    """Returns the config and the parameters of a folder; see `load_params`.

    Raises:
      InputError: a damaged file, another model than a Whisper, or one of integers.
    """
    path = folder / FILE
    variables = _read_index(path)
    config = _config_of(folder, path, variables)
    names = _tensor_names(config)
    if missing := [rows.name for rows in names.values() if rows.name not in variables]:
        raise InputError(f"{path}: lacks the variable {missing[0]}")
    used = {rows.name: variables[rows.name].kind for rows in names.values()}
    if integers := [name for name, kind in used.items() if kind not in _FLOATS]:
        raise InputError(f"{path}: expected weights of floats, got {integers[0]} of integers")

    def shape_of(rows: _Rows) -> Shape:
        first, *rest = variables[rows.name].shape
        return first // rows.parts, *rest

    def read(name: str, wanted: np.dtype) -> np.ndarray:
        rows = names[name]
        return _read_rows(path, variables[rows.name], rows).astype(wanted, copy=False)

    shapes = {name: shape_of(rows) for name, rows in names.items()}
    return config, load_params(config, TensorSource(str(path), shapes, read), dtype, quantization)


def _read_rows(path: pathlib.Path, variable: _Variable, rows: _Rows) -> np.ndarray:
    first, *rest = variable.shape
    count, size = first // rows.parts, variable.num_bytes // rows.parts
    values = np.fromfile(
        path, np.uint8, count=size, offset=variable.offset + rows.part * size
    ).view(_TYPES[variable.kind])
    return values.reshape(count, *rest)


def _read_index(path: pathlib.Path) -> dict[str, _Variable]:
    """Returns the variables of a file; no data is read."""
    size, variables = path.stat().st_size, dict[str, _Variable]()
    with path.open("rb") as file:

        def number(form: str) -> int:
            length = struct.calcsize(form)
            data = file.read(length)
            if len(data) < length:
                raise InputError(f"{path}: expected a whole file, and it ends after {size} bytes")
            return struct.unpack(f"<{form}", data)[0]

        def name() -> str:
            return file.read(number("H")).rstrip(b"\0").decode("utf-8", "replace")

        if (version := number("I")) != _VERSION:
            raise InputError(f"{path}: expected CTranslate2's format {_VERSION}, got {version}")
        kind, _ = name(), number("I")
        if kind != _KIND:
            raise InputError(f"{path}: expected a {_KIND}, got {kind!r}")
        count = number("I")
        for _ in range(min(count, _MAX_COUNT)):
            key, rank = name(), number("B")
            if rank > _MAX_RANK:
                raise InputError(f"{path}: damaged: {key!r} has {rank} sizes")
            shape = tuple(number("I") for _ in range(rank))
            of_type, num_bytes = number("B"), number("I")
            item = np.dtype(_TYPES.get(of_type, np.uint8)).itemsize
            begin = file.tell()
            elements = int(np.prod(shape, dtype=object))
            if of_type not in _TYPES or num_bytes != elements * item or begin + num_bytes > size:
                raise InputError(f"{path}: damaged: {key!r} of {list(shape)} has {num_bytes} bytes")
            variables[key] = _Variable(shape, of_type, begin, num_bytes)
            file.seek(num_bytes, 1)
    return variables


def _config_of(
    folder: pathlib.Path, path: pathlib.Path, variables: dict[str, _Variable]
) -> DecoderConfig:
    def sizes(name: str, rank: int) -> Shape:
        if name not in variables or len(variables[name].shape) != rank:
            raise InputError(f"{path}: expected a variable {name} of {rank} sizes")
        return variables[name].shape

    def scalar(name: str) -> int:
        if name not in variables or variables[name].shape:
            raise InputError(f"{path}: expected a number {name}")
        return int(_read_rows(path, variables[name]._replace(shape=(1,)), _Rows(name))[0])

    def num_layers(side: str) -> int:
        layers = (re.match(rf"{side}/layer_(\d+)/", name) for name in variables)
        return len({layer[1] for layer in layers if layer is not None})

    vocab_size, width = sizes("decoder/embeddings/weight", 2)
    heads, encoder_heads = scalar("decoder/num_heads"), scalar("encoder/num_heads")
    if heads < 1 or encoder_heads < 1 or width % heads or width % encoder_heads:
        got = f"{heads} and {encoder_heads}"
        raise InputError(f"{path}: expected numbers of heads that divide {width}, got {got}")
    settings, ids = read_json(folder / "config.json"), load_tokenizer(folder).vocabulary()
    special = [ids.get(f"<|{name}|>") for name in ("startoftranscript", "endoftext")]
    if None in special:
        raise InputError(f"{folder}: expected the tokenizer of a Whisper, got another")
    start, end = (token_id or 0 for token_id in special)
    try:
        encoder = EncoderConfig(
            num_layers=num_layers("encoder"),
            num_heads=encoder_heads,
            head_dim=width // encoder_heads,
            hidden_dim=sizes("encoder/layer_0/ffn/linear_0/weight", 2)[0],
            max_len=sizes("encoder/position_encodings/encodings", 2)[0],
            start_id=start,
            num_mels=sizes("encoder/conv1/weight", 3)[1],
            is_gated=False,
            never_ids=tuple(settings.get("suppress_ids", ())),
            never_first_ids=tuple(settings.get("suppress_ids_begin", ())),
        )
        return DecoderConfig(
            vocab_size=vocab_size,
            embed_dim=width,
            hidden_dim=sizes("decoder/layer_0/ffn/linear_0/weight", 2)[0],
            num_layers=num_layers("decoder"),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=width // heads,
            max_seq_len=sizes("decoder/position_encodings/encodings", 2)[0],
            tie_embeddings=True,
            eos_ids=(end,),
            family="whisper",
            activation="gelu",
            encoder=encoder,
        )
    except (TypeError, ValueError) as error:
        raise InputError(f"{folder}: {error}") from None


def _tensor_names(config: DecoderConfig) -> dict[str, _Rows]:
    assert config.encoder is not None
    names = {"model.decoder.embed_tokens.weight": _Rows("decoder/embeddings/weight")}
    for kind in ("weight", "bias"):
        for number in (1, 2):
            names[f"model.encoder.conv{number}.{kind}"] = _Rows(f"encoder/conv{number}/{kind}")
    for side, count in (("encoder", config.encoder.num_layers), ("decoder", config.num_layers)):
        positions = _Rows(f"{side}/position_encodings/encodings")
        names[f"model.{side}.embed_positions.weight"] = positions
        names |= _norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        for layer in range(count):
            names |= _layer(f"model.{side}.layers.{layer}", f"{side}/layer_{layer}", side)
    return names


def _layer(name: str, place: str, side: str) -> dict[str, _Rows]:
    # Each attention: its norm, then its products, as (product, part, of how many parts).
    self_attention = {"q": (0, 0, 3), "k": (0, 1, 3), "v": (0, 2, 3), "out": (1, 0, 1)}
    cross = {"q": (0, 0, 1), "k": (1, 0, 2), "v": (1, 1, 2), "out": (2, 0, 1)}
    attentions = {("self_attn", "self_attention"): self_attention}
    if side == "decoder":
        attentions["encoder_attn", "attention"] = cross
    names = dict[str, _Rows]()
    for (theirs, here), products in attentions.items():
        names |= _norm(f"{name}.{theirs}_layer_norm", f"{place}/{here}/layer_norm")
        for key, (number, *rows) in products.items():
            tensor, linear = f"{name}.{theirs}.{key}_proj", f"{place}/{here}/linear_{number}"
            names[f"{tensor}.weight"] = _Rows(f"{linear}/weight", *rows)
            if key != "k":  # it is 0
                names[f"{tensor}.bias"] = _Rows(f"{linear}/bias", *rows)
    for number in (0, 1):
        for kind in ("weight", "bias"):
            names[f"{name}.fc{number + 1}.{kind}"] = _Rows(f"{place}/ffn/linear_{number}/{kind}")
    return names | _norm(f"{name}.final_layer_norm", f"{place}/ffn/layer_norm")


def _norm(name: str, place: str) -> dict[str, _Rows]:
    return {f"{name}.weight": _Rows(f"{place}/gamma"), f"{name}.bias": _Rows(f"{place}/beta")}
