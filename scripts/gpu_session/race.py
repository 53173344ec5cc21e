"""The smallest program in which a loop of a CUDA graph may start too early.

An outer loop computes for a while and then decides whether an inner loop makes a trip. In a graph
XLA gives a loop whose condition compiles to no kernel, as one does that is only carried, no
predecessor: it would start at once, on a stale condition. The first run of a program is no graph.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.gpu_session.arms import GRAPH, NO_EARLY_LAUNCH, NO_GRAPH, SERIALISED, known
from scripts.gpu_session.session import Work

_ARMS = {
    "graph": GRAPH,
    "no graph": NO_GRAPH,
    "graph, serialised": GRAPH | SERIALISED,
    "graph, no early launch": GRAPH | NO_EARLY_LAUNCH,
}
_CONDITIONS = "carried", "computed"
_RUNS = 6
_PRODUCTS = 24  # which take a while
_TRIPS = 5
_FARTHEST = 1e-2  # values are at most 1, and those of a trip too few or too many far from right


def make_program(condition: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the program, (values [r i], kernel [i i]) -> values, of a kind of condition."""
    is_carried = condition == "carried"

    def inner(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros_like(carry[0]), jnp.cos(carry[1]) * 1.5 + 1.0

    def is_wanted(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return carry[0].any() if is_carried else carry[0] > 0

    def run(values: jax.Array, kernel: jax.Array) -> jax.Array:
        def turn(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            index, values = carry
            for _ in range(_PRODUCTS):
                # In full float32, so that another tiling changes nothing that counts.
                product = jnp.matmul(values, kernel, precision="highest")
                values = jnp.tanh(product) + 0.1 * values
            is_positive = jnp.sum(values * values) + index.astype(jnp.float32) > 0
            wanted = is_positive[None] if is_carried else is_positive.astype(jnp.int32)
            _, values = jax.lax.while_loop(is_wanted, inner, (wanted, values))
            return index + 1, values / (1 + jnp.max(jnp.abs(values)))

        return jax.lax.while_loop(lambda carry: carry[0] < _TRIPS, turn, (jnp.int32(0), values))[1]

    return run


def run(work: Work) -> str:
    """Runs both programs in every arm, each time on new memory, and compares with no graph."""
    width = 64 if work.is_rehearsal else 512
    values = np.random.default_rng(0).normal(size=(64, width)).astype(np.float32)
    kernel = np.random.default_rng(1).normal(size=(width, width)).astype(np.float32) / width**0.5
    programs: dict[str, Any] = {
        f"{condition}; {arm}": jax.jit(make_program(condition), compiler_options=known(options))
        for condition in _CONDITIONS
        for arm, options in _ARMS.items()
    }
    programs |= {f"{condition}; reference": jax.jit(make_program(condition),
                                                    compiler_options=known(NO_GRAPH))
                 for condition in _CONDITIONS}  # fmt: skip
    lowered = {name: program.lower(values, kernel) for name, program in programs.items()}
    compiled = work.together({name: one.compile for name, one in lowered.items()})
    wrong: dict[str, int] = {}
    for condition in _CONDITIONS:
        reference = np.asarray(compiled[f"{condition}; reference"](values, kernel))
        for arm, options in _ARMS.items():
            name = f"{condition}; {arm}"
            if name not in compiled:
                continue
            distances = [
                float(np.abs(np.asarray(compiled[name](values + 0, kernel)) - reference).max())
                for _ in range(_RUNS)
            ]
            wrong[name] = sum(not one <= _FARTHEST for one in distances)  # NaN is wrong, too
            unknown = sorted(options.keys() - known(options).keys())
            work.record(
                "distances", condition=condition, arm=arm, distances=distances, unknown=unknown
            )
    return decide(wrong)


def decide(wrong: dict[str, int]) -> str:
    """Returns what the numbers of wrong runs say, by condition and arm."""
    listed = ", ".join(f"{name} ({count} of {_RUNS})" for name, count in wrong.items() if count)
    if any(count for name, count in wrong.items() if "; no graph" in name):
        return f"wrong without a graph, too: {listed}"
    if wrong.get("computed; graph"):
        return f"a computed condition is no cure: {listed}"
    if wrong.get("carried; graph"):
        return f"a carried condition starts its loop too early, a computed one does not: {listed}"
    if listed:
        return f"wrong in some arms only: {listed}"
    return "no run is wrong: this program does not show it here"
