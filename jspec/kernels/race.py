"""How long blocks take: many in one program, as rounds run them, by several candidates in turn."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jspec.common.errors import describe_error
from jspec.common.memory import available_bytes, tree_bytes
from jspec.kernels.backend import run_options
from jspec.kernels.trial import WIDTHS, Draw, Operands, Run

Seconds = dict[str, dict[str, float]]  # of one block, by candidate and width

_TIMED = WIDTHS[:2]
_LEAST_GAIN = 0.03  # medians of a few runs differ by 1 or 2 %
_COLD_BYTES = 256 << 20  # more than a GPU's caches hold; small blocks stay in them
_MOST_BLOCKS = 32  # of a program
_TURNS = 16  # over all blocks, in a run
_WARM_UP = 3  # runs: XLA makes a graph in the second one, and may change it in the third
_REPEATS = 7


def race(entrants: Mapping[str, tuple[Run, Draw]]) -> tuple[Seconds, dict[str, str]]:
    """Returns the seconds of each entrant's block by width, and why some have none.

    An entrant is what computes, and what draws its operands. The first one must not fail.
    """
    draws = list(dict.fromkeys(draw for _, draw in entrants.values()))
    layers = {draw: _draw_layers(draw, len(draws)) for draw in draws}
    first, faults = next(iter(entrants)), {}
    seconds: Seconds = {name: {} for name in entrants}
    for width in _TIMED:
        calls = {}
        for name in seconds:
            run, draw = entrants[name]
            try:
                calls[name] = _compile(run, layers[draw], width)
            except Exception as error:  # of a compiler, a library, the device
                if name == first:
                    raise
                faults[name] = describe_error(error)[:200]
        seconds = {name: seconds[name] for name in calls}
        for name, median in medians(calls).items():
            num_blocks = len(layers[entrants[name][1]]) * _TURNS
            seconds[name][str(width)] = median / num_blocks
    return seconds, faults


def fastest(seconds: Seconds) -> str:
    """Returns the first entrant's name, or that of the fastest if it is 3 % faster.

    The widths' times are added. A round is made of narrow and of wider calls: neither may be bought
    with the other.
    """
    totals = {name: sum(times.values()) for name, times in seconds.items()}
    first, best = next(iter(totals)), min(totals, key=lambda name: totals[name])
    return best if totals[best] <= (1 - _LEAST_GAIN) * totals[first] else first


def medians(
    calls: Mapping[str, Callable[[], object]], clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Returns the median seconds of each call; they take turns, so that all meet the same load."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_REPEATS):
        for name, call in calls.items():
            begin = clock()
            call()
            times[name].append(clock() - begin)
    return {name: statistics.median(durations) for name, durations in times.items()}


def _draw_layers(draw: Draw, num_draws: int) -> list[Operands]:
    """Returns operands of as many blocks as fill the caches, or as half of the memory holds."""
    shapes = jax.eval_shape(draw, jnp.int32(0))
    count = min(_MOST_BLOCKS, math.ceil(_COLD_BYTES / max(1, tree_bytes(shapes.weights))))
    if (free := available_bytes()) is not None:
        count = min(count, free // (2 * num_draws * tree_bytes(shapes)))
    compiled = jax.jit(draw)
    return [compiled(jnp.int32(2 * number)) for number in range(max(1, count))]


def _compile(run: Run, layers: Sequence[Operands], width: int) -> Callable[[], object]:
    """Returns a run over the layers, compiled and warm.

    The stream goes through all of them, turn after turn: nothing can be computed ahead.
    """

    def program(layers: Sequence[Operands], turns: Array) -> Array:
        calls = [layer.first(width) for layer in layers]

        def turn(carry: Any) -> Any:
            number, stream, states = carry
            changed = []
            for call, state in zip(calls, states, strict=True):
                # Else what depends on the fixed operands alone would be computed once for all.
                stream, fixed = jax.lax.optimization_barrier((stream, call.fixed))
                result, state = run(Operands(call.weights, stream, fixed, state))
                if result.shape != stream.shape:  # of a product
                    result = stream + 1e-30 * jnp.max(result, axis=-1, keepdims=True)
                stream = result
                changed.append(state)
            size = jnp.sqrt(jnp.mean(jnp.square(stream), axis=-1, keepdims=True))
            return number + 1, stream / (size + 1e-6), changed

        start = jnp.int32(0), calls[0].stream, [call.state for call in calls]
        return jax.lax.while_loop(lambda carry: carry[0] < turns, turn, start)[1]

    compiled = jax.jit(program, compiler_options=run_options())

    def call() -> object:
        return compiled(layers, np.int32(_TURNS)).block_until_ready()

    for _ in range(_WARM_UP):
        call()
    return call
