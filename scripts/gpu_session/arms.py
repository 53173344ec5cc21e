"""The arms of the experiments on loops in a CUDA graph: how the program of rounds is compiled."""

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from jspec import kernels

GRAPH: dict[str, Any] = dict(kernels.one_graph_options())
NO_GRAPH: dict[str, Any] = {"xla_gpu_enable_command_buffer": ""}
SERIALISED: dict[str, Any] = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}
# Its name differs between versions of XLA.
NO_EARLY_LAUNCH: dict[str, Any] = {"xla_gpu_enable_pdl": False, "xla_gpu_enable_pdl_launch": False}


class Arm(NamedTuple):
    """A way of running rounds.

    Attributes:
      name: in the journal.
      options: XLA's, of the program of rounds.
      has_carried_loops: whether its loops are the old ones, whose condition is a carried value.
      variables: of the environment.
    """

    name: str
    options: Mapping[str, Any]
    has_carried_loops: bool = False
    variables: Mapping[str, str] = {}

    def to_text(self) -> str:
        """Returns it as an argument of a command line."""
        return json.dumps(self._asdict())


def arm_of(text: str) -> Arm:
    """Returns the arm of `Arm.to_text`."""
    return Arm(**json.loads(text))


FIRST = (
    Arm("no graph", NO_GRAPH),
    Arm("graph", GRAPH),
    Arm("old loops, graph", GRAPH, has_carried_loops=True),
    Arm("graph, no early launch", GRAPH | NO_EARLY_LAUNCH),
)
"""The four that run at once: "no graph" is what the others are compared with."""


def _graph_of(kinds: str) -> dict[str, Any]:
    return GRAPH | {"xla_gpu_enable_command_buffer": kinds}


# Where the new loops are wrong in a graph only: which part of a graph it takes.
WHY_A_GRAPH = (
    Arm("graph, serialised", GRAPH | SERIALISED),
    Arm("graph of products and fusions", _graph_of("FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN")),
    Arm("graph without loops", _graph_of("FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL")),
    Arm("graph without branches", _graph_of("FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,WHILE")),
)
# Where they are wrong without a graph, too: which kernels it takes.
_NO_TILING = "--xla_gpu_autotune_level=0"
WHY_AT_ALL = (
    Arm("XLA's kernels alone", NO_GRAPH, variables={"JSPEC_KERNELS": "xla", "JSPEC_CUDNN": "0"}),
    Arm("no products of Triton", NO_GRAPH,
        variables={"XLA_FLAGS": f"{_NO_TILING} --xla_gpu_enable_triton_gemm=false"}),
    Arm("no cuBLAS", NO_GRAPH,
        variables={"XLA_FLAGS": f"{_NO_TILING} --xla_gpu_cublas_fallback=false"}),
    Arm("one stream", NO_GRAPH | NO_EARLY_LAUNCH, variables={"CUDA_LAUNCH_BLOCKING": "1"}),
)  # fmt: skip


def known(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the options that this XLA knows."""
    return {name: value for name, value in options.items() if _is_known(name, value)}


@functools.cache
def _is_known(name: str, value: Any) -> bool:
    try:
        jax.jit(lambda x: x + 1, compiler_options={name: value})(1.0)
    except jax.errors.JaxRuntimeError:
        return False
    return True


@contextlib.contextmanager
def rounds_compiled_with(arm: Arm) -> Iterator[None]:
    """Within it `Generator` compiles rounds as the arm says, whatever a trial of the graph says."""
    before = kernels.run_options, kernels.awaits_graph_trial, jax.lax.while_loop
    options = known(arm.options)
    kernels.run_options = lambda: dict(options)
    kernels.awaits_graph_trial = lambda: False  # which would compile for a while
    if arm.has_carried_loops:
        jax.lax.while_loop = _carried(jax.lax.while_loop)
    try:
        yield
    finally:
        kernels.run_options, kernels.awaits_graph_trial, jax.lax.while_loop = before


def _carried(while_loop: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the loop as jspec's once were: its condition is computed in its body, and carried.

    Then XLA finds no kernel in the condition. The outermost loop, over rounds, always compared two
    numbers, and still does.
    """

    def loop(cond_fun: Callable[..., Any], body_fun: Callable[..., Any], init_val: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") == "jspec.speculation.plain":
            return while_loop(cond_fun, body_fun, init_val)

        def body(carry: Any) -> Any:
            value = body_fun(carry[1])
            return cond_fun(value), value

        return while_loop(lambda carry: carry[0], body, (cond_fun(init_val), init_val))[1]

    return loop
