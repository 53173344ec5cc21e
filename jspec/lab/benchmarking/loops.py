"""Compiled loops timed by turns: steps of quantised weights, and drafters that only look back."""

import functools
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.common.errors import check_range
from jspec.common.memory import tree_bytes
from jspec.common.text_table import format_table
from jspec.common.timing import Loop, make_loop, seconds_in_turn
from jspec.drafters import DrafterOptions, make_drafter
from jspec.generation.programs import make_spec
from jspec.kernels import check_device
from jspec.lab.benchmarking.measurement import Measurement, Outcome
from jspec.lab.benchmarking.parts import call_loop
from jspec.models import make_apply
from jspec.sampling.noise import independent_draft_keys
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.types import Drafter, RoundInputs, TargetView
from jspec.weights.quantize import KINDS, QUANTIZATIONS
from jspec.weights.resolver import LoadedModel, find_model, load_model

_NUM_ROUNDS = 64  # of a drafter's turn, each of which commits one token
_DRAFTERS = {  # name, options, temperature
    "prompt_lookup": ("prompt_lookup", DrafterOptions(), 0.0),
    "suffix": ("suffix", DrafterOptions(), 0.0),
    "ngram": ("ngram", DrafterOptions(), 0.0),
    "ngram, sampled distribution": ("ngram", DrafterOptions(ngram_probs="sampled"), 1.0),
}


def measure_quantization(asked: Measurement) -> Iterator[Outcome]:
    """Times a greedy step of one row with each kind of weights; yields after each repeat.

    All kinds have to fit into memory together.
    """
    check_device()
    loops, sizes = {}, {}
    path = find_model(asked.target)
    is_packed = path is not None and path.suffix == ".gguf"
    for kind in QUANTIZATIONS if is_packed else ("none", *KINDS):
        model = load_model(asked.target, dtype=asked.dtype, quantization=kind)
        title = model.quantization or asked.dtype
        sizes[title] = {"megabytes": tree_bytes(model.params) / 1e6}
        loops[title] = call_loop(model, 1, asked.contexts()[0])
    return _measure_loops(loops, asked.repeats, sizes)


def measure_drafting(asked: Measurement) -> Iterator[Outcome]:
    """Times rounds of drafters, one `propose` and one `observe` each, beside a plain step.

    Rounds run over a text of random phrases that come again and again. Yields after each repeat.

    Raises:
      InputError: a context that has no place for the rounds.
    """
    for context in asked.contexts():
        check_range("context", context, _NUM_ROUNDS + 2, 2**20)
    target, _ = asked.models()
    loops: dict[str, Loop] = {"a plain step of the target": call_loop(target, 1, 256)}
    for name, (drafter, options, temperature) in _DRAFTERS.items():
        spec = make_spec(target, None, drafter, options, int(asked.num_draft_tokens))
        built = make_drafter(drafter, spec).drafter
        assert built is not None
        for context in asked.contexts():
            title = f"{name}, {context} tokens"
            loops[title] = _rounds_loop(target, built, temperature, context)
    return _measure_loops(loops, asked.repeats, {}, _NUM_ROUNDS)


def _measure_loops(
    loops: Mapping[str, Loop],
    repeats: int,
    sizes: Mapping[str, Mapping[str, float]],
    num_rounds: int = 1,
) -> Iterator[Outcome]:
    """Yields after each repeat every loop's milliseconds, and their ratio to the first loop's.

    A ratio is the median over repeats of one repeat's times. `sizes` are more columns, and
    `num_rounds` is in a turn of every loop but the first.
    """
    first = next(iter(loops))
    times: dict[str, list[float]] = {name: [] for name in loops}
    for turn in seconds_in_turn(loops, repeats):
        for name, own in times.items():
            own.append(1e3 * turn[name] / (1 if name == first else num_rounds))
        report = {
            name: {
                "milliseconds": statistics.median(own),
                "least_milliseconds": min(own),
                "ratio": statistics.median(map(np.divide, own, times[first])).item(),
                **sizes.get(name, {}),
                "all_milliseconds": own,
            }
            for name, own in times.items()
        }
        columns = [key for key in report[first] if key != "all_milliseconds"]
        rows = [[name, *(f"{row[key]:.4g}" for key in columns)] for name, row in report.items()]
        yield Outcome({"loops": report}, format_table(["", *columns], rows))


def _rounds_loop(target: LoadedModel, drafter: Drafter, temperature: float, context: int) -> Loop:
    """Returns a loop each turn of which is `_NUM_ROUNDS` rounds, the last of a text."""
    rng = np.random.default_rng(0)
    vocab_size = target.config.vocab_size
    phrases = [rng.integers(0, vocab_size, rng.integers(3, 11)) for _ in range(20)]
    repeated = np.concatenate([phrases[i] for i in rng.integers(0, 20, context)])
    text = jnp.asarray(repeated[:context], jnp.int32)
    begin = text[None, : context - _NUM_ROUNDS]
    state = drafter.observe(None, drafter.init(1, context), begin, begin, begin >= 0)
    zeros, ones = jnp.zeros([1], jnp.int32), jnp.ones([1], jnp.float32)
    settings = SamplingSettings(temperature * ones, zeros, ones, 0 * ones)
    width = drafter.num_draft_tokens
    view = TargetView(None, make_apply(target.config), None)

    def one_round(text: jax.Array, i: jax.Array, carry: tuple[Any, jax.Array]) -> Any:
        state, total = carry
        last = jax.lax.dynamic_slice(text, [context - _NUM_ROUNDS + i], [1])
        inputs = RoundInputs(
            last,
            limit=lambda kind: jnp.full_like(kind, width),
            rng_keys=independent_draft_keys(zeros.astype(jnp.uint32), zeros + i, width),
            settings=settings,
            view=view,
        )
        proposal, state = drafter.propose(None, state, inputs)
        block = jnp.concatenate([last[:, None], proposal.tokens], axis=1)
        valid = jnp.arange(width + 1)[None] < 1
        state = drafter.observe(None, state, block, block, valid)
        # Every draft has a part in the result, so that XLA leaves none out.
        return state, total + proposal.num_tokens[0] + proposal.tokens.max() // 2**20

    def turn(constants: tuple[Any, jax.Array], total: jax.Array) -> jax.Array:
        state, text = constants
        start = state, jnp.minimum(total, 0)  # always 0, but only after the turn before
        return jax.lax.fori_loop(0, _NUM_ROUNDS, functools.partial(one_round, text), start)[1]

    return make_loop(turn, (state, text), jnp.int32(0))
