"""TensorBoard's event files: numbers by step, without its libraries.

A file is a row of records, little-endian, [length, u64] [its checksum, u32] [event] [its checksum,
u32], and an event is a message of Protocol Buffers:

    Event    1: wall_time, double    2: step, int64    3: file_version, text    5: Summary
    Summary  1: Value, any number
    Value    1: tag, text            2: simple_value, float

(github.com/tensorflow/tensorboard: compat/proto/event.proto, summary.proto; the records are
TFRecords, their checksum is a masked CRC-32C.)
"""

import functools
import struct
from collections.abc import Iterator, Mapping
from typing import Any

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reversed
_MASK = 0xA282EAD8
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5  # wire types


def first_record(wall_time: float) -> bytes:
    """Returns how a file begins; the time is in seconds."""
    return _record(_double(1, wall_time) + _field(3, b"brain.Event:2"))


def scalars_record(step: int, wall_time: float, values: Mapping[str, float]) -> bytes:
    """Returns the record of one step's numbers.

    Args:
      step: of the run.
      wall_time: in seconds.
      values: by tag, whose parts a "/" separates.
    """
    summary = b"".join(_field(1, _field(1, tag.encode()) + _float(2, value))
                       for tag, value in values.items())  # fmt: skip
    return _record(_double(1, wall_time) + _key(2, _VARINT) + _varint(step) + _field(5, summary))


def scalars_of(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields the numbers of an entry of a log by tags like "held_out/acceptance/0"."""
    for name, value in record.items():
        tag = prefix + name
        if isinstance(value, Mapping):
            yield from scalars_of(value, f"{tag}/")
        elif isinstance(value, list):
            yield from scalars_of({str(i): one for i, one in enumerate(value)}, f"{tag}/")
        elif tag != "step":
            yield tag, float(value)


def crc32c(data: bytes) -> int:
    """Returns the CRC-32C (Castagnoli) of bytes (RFC 3720, section 12.1)."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


@functools.cache
def _table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


def _record(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    return length + _checksum(length) + event + _checksum(event)


def _checksum(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    parts = []
    while value >= 128:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _field(number: int, content: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(content)) + content


def _double(number: int, value: float) -> bytes:
    return _key(number, _EIGHT_BYTES) + struct.pack("<d", value)


def _float(number: int, value: float) -> bytes:
    return _key(number, _FOUR_BYTES) + struct.pack("<f", value)
