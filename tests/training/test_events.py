"""TensorBoard's files: read back by a reader that knows the format alone, checksums included."""

import struct

import pytest

from jspec.training.events import crc32c, first_record, scalars_of, scalars_record


def read_fields(message):
    """Yields number and value of each field of a message; texts and messages stay bytes."""
    place = 0

    def varint():
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < len(message):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        layout = {1: "<d", 5: "<f"}.get(key & 7)
        size = struct.calcsize(layout) if layout else varint()
        content = message[place : place + size]
        place += size
        yield key >> 3, struct.unpack(layout, content)[0] if layout else content


def read_records(content):
    """Yields the messages of a file, checked."""
    while content:
        (size,) = struct.unpack("<Q", content[:8])
        message = content[12 : 12 + size]
        end = 12 + size
        for data, stored in ((content[:8], content[8:12]), (message, content[end : end + 4])):
            crc = crc32c(data)
            assert struct.unpack("<I", stored)[0] == ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32
        yield message
        content = content[16 + size :]


def read_events(content):
    """Returns step and numbers by tag of every record but the first, which says the version."""
    first, *others = read_records(content)
    assert dict(read_fields(first))[3] == b"brain.Event:2"
    found = []
    for message in others:
        fields = dict(read_fields(message))
        values = [dict(read_fields(value)) for _, value in read_fields(fields[5])]
        found.append((fields[2], {value[1].decode(): value[2] for value in values}))
    return found


def test_checksums_are_those_of_the_standard():
    """RFC 3720, B.4, and the check value of CRC-32C."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(bytes([255] * 32)) == 0x62A8AB43


def test_a_record_byte_by_byte():
    """Made by hand from the format: step 300, tag "a", 1.5, at 2 seconds."""
    (message,) = read_records(scalars_record(300, 2.0, {"a": 1.5}))
    value = b"\x0a\x01a\x15" + struct.pack("<f", 1.5)
    summary = b"\x0a" + bytes([len(value)]) + value
    head = b"\x09" + struct.pack("<d", 2.0) + b"\x10\xac\x02"
    assert message == head + b"\x2a" + bytes([len(summary)]) + summary


def test_what_was_written_is_read():
    """Steps and tags of any length."""
    values = {"loss": -2.5, "held_out/" + "x" * 200: 1e-3}
    content = first_record(1.0) + scalars_record(0, 1.0, values) + scalars_record(10**9, 2.0, {})
    (step, found), last = read_events(content)[0], read_records(content)
    assert step == 0
    assert found == pytest.approx(values)
    assert dict(read_fields(list(last)[2]))[2] == 10**9


def test_numbers_of_an_entry():
    """Groups and lists become parts of tags; the step is no number to show."""
    record = {"step": 3, "loss": 2, "held_out": {"score": 1.5, "chain": [0.5, 0.25], "step": 7}}
    assert dict(scalars_of(record)) == {
        "loss": 2.0, "held_out/score": 1.5, "held_out/chain/0": 0.5, "held_out/chain/1": 0.25,
        "held_out/step": 7.0,
    }  # fmt: skip
