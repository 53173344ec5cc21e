"""The GGUF container: its metadata, and its tensors dequantised.

`gguf.GGUFReader` needs two seconds for the hundred thousand strings of a vocabulary, because it
wraps each in numpy arrays. This reader needs a tenth of a second and names what is broken in a
damaged file. The types and the dequantisation are the `gguf` library's.
"""

import math
import mmap
import pathlib
import re
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from jspec.common.errors import InputError

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
        """Adds a file, which must be that part of that number of parts."""
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
            formats = ", ".join(each.name for each in known.values())
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
        for one in self._maps if hasattr(mmap, "MADV_DONTNEED") else ():
            one.madvise(mmap.MADV_DONTNEED)

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
    """Returns the file, or all parts where it is named as one.

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
