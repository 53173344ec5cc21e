"""Flags of a program that runs on several devices, or in several processes."""

import contextlib
from collections.abc import Iterator

from absl import flags
from jax.sharding import Mesh

from jspec.cli.program import list_flags
from jspec.common import processes
from jspec.common.errors import InputError
from jspec.kernels import check_device
from jspec.models.sharding import make_mesh

MESH = flags.DEFINE_string(
    "mesh", None, "Devices to answer with, such as data:2,model:4: each layer of the target is "
    "split over 4 of them, and 2 groups of 4 answer other prompts. Default: one device."
)  # fmt: skip
COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "For several processes, which together have the devices of --mesh: "
    "HOST:PORT at which the first of them can be reached; or auto, where SLURM, Open MPI or a TPU "
    "slice has started them and says the rest."
)  # fmt: skip
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes.")
PROCESS_ID = flags.DEFINE_integer("process_id", None, "Number of this process, from 0.")
_AUTO = "auto"
OF_PROCESSES = COORDINATOR, NUM_PROCESSES, PROCESS_ID

list_flags("Models", "", "mesh coordinator num_processes process_id")


def given_of_processes() -> list[str]:
    """Returns the names of the flags of several processes that are given."""
    return [flag.name for flag in OF_PROCESSES if flag.value is not None]


@contextlib.contextmanager
def flagged_mesh(text: str | None = None, name: str = "--mesh") -> Iterator[Mesh | None]:
    """Joins the other processes, if there are any; gives the mesh that the flags ask for, if any.

    A program that has it elsewhere gives its text, and the name of the place.

    Raises:
      InputError: flags that do not belong together, or a mesh that does not fit the devices.
    """
    text, given = text or MESH.value, given_of_processes()
    coordinator, number, process_id = COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value
    if not given:
        check_device()
        yield None if text is None else make_mesh(text)
        return
    if coordinator == _AUTO and given[1:] == [] and text is not None:
        coordinator = None
    elif text is None or coordinator in (None, _AUTO) or number is None or process_id is None:
        expected = f"{name}, --coordinator, --num_processes and --process_id together"
        got = ", ".join([name] * (text is not None) + [f"--{one}" for one in given])
        raise InputError(f"expected {expected}, or {name} and --coordinator={_AUTO}; got {got}")
    values = {
        name: str(flags.FLAGS[name].value) for name in flags.FLAGS if flags.FLAGS[name].present
    }
    values.pop(PROCESS_ID.name, None)
    with processes.joined(coordinator, number, process_id, values):
        yield make_mesh(text)
