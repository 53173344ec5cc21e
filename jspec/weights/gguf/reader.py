"""The GGUF container: its metadata, and its tensors dequantised.

`gguf.GGUFReader` wraps each of the hundred thousand strings of a vocabulary in numpy arrays (two
seconds); this reader parses the same header in a tenth, and names what is broken in a damaged
file. The dequantisation itself is the `gguf` library's.
"""

import dataclasses
import math
import mmap
import pathlib
import struct
from typing import Any

import numpy as np

from jspec.common.errors import InputError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
# Blocks dequantised at once: the intermediate arrays (about 1 MB) stay in the cache.
_CHUNK_BLOCKS = 8192


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
      shape: outermost axis first (the file stores it innermost first).
      kind: the number of its storage type.
      offset: bytes from the start of the tensor data.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int


class _Truncated(Exception):
    """The header goes on past the end of the file."""


class _Cursor:
    """Reads values one after the other from a buffer; past its end raises _Truncated."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = 0

    def scalar(self, code: str) -> Any:
        start = self._advance(struct.calcsize("<" + code))
        return struct.unpack_from("<" + code, self.data, start)[0]

    def string(self) -> str:
        start = self._advance(self.scalar("Q"))
        return self.data[start : self.offset].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            kind, length = self.scalar("I"), self.scalar("Q")
            if kind in _SCALARS:
                dtype = np.dtype("<" + _SCALARS[kind])
                start = self._advance(length * dtype.itemsize)
                return np.frombuffer(self.data, dtype, length, start).tolist()
            return [self.value(kind) for _ in range(length)]
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return self.scalar(_SCALARS[kind])

    def _advance(self, num_bytes: int) -> int:
        """Moves on; returns where it was."""
        start, self.offset = self.offset, self.offset + num_bytes
        if self.offset > len(self.data):
            raise _Truncated
        return start


class GgufFile:
    """An open GGUF file.

    Attributes:
      path: the file.
      metadata: its key-value pairs.
      tensors: where each tensor lies, by the file's own names.
    """

    def __init__(self, path: pathlib.Path) -> None:
        """Reads the header and checks that every tensor lies inside the file.

        Raises:
          InputError: not a GGUF file, another version, truncated, or an unknown tensor type.
        """
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read_header()
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
        except InputError:
            raise
        except _Truncated:
            raise InputError(f"{path}: truncated GGUF file: it ends inside its header") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: truncated or damaged GGUF file ({error})") from None

    def _read_header(self) -> None:
        cursor = _Cursor(self._map)
        if self._map[:4] != _MAGIC:
            raise InputError(f"{self.path}: not a GGUF file (it does not begin with GGUF)")
        cursor.offset = 4
        version = cursor.scalar("I")
        if version not in _VERSIONS:
            raise InputError(f"{self.path}: expected GGUF version 2 or 3, got {version}")
        num_tensors, num_pairs = cursor.scalar("Q"), cursor.scalar("Q")
        for _ in range(num_pairs):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        for _ in range(num_tensors):
            name = cursor.string()
            shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))
            self.tensors[name] = TensorInfo(shape[::-1], cursor.scalar("I"), cursor.scalar("Q"))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"expected an alignment of at least 1, got {alignment!r}")
        self._data_start = -(-cursor.offset // alignment) * alignment
        for name in self.tensors:
            self._raw(name)

    def _raw(self, name: str) -> tuple[np.ndarray, Any]:
        """Returns the tensor's blocks [num_blocks, block_bytes] as bytes, and its type."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        info = self.tensors[name]
        kind = GGMLQuantizationType(info.kind)
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        num_blocks, rest = divmod(math.prod(info.shape), block_size)
        if rest:
            raise ValueError(f"{name} has no whole number of {kind.name} blocks")
        start = self._data_start + info.offset
        if start + num_blocks * block_bytes > len(self._map):
            raise ValueError(f"{name} reaches past the end of the file")
        raw = np.frombuffer(self._map, np.uint8, num_blocks * block_bytes, start)
        return raw.reshape(num_blocks, block_bytes), kind

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Returns a tensor, dequantised in float32 and rounded once to `dtype`.

        Raises:
          InputError: a storage type that the gguf library cannot dequantise.
        """
        blocks, kind = self._raw(name)
        shape = self.tensors[name].shape
        out = np.empty(shape, dtype).reshape(len(blocks), -1)
        step = max(1, _CHUNK_BLOCKS * 32 // max(1, out.shape[1]))
        for start in range(0, len(blocks), step):
            chunk = blocks[start : start + step]
            out[start : start + step] = self._dequantize(name, chunk, kind)
        if hasattr(mmap, "MADV_DONTNEED"):  # the file's pages would stand beside the tensors
            self._map.madvise(mmap.MADV_DONTNEED)
        return out.reshape(shape)

    def _dequantize(self, name: str, blocks: np.ndarray, kind: Any) -> np.ndarray:
        """Returns blocks [n, block_bytes] as float32 [n, block_size]."""
        import gguf.quants

        try:
            # As one row: the library works through groups of 16 rows, slowly where rows are short.
            return gguf.quants.dequantize(blocks.reshape(1, -1), kind).reshape(len(blocks), -1)
        except NotImplementedError:
            raise InputError(
                f"{self.path}: {name} is stored as {kind.name}, which cannot be dequantised"
            ) from None
