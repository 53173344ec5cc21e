"""Law 8: samples through the real compiled loop follow the target; wrong rules are rejected.

Every test draws the first NUM_TOKENS tokens of NUM_ROWS requests with seeds 0 .. NUM_ROWS - 1 from
toy tables and compares their joint counts with the exact joint law by a chi-square; cells with less
than 8 expected are merged. Seeds are fixed, so a test passes or fails for good; by chance alone a
right rule would fail for one in 10^5 choices of seeds.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jspec.drafters import ModelDrafter, PromptLookupDrafter
from jspec.sampling import sample
from jspec.speculation.acceptance import get_rule
from jspec.speculation.noise import Purpose, acceptance_noise, gumbel_noise, round_keys
from jspec.speculation.types import AcceptanceNoise
from tests.speculation.drive import Engine
from tests.speculation.toys import VOCAB, make_tables, softmax, toy_apply, toy_cache

NUM_ROWS = 20_000
NUM_TOKENS = 5
NUM_ROUNDS = 4  # prefill draws a token and each round at least one
FALSE_ALARM = 1e-5
PROMPT = [2, 0, 1, 2, 0, 3]
TABLES = make_tables(seed=3)
REJECTION = get_rule("rejection")


def p_value(drafter, rule=REJECTION, temperature=1.0, draft_temperature=None):
    """Returns how likely counts as far from the target's law as those of a run are."""
    engine = Engine(toy_apply, toy_cache, TABLES, drafter, rule, capacity=40, max_rounds=NUM_ROUNDS)
    state = engine.start(
        [PROMPT] * NUM_ROWS, temperature=temperature, draft_temperature=draft_temperature
    )
    first = np.asarray(state.last_token)
    _, infos = engine.advance(state, NUM_ROUNDS)
    tokens = first_tokens(first, infos)
    counts = np.zeros([VOCAB] * NUM_TOKENS)
    np.add.at(counts, tuple(tokens.T), 1)
    expected = NUM_ROWS * target_joint(softmax(TABLES[0], temperature))
    rare = expected < 8
    counts, expected = (np.append(cells[~rare], cells[rare].sum()) for cells in (counts, expected))
    statistic = np.sum((counts - expected) ** 2 / expected)
    return scipy.stats.chi2.sf(statistic, len(counts) - 1)


