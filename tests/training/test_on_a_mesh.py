"""Training on a mesh of 8 virtual devices: the losses of one device, and checkpoints that move."""

import pytest

from tests.meshes import run_on_devices
from tests.training.on_meshes import check_alike

_TRAINED = """
import pathlib, tempfile
from tests.training.on_meshes import *

folder, outputs = pathlib.Path(tempfile.mkdtemp()), {{}}
prepare(folder)
config = kinds(folder)[{kind!r}]
for number, mesh in enumerate((None, "data:2", "data:8", "data:4,model:2", "data:2,model:4")):
    outputs[str(mesh)] = losses(config, folder / str(number), mesh)
begin(config, folder / "moved", "data:2,model:4")
outputs["moved"] = losses(config, folder / "moved", "data:8")
report(outputs)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle", "medusa", "draft_model"])
def test_losses_are_those_of_one_device(kind):
    """Up to the order of sums, in float32; also where a run goes on on another mesh."""
    losses_by_mesh = run_on_devices(_TRAINED.format(kind=kind))
    alone = losses_by_mesh.pop("None")
    for mesh, losses in losses_by_mesh.items():
        check_alike(f"{kind} on {mesh}", losses, alone)
