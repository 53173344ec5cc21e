"""Alters config.json files of every family at random, and checks that each gives one clear line."""

import copy
import json
import pathlib
import re
import tempfile

import numpy as np
import safetensors.numpy

from jspec.models.families.hf_config import from_hf_config
from jspec.weights.hf import load_hf
from jspec.weights.parameter import tensor_shapes
from jspec.weights.tensor_names import parameter_table
from tests.models.family_checkpoints import FAMILIES, make_config
from tests.weights.fuzz_headers import refusal

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


def alter(raw, rng):
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


def fuzz(num, seed=0):
    """Returns how many of `num` altered configs were refused; see `refusal` for what is raised."""
    rng, num_refused = np.random.default_rng(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        files = write_folders(pathlib.Path(folder))
        for path, raw in files.items():
            path.write_text(json.dumps(raw))
            load_hf(path.parent, "float32")  # whatever is made once
        for number in range(num):
            path = list(files)[number % len(files)]
            path.write_text(json.dumps(alter(files[path], rng)))
            size = sum(file.stat().st_size for file in path.parent.iterdir())
            message = refusal(path, size)
            num_refused += message is not None
            assert not _UNCHECKED.search(message or ""), message
    return num_refused
