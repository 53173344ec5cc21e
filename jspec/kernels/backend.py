"""Which kind of device programs are made for: the default, or one that is not here.

And how XLA computes products on it.
"""

import contextlib
import contextvars
import functools
import os
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from jspec.common.errors import InputError, say

_LANES = 128  # numbers side by side in a TPU's memory
_FOREIGN = contextvars.ContextVar[str | None]("foreign backend", default=None)
_TRIED = contextvars.ContextVar[dict[str, int | str] | None]("options on trial", default=None)
_VERDICT: dict[str, bool] = {}  # of this process, once there is one
# Command buffers are CUDA graphs. All of these kinds of work, loops included, become part of them,
# however few: then the host starts a run of many rounds and waits for its end only.
_ONE_GRAPH = {
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    # Else XLA 0.11 joins a call of CUDA C++ with the slice that it reads, which no graph takes.
    "xla_gpu_enable_dynamic_slice_fusion": False,
}
XLA, CUDA, LAYER = "xla", "cuda", "layer"
NAMES = (XLA, "attention", CUDA, LAYER, f"{LAYER}-pdl")  # of all candidates for a block
_LEAST_ROWS = 16  # of a product on a GPU: a tile's
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


def row_major(logits: Float[Array, "*b v"]) -> Float[Array, "*b v"]:
    """Returns logits, on a CPU laid out as the product that made them leaves them.

    Else a branch that is not taken, such as that of sampling, may choose a layout for all, and XLA
    copies what the kernels read. Such a copy also moves the program to another thread.
    """
    if backend() != "cpu":
        return logits
    return with_layout_constraint(logits, Layout(major_to_minor=tuple(range(logits.ndim))))


def run_options() -> dict[str, int | str] | None:
    """Returns XLA's options for the program of many rounds; None for its defaults.

    On a GPU they make it one graph, once a trial has allowed that (`allow_one_graph`). By default
    the host reads back the condition of every loop. An option in XLA_FLAGS is the user's, and
    `JSPEC_ONE_GRAPH=0` in the environment leaves all to XLA.
    """
    if (tried := _TRIED.get()) is not None:
        return tried
    if not _may_be_one_graph():
        return None
    return one_graph_options() if is_foreign() or _VERDICT.get("one graph") else None


def one_graph_options() -> dict[str, int | str]:
    """Returns XLA's options that make a program one graph."""
    return dict(_ONE_GRAPH)


def awaits_graph_trial() -> bool:
    """Returns whether a run would be one graph, if only it were known that graphs are right here.

    The trial needs whole rounds, which this package does not know: `jspec.generation.graph_trial`.
    """
    return _may_be_one_graph() and not is_foreign() and not _VERDICT


def allow_one_graph(is_right: bool) -> None:
    """Sets, for this process, whether runs may be one graph on its GPU."""
    _VERDICT["one graph"] = is_right


@contextlib.contextmanager
def trying_options(options: dict[str, int | str]) -> Iterator[None]:
    """Within it these are the `run_options`, whatever is known of the device."""
    token = _TRIED.set(dict(options))
    try:
        yield
    finally:
        _TRIED.reset(token)


def _may_be_one_graph() -> bool:
    is_set = any(name in os.environ.get("XLA_FLAGS", "") for name in _ONE_GRAPH)
    return backend() == "gpu" and not is_set and os.environ.get("JSPEC_ONE_GRAPH") != "0"


def asked_kernels() -> str | None:
    """Returns the candidate that `JSPEC_KERNELS` names; None where a contest decides.

    Raises:
      InputError: there is no such candidate.
    """
    name = os.environ.get("JSPEC_KERNELS") or None
    if name is not None and name not in NAMES:
        raise InputError(f"expected JSPEC_KERNELS among {', '.join(NAMES)}; got {name!r}")
    return name


def may_be_native() -> bool:
    """Returns whether kernels in C++ may be used: unless `JSPEC_NATIVE` is 0; empty is as 1.

    Raises:
      InputError: it is neither 0 nor 1.
    """
    value = os.environ.get("JSPEC_NATIVE") or "1"
    if value not in ("0", "1"):
        raise InputError(f"expected JSPEC_NATIVE to be 0 or 1, got {value!r}")
    return value == "1"


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
    say(message)
    return False


def exact_float32(dtype: DTypeLike) -> jax.lax.Precision | None:
    """Returns the precision of products of that type: float32 means float32, not a GPU's TF32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def padded(rows: Shaped[Array, "r i"]) -> Shaped[Array, "q i"]:
    """Returns rows, on a GPU with zeros after them where they are fewer than 16.

    So a plain step and a verify call multiply by one program, and up to 16 rows a row's result does
    not depend on their number. An H100 takes 30.0 µs for 16 rows of a product for which one row
    takes 31.1.
    """
    num_missing = _LEAST_ROWS - rows.shape[0]
    if backend() != "gpu" or num_missing <= 0:
        return rows
    return jnp.pad(rows, ((0, num_missing), (0, 0)))


def dot(
    rows: Shaped[Array, "r i"], kernel: Shaped[Array, "o i"], dtype: DTypeLike = jnp.float32
) -> Shaped[Array, "r o"]:
    """Returns rows · kernelᵀ by XLA, of one type and summed in `dtype`."""
    precision, contract_last = exact_float32(rows.dtype), (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(
        rows, kernel, contract_last, precision=precision, preferred_element_type=dtype
    )
