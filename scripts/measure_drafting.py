"""Times drafters that only look back at the text, alone: one `propose` and one `observe` a round.

`python scripts/measure_drafting.py --repeats=41 --output_json=drafting.jsonl`

Rounds run inside one compiled loop on the device, over a text of random phrases that come again and
again; every round proposes --num_draft_tokens and commits one token. The median and the least over
repeats are given in microseconds, each with its share of the median or the least plain step of the
target, which is timed in the same run unless --round_ms says how long a round takes.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from jspec.common import cli
from jspec.common.errors import check_range
from jspec.common.json_lines import JsonLinesWriter
from jspec.drafters import Drafter, DrafterOptions, DrafterSpec, make_drafter
from jspec.generation import provenance
from jspec.generation.generator import DEFAULT_TARGET, Generator
from jspec.generation.request import Request, Settings
from jspec.models import make_apply
from jspec.models.config import PRESETS
from jspec.sampling.noise import independent_draft_keys
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.types import TargetView
from jspec.weights.resolver import check_device

_TARGET = flags.DEFINE_string("target", DEFAULT_TARGET, "Whose plain step is a round.")
_ROUND_MS = flags.DEFINE_float("round_ms", None, "A round, in milliseconds: no target is timed.")
_NUM_DRAFT_TOKENS = flags.DEFINE_integer("num_draft_tokens", 4, "Drafts a round.")
_CONTEXTS = flags.DEFINE_multi_integer("context", [512, 1024, 2048, 4096, 8192], "Tokens of text.")
_REPEATS = flags.DEFINE_integer("repeats", 9, "Repeats of each measurement.")
_OUTPUT_JSON = flags.DEFINE_string("output_json", None, "Write the results to this file.")
_CONFIG = PRESETS["smollm2-135m"]
_ROUNDS = 64
_WAYS = {  # drafter, options, temperature
    "prompt_lookup": ("prompt_lookup", DrafterOptions(), 0.0),
    "ngram": ("ngram", DrafterOptions(), 0.0),
    "ngram, sampled distribution": ("ngram", DrafterOptions(ngram_probs="sampled"), 1.0),
}
_PROMPT = "Tell me a long story about a dragon and a knight."


class Times(NamedTuple):
    """Of several repeats."""

    median: float
    least: float


def main() -> None:
    """Measures and prints; writes JSON."""
    check_range("repeats", _REPEATS.value, 1, 1000)
    for context in _CONTEXTS.value:
        check_range("context", context, _ROUNDS + 2, 2**20)
    output = JsonLinesWriter(_OUTPUT_JSON.value) if _OUTPUT_JSON.value else None
    check_device()
    times = {
        name: {context: microseconds(*method, context) for context in _CONTEXTS.value}
        for name, method in _WAYS.items()
    }
    round_ms = plain_step_ms() if _ROUND_MS.value is None else Times(*[_ROUND_MS.value] * 2)
    print(f"a round: {round_ms.median:.2f} ms, at least {round_ms.least:.2f}")
    for name, by_context in times.items():
        for context, found in by_context.items():
            shares = [found.median / round_ms.median / 1e3, found.least / round_ms.least / 1e3]
            print(
                f"{name}, {context} tokens: {found.median:.0f} microseconds ({shares[0]:.2%} of a "
                f"round), at least {found.least:.0f} ({shares[1]:.2%})"
            )
    if output is not None:
        record: dict[str, Any] = {
            "vocab_size": _CONFIG.vocab_size,
            "num_draft_tokens": _NUM_DRAFT_TOKENS.value,
            "round_ms": round_ms._asdict(),
            "round_is_measured": _ROUND_MS.value is None,
            "microseconds": {
                name: {context: found._asdict() for context, found in by_context.items()}
                for name, by_context in times.items()
            },
        }
        with output:
            output.write(provenance.environment() | record)


def microseconds(name: str, options: DrafterOptions, temperature: float, context: int) -> Times:
    """Returns the time of one proposal and one observation after so many tokens."""
    spec = DrafterSpec(
        num_draft_tokens=_NUM_DRAFT_TOKENS.value,
        target_config=_CONFIG,
        vocab_size=_CONFIG.vocab_size,
        draft_config=None,
        dtype=jnp.bfloat16,
        options=options,
    )
    drafter = make_drafter(name, spec).drafter
    assert drafter is not None
    text = jnp.asarray(make_text(context), jnp.int32)
    state = drafter.init(1, context)
    begin = text[None, : context - _ROUNDS]
    state = drafter.observe(None, state, begin, begin, begin >= 0)
    run = jax.jit(make_rounds(drafter, temperature))
    proposed = int(run(state, text)) / _ROUNDS
    print(f"{name} at {context} tokens: {proposed:.2f} drafts a round", flush=True)
    seconds = []
    for _ in range(_REPEATS.value):
        start = time.perf_counter()
        jax.block_until_ready(run(state, text))
        seconds.append(time.perf_counter() - start)
    return Times(*(1e6 / _ROUNDS * pick(seconds) for pick in (statistics.median, min)))


def make_rounds(drafter: Drafter, temperature: float) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns (state, text) -> drafts put forward in _ROUNDS rounds, the last of the text."""
    zeros, ones = jnp.zeros([1], jnp.int32), jnp.ones([1], jnp.float32)
    settings = SamplingSettings(temperature * ones, zeros, ones, 0 * ones)
    width = drafter.num_draft_tokens

    def run(state: Any, text: jax.Array) -> jax.Array:
        def body(i: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            state, total = carry
            last = jax.lax.dynamic_slice(text, [text.shape[0] - _ROUNDS + i], [1])
            proposal, state = drafter.propose(
                None,
                state,
                last,
                limit=lambda kind: jnp.full_like(kind, width),
                rng_keys=independent_draft_keys(zeros.astype(jnp.uint32), zeros + i, width),
                settings=settings,
                view=TargetView(None, make_apply(_CONFIG), None),
            )
            block = jnp.concatenate([last[:, None], proposal.tokens], axis=1)
            valid = jnp.arange(width + 1)[None] < 1
            state = drafter.observe(None, state, block, block, valid)
            # Every draft has a part in the result, so that none is left out as useless.
            return state, total + proposal.num_tokens[0] + proposal.tokens.max() // 2**20

        return jax.lax.fori_loop(0, _ROUNDS, body, (state, jnp.int32(0)))[1]

    return run


def make_text(length: int) -> np.ndarray:
    """Returns phrases of three to ten tokens, each drawn from the same 20, [length]."""
    rng = np.random.default_rng(0)
    phrases = [rng.integers(0, _CONFIG.vocab_size, rng.integers(3, 11)) for _ in range(20)]
    return np.concatenate([phrases[i] for i in rng.integers(0, 20, length)])[:length]


def plain_step_ms() -> Times:
    """Returns the time of a plain step of the target, in bfloat16, at temperature 0."""
    generator = Generator.load(_TARGET.value, drafter="none")
    request = Request(_PROMPT, Settings(max_new_tokens=64))
    generator.generate(request)
    all_stats = [generator.generate(request).stats for _ in range(_REPEATS.value)]
    steps = [stats.decode_seconds / stats.num_rounds * 1e3 for stats in all_stats]
    return Times(statistics.median(steps), min(steps))


if __name__ == "__main__":
    cli.run_main(main)
