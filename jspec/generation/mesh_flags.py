"""Flags of a program that runs on several devices, or in several processes."""

import contextlib
from collections.abc import Iterator

from absl import flags
from jax.sharding import Mesh

from jspec.common import processes
from jspec.common.cli import list_flags
from jspec.common.errors import InputError
from jspec.kernels import check_device
from jspec.models.sharding import make_mesh

MESH = flags.DEFINE_string(
    "mesh", None, "Devices to answer with, such as data:2,model:4: each layer of the target is "
    "split over 4 of them, and 2 groups of 4 answer other prompts. Default: one device."
)  # fmt: skip
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "For several processes, which together have the devices of --mesh: "
    "HOST:PORT at which the first of them can be reached; or auto, where SLURM, Open MPI or a TPU "
    "slice has started them and says the rest."
)  # fmt: skip
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Number of this process, from 0.")
_AUTO = "auto"
_OF_PROCESSES = _COORDINATOR, _NUM_PROCESSES, _PROCESS_ID

list_flags("Models", "", "mesh coordinator num_processes process_id")


@contextlib.contextmanager
def flagged_mesh() -> Iterator[Mesh | None]:
    """Joins the other processes, if there are any; gives the mesh that the flags ask for, if any.

    Raises:
      InputError: flags that do not belong together, or a mesh that does not fit the devices.
    """
    given = [flag.name for flag in _OF_PROCESSES if flag.value is not None]
    coordinator, number, own = _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value
    if not given:
        check_device()
        yield None if MESH.value is None else make_mesh(MESH.value)
        return
    if coordinator == _AUTO and given[1:] == [] and MESH.value is not None:
        coordinator = None
    elif MESH.value is None or coordinator in (None, _AUTO) or number is None or own is None:
        expected = "--mesh, --coordinator, --num_processes and --process_id together"
        raise InputError(
            f"expected {expected}, or --mesh and --coordinator={_AUTO}; got --{', --'.join(given)}"
        )
    values = {
        name: str(flags.FLAGS[name].value) for name in flags.FLAGS if flags.FLAGS[name].present
    }
    values.pop(_PROCESS_ID.name, None)
    with processes.joined(coordinator, number, own, values):
        yield make_mesh(MESH.value)
