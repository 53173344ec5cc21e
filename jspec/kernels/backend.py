"""Which kind of device programs are made for: the default one, or one that is not here."""

import contextlib
import contextvars
import os
from collections.abc import Iterator

import jax

_FOREIGN = contextvars.ContextVar[str | None]("foreign backend", default=None)
# Command buffers are CUDA graphs. All of these kinds of work, loops included, become part of them,
# however few: then the host starts a run of many rounds and waits for its end only.
_ONE_GRAPH = {
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
}


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


def run_options() -> dict[str, int | str] | None:
    """Returns XLA's options for the program of many rounds; None for its defaults.

    On a GPU they make it one graph. By default the host reads back the condition of every loop. An
    option that XLA_FLAGS sets is the user's, and `JSPEC_ONE_GRAPH=0` in the environment leaves both
    to XLA.
    """
    is_set = any(name in os.environ.get("XLA_FLAGS", "") for name in _ONE_GRAPH)
    if backend() != "gpu" or is_set or os.environ.get("JSPEC_ONE_GRAPH") == "0":
        return None
    return dict(_ONE_GRAPH)
