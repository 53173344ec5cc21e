"""Times calls of models, rounds, the choice of tokens, and the host's share.

Rounds are those that `auto` measures (`generation.costs`); drafting is what they take beside
the call and the choice. For a drafter that computes some of the target's layers, from which the
call goes on, this means nothing.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jspec.common.timing import Loop, TurnLoop, seconds_each, with_first
from jspec.common.typing import Logits, RowTokens
from jspec.drafters import DrafterOptions
from jspec.drafters.model import with_draft_vocabulary
from jspec.generation.costs import PROMPT_TOKENS
from jspec.generation.generator import Generator
from jspec.generation.options import make_spec
from jspec.generation.request import Request, SamplingParams
from jspec.generation.rows import capacity_for
from jspec.kernels import first_argmax, run_options
from jspec.models import init_cache, make_apply
from jspec.sampling.distribution import draw_next
from jspec.sampling.settings import SamplingSettings, Switches
from jspec.speculation.acceptance import get_rule
from jspec.speculation.round import judge
from jspec.speculation.types import Proposal
from jspec.weights.resolver import LoadedModel

_MOST_WIDTH = 16  # of a verify call; wider calls are those of a prefill
_NUM_DRAFTS = 5  # of the choices that are timed
# One token over and over: a drafter that looks back finds a match.
PROFILED = Request([1] * PROMPT_TOKENS, SamplingParams(max_new_tokens=64))
_KINDS = {  # of a choice
    "T = 0": {"temperature": 0.0},
    "T = 1": {},
    "T = 1, filters": {"has_filters": True},
    "T = 1, drafts with a distribution": {"has_distribution": True},
}


def with_own_head(target: LoadedModel, draft: LoadedModel, options: DrafterOptions) -> LoadedModel:
    """Returns the draft model as rounds use it: with the head that `draft_vocab_size` leaves."""
    spec = with_draft_vocabulary(make_spec(target, draft, "model", options, 1))
    assert spec.draft_config is not None
    return dataclasses.replace(draft, config=spec.draft_config, params=spec.draft_params)


def time_call(model: LoadedModel, width: int, context: int) -> float:
    """Returns the seconds of a call of one row, the median of several measurements."""
    return seconds_each(call_loop(model, width, context))


def call_loop(model: LoadedModel, width: int, context: int, batch_size: int = 1) -> TurnLoop:
    """Returns a loop over calls, each with a greedy choice, on what the one before it chose.

    It is compiled as a run of rounds is: on a GPU as one graph.

    Args:
      model: whose calls they are.
      width: tokens of each row.
      context: tokens in each row's cache before them.
      batch_size: rows.
    """
    apply = make_apply(model.config)
    # Of a long block, as of a prefill, only the last logits are wanted.
    last = jnp.full([batch_size], width - 1, jnp.int32) if width > _MOST_WIDTH else None

    def turn(params: Any, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        cache, tokens = carry
        logits, _, cache = apply(params, tokens, cache, logits_at=last)
        return cache, jnp.broadcast_to(first_argmax(logits)[0], tokens.shape)

    dtype, capacity = model.params["embedding"].dtype, capacity_for(context, width)
    cache = init_cache(model.config, batch_size=batch_size, capacity=capacity, dtype=dtype)
    cache = cache.commit(jnp.full([batch_size], context, jnp.int32))
    carry = cache, jnp.zeros([batch_size, width], jnp.int32)
    return TurnLoop(turn, model.params, carry, run_options())


def choice_lines(vocab_size: int) -> Iterator[dict[str, Any]]:
    """Yields what follows a call: distributions, acceptance, choice of tokens."""
    for num_drafts in (0, _NUM_DRAFTS):
        for title, options in _KINDS.items():
            if num_drafts or not options.get("has_distribution"):
                name = f"choice among {vocab_size} ids, {num_drafts} drafts, {title}"
                choice = choice_loop(vocab_size, num_drafts, **options)
                yield {"name": name, "seconds": seconds_each(choice)}


def round_lines(generators: Mapping[str, Generator]) -> Iterator[dict[str, Any]]:
    """Yields rounds of each Generator, T = 0: drafting, the whole, and the host beside it."""
    for name, generator in generators.items():
        yield from _rounds_of(name, generator)
        generator.generate(PROFILED)
        stats = [generator.generate(PROFILED).stats for _ in range(5)]
        device = sorted(s.device_seconds / s.num_rounds for s in stats if s.num_rounds)
        if device and generator.engine.drafter is None:  # by whole visits: one round may be noise
            yield {"name": f"{name}: a round without drafts", "seconds": device[len(device) // 2]}
        # The least: text, bookkeeping and Python are only slowed down by other work on the machine.
        host = [(s.decode_seconds - s.device_seconds) / s.num_rounds for s in stats if s.num_rounds]
        if host:
            yield {"name": f"{name}: the host, a round", "seconds": min(host)}


def _rounds_of(name: str, generator: Generator) -> Iterator[dict[str, Any]]:
    target, costs = generator.target, generator.measure_costs()
    if costs is None:
        return
    beside = {}
    for number in costs.numbers[1:]:
        choice = choice_loop(target.config.vocab_size, number, temperature=0.0)
        beside[number] = time_call(target, number + 1, PROMPT_TOKENS) + seconds_each(choice)
    plain = costs.seconds[0][0][0]
    yield {"name": f"{name}: a round without drafts", "seconds": plain, "ratio": 1.0}
    for drafter, (plain, *others) in zip(costs.drafters, costs.seconds[0], strict=True):
        for number, whole in zip(beside, others, strict=True):
            drafting = max(whole - beside[number], 0.0)  # a difference of two times
            yield {"name": f"{name}: {drafter} drafts {number}", "seconds": drafting}
            title = f"{name}: a round of {drafter}, {number} drafts"
            yield {"name": title, "seconds": whole, "ratio": whole / plain}


def choice_loop(
    vocab_size: int,
    num_drafts: int,
    *,
    temperature: float = 1.0,
    has_filters: bool = False,
    has_distribution: bool = False,
) -> Loop:
    """Returns a loop over what turns a call's logits into a round's tokens, for one row.

    Args:
      vocab_size: v.
      num_drafts: judged by the rule `rejection`; 0 for plain decoding.
      temperature: of the draw.
      has_filters: whether top-k, top-p and min-p are on.
      has_distribution: whether the drafts come with a distribution, which is uniform.
    """
    unit = jnp.ones([1])
    settings = SamplingSettings(
        temperature * unit, 50 * unit.astype(jnp.int32), 0.95 * unit, 0.02 * unit,
        switches=Switches(top_k=has_filters, top_p=has_filters, min_p=has_filters),
    )  # fmt: skip

    def turn(settings: SamplingSettings, carry: tuple[Logits, RowTokens]) -> Any:
        logits, token = carry
        token = choose(logits, token, settings, has_distribution)
        # So little that it changes nothing, but the next turn has to wait for it.
        return with_first(logits, 1e-30 * token[0].astype(jnp.float32)), token

    logits = 3 * jax.random.normal(jax.random.key(0), [1, num_drafts + 1, vocab_size])
    return TurnLoop(turn, settings, (logits, jnp.zeros([1], jnp.int32)))


def choose(
    logits: Logits, token: RowTokens, settings: SamplingSettings, has_distribution: bool
) -> RowTokens:
    """Returns the token that a round ends with, as `plain_step` or `verify` choose it."""
    num_drafts, vocab_size = logits.shape[1] - 1, logits.shape[2]
    seed = token.astype(jnp.uint32)
    if not num_drafts:
        return draw_next(logits[:, 0], settings, seed, token)[0]
    proposal = Proposal(
        tokens=jnp.broadcast_to(token, [1, num_drafts]),
        num_tokens=jnp.full([1], num_drafts, jnp.int32),
        probs=jnp.full([1, num_drafts, vocab_size], 1 / vocab_size) if has_distribution else None,
    )
    return judge(get_rule("rejection"), logits, settings, proposal, seed, token)[0].next_token
