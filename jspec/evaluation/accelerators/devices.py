"""The accelerators that XLA's compilers know without having one."""

import importlib.util
import os
import pathlib
import re
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from jspec.common.errors import InputError, check_among, describe_error

# JAX's names of the platforms, and the modules of which one must be there.
_COMPILERS = {"gpu": ("cuda", "jax_cuda12_plugin", "jax_cuda13_plugin"), "tpu": ("tpu", "libtpu")}
# So that libtpu does not ask the machine around the chip about it.
_NO_TPU = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}


class Accelerator(NamedTuple):
    """One device.

    Attributes:
      name: as `--device` takes it.
      backend: "gpu" or "tpu".
      bandwidth: of its memory, in bytes a second, as published.
      memory: its bytes.
      description: of a GPU, for XLA; of a TPU, what libtpu calls a host with four.
    """

    name: str
    backend: str
    bandwidth: float
    memory: int
    description: str

    @property
    def advice(self) -> str:
        """What installs its compiler."""
        return f'pip install -e ".[compile-{self.backend}]"'

    def device(self) -> Any:
        """Returns a device to compile for; nothing can be put on it.

        Raises:
          InputError: its compiler is not installed, or does not know it.
        """
        platform, *modules = _COMPILERS[self.backend]
        if not any(map(importlib.util.find_spec, modules)):
            raise InputError(f"--device={self.name} expects XLA's compiler for it: {self.advice}")
        name, options = f"{self.name}:2x2", {}
        if self.backend == "gpu":
            name, options = "", {"target_config": self.description, "topology": "1x1x1"}
        else:
            os.environ.update({"TPU_ACCELERATOR_TYPE": self.description, **_NO_TPU, **os.environ})
        try:
            return topologies.get_topology_desc(name, platform, **options).devices[0]
        except Exception as error:  # whatever the plugin raises
            found = f"jax {jax.__version__} cannot compile for it, {describe_error(error)[:200]}"
            raise InputError(f"--device={self.name}: {found}; {self.advice}") from None


def find_accelerator(name: str) -> Accelerator:
    """Returns the accelerator of that name; an `InputError` if there is none."""
    check_among("device", name, (*_GPUS, *_TPUS))
    if name in _TPUS:
        return _TPUS[name]
    text = pathlib.Path(__file__).with_name(f"{name}.txtpb").read_text()
    # They stand there in this order.
    bandwidth, memory = re.findall(r"(?:memory_bandwidth|device_memory_size): (\d+)", text)
    return Accelerator(name, "gpu", int(bandwidth), int(memory), text)


_GPUS = "h200", "h100", "a100"
_TPUS = {
    "v5e": Accelerator("v5e", "tpu", 819e9, 16 << 30, "v5litepod-4"),
    "v6e": Accelerator("v6e", "tpu", 1640e9, 32 << 30, "v6e-4"),
}
