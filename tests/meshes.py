"""Runs on meshes of 8 virtual devices, which a process has from its start: see `run_on_devices`.

The targets have 8 query heads and 2 key/value heads, so that 4 devices and more have copies of a
head.
"""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys

import numpy as np

from tests import tiny_models

NUM_DEVICES = 8
CONFIG = dataclasses.replace(tiny_models.CONFIG, num_heads=8, vocab_size=128)
PROMPTS = ["hello there", "abc abc abc abc", "the end of it", "x"]


def run_on_devices(statements, *, num_devices=NUM_DEVICES, timeout=600):
    """Runs Python after `from tests.meshes import *`; returns what it gives to `report`."""
    flags = (
        f"--xla_force_host_platform_device_count={num_devices} {os.environ.get('XLA_FLAGS', '')}"
    )
    code = f"from tests.meshes import *\n{statements}"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return json.loads(done.stdout.decode().splitlines()[-1])


def report(value):
    """Prints what `run_on_devices` returns."""
    print(json.dumps(value))


def replica_groups(text):
    """Returns the different groups of devices of a program's collectives, sorted.

    XLA writes groups as lists, `{{0,1},{2,3}}`, as a range that is cut, `[2,2]<=[4]`, transposed
    first in `[2,2]<=[2,2]T(1,0)`, or as axes of a mesh, `mesh['data'=2,'model'=2] {'model'}`.

    Raises:
        ValueError: another spelling, which is named.
    """
    spelled = re.findall(r"replica_groups=(.*?), (?=[a-z_]+=)", text)
    return sorted({tuple(map(tuple, _read_groups(groups))) for groups in spelled})


def _read_groups(spelled):
    if re.fullmatch(r"\{(\{[\d,]+\},?)+\}", spelled):
        return [list(map(int, ids.split(","))) for ids in re.findall(r"\{([\d,]+)\}", spelled)]
    if cut := re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", spelled):
        shape, sizes, order = (part and list(map(int, part.split(","))) for part in cut.groups())
        ids = np.arange(math.prod(sizes)).reshape(sizes)
        return ids.transpose(order).reshape(shape).tolist()
    if mesh := re.fullmatch(r"mesh\[((?:'\w+'=\d+,?)+)\] \{((?:'\w+',? ?)+)\}", spelled):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        names = re.findall(r"'(\w+)'", mesh[2])
        ids = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
        last = range(-len(names), 0)
        ids = np.moveaxis(ids, [list(sizes).index(name) for name in names], last)
        return ids.reshape(-1, math.prod(sizes[name] for name in names)).tolist()
    raise ValueError(f"expected groups in a spelling that is known here, got {spelled!r}")


def target(config=CONFIG, **changes):
    """Returns a tiny target with opinions."""
    config = dataclasses.replace(config, **changes)
    return tiny_models.make_model(config, params=tiny_models.peaked_params(config))


def draft():
    """Returns a draft that agrees with the target often, but not always."""
    params = tiny_models.peaked_params(CONFIG, disturbance=0.03)
    return tiny_models.make_model(CONFIG, params=params, name="draft")


def spread(model, text):
    """Returns a model on the mesh of that text, the same one for None."""
    from jspec.models.sharding import make_mesh
    from jspec.weights.shards import spread_params

    if text is None:
        return model
    mesh = make_mesh(text)
    config, params = spread_params(model.config, model.params, mesh)
    return dataclasses.replace(model, config=config, params=params, mesh=mesh)


def make_generator(drafter, mesh, model=None, **options):
    """Returns a Generator on a mesh."""
    from jspec.generation.generator import Generator
    from jspec.generation.layout import place_model

    fields = {"num_mtp_layers": 1} if drafter == "mtp" else {}
    model, drafts = spread(model or target(**fields), mesh), None
    if "model" in drafter or "hierarchical" in drafter:
        drafts = draft() if mesh is None else place_model(draft(), model.mesh)
    usual = {} if drafter == "none" else {"num_draft_tokens": 4}
    options = {"batch_size": 4, "acceptance": "coupled", **usual, **options}
    return Generator(model, drafts, drafter=drafter, **options)


def answers(drafter, mesh, max_new_tokens=24, **options):
    """Returns the token ids of the answers at temperatures 0 and 1, and the drafts accepted."""
    from jspec import SamplingParams

    generator, token_ids = make_generator(drafter, mesh, **options), []
    for temperature in (0.0, 1.0):
        settings = SamplingParams(max_new_tokens, temperature, seed=3)
        results = generator.generate(PROMPTS, settings)
        accepted = sum(result.stats.num_accepted for result in results)
        token_ids.append([[result.token_ids for result in results], accepted])
    return token_ids


def drafter_options(drafter, folder, **changes):
    """Returns options with what a drafter needs: a head or a table, saved there, or a pattern."""
    from jspec.drafters import DrafterOptions
    from jspec.drafters.tables import count_ngrams, save_table
    from tests.tiny_heads import SAVE_HEAD

    if drafter in SAVE_HEAD:
        fitted = {"target": target().params} if drafter == "dflash" else {}
        changes["draft_head"] = SAVE_HEAD[drafter](folder / drafter, CONFIG, **fitted)
    if drafter == "pattern":
        changes["pattern"] = "[ -~]*"
    if drafter in ("unigram", "bigram"):
        path = folder / "table.safetensors"
        save_table(count_ngrams([list(b"why is the sky blue")], 128), path)
        changes["draft_table"] = str(path)
    return DrafterOptions(**changes)
