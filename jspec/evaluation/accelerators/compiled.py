"""One program compiled for an accelerator, and its figures."""

import pathlib
import re
import tempfile
import time
from typing import Any

import jax

from jspec.common.errors import InputError, describe_error
from jspec.evaluation.accelerators.devices import Accelerator
from jspec.evaluation.accelerators.hlo import Module
from jspec.evaluation.accelerators.rounds import Assumptions, count_round

_LAUNCH_US = {"gpu": 1.5, "tpu": 0.0}  # of a launch in a graph; of a TPU's nothing is known
_WAIT_US = 15.0  # of the host's look at a condition


def compile_for(
    accelerator: Accelerator, function: Any, arguments: Any, assumed: Assumptions | None,
    num_layers: int,
) -> dict[str, Any]:  # fmt: skip
    """Returns the figures of a function under `jax.jit`, called with shapes.

    Call it within `kernels.compiling_for(accelerator.backend)`. A run over rounds is known by what
    is `assumed` of a round; its figures are one round's. `num_layers` are those that are run.

    Raises:
      InputError: XLA cannot compile it.
    """
    sharding = jax.sharding.SingleDeviceSharding(accelerator.device())
    placed = jax.tree.map(lambda leaf: leaf.update(sharding=sharding), arguments)
    begin = time.monotonic()
    try:
        text, temporary, is_one_graph = _compile(function.lower(*placed), accelerator.backend)
    except (RuntimeError, NotImplementedError) as error:
        reason = f"XLA cannot compile it for {accelerator.name}: {describe_error(error)}"
        raise InputError(f"{reason}; {accelerator.advice}") from None
    seconds = time.monotonic() - begin
    found = count_round(Module(text), assumed)
    waits = 0.0 if is_one_graph else found.waits
    launched = found.figures["launches_per_round"] * _LAUNCH_US[accelerator.backend]
    reading = found.figures["bytes_moved"] / accelerator.bandwidth * 1e6
    return found.figures | {
        "host_waits": waits,
        "is_one_graph": is_one_graph,
        "temporary_bytes": temporary,
        "estimated_us": reading + launched + waits * _WAIT_US,
        "seconds_to_compile": seconds,
        "loops": found.loops,
        "kernels": {line: [n, n / num_layers] for line, n in found.kernels.most_common()},
    }


def _compile(lowered: Any, backend: str) -> tuple[str, int, bool]:
    """Returns the optimised program, its temporary bytes, and whether the host starts it once."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(compiler_options=options if backend == "gpu" else None)
        graphs = pathlib.Path(folder).glob("*thunk_sequence_after_thunk_passes.txt")
        # What stands at the margin is started by the host; graphs hold the rest.
        thunks = "".join(path.read_text() for path in graphs)
    is_one_graph = not re.search(r"^\d+: k(While|Conditional)", thunks, re.MULTILINE)
    return compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes, is_one_graph
