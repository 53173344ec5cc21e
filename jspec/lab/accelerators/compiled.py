"""One program compiled for an accelerator, and its figures."""

import contextlib
import datetime
import importlib.metadata
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from jspec.common.errors import InputError, describe_error
from jspec.lab.accelerators.devices import Accelerator
from jspec.lab.accelerators.hlo import Module
from jspec.lab.accelerators.rounds import Assumptions, count_round

_PACKAGES = (
    "jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt", "nvidia-cuda-nvcc-cu12",
    "nvidia-cuda-nvcc",
)  # fmt: skip
_VARIABLES = "JSPEC_KERNELS", "JSPEC_CUDNN", "JSPEC_ONE_GRAPH", "XLA_FLAGS"


def compiled_with() -> dict[str, Any]:
    """Returns what decides the figures beside the program: date, versions, and the environment."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    date = datetime.date.today().isoformat()
    return {"date": date, "versions": versions, "environment": variables}


def compile_for(
    accelerator: Accelerator, function: Any, arguments: Any, assumed: Assumptions | None,
    num_layers: int,
) -> dict[str, Any]:  # fmt: skip
    """Returns the figures of a function under `jax.jit`, called with shapes, as on one device.

    Shapes that have a sharding are on those devices instead, and the figures are one device's.

    Call it within `kernels.compiling_for(accelerator.backend)`. A run over rounds is known by what
    is `assumed` of a round; its figures are one round's. `num_layers` are those that are run.

    Raises:
      InputError: XLA cannot compile it, or does not say what the host starts.
    """
    sharding = jax.sharding.SingleDeviceSharding(accelerator.devices()[0])
    placed = jax.tree.map(
        lambda leaf: leaf if leaf.sharding else leaf.update(sharding=sharding), arguments
    )
    begin = time.monotonic()
    try:
        program = compile_program(function.lower(*placed), accelerator.backend)
    except (RuntimeError, NotImplementedError) as error:
        reason = describe_error(error)
        if sizes := re.search(r"([\d.]+G) exceeds .*?\(([\d.]+G)\)", reason):  # of a TPU
            reason = f"it takes {sizes[1]} of {sizes[2]}, programs' own memory included"
        raise InputError(f"XLA cannot compile it for {accelerator.name}: {reason}") from None
    seconds = time.monotonic() - begin
    found = count_round(Module(program.text), assumed)
    return found.figures | {
        "host_waits": found.waits if program.is_one_graph is False else 0.0,
        "is_one_graph": program.is_one_graph,
        "loops_without_condition": program.loops_without_condition,
        "temporary_bytes": program.temporary_bytes,
        "seconds_to_compile": seconds,
        "loops": found.loops,
        "kernels": {
            line: [n, n / num_layers, found.line_bytes[line]]
            for line, n in found.kernels.most_common()
        },
    }


class CompiledProgram(NamedTuple):
    """What XLA has made of a program.

    Attributes:
      text: the optimised HLO.
      temporary_bytes: memory beside arguments and results.
      is_one_graph: whether a GPU's host starts it once; None of a TPU, which runs loops itself.
      loops_without_condition: loops whose condition has no kernel, which a graph starts too early
        (see `jspec.kernels.loops`); None of a TPU.
    """

    text: str
    temporary_bytes: int
    is_one_graph: bool | None
    loops_without_condition: int | None


def compile_program(
    lowered: Any, backend: str, options: Mapping[str, int | str] = MappingProxyType({})
) -> CompiledProgram:
    """Compiles what `jax.jit` has lowered, with more of XLA's options besides its own.

    Raises:
      InputError: XLA does not say what the host starts.
    """
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True} if backend == "gpu" else {}
        compiled = lowered.compile(compiler_options={**options, **dump} or None)
        # Passes that change nothing, as with one launch, leave only the text before them.
        endings = "_after_thunk_passes", ""
        found = (pathlib.Path(folder).glob(f"*thunk_sequence{end}.txt") for end in endings)
        texts = ("".join(path.read_text() for path in paths) for paths in found)
        # What stands at the margin is started by the host; graphs hold the rest.
        thunks = next(filter(None, texts), "")
    if backend == "gpu" and not thunks:
        expected = "expected XLA to write the thunks of a GPU's program"
        raise InputError(f"{expected}, got none: jax {jax.__version__} may name them otherwise")
    text, temporary = compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes
    if not thunks:
        return CompiledProgram(text, temporary, None, None)
    is_driven = re.search(r"^\d+: k(While|Conditional)", thunks, re.MULTILINE)
    without = re.findall(r"^ *condition:\s*^ *No thunks", thunks, re.MULTILINE)
    return CompiledProgram(text, temporary, not is_driven, len(without))
