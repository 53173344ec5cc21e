"""Times drafters that only look back at the text, alone: one `propose` and one `observe` a
round.
"""

import functools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.common.text_table import format_table
from jspec.common.timing import Loop, make_loop, seconds_in_turn
from jspec.drafters import Drafter, DrafterOptions, make_drafter
from jspec.evaluation.benchmarking.call_parts import CallShape, call_loop
from jspec.evaluation.benchmarking.outcome import Outcome
from jspec.generation.programs import make_spec
from jspec.models import make_apply
from jspec.sampling.noise import independent_draft_keys
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.types import TargetView
from jspec.weights.resolver import LoadedModel

NUM_ROUNDS = 64  # of a turn, each of which commits one token
_STEP = "a plain step of the target"
_DRAFTERS = {  # name, options, temperature
    "prompt_lookup": ("prompt_lookup", DrafterOptions(), 0.0),
    "ngram": ("ngram", DrafterOptions(), 0.0),
    "ngram, sampled distribution": ("ngram", DrafterOptions(ngram_probs="sampled"), 1.0),
}


def measure_drafting(
    target: LoadedModel, num_draft_tokens: int, contexts: Sequence[int], repeats: int
) -> Iterator[Outcome]:
    """Times rounds of drafters beside a plain step of the target; yields after each repeat.

    Rounds run over a text of random phrases that come again and again.

    Args:
      target: whose vocabulary the text is drawn from.
      num_draft_tokens: drafts a round.
      contexts: tokens of the text.
      repeats: of every measurement.
    """
    loops: dict[tuple[str, int], Loop] = {(_STEP, 1): call_loop(target, CallShape(1, 256))}
    for name, (drafter, options, temperature) in _DRAFTERS.items():
        spec = make_spec(target, None, drafter, options, num_draft_tokens)
        built = make_drafter(drafter, spec).drafter
        assert built is not None
        for context in contexts:
            loops[name, context] = rounds_loop(target, built, temperature, context)
    times = {key: [] for key in loops}
    for turn in seconds_in_turn(loops, repeats):
        for key, seconds in turn.items():
            times[key].append(seconds if key[0] == _STEP else seconds / NUM_ROUNDS)
        yield _outcome(times)


def _outcome(times: dict[tuple[str, int], list[float]]) -> Outcome:
    step, report, rows = times[_STEP, 1], {}, []
    for (name, context), own in times.items():
        typical, least = statistics.median(own), min(own)
        share = typical / statistics.median(step)
        row = {"median": 1e6 * typical, "least": 1e6 * least, "share_of_a_step": share}
        report.setdefault(name, {})[context] = row
        rows.append([name, str(context), *(f"{1e6 * value:.0f}" for value in (typical, least)),
                     f"{share:.2%}"])  # fmt: skip
    columns = ["", "tokens", "microseconds", "least", "of a plain step"]
    return Outcome({"microseconds": report}, format_table(columns, rows))


def rounds_loop(target: LoadedModel, drafter: Drafter, temperature: float, context: int) -> Loop:
    """Returns a loop each turn of which is `NUM_ROUNDS` rounds, the last of a text.

    Args:
      target: whose vocabulary the text is drawn from.
      drafter: what proposes.
      temperature: of the rounds.
      context: tokens of the text.
    """
    text = jnp.asarray(make_text(context, target.config.vocab_size), jnp.int32)
    begin = text[None, : context - NUM_ROUNDS]
    state = drafter.observe(None, drafter.init(1, context), begin, begin, begin >= 0)
    zeros, ones = jnp.zeros([1], jnp.int32), jnp.ones([1], jnp.float32)
    settings = SamplingSettings(temperature * ones, zeros, ones, 0 * ones)
    width = drafter.num_draft_tokens
    view = TargetView(None, make_apply(target.config), None)

    def one_round(text: jax.Array, i: jax.Array, carry: tuple[Any, jax.Array]) -> Any:
        state, total = carry
        last = jax.lax.dynamic_slice(text, [context - NUM_ROUNDS + i], [1])
        proposal, state = drafter.propose(
            None,
            state,
            last,
            limit=lambda kind: jnp.full_like(kind, width),
            rng_keys=independent_draft_keys(zeros.astype(jnp.uint32), zeros + i, width),
            settings=settings,
            view=view,
        )
        block = jnp.concatenate([last[:, None], proposal.tokens], axis=1)
        valid = jnp.arange(width + 1)[None] < 1
        state = drafter.observe(None, state, block, block, valid)
        # Every draft has a part in the result, so that XLA leaves none out.
        return state, total + proposal.num_tokens[0] + proposal.tokens.max() // 2**20

    def turn(constants: tuple[Any, jax.Array], total: jax.Array) -> jax.Array:
        state, text = constants
        start = state, jnp.minimum(total, 0)  # always 0, but only after the turn before
        return jax.lax.fori_loop(0, NUM_ROUNDS, functools.partial(one_round, text), start)[1]

    return make_loop(turn, (state, text), jnp.int32(0))


def make_text(length: int, vocab_size: int) -> np.ndarray:
    """Returns phrases of three to ten tokens, each drawn from the same 20, [length]."""
    rng = np.random.default_rng(0)
    phrases = [rng.integers(0, vocab_size, rng.integers(3, 11)) for _ in range(20)]
    return np.concatenate([phrases[i] for i in rng.integers(0, 20, length)])[:length]
