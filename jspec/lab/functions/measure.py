"""What guesses save in a chain: a table by their number, and for images a picture."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.common.errors import check_among, check_range
from jspec.lab.functions import digits, posterior
from jspec.speculation.functions import RULES, latest, speculate

_REPEATS = 3
_NUM_PICTURES = 12

GUESSES = {
    "digits": ("small", "table"),
    "metropolis": ("quadratic", "coin"),
    "langevin": ("quadratic", "nothing"),
}


@dataclasses.dataclass(frozen=True)
class FunctionsSpec:
    """A chain, who guesses, and how much is measured.

    Attributes:
      chain: "digits", "metropolis" or "langevin".
      guess: f of the chain, a name of `GUESSES`.
      acceptance: the rule.
      num_drafts: numbers of guesses a round.
      num_steps: of a chain; an image has 64.
      num_chains: independent ones, for the counts; times are those of a single chain.
      num_updates: of training the networks of "digits".
    """

    chain: str = "digits"
    guess: str = "small"
    acceptance: str = "rejection"
    num_drafts: tuple[int, ...] = (1, 2, 4, 8)
    num_steps: int = 64
    num_chains: int = 64
    num_updates: int = 2000

    def __post_init__(self) -> None:
        check_among("chain", self.chain, GUESSES)
        check_among("guess", self.guess, GUESSES[self.chain])
        check_among("acceptance", self.acceptance, RULES)
        for number in self.num_drafts:
            check_range("num_drafts", number, 1, 4096)
        most = digits.NUM_PIXELS if self.chain == "digits" else 10**6
        check_range("num_steps", self.num_steps, 1, most)
        check_range("num_chains", self.num_chains, 1, 10**5)
        check_range("num_updates", self.num_updates, 1, 10**6)


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
    rows, result = [], None
    alone = _time_of(spec, chain, 0)
    for number in spec.num_drafts:
        keys = jax.random.split(jax.random.key(0), spec.num_chains)
        result = jax.vmap(lambda key, number=number: _run(spec, chain, number, key))(keys)
        calls, kept = int(result.num_rounds.sum()), int(result.is_guess.sum())
        ratios = [base / own for base, own in zip(alone(), _time_of(spec, chain, number)(), strict=True)]
        total = spec.num_chains * spec.num_steps
        rows.append([number, total / calls, kept / int(result.num_proposed.sum()),
                     _call_cost(chain, number + 1), statistics.median(ratios)])  # fmt: skip
    note = (
        f"{spec.num_chains} chains of {spec.num_steps} steps, rule {spec.acceptance}. Calls and "
        "guesses are counted, and the same in every run; the last two columns are times of one "
        "chain on this machine."
    )
    record = {
        "columns": ["guesses a round", "values per call of g", "guesses kept",
                    "call on all states", "speed"],
        "units": ["", "", "", "times a call on one", "times g alone"],
        "rows": rows,
        "notes": [note, *chain.notes],
    }  # fmt: skip
    if spec.chain == "digits" and result is not None:
        record["images"] = np.asarray(result.values[:_NUM_PICTURES]).tolist()
        record["is_guess"] = np.asarray(result.is_guess[:_NUM_PICTURES]).tolist()
    return record


def _run(spec: FunctionsSpec, chain: Chain, num_drafts: int, key: Any) -> Any:
    return speculate(
        chain.f, chain.g, chain.state, key, num_steps=spec.num_steps, num_drafts=num_drafts,
        update=chain.update, acceptance=spec.acceptance,
    )  # fmt: skip


def _time_of(spec: FunctionsSpec, chain: Chain, num_drafts: int) -> Callable[[], list[float]]:
    """Returns what gives the seconds of a chain, several times; it is compiled first."""

    def run(seed: int) -> None:
        _run(spec, chain, num_drafts, jax.random.key(seed)).values.block_until_ready()

    run(0)

    def times() -> list[float]:
        seconds = []
        for seed in range(_REPEATS):
            begin = time.perf_counter()
            run(seed)
            seconds.append(time.perf_counter() - begin)
        return seconds

    return times


def _call_cost(chain: Chain, count: int) -> float:
    """Returns how many times longer a call of g on this many states takes than on one."""
    mapped = jax.jit(jax.vmap(chain.g))
    seconds: list[list[float]] = [[], []]
    states = [
        jax.tree.map(lambda leaf, n=n: jnp.stack([jnp.asarray(leaf)] * n), chain.state)
        for n in (1, count)
    ]
    for repeat in range(20 * _REPEATS):
        for own, state in zip(seconds, states, strict=True):
            begin = time.perf_counter()
            jax.block_until_ready(mapped(state))
            if repeat:  # the first compiles
                own.append(time.perf_counter() - begin)
    return statistics.median(seconds[1]) / statistics.median(seconds[0])
