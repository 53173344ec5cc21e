"""Which kind of device programs are made for: the default one, or one that is not here."""

import contextlib
import contextvars
import functools
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from jspec.common.errors import describe_error

_LANES = 128  # numbers side by side in a TPU's memory
_FOREIGN = contextvars.ContextVar[str | None]("foreign backend", default=None)
# Command buffers are CUDA graphs. All of these kinds of work, loops included, become part of them,
# however few: then the host starts a run of many rounds and waits for its end only.
_ONE_GRAPH = {
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
}
_BFLOAT16 = 8.0  # the first compute capability that has products of bfloat16


def backend() -> str:
    """Returns "cpu", "gpu" or "tpu": that of the default device, or of `compiling_for`."""
    return _FOREIGN.get() or jax.default_backend()


def is_foreign() -> bool:
    """Returns whether programs are made for a device that is not here: nothing can be tried."""
    return _FOREIGN.get() is not None


@contextlib.contextmanager
def compiling_for(name: str) -> Iterator[None]:
    """Within it programs are traced for that kind of device. They can be compiled, but not run."""
    jax.clear_caches()  # what was traced for the default device is not what is wanted
    token = _FOREIGN.set(name)
    try:
        yield
    finally:
        _FOREIGN.reset(token)
        jax.clear_caches()


def pinned(layer: Float[Array, "b k s h"]) -> Float[Array, "b k s h"]:
    """Returns a layer of a cache, on a TPU laid out in memory as XLA lays out arguments there.

    Else each loop that writes the cache chooses a layout, and it is copied between the loops.
    """
    if backend() != "tpu":
        return layer
    # The last axis fills lanes, with heads or with slots: where less is left empty.
    s, h = layer.shape[2:]
    order = (0, 1, 2, 3) if -h % _LANES * s <= -s % _LANES * h else (0, 1, 3, 2)
    return with_layout_constraint(layer, Layout(major_to_minor=order))


def run_options() -> dict[str, int | str] | None:
    """Returns XLA's options for the program of many rounds; None for its defaults.

    On a GPU they make it one graph. By default the host reads back the condition of every loop. An
    option in XLA_FLAGS is the user's, and `JSPEC_ONE_GRAPH=0` in the environment leaves all to XLA.
    """
    is_set = any(name in os.environ.get("XLA_FLAGS", "") for name in _ONE_GRAPH)
    if backend() != "gpu" or is_set or os.environ.get("JSPEC_ONE_GRAPH") == "0":
        return None
    return dict(_ONE_GRAPH) if is_foreign() or _can_loop() else None


@functools.cache
def _can_loop() -> bool:
    """Tries a loop that chooses in each turn, as rounds do, on new memory several times.

    This XLA may not know an option, the driver no loop in a graph, or a graph may go on with the
    memory that it was made for: XLA makes it when a program runs for the second time, and changes
    its addresses in later runs (openxla/xla#33073).
    """

    def run(numbers: jax.Array, signs: jax.Array) -> jax.Array:
        def turn(carry: Any) -> Any:
            now, total = carry
            grow, shrink = lambda x: 2 * x + numbers, lambda x: x - 3 * numbers
            return now + 1, jax.lax.cond(signs[now] > 0, grow, shrink, total)

        return jax.lax.while_loop(
            lambda carry: carry[0] < signs.size, turn, (np.int32(0), numbers)
        )[1]

    def trial(seed: int) -> bool:
        numbers, signs = np.arange(1000, dtype=np.int32) + seed, np.arange(8) % (seed + 2)
        expected = numbers
        for sign in signs:
            expected = 2 * expected + numbers if sign > 0 else expected - 3 * numbers
        return bool((np.asarray(program(numbers, signs.astype(np.int32))) == expected).all())

    program, problem = jax.jit(run, compiler_options=_ONE_GRAPH), ""
    try:
        if not all(map(trial, range(4))):
            problem = "a loop came to a wrong number"
    except jax.errors.JaxRuntimeError as error:
        problem = describe_error(error)[:200]
    if problem:
        slow = "the host drives its loops, and short rounds take longer"
        print(f"jspec: a run is not one graph ({problem}): {slow}", file=sys.stderr, flush=True)
    return not problem


def has_bfloat16() -> bool:
    """Returns whether the GPU has products of bfloat16, which cuDNN and jspec's own kernels take.

    A compiler may end the process where it is given a GPU that is too old: that is not tried.
    """
    return is_foreign() or _is_new_enough()


@functools.cache
def _is_new_enough() -> bool:
    device = jax.devices()[0]
    # Of another maker's GPU it is no number: a trial tells.
    capability = str(getattr(device, "compute_capability", ""))
    if not re.fullmatch(r"\d+\.\d+", capability) or float(capability) >= _BFLOAT16:
        return True
    name = f"{device.device_kind}, compute capability {capability}"
    cost = "XLA computes them in float32, and other kernels are not used"
    message = f"jspec: the GPU ({name}) has no products of bfloat16, as {_BFLOAT16} has: {cost}"
    print(message, file=sys.stderr, flush=True)
    return False
