"""Training runs of every kind of drafter, which meshes and processes have to do alike.

Run by `test_processes` in one of several processes: coordinator, number, own number, folder and
meshes. The first process prints the losses, by mesh and kind.
"""

import pathlib
import sys

import jax
import numpy as np

from jspec.common import processes
from jspec.models.sharding import make_mesh
from jspec.training import run
from jspec.training.config import Recipe
from jspec.training.draft_model import DraftModelTraining
from jspec.training.eagle import EagleTraining
from jspec.training.heads import BlockwiseTraining
from jspec.training.lookahead import LookaheadTraining
from jspec.training.medusa import MedusaTraining
from jspec.training.placement import Placement
from jspec.training.texts import Text
from tests import tiny_models
from tests.meshes import report
from tests.training.folders import read_metrics, save_texts

RECIPE = Recipe(num_steps=12, learning_rate=1e-2, warmup_steps=2, log_every=1, evaluate_every=4)


class KilledError(Exception):
    """Ends a run."""


def prepare(folder):
    tiny_models.save_folder(folder / "m", num_heads=8, max_seq_len=64)
    rng = np.random.default_rng(0)
    texts = [Text(*(tuple(rng.integers(3, 120, n).tolist()) for n in (4, 20))) for _ in range(64)]
    save_texts(folder / "texts.jsonl", texts)


def kinds(folder, states="states"):
    """Returns the configs of runs by name; those of `joint` and `boosted` need runs of others."""
    usual = {
        "target": str(folder / "m"), "dtype": "float32", "texts": (str(folder / "texts.jsonl"),),
        "num_held_out": 16, "seq_len": 48, "batch_size": 8, "recipe": RECIPE,
    }  # fmt: skip
    eagle = {"vocab_size": 60, "feature_layers": (1, 2), **usual}
    medusa, draft = {"num_heads": 2, **usual}, {"drafter": "draft_model", **usual}
    head, earlier = str(folder / "medusa" / "head"), (str(folder / "draft_model" / "draft"),)
    return {
        "eagle": EagleTraining(**eagle),
        "stored": EagleTraining(states=str(folder / states), **eagle),
        "medusa": MedusaTraining(**medusa),
        "joint": MedusaTraining(train_target=True, init_head=head, **medusa),
        "draft_model": DraftModelTraining(init_layers=(0,), **draft),
        "shared": DraftModelTraining(init_layers=(0,), embeddings="shared", **draft),
        "boosted": DraftModelTraining(init_layers=(1,), earlier=earlier, **draft),
        "blockwise": BlockwiseTraining(num_heads=2, **usual),
        "lookahead": LookaheadTraining(num_tokens=2, **usual),
    }


def losses(config, workdir, mesh=None):
    if processes.is_first():
        workdir.mkdir(exist_ok=True, parents=True)
    with jax.numpy_dtype_promotion("standard"):
        run.run_training(config, workdir, Placement(None if mesh is None else make_mesh(mesh)))
    return [one["loss"] for one in read_metrics(workdir) if "loss" in one]


def begin(config, workdir, mesh=None):
    """Trains until the run is killed after step 6 of 12, the checkpoint of step 4 left."""
    before = run.Batches.__getitem__

    def killed(self, index):
        if index == 6:
            raise KilledError
        return before(self, index)

    run.Batches.__getitem__ = killed
    try:
        losses(config, workdir, mesh)
    except KilledError:
        run.Batches.__getitem__ = before


def check_alike(name, losses, alone):
    assert alone[-1] < alone[0], "something is learned"
    difference = np.abs(np.array(losses) - alone).max()
    print(f"{name}: at most {difference:.1e} of {alone[0]:.2f}")
    assert len(losses) == len(alone)
    # What is stored is rounded to bfloat16: a sum in another order gives another neighbour.
    assert difference < (1e-3 if name.startswith("stored") else 1e-4)


if __name__ == "__main__":
    coordinator, number, process_id, name, *meshes = sys.argv[1:]
    folder = pathlib.Path(name)
    with processes.joined(coordinator, int(number), int(process_id), {}):
        outputs = {}
        for index, mesh in enumerate(meshes):  # each has its share of the kinds
            configs = kinds(folder, f"states on {mesh}")
            outputs[mesh] = {
                kind: losses(configs[kind], folder / mesh / kind, mesh)
                for kind in list(configs)[index :: len(meshes)]
            }
        outputs["moved"] = {"eagle": losses(configs["eagle"], folder / "moved", meshes[0])}
        begin(configs["eagle"], folder / "back", meshes[0])
        report(outputs)
