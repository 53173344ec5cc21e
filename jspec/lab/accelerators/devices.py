"""Accelerators for which XLA can compile without the device."""

import importlib.util
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from jspec.common.errors import InputError, check_among, describe_error

# JAX's names of the platforms, and the modules of which one must be there.
_COMPILERS = {"gpu": ("cuda", "jax_cuda12_plugin", "jax_cuda13_plugin"), "tpu": ("tpu", "libtpu")}
_HOST = 4  # chips of a TPU's host
# libtpu does not ask the machine around the chip about it, and two processes may compile at once.
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}  # fmt: skip


class Accelerator(NamedTuple):
    """One device.

    Attributes:
      name: as `--device` takes it.
      backend: "gpu" or "tpu".
      memory: its bytes that a program may use.
      description: of a GPU, for XLA; of a TPU, what libtpu calls chips of it, but for their number.
    """

    name: str
    backend: str
    memory: int
    description: str

    @property
    def advice(self) -> str:
        """What installs its compiler."""
        return f'pip install -e ".[compile-{self.backend}]"'

    def devices(self, number: int = 1, hosts: int = 1) -> Sequence[Any]:
        """Returns devices to compile for, at least that many; they cannot hold arrays.

        Raises:
          InputError: its compiler is not installed, or does not know it or that many.
        """
        platform, *modules = _COMPILERS[self.backend]
        if not any(map(importlib.util.find_spec, modules)):
            raise InputError(f"--device={self.name} expects XLA's compiler for it: {self.advice}")
        name, options = f"{self.name}:{'2x2' if number <= _HOST else '2x4'}", {}
        if self.backend == "gpu":
            topology = f"1x{hosts}x{number // hosts}"
            name, options = "", {"target_config": self.description, "topology": topology}
        else:
            kind = f"{self.description}-{_HOST if number <= _HOST else 2 * _HOST}"
            os.environ.update({"TPU_ACCELERATOR_TYPE": kind, **_NO_TPU, **os.environ})
        try:
            return topologies.get_topology_desc(name, platform, **options).devices
        except Exception as error:  # whatever the plugin raises
            reason = f"jax {jax.__version__} cannot compile for it, {describe_error(error)[:200]}"
            raise InputError(f"--device={self.name}: {reason}; {self.advice}") from None


def find_accelerator(name: str) -> Accelerator:
    """Returns the accelerator of that name; an `InputError` if there is none."""
    check_among("device", name, (*_GPUS, *_TPUS))
    if name in _TPUS:
        return _TPUS[name]
    text = pathlib.Path(__file__).with_name(f"{name}.txtpb").read_text()
    (memory,) = re.findall(r"device_memory_size: (\d+)", text)
    return Accelerator(name, "gpu", int(_SHARE * int(memory)), text)


_SHARE = 0.98  # of the memory that a device has: a margin, as in `common.memory`
_GPUS = "h200", "h100", "a100"
_TPUS = {
    "v5e": Accelerator("v5e", "tpu", int(_SHARE * (63 << 28)), "v5litepod"),
    "v6e": Accelerator("v6e", "tpu", int(_SHARE * (125 << 28)), "v6e"),
}