def first_tokens(first, infos):
    """Returns the first NUM_TOKENS of each row, [b NUM_TOKENS]."""
    tokens = np.zeros([NUM_ROWS, NUM_TOKENS + infos.tokens.size // NUM_ROWS], np.int32)
    tokens[:, 0] = first
    filled, rows = np.ones(NUM_ROWS, int), np.arange(NUM_ROWS)
    for block, count in zip(infos.tokens, infos.num_tokens, strict=True):
        for i in range(block.shape[1]):
            tokens[rows, filled + i] = np.where(i < count, block[:, i], 0)
        filled += count
    assert filled.min() >= NUM_TOKENS
    return tokens[:, :NUM_TOKENS]


def target_joint(target):
    """Returns the exact joint law of the first tokens after the prompt."""
    probs = target[PROMPT[-2], PROMPT[-1]]
    probs = probs[:, None] * target[PROMPT[-1]]
    while probs.ndim < NUM_TOKENS:
        probs = probs[..., None] * target
    return probs


def model_drafter(width=2, cls=ModelDrafter):
    return cls(toy_apply, toy_cache, width, VOCAB, VOCAB)


LOOKUP = PromptLookupDrafter(2, min_match=1)


@pytest.mark.parametrize(
    ("drafter", "draft_temperature"),
    [(None, None), (model_drafter(), None), (model_drafter(3), 0.5), (model_drafter(1), 0.0),
     (LOOKUP, None)],
    ids=["plain", "model", "cooler draft", "greedy draft", "prompt lookup"],
)  # fmt: skip
def test_samples_follow_the_targets_law(drafter, draft_temperature):
    """The whole path: noise, drafts, verdicts, caches, loop."""
    assert p_value(drafter, temperature=1.2, draft_temperature=draft_temperature) > FALSE_ALARM


def accept_without_residual(target_probs, proposal, noise):
    """After a refusal, draws from the target again."""
    verdict = REJECTION.accept(target_probs, proposal, noise)
    index = verdict.num_accepted[:, None, None]
    law = jnp.take_along_axis(target_probs, index, axis=1)[:, 0]
    return verdict.replace(next_token=sample(law, noise.gumbel))


@pytest.mark.parametrize("drafter", [model_drafter(), LOOKUP], ids=["model", "prompt lookup"])
def test_resampling_from_the_target_is_rejected(drafter):
    """Negative control: the residual left out."""
    rule = REJECTION._replace(accept=accept_without_residual)
    assert p_value(drafter, rule) < FALSE_ALARM


def test_greedy_match_of_samples_is_rejected():
    """Negative control: the greedy rule where the target samples."""
    assert p_value(model_drafter(), get_rule("greedy")) < FALSE_ALARM


def noise_shared_with_the_draft(seed, position, width, vocab_size, is_random):
    """Gives the next token the noise that drew the first draft."""
    noise = acceptance_noise(seed, position, width, vocab_size, is_random)
    keys = round_keys(seed, position, Purpose.DRAFT, 1)[:, 0]
    return noise.replace(gumbel=gumbel_noise(keys, vocab_size, is_random))


def noise_of_the_first_round(seed, position, width, vocab_size, is_random):
    """Forgets the position: every round of a request meets the same noise."""
    return acceptance_noise(seed, jnp.ones_like(position), width, vocab_size, is_random)


def one_uniform_for_all(seed, position, width, vocab_size, is_random):
    """Forgets the offset: all drafts of a round meet the same uniform."""
    noise = acceptance_noise(seed, position, width, vocab_size, is_random)
    uniforms = jnp.broadcast_to(noise.uniforms[:, :1], noise.uniforms.shape)
    return AcceptanceNoise(uniforms, noise.gumbel)


@pytest.mark.parametrize(
    "wrong", [noise_shared_with_the_draft, noise_of_the_first_round, one_uniform_for_all]
)
def test_reused_noise_is_rejected(wrong):
    """Negative control: a bias that shows only jointly over tokens or rounds."""
    rule = REJECTION._replace(noise=REJECTION.noise._replace(acceptance=wrong))
    assert p_value(model_drafter(), rule) < FALSE_ALARM


class MisreportingDrafter(ModelDrafter):
    """Draws at another temperature than it reports."""

    def _draw(self, logits, settings, keys):
        other = settings.replace(temperature=settings.temperature * self.factor)
        token, _ = super()._draw(logits, other, keys)
        return token, super()._draw(logits, settings, keys)[1]


class HotDrafter(MisreportingDrafter):
    """Draws at twice the temperature."""

    factor = 2.0


class GreedyDrafter(MisreportingDrafter):
    """Draws the most likely token and reports the law."""

    factor = 0.0


class DroppingDrafter(ModelDrafter):
    """Takes back a sampled draft that looks unlikely, and those after it."""

    def propose(self, params, state, last_token, **options):
        proposal, state = super().propose(params, state, last_token, **options)
        probs = jnp.take_along_axis(proposal.probs, proposal.tokens[..., None], axis=2)[..., 0]
        is_kept = jnp.cumprod((probs > 0.3).astype(jnp.int32), axis=1)
        return proposal.replace(num_tokens=is_kept.sum(axis=1)), state


@pytest.mark.parametrize("cls", [HotDrafter, GreedyDrafter, DroppingDrafter])
def test_drafters_that_misreport_their_law_are_rejected(cls):
    """Negative control: the law must be the one the tokens were really drawn from."""
    assert p_value(model_drafter(cls=cls)) < FALSE_ALARM
