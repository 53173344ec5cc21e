"""GGUF files (llama.cpp's format): the container, the config in its metadata, and the parameters.

`gguf.GGUFReader` needs two seconds for the hundred thousand strings of a vocabulary, because it
wraps each in numpy arrays. This reader needs a tenth of a second and names what is broken in a
damaged file. The types and the dequantisation are the `gguf` library's.

Keys of the config stand under the architecture's name (`qwen2.block_count`) and are the same for
all; what a family has besides is said beside it, in `models.families`. A key that is not known is
an error.
"""

import dataclasses
import difflib
import math
import mmap
import pathlib
import re
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np

from jspec.common.errors import InputError
from jspec.common.typing import Params
from jspec.models.config import DecoderConfig, RopeScaling
from jspec.models.families import FAMILIES
from jspec.models.families.family import Family, GgufForm
from jspec.models.families.hf_config import from_hf_config
from jspec.models.layers import rope_frequencies
from jspec.weights.assemble import TensorSource, check_counts, load_params
from jspec.weights.packed_weights import PackedSource, PackedTensor
from jspec.weights.tensor_names import parameter_table

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_AXES = 4
_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")
# A damaged length would otherwise be read as a text of gigabytes, for many seconds.
_MAX_NAME_BYTES, _MAX_TEXT_BYTES, _MAX_VALUES = 1 << 16, 1 << 24, 1 << 22
# Blocks dequantised at once: the intermediate arrays (about 1 MB) stay in the processor's cache.
_CHUNK_BLOCKS = 8192


class GgufTensor(NamedTuple):
    """A tensor of an open file."""

    shape: tuple[int, ...]  # outermost axis first; the file stores it innermost first
    kind: Any  # its storage type, a `gguf.GGMLQuantizationType`
    blocks: np.ndarray  # uint8 [num_blocks, block_bytes], a view of the file


