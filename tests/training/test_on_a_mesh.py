"""Training on a mesh of 8 virtual devices: the losses of one device, and checkpoints that move."""

import numpy as np
import pytest

from tests.meshes import run_on_devices

_TRAINED = """
import dataclasses, jax, pathlib, tempfile
import numpy as np
from jspec.models.sharding import make_mesh
from jspec.training import loop, run
from jspec.training.config import Recipe
from jspec.training.draft_model import DraftModelTraining
from jspec.training.eagle import EagleTraining
from jspec.training.medusa import MedusaTraining
from jspec.training.placement import Placement
from jspec.training.texts import Text
from tests.training.folders import read_metrics, save_texts

jax.config.update("jax_numpy_dtype_promotion", "standard")
folder = pathlib.Path(tempfile.mkdtemp())
target = str(tiny_models.save_folder(folder / "m", num_heads=8, max_seq_len=64))
rng = np.random.default_rng(0)
texts = [Text(tuple(rng.integers(3, 120, 4).tolist()), tuple(rng.integers(3, 120, 20).tolist()))
         for _ in range(64)]
paths = (save_texts(folder / "texts.jsonl", texts),)
recipe = Recipe(num_steps=12, learning_rate=1e-2, warmup_steps=2, log_every=1, evaluate_every=4)
usual = dict(target=target, dtype="float32", texts=paths, num_held_out=16, seq_len=48,
             batch_size=8, recipe=recipe)
kinds = {{
    "eagle": EagleTraining(vocab_size=60, feature_layers=(1, 2), **usual),
    "medusa": MedusaTraining(num_heads=2, **usual),
    "draft_model": DraftModelTraining(drafter="draft_model", init_layers=(0,), **usual),
}}
config = kinds[{kind!r}]

def losses(workdir, mesh):
    workdir.mkdir(exist_ok=True)
    place = Placement(None if mesh is None else make_mesh(mesh))
    run.run_training(config, workdir, place)
    return [one["loss"] for one in read_metrics(workdir) if "loss" in one]

class Killed(Exception):
    pass

found = {{}}
for number, mesh in enumerate((None, "data:2", "data:8", "data:4,model:2", "data:2,model:4")):
    found[str(mesh)] = losses(folder / str(number), mesh)

# Killed after step 6 of 12, and gone on with elsewhere from the checkpoint of step 4.
before = run.Batches.__getitem__
def killed(self, index):
    if index == 6:
        raise Killed
    return before(self, index)
run.Batches.__getitem__ = killed
try:
    losses(folder / "moved", "data:2,model:4")
except Killed:
    run.Batches.__getitem__ = before
found["moved"] = losses(folder / "moved", "data:8")
report(found)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle", "medusa", "draft_model"])
def test_losses_are_those_of_one_device(kind):
    """Up to the order of sums, in float32; also where a run goes on on another mesh."""
    found = run_on_devices(_TRAINED.format(kind=kind))
    alone = np.array(found.pop("None"))
    assert alone[-1] < alone[0], "something is learned"
    for mesh, losses in found.items():
        difference = np.abs(np.array(losses) - alone).max()
        print(f"{kind} on {mesh}: at most {difference:.1e} of {alone[0]:.2f}")
        assert len(losses) == len(alone)
        assert difference < 1e-4
