"""What guesses save in a chain: a table by their number, and for images a picture."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.lab.experiments.spec import FunctionsSpec
from jspec.lab.functions import digits, posterior
from jspec.speculation.functions import Speculation, latest, speculate

_NUM_CALLS = 50  # timed of vmapped g
_NUM_PICTURES = 12


class Chain(NamedTuple):
    """Two functions, how the state goes on, and where it begins; see `speculate`."""

    f: Any
    g: Any
    update: Callable[[Any, Any], Any]
    state: Any
    notes: list[str]


def make_chain(spec: FunctionsSpec) -> Chain:
    """Returns the chain, its networks trained."""
    if spec.chain == "digits":
        (g, large), (f, small) = (
            digits.make_step(name, spec.num_updates) for name in ("large", spec.guess)
        )
        note = f"Held out: {large:.3f} nats a pixel for g, {small:.3f} for f."
        return Chain(f, g, digits.draw_pixel, digits.empty_canvas(), [note])
    of, partial = posterior.make_posterior(), jax.tree_util.Partial
    f = getattr(posterior, f"{spec.chain}_by_{spec.guess}")
    g = partial(getattr(posterior, f"{spec.chain}_by_data"), of)
    if spec.chain == "metropolis":
        return Chain(f, g, posterior.move, posterior.start_walk(jax.random.key(1)), [])
    return Chain(f, g, latest, jnp.zeros_like(of.mode), [])


def measure(spec: FunctionsSpec) -> dict[str, Any]:
    """Returns a table of what each number of guesses gives, and images with whose pixels are whose.

    `columns`, `units`, `rows` and `notes` are a table's; `images` are [n 64] levels, `is_guess` the
    same for the pixels that f guessed, at the largest number of guesses.
    """
    chain = make_chain(spec)
    rows, results = [], []
    for number in spec.num_drafts:
        for compiled in (number, 0):
            _run(spec, chain, compiled, 0)
        pairs = [(_run(spec, chain, number, seed), _run(spec, chain, 0, seed))
                 for seed in range(spec.num_chains)]  # fmt: skip
        results = [result for (result, _), _ in pairs]
        calls = sum(int(result.num_rounds) for result in results)
        kept = sum(int(result.num_accepted) for result in results)
        proposed = sum(int(result.num_proposed) for result in results)
        speed = statistics.median(alone / seconds for (_, seconds), (_, alone) in pairs)
        total = spec.num_chains * spec.num_steps
        rows.append([number, total / calls, kept / proposed, _call_cost(chain, number + 1), speed])
    note = (
        f"{spec.num_chains} chains of {spec.num_steps} steps, rule {spec.acceptance}. Calls and "
        "guesses are counted, and the same in every run; the last two columns are times on this "
        "machine."
    )
    record = {
        "columns": ["guesses a round", "values per call of g", "guesses kept",
                    "call on all states", "speed"],
        "units": ["", "", "", "times a call on one", "times g alone"],
        "rows": rows,
        "notes": [note, *chain.notes],
    }  # fmt: skip
    if spec.chain == "digits":
        shown = results[:_NUM_PICTURES]
        rest = 0, digits.NUM_PIXELS - spec.num_steps  # an image that is not drawn to its end
        record["images"] = [np.pad(result.values, rest).tolist() for result in shown]
        record["is_guess"] = [np.pad(result.is_guess, rest).tolist() for result in shown]
    return record


def _run(
    spec: FunctionsSpec, chain: Chain, num_drafts: int, seed: int
) -> tuple[Speculation, float]:
    begin = time.perf_counter()
    result = speculate(
        chain.f, chain.g, chain.state, jax.random.key(seed), num_steps=spec.num_steps,
        num_drafts=num_drafts, update=chain.update, acceptance=spec.acceptance,
    )  # fmt: skip
    result.values.block_until_ready()
    return result, time.perf_counter() - begin


def _call_cost(chain: Chain, count: int) -> float:
    """Returns how many times longer a call of g on this many states takes than on one state."""
    mapped = jax.jit(jax.vmap(chain.g))
    seconds: list[list[float]] = [[], []]
    states = [
        jax.tree.map(lambda leaf, n=n: jnp.stack([jnp.asarray(leaf)] * n), chain.state)
        for n in (1, count)
    ]
    for repeat in range(_NUM_CALLS):
        for times, state in zip(seconds, states, strict=True):
            begin = time.perf_counter()
            jax.block_until_ready(mapped(state))
            if repeat:  # the first compiles
                times.append(time.perf_counter() - begin)
    return statistics.median(seconds[1]) / statistics.median(seconds[0])
