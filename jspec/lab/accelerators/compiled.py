"""Accelerators for which XLA compiles without the device, and what it makes of a program."""

import contextlib
import datetime
import importlib.metadata
import importlib.util
import math
import os
import pathlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from types import MappingProxyType
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

_SHARE = 0.98  # of the memory that a device has: a margin, as in `common.memory`
_GPUS = "h200", "h100", "a100"
# An H200 is an H100 with other memory: bandwidth, size, clock and name.
_H200 = {
    "3352320000000": "4800000000000",
    "84942979072": "151397597184",
    "2619000KHz": "3750000KHz",
    "H100 80GB HBM3": "H200 141GB HBM3e",
}
_PACKAGES = (
    "jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt", "nvidia-cuda-nvcc-cu12",
    "nvidia-cuda-nvcc",
)  # fmt: skip
_VARIABLES = "JSPEC_KERNELS", "JSPEC_CUDNN", "JSPEC_ONE_GRAPH", "XLA_FLAGS"
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
# Name, shape, op, operands and attributes.
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\([^)]*\)?(.*)$"
)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([0-9,]*)\]")  # dtype and sizes
_ON_CHIP = "S(1)"  # in a layout of a TPU
# What carries numbers elsewhere and computes nothing.
_MOVES = {"convert", "transpose", "pad", "copy"}
# Beside them a slice is the cut to or from a multiple of the tile; the others name arrays.
_FREE = {"slice", "bitcast", "reshape", "parameter", "constant", "get-tuple-element", "tuple"}
_LARGE = 1e6  # bytes: a weight, or one layer's keys of a short context


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
    kept = "h100" if name == "h200" else name
    text = pathlib.Path(__file__).with_name(f"{kept}.txtpb").read_text()
    for was, becomes in _H200.items() if name == "h200" else ():
        text = text.replace(was, becomes)
    (memory,) = re.findall(r"device_memory_size: (\d+)", text)
    return Accelerator(name, "gpu", int(_SHARE * int(memory)), text)


_TPUS = {
    "v5e": Accelerator("v5e", "tpu", int(_SHARE * (63 << 28)), "v5litepod"),
    "v6e": Accelerator("v6e", "tpu", int(_SHARE * (125 << 28)), "v6e"),
}


class CompiledProgram(NamedTuple):
    """A program as XLA has compiled it.

    Attributes:
      text: the optimised HLO.
      argument_bytes: memory of weights, caches and whatever else it is given.
      temporary_bytes: memory beside arguments and results.
      is_one_graph: whether a GPU's host starts it once; None of a TPU, which runs loops itself.
      loops_without_condition: loops whose condition has no kernel, which a graph starts too early
        (see `jspec.kernels.loops`); None of a TPU.
    """

    text: str
    argument_bytes: int
    temporary_bytes: int
    is_one_graph: bool | None
    loops_without_condition: int | None


def compiled_with() -> dict[str, Any]:
    """Returns date, versions and environment, which decide the program beside its source."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    date = datetime.date.today().isoformat()
    return {"date": date, "versions": versions, "environment": variables}


def compile_for(accelerator: Accelerator, function: Any, arguments: Any) -> CompiledProgram:
    """Compiles a function under `jax.jit`, called with shapes, as on one device.

    Shapes that have a sharding are on those devices instead, and memory is one device's. Call it
    within `kernels.compiling_for(accelerator.backend)`.

    Raises:
      InputError: XLA cannot compile it, it does not fit into the device's memory, or XLA does not
        say what the host starts.
    """
    sharding = jax.sharding.SingleDeviceSharding(accelerator.devices()[0])
    placed = jax.tree.map(
        lambda leaf: leaf if leaf.sharding else leaf.update(sharding=sharding), arguments
    )
    try:
        program = compile_program(function.lower(*placed), accelerator.backend)
    except (RuntimeError, NotImplementedError) as error:
        reason = describe_error(error)
        if sizes := re.search(r"([\d.]+G) exceeds .*?\(([\d.]+G)\)", reason):  # of a TPU
            reason = f"it takes {sizes[1]} of {sizes[2]}, programs' own memory included"
        raise InputError(f"XLA cannot compile it for {accelerator.name}: {reason}") from None
    needed = program.argument_bytes + program.temporary_bytes
    if needed > accelerator.memory:
        raise InputError(
            f"expected a program within {accelerator.memory / 1e9:.1f} GB of {accelerator.name}, "
            f"got one of {needed / 1e9:.1f} GB: {program.argument_bytes / 1e9:.1f} GB of weights "
            "and caches, the rest for what it computes"
        )
    return program


def compile_program(
    lowered: Any, backend: str, options: Mapping[str, int | str] = MappingProxyType({})
) -> CompiledProgram:
    """Compiles what `jax.jit` has lowered, with additional options of XLA.

    Raises:
      InputError: XLA does not say what the host starts.
    """
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True} if backend == "gpu" else {}
        compiled = lowered.compile(compiler_options={**options, **dump} or None)
        # Passes that change nothing, as with one launch, leave only the text before them.
        endings = "_after_thunk_passes", ""
        groups = (pathlib.Path(folder).glob(f"*thunk_sequence{end}.txt") for end in endings)
        texts = ("".join(path.read_text() for path in paths) for paths in groups)
        # What stands at the margin is started by the host; graphs hold the rest.
        thunks = next(filter(None, texts), "")
    if backend == "gpu" and not thunks:
        expected = "expected XLA to write the thunks of a GPU's program"
        raise InputError(f"{expected}, got none: jax {jax.__version__} may name them otherwise")
    memory = compiled.memory_analysis()
    sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    if not thunks:
        return CompiledProgram(compiled.as_text(), *sizes, None, None)
    is_driven = re.search(r"^\d+: k(While|Conditional)", thunks, re.MULTILINE)
    without = re.findall(r"^ *condition:\s*^ *No thunks", thunks, re.MULTILINE)
    return CompiledProgram(compiled.as_text(), *sizes, not is_driven, len(without))


def count_moves(text: str) -> int:
    """Returns how many launches of a program, optimised HLO, only move a megabyte or more.

    That is, they copy, transpose, pad or convert an array, such as a cache that the loop needs in
    another layout. A launch counts once, however often a loop runs it. Copies to a TPU's chip,
    which are needed, do not count.
    """
    computations: dict[str, list[tuple[str, str, str]]] = {}
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = computations[head[1]] = []
        elif body := _INSTRUCTION.match(line):
            shape, op, attributes = body.groups()
            fused = re.search(r"\bcalls=%?([\w.\-]+)", attributes) if "fusion" in op else None
            current.append((shape, op, fused[1] if fused else ""))
    instructions = [line for lines in computations.values() for line in lines]
    fusions = {fused for _, _, fused in instructions}
    launches = [line for name in computations.keys() - fusions for line in computations[name]]
    count = 0
    for shape, op, fused in launches:
        ops = {op.removesuffix("-start")}
        if fused:
            ops = {inner for _, inner, _ in computations[fused]}
        is_move = bool(ops & _MOVES) and ops <= _MOVES | _FREE
        is_needed = op.endswith("-start") and _ON_CHIP in shape
        count += is_move and not is_needed and _num_bytes(shape) >= _LARGE
    return count


def _num_bytes(shape: str) -> float:
    total = 0.0
    for dtype, sizes in _ARRAY.findall(shape):
        bits = re.search(r"\d+", dtype)
        width = int(bits[0]) / 8 if bits else dtype == "pred"
        total += width * math.prod(map(int, filter(None, sizes.split(","))))
    return total
