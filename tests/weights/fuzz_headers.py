"""Alters the headers of weight files at random, and checks that each gives one clear line."""

import pathlib
import struct
import tempfile
import time
import tracemalloc

import numpy as np

from jspec.common.errors import InputError
from jspec.weights.gguf import load_gguf
from jspec.weights.hf import load_hf, save_hf
from jspec.weights.tokenizers.gguf_tokenizer import build_tokenizer
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


def alter(content, header, rng):
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


def fuzz(num, seed=0):
    """Returns how many of `num` altered files were refused; raises for a wrong kind of failure."""
    rng, num_refused = np.random.default_rng(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(pathlib.Path(folder))
        contents = {path: path.read_bytes() for path in files}
        for path in files:
            load(path)  # whatever is made once
        for number in range(num):
            path = list(files)[number % len(files)]
            altered = alter(contents[path], files[path], rng)
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