class GgufFile:
    """An open GGUF file, or all its parts: `path`, `metadata` and `tensors` by their own names."""

    def __init__(self, path: pathlib.Path) -> None:
        """Reads the header and checks that every tensor lies inside the file.

        Of a file that is one part of several, such as NAME-00001-of-00003.gguf, all are read, which
        lie beside it; the first one has the metadata.

        Raises:
          InputError: not a GGUF file, another version, truncated, an unknown tensor type, or one
            part without the others.
        """
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._maps: list[mmap.mmap] = []
        parts = _parts_of(path)
        for number, part in enumerate(parts):
            self._add(part, number, len(parts))

    def _add(self, path: pathlib.Path, number: int, count: int) -> None:
        """Adds a file, which must be the part of that number among `count`."""
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._maps.append(self._map)
            metadata = self._read_header(path)
        except InputError:
            raise
        except EOFError:
            raise InputError(f"{path}: truncated GGUF file: it ends inside its header") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: truncated or damaged GGUF file ({error})") from None
        said = metadata.get("split.no", number), metadata.get("split.count", count)
        if said != (number, count) and said[1] != 0:
            name = "a name such as NAME-00001-of-00002.gguf, the others beside it"
            raise InputError(f"{path}: part {said[0]} (from 0) of {said[1]}: expected {name}")
        self.metadata = self.metadata or metadata

    def _take(self, size: int, limit: int | None = None) -> bytes:
        if size > len(self._map) - self._map.tell():
            raise EOFError
        if limit is not None and size > limit:
            raise ValueError(f"expected a text of at most {limit} bytes, got {size}")
        return self._map.read(size)

    def _number(self, size: int = 8) -> int:
        return int.from_bytes(self._take(size), "little")

    def _string(self, limit: int = _MAX_TEXT_BYTES) -> str:
        return self._take(self._number(), limit).decode("utf-8", errors="replace")

    def _name(self, known: Collection[str], what: str) -> str:
        name = self._string(_MAX_NAME_BYTES)
        if not name or not name.isprintable():
            raise ValueError(f"expected a name of {what}, got {name[:40]!r}")
        if name in known:
            raise ValueError(f"the name {name} is there twice")
        return name

    def _values(self, kind: int, length: int) -> list[Any]:
        if _MAX_VALUES < length < len(self._map):
            raise ValueError(f"expected a list of at most {_MAX_VALUES} values, got {length}")
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self._take(length * dtype.itemsize), dtype).tolist()
        if kind == _STRING:
            return [self._string() for _ in range(length)]
        if kind == _ARRAY:
            return [self._values(self._number(4), self._number()) for _ in range(length)]
        raise ValueError(f"unknown value type {kind}")

    def _read_header(self, path: pathlib.Path) -> dict[str, Any]:
        """Returns a file's metadata, and adds its tensors."""
        metadata: dict[str, Any] = {}
        if self._map.read(len(_MAGIC)) != _MAGIC:
            raise InputError(f"{path}: not a GGUF file (it does not begin with GGUF)")
        if (version := self._number(4)) not in _VERSIONS:
            raise InputError(f"{path}: expected GGUF version 2 or 3, got {version}")
        num_tensors, num_pairs = self._number(), self._number()
        for number in range(num_pairs):
            key = self._name(metadata, f"value {number + 1} of {num_pairs}")
            metadata[key] = self._values(self._number(4), 1)[0]
        places: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for number in range(num_tensors):
            name = self._name(places, f"tensor {number + 1} of {num_tensors}")
            if not 1 <= (num_axes := self._number(4)) <= _MAX_AXES:
                raise ValueError(f"{name} has {num_axes} axes, expected 1 to {_MAX_AXES}")
            shape = tuple(self._number() for _ in range(num_axes))
            if 0 in shape:
                raise ValueError(f"{name} has an axis of length 0")
            places[name] = shape[::-1], self._number(4), self._number()
        if twice := sorted(places.keys() & self.tensors.keys()):
            raise ValueError(f"{twice[0]} is in an earlier part, too")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"expected an alignment of at least 1, got {alignment!r}")
        begin = -(-self._map.tell() // alignment) * alignment
        end = 0
        for name, (shape, kind, offset) in places.items():
            # As llama.cpp has it, each tensor follows the one before: none overlaps another.
            if offset != (expected := -(-end // alignment) * alignment):
                raise ValueError(f"{name} begins at byte {offset} of the data, expected {expected}")
            self.tensors[name] = tensor = self._locate(name, shape, kind, begin + offset)
            end = offset + tensor.blocks.size
        return metadata

    def _locate(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> GgufTensor:
        import gguf

        known = {int(known): known for known in gguf.GGML_QUANT_SIZES}
        if kind not in known:
            formats = ", ".join(format.name for format in known.values())
            raise InputError(
                f"{self.path}: expected {name} in one of {formats}; got the unknown type {kind}"
            )
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[known[kind]]
        if math.prod(shape[-1:]) % block_size:
            row = f"rows of {shape[-1]} weights, expected a multiple of {block_size}"
            raise ValueError(f"{name} in {known[kind].name} has {row}")
        num_blocks = math.prod(shape) // block_size
        if begin + num_blocks * block_bytes > len(self._map):
            raise ValueError(f"{name} reaches past the end of the file")
        blocks = np.frombuffer(self._map, np.uint8, num_blocks * block_bytes, begin)
        return GgufTensor(shape, known[kind], blocks.reshape(num_blocks, block_bytes))

    def release(self) -> None:
        """Gives back the memory of the file's pages; they stay in the system's cache."""
        for mapped in self._maps if hasattr(mmap, "MADV_DONTNEED") else ():
            mapped.madvise(mmap.MADV_DONTNEED)

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Returns a tensor, dequantised in float32 and rounded once to `dtype`.

        Raises:
          InputError: a storage type that the gguf library cannot dequantise.
        """
        import gguf

        shape, kind, blocks = self.tensors[name]
        out = np.empty(shape, dtype).reshape(len(blocks), -1)
        step = max(1, _CHUNK_BLOCKS * 32 // max(1, out.shape[1]))
        for start in range(0, len(blocks), step):
            # As one row: the library works through groups of 16 rows, slowly where rows are short.
            chunk = blocks[start : start + step].reshape(1, -1)
            try:
                values = gguf.dequantize(chunk, kind)
            except NotImplementedError:
                raise InputError(f"{self.path}: {name}: cannot dequantise {kind.name}") from None
            out[start : start + step] = values.reshape(-1, out.shape[1])
        self.release()  # else the file's pages stay in memory with the tensors
        return out.reshape(shape)


def _parts_of(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the file, or all parts where it is named as a part.

    Raises:
      InputError: some are missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [path]
    stem, count = match[1], match[3]
    parts = [path.with_name(f"{stem}-{k:05}-of-{count}.gguf") for k in range(1, int(count) + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        shown = ", ".join(missing[:3]) + ", ..." * (len(missing) > 3)
        raise InputError(f"{path}: one of {int(count)} parts: expected {shown} beside it")
    return parts


_FACTORS = "rope_freqs.weight"  # of llama3: the divisor of each frequency
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"  # of longrope
CONFIG_TENSORS = frozenset({_FACTORS, _LONG, _SHORT})
_EPSILON = "attention.layer_norm_rms_epsilon"
# Keys of every architecture, and the keys of config.json that they become.
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    _EPSILON: "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_SIZES = (
    "block_count", "context_length", "embedding_length", "feed_forward_length",
    "attention.head_count",
)  # fmt: skip
_SAME_AS_HEAD_DIM = ("attention.value_length", "rope.dimension_count")
# The output matrix tells the size of the vocabulary; the other says how a model was made.
_IGNORED = frozenset({"vocab_size", "rope.scaling.finetuned"})
# Keys that would change the computation, and the only values that jspec honours.
_REQUIRED_VALUES = {"attention.causal": True, "rope.scaling.yarn_ext_factor": 1.0}
_MAX_EXPERTS = 1024
_SCALING = "rope.scaling."
_ATTENTION_FACTORS = ("attn_factor", "yarn_attn_factor")  # their product counts
_SCALING_KEYS = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def read_gguf_config(file: GgufFile) -> tuple[DecoderConfig, GgufForm]:
    """Returns a file's config, and how llama.cpp writes models of its family.

    Raises:
      InputError: an unknown architecture, a missing or unknown key, or a value that jspec cannot
        honour; the message names it.
    """
    try:
        return _read(file)
    except InputError:  # names the path already
        raise
    except KeyError as error:
        raise InputError(f"{file.path}: the file lacks {error}") from None
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        raise InputError(f"{file.path}: {error}") from None


def _read(file: GgufFile) -> tuple[DecoderConfig, GgufForm]:
    architecture = file.metadata.get("general.architecture")
    raw_keys = _own_keys(file, f"{architecture}.")
    family, form = find_gguf_family(architecture, bool(raw_keys.get("expert_count")))
    if missing := [key for key in (*_SIZES, _EPSILON) if key not in raw_keys]:
        raise KeyError(f"{architecture}.{missing[0]}")
    for key in _SIZES:
        if not isinstance(raw_keys[key], int) or raw_keys[key] < 1:
            least = "a whole number of at least 1"
            raise ValueError(f"expected {architecture}.{key} to be {least}, got {raw_keys[key]!r}")
    if not form.has_experts:  # some converters write zeros
        raw_keys = {
            key: raw_keys[key]
            for key in raw_keys
            if key not in ("expert_count", "expert_used_count")
        }
    # Every layer and expert is listed: a damaged number would take hours.
    for key in ("block_count", "expert_count"):
        if (count := raw_keys.get(key, 0)) > (limit := max(len(file.tensors), _MAX_EXPERTS)):
            raise ValueError(f"expected {architecture}.{key} to be at most {limit}, got {count}")
    scaling = _take_scaling(file, raw_keys)
    known = {**_KEYS, **form.keys}
    raw = {known[key]: raw_keys.pop(key) for key in known if key in raw_keys}
    raw.setdefault("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    for key in _SAME_AS_HEAD_DIM:
        if (length := raw_keys.pop(key, raw["head_dim"])) != raw["head_dim"]:
            raise ValueError(f"expected {architecture}.{key} to be {raw['head_dim']}, got {length}")
    if strangers := sorted(f"{architecture}.{key}" for key in raw_keys.keys() - _IGNORED):
        raise ValueError(f"unknown keys {', '.join(strangers)}")
    raw.setdefault("rope_theta", 10_000.0)
    raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    raw |= form.complete(raw) | _from_tensors(file, family.keys)
    raw |= {"model_type": family.model_type} | ({"rope_scaling": scaling} if scaling else {})
    raw["bos_token_id"] = file.metadata.get("tokenizer.ggml.bos_token_id")
    raw["eos_token_id"] = None  # the tokenizer knows the ends
    config = from_hf_config(raw)
    if _FACTORS in file.tensors:
        config = _with_llama3_scaling(config, file.read(_FACTORS, np.dtype(np.float32)))
    return config, form


def find_gguf_family(architecture: object, has_experts: bool) -> tuple[Family, GgufForm]:
    """Returns the family of a GGUF file, and how llama.cpp writes it.

    Raises:
      ValueError: an architecture that jspec does not know.
    """
    forms = [(family, family.gguf) for family in FAMILIES.values() if family.gguf is not None]
    for family, form in forms:
        if (form.architecture, form.has_experts) == (architecture, has_experts):
            return family, form
    known = sorted({form.architecture for _, form in forms})
    nearest = difflib.get_close_matches(str(architecture), known, 1, 0.0)[0]
    experts = " with experts" if has_experts else " without experts"
    experts = experts if architecture in known else ""
    raise ValueError(
        f"expected an architecture among {', '.join(known)}; got {architecture!r}{experts}, "
        f"to which {nearest} is the nearest"
    )


def _own_keys(file: GgufFile, prefix: str) -> dict[str, Any]:
    """Returns the metadata under the architecture's name, checked as far as it can be alone."""
    prefixed = {key: file.metadata[key] for key in file.metadata if key.startswith(prefix)}
    raw = {key.removeprefix(prefix): value for key, value in prefixed.items()}
    for key, value in raw.items():
        if isinstance(value, float):
            raw[key] = _shortest(value)
        elif isinstance(value, list) and not key.endswith("sliding_window_pattern"):
            if len(set(value)) != 1:  # one for each layer
                raise ValueError(f"{prefix}{key} differs between layers, got {value}")
            raw[key] = value[0]
    for key, value in _REQUIRED_VALUES.items():
        if (got := raw.pop(key, value)) != value:
            raise ValueError(f"expected {prefix}{key} to be {value!r}, got {got!r}")
    return raw


def _shortest(value: float) -> float:
    """Returns the shortest decimal that is this float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _take_scaling(file: GgufFile, raw_keys: dict[str, Any]) -> dict[str, Any] | None:
    """Takes the RoPE settings out of the keys; returns config.json's, None for no scaling."""
    keys = [key for key in raw_keys if key.removeprefix(_SCALING) in _SCALING_KEYS]
    settings = {_SCALING_KEYS[key.removeprefix(_SCALING)]: raw_keys.pop(key) for key in keys}
    attention = math.prod(raw_keys.pop(_SCALING + key, 1.0) for key in _ATTENTION_FACTORS)
    linear = raw_keys.pop("rope.scale_linear", 1.0)  # of early files
    if _SHORT in file.tensors:  # llama.cpp's converter of Phi-3 names no type
        factors = {"short_factor": file.read(_SHORT, np.dtype(np.float32)),
                   "long_factor": file.read(_LONG, np.dtype(np.float32))}  # fmt: skip
        lists = {key: [_shortest(factor) for factor in factors[key].ravel()] for key in factors}
        own_attention = {} if attention == 1.0 else {"attention_factor": attention}
        return settings | own_attention | {"rope_type": "longrope"} | lists
    kind = settings.get("rope_type", "none" if linear == 1.0 else "linear")
    if attention != 1.0 and kind != "yarn":
        raise ValueError(f"expected {_SCALING}attn_factor to be 1.0 here, got {attention}")
    if kind == "none":
        return None
    if linear != 1.0:
        settings["factor"] = linear
    if "factor" not in settings:
        raise KeyError(f"{_SCALING}factor")
    if attention != 1.0:  # llama.cpp multiplies yarn's own by it
        own_factor = 1.0 + 0.1 * math.log(max(settings["factor"], 1.0))
        settings["attention_factor"] = attention * own_factor
    return settings | {"rope_type": kind}


def _from_tensors(file: GgufFile, keys: Any) -> dict[str, Any]:
    """Returns the keys of config.json that a file says by the tensors that it holds."""
    raw = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
    return raw | {key: name in file.tensors for key, name in biases.items() if key in keys}


def _with_llama3_scaling(config: DecoderConfig, factors: np.ndarray) -> DecoderConfig:
    """Recognises Llama 3's scaling by its effect on each frequency, all that a file holds of it."""
    if np.all(factors == 1):
        return config
    # The lowest frequency is divided by the whole factor; the other values are always the same.
    scaled = dataclasses.replace(config, rope_scaling=RopeScaling(_shortest(factors.max())))
    expected = rope_frequencies(config) / rope_frequencies(scaled)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4, atol=0):
        raise ValueError(f"expected {_FACTORS} to hold Llama 3's scaling, got other factors")
    return scaled


_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")  # of all experts together, [e o i]


def load_gguf(
    path: pathlib.Path, dtype: Any, quantization: str | None = None
) -> tuple[DecoderConfig, Params, GgufFile]:
    """Returns the config and the parameters of a GGUF file, and the open file.

    With the quantization "packed" the weights stay as they are in the file. With "q4_0" those stay
    that it would not make smaller. For "int8" and "int4" they are quantised again, from float32,
    which loses at most another half step. Where the blocks of a row of Q8_0 share one scale and its
    largest weight is 127 steps, int8 gives the same integers.

    Raises:
      InputError: a file that is damaged, of another architecture, or more than jspec can honour.
    """
    file = GgufFile(path)
    config, form = read_gguf_config(file)
    return config, load_params(config, _open(file, config, form), dtype, quantization), file


def _open(file: GgufFile, config: DecoderConfig, form: GgufForm) -> TensorSource:
    """Returns a GGUF file as a source of Hugging Face tensors; unknown ones keep their names."""
    if form.has_experts:
        _split_experts(file)
    check_counts(str(file.path), config, len(file.tensors))
    names = {name: name for name in file.tensors.keys() - CONFIG_TENSORS}
    wanted = {part.name: part.offset for entry in parameter_table(config) for part in entry.parts}
    for name, own in _own_names(config, form, wanted):
        if own in names:
            names[name] = names.pop(own)

    def is_permuted(name: str) -> bool:
        return form.is_permuted and (".q_proj." in name or ".k_proj." in name)

    def read(name: str, dtype: np.dtype) -> np.ndarray:
        # llama.cpp keeps the whole weight of a norm, Hugging Face what is left without the offset.
        if offset := wanted.get(name):
            return (file.read(names[name], np.dtype(np.float32)) - np.float32(offset)).astype(dtype)
        tensor = file.read(names[name], dtype)
        return _unpermute(tensor, config.head_dim) if is_permuted(name) else tensor

    def find(name: str) -> PackedTensor:
        shape, kind, blocks = file.tensors[names[name]]
        order = np.arange(shape[0])
        if is_permuted(name):
            order = _unpermute(order, config.head_dim)
        return PackedTensor(kind.name.lower(), blocks.reshape(len(order), -1), order)

    shapes = {name: file.tensors[own].shape for name, own in names.items()}
    packed = PackedSource(find, file.release)
    return TensorSource(str(file.path), shapes, read, packed)


def _own_names(
    config: DecoderConfig, form: GgufForm, names: Iterable[str]
) -> Iterable[tuple[str, str | None]]:
    """Returns Hugging Face tensors' names and llama.cpp's."""
    import gguf

    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(architectures[form.architecture], config.num_layers)
    products = (FAMILIES[config.family].sparse_names or ())[1:]
    for name in names:
        if ".experts." not in name:
            yield name, table.get_name(name, try_suffixes=(".weight", ".bias"))
            continue
        # model.layers.3.mlp.experts.5.up_proj.weight
        layer, number, product = (name.split(".")[i] for i in (2, 5, 6))
        fused_name = _EXPERTS[products.index(product)]
        yield name, f"blk.{layer}.{fused_name}.{number}.weight"


def _split_experts(file: GgufFile) -> None:
    """Replaces each tensor of all experts by a view of every expert's part."""
    fused = [name for name in file.tensors if name.rpartition(".")[0].endswith(_EXPERTS)]
    # One of another shape stays, and is refused as unknown.
    for name in [name for name in fused if len(file.tensors[name].shape) == 3]:
        shape, kind, blocks = file.tensors.pop(name)
        stem, _, end = name.rpartition(".")
        for number, part in enumerate(blocks.reshape(shape[0], -1, blocks.shape[1])):
            file.tensors[f"{stem}.{number}.{end}"] = GgufTensor(shape[1:], kind, part)


def _unpermute(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Returns query or key rows, [heads·H, D] or [heads·H], in Hugging Face's order in each head.

    llama.cpp rotates neighbours (2i, 2i+1), Hugging Face the halves (i, i + H/2). Its converter
    interleaves the two halves of every head, and this function undoes it.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
