"""Times what a round has beside the calls of models: the choice of tokens, and the host."""

import jax
import jax.numpy as jnp

from jspec.common.timing import Loop, make_loop, with_first
from jspec.common.typing import Logits, RowTokens
from jspec.generation.generator import Generator
from jspec.generation.request import Request, Settings
from jspec.sampling.settings import SamplingSettings, Switches
from jspec.speculation.acceptance import get_rule
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.judge import judge
from jspec.speculation.plain import draw_next

_PROMPT = [1] * 129  # one token over and over: a drafter that looks back finds a match
_ANSWER_TOKENS = 64
_ANSWERS = 5


def choice_loop(
    vocab_size: int,
    num_drafts: int,
    *,
    temperature: float,
    has_filters: bool = False,
    has_distribution: bool = False,
) -> Loop:
    """Returns a loop over what turns a call's logits into a round's tokens, for one row.

    Args:
      vocab_size: v.
      num_drafts: judged by the rule `rejection`; 0 for plain decoding.
      temperature: of the draw.
      has_filters: whether top-k, top-p and min-p are on.
      has_distribution: whether the drafts come with the distribution they were drawn from, which is
        uniform here.
    """
    one = jnp.ones([1])
    settings = SamplingSettings(
        temperature * one, 50 * one.astype(jnp.int32), 0.95 * one, 0.02 * one,
        switches=Switches(top_k=has_filters, top_p=has_filters, min_p=has_filters),
    )  # fmt: skip
    logits = 3 * jax.random.normal(jax.random.key(0), [1, num_drafts + 1, vocab_size])

    def turn(
        settings: SamplingSettings, carry: tuple[Logits, RowTokens]
    ) -> tuple[Logits, RowTokens]:
        logits, token = carry
        token = _choose(logits, token, settings, has_distribution)
        # So little that it changes nothing, but the next turn has to wait for it.
        return with_first(logits, 1e-30 * token[0].astype(jnp.float32)), token

    return make_loop(turn, settings, (logits, jnp.zeros([1], jnp.int32)))


def _choose(
    logits: Logits, token: RowTokens, settings: SamplingSettings, has_distribution: bool
) -> RowTokens:
    """Returns the token that a round ends with, as `plain_step` or `verify` choose it."""
    _, num_tokens, vocab_size = logits.shape
    seed = token.astype(jnp.uint32)
    if num_tokens == 1:
        return draw_next(logits[:, 0], settings, seed, token)[0]
    num_drafts = num_tokens - 1
    proposal = Proposal(
        tokens=jnp.broadcast_to(token, [1, num_drafts]),
        num_tokens=jnp.full([1], num_drafts, jnp.int32),
        probs=jnp.full([1, num_drafts, vocab_size], 1 / vocab_size) if has_distribution else None,
    )
    return judge(get_rule("rejection"), logits, settings, proposal, seed, token)[0].next_token


def host_seconds(generator: Generator) -> float | None:
    """Returns the seconds that the host spends on a round of an answer, beside the device.

    The least over a few answers: it is text, bookkeeping and Python, which other work on the
    machine can only slow down. None where the answers have no round.
    """
    request = Request(_PROMPT, Settings(max_new_tokens=_ANSWER_TOKENS))
    generator.generate(request)
    all_stats = [generator.generate(request).stats for _ in range(_ANSWERS)]
    return min(
        ((s.decode_seconds - s.device_seconds) / s.num_rounds for s in all_stats if s.num_rounds),
        default=None,
    )
