"""Invariant 8: samples through the real compiled loop follow the target; wrong rules are rejected.

Every test draws NUM_TOKENS tokens after a first one in NUM_ROWS requests with their own seeds,
from toy tables, and compares their joint counts with the exact joint distribution. Seeds are fixed,
so a test passes or fails for good; by chance alone some of the NUM_RIGHT right cells would fail for
one in 10^5 choices of seeds. `scripts/prove.py` is the same for every cell, on tiny Llamas.
"""

import dataclasses
import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters import tables
from jspec.drafters.cascade import CascadeDrafter
from jspec.drafters.hierarchical import HierarchicalDrafter, HierarchicalParams
from jspec.drafters.model import ModelDrafter
from jspec.drafters.ngram import NgramDrafter
from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.drafters.recycle import RecycleDrafter
from jspec.drafters.suffix import SuffixDrafter
from jspec.drafters.tables import TableDrafter, count_ngrams
from jspec.generation.batch import needed_switches
from jspec.generation.request import SamplingParams
from jspec.lab.analysis.goodness import goodness_of_fit
from jspec.lab.auditing import controls
from jspec.lab.auditing.distribution import joint_distribution
from jspec.lab.auditing.rows import Context, first_tokens
from jspec.sampling.noise import Purpose, acceptance_noise, gumbel_noise, round_keys
from jspec.speculation.acceptance import get_rule
from jspec.speculation.control import Kind
from tests.cases import slow_unless
from tests.speculation.drive import Engine, request_settings
from tests.speculation.toys import VOCAB, make_tables, toy_apply, toy_cache

NUM_ROWS = 10_000
NUM_TOKENS = 4  # and as many rounds: each emits at least one
CONTEXT = Context(prompt=[2, 0, 1, 2, 0, 3], first=1, alphabet=list(range(VOCAB)))
TABLES = make_tables(seed=3)
RULES = {name: get_rule(name) for name in ("rejection", "block", "coupled")}
REJECTION, BLOCK = RULES["rejection"], RULES["block"]
LOOKUP = PromptLookupDrafter(2, min_match=1)
MODEL = ModelDrafter(2, VOCAB, VOCAB, apply=toy_apply, init_cache=toy_cache)
HIERARCHICAL = HierarchicalDrafter(MODEL, LOOKUP)
CASCADE = CascadeDrafter((PromptLookupDrafter(2, min_match=2), MODEL))
UNSURE = dataclasses.replace(MODEL, min_confidence=0.6)
NGRAM = NgramDrafter(2, VOCAB, VOCAB, window=8, is_sampled=True)
BIGRAM_KIND, UNIGRAM_KIND = Kind("bigram", 0.2, 0.2), Kind("unigram", 0.05, 0.05)
BIGRAM = TableDrafter(2, VOCAB, VOCAB, kind=BIGRAM_KIND, logits=tables.bigram_logits)
UNIGRAM = TableDrafter(2, VOCAB, VOCAB, kind=UNIGRAM_KIND, logits=tables.unigram_logits)
ANYTHING = functools.partial(tables.uniform_logits, vocab_size=VOCAB)
RANDOM = TableDrafter(2, VOCAB, VOCAB, kind=Kind("random", 0.01, 0.01), logits=ANYTHING)
TEXT = np.random.default_rng(0).choice(4, p=[0.4, 0.3, 0.2, 0.1], size=60)
COUNTS = count_ngrams([TEXT.tolist()], VOCAB, num_continuations=3)  # nothing follows 4
SETTINGS = {
    "temperature": SamplingParams(temperature=1.2),
    "top_k": SamplingParams(temperature=1.0, top_k=3),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "min_p": SamplingParams(temperature=1.0, min_p=0.1),
    "penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3,
        logit_bias={1: -0.5, 4: 1.0},
    ),
}  # fmt: skip
FEW_SETTINGS = ("top_k", "penalties")
DRAFTERS = {  # with the drafter's own temperature
    "prompt lookup": (LOOKUP, None),
    "model": (MODEL, None),
    "cooler model": (MODEL, 0.5),
    "greedy model": (MODEL, 0.0),
}
OTHERS = {
    "hierarchical": (HIERARCHICAL, "block"),
    "ngram": (NGRAM, "rejection"),
    "bigram": (BIGRAM, "block"),
    "unigram": (UNIGRAM, "coupled"),
    "random": (RANDOM, "rejection"),
    "cascade": (CASCADE, "rejection"),  # rows with one-hot distributions beside sampled ones
    "unsure model": (UNSURE, "block"),  # stops before it draws what it is not sure of
    "suffix": (SuffixDrafter(2), "block"),
    "recycle": (RecycleDrafter(2, VOCAB), "rejection"),
}
# Every pair of a drafter and a kind of sampling, with a rule such that each rule meets them all;
# the other drafters meet one rule and two kinds of sampling, one of them with penalties.
RIGHT = [
    (tuple(RULES)[(i + j) % 3], drafter, settings)
    for (i, drafter), (j, settings) in itertools.product(enumerate(DRAFTERS), enumerate(SETTINGS))
]
RIGHT += [
    (rule, drafter, settings)
    for (drafter, (_, rule)), settings in itertools.product(OTHERS.items(), FEW_SETTINGS)
]
NUM_RIGHT = len(RIGHT) + len(SETTINGS)  # and plain decoding
QUICK = (0, 8, 16)  # a lookup and a model, by two rules, with and without filters: two programs
FALSE_ALARM = 1e-5 / NUM_RIGHT


@functools.cache
def engine_of(drafter, rule):
    """Returns the compiled rounds; how tokens are sampled is data."""
    target, draft = params = TABLES
    if drafter is HIERARCHICAL:
        params = target, HierarchicalParams(draft)
    if drafter is CASCADE:
        params = target, (None, draft)
    if isinstance(drafter, TableDrafter) and drafter.kind.drafter != "random":
        params = target, tables.table_params(COUNTS, drafter.kind.drafter)
    return Engine(toy_apply, toy_cache, params, drafter, rule, capacity=32, max_rounds=NUM_TOKENS)


@functools.cache
def expected_distribution(name):
    """Returns the exact joint distribution of the tokens after the first."""
    table = np.asarray(TABLES[0])
    logits = np.zeros([VOCAB] * (NUM_TOKENS - 1) + [NUM_TOKENS, VOCAB])
    for path in itertools.product(range(VOCAB), repeat=NUM_TOKENS - 1):
        text = [CONTEXT.prompt[-1], CONTEXT.first, *path]
        logits[path] = table[text[:-1], text[1:]]
    return joint_distribution(logits, CONTEXT, SETTINGS[name], NUM_TOKENS)


def count_tokens(
    drafter, rule, name, draft_temperature=None, switches=None, first_seed=0, draft_filters=None
):
    """Returns how often each text came, [v, ..., v]."""
    settings = SETTINGS[name]
    engine = engine_of(drafter, rule)
    if draft_temperature is None:
        draft_temperature = settings.temperature
    state = engine.start(
        [CONTEXT.prompt] * NUM_ROWS,
        seeds=np.arange(first_seed, first_seed + NUM_ROWS),
        temperature=settings.temperature,
        draft_temperature=draft_temperature,
    )
    state = state.replace(
        last_token=jnp.full_like(state.last_token, CONTEXT.first),
        settings=request_settings(settings, [CONTEXT.prompt] * NUM_ROWS, VOCAB, switches),
    )
    if draft_filters is not None:
        top_k, top_p = draft_filters
        state = state.replace(
            draft_top_k=jnp.full([NUM_ROWS], top_k, jnp.int32),
            draft_top_p=jnp.full([NUM_ROWS], top_p, jnp.float32),
        )
    _, infos = engine.advance(state, NUM_TOKENS)
    counts = np.zeros([VOCAB] * NUM_TOKENS)
    np.add.at(counts, tuple(first_tokens(infos, NUM_TOKENS).T), 1)
    return counts


def p_value(drafter, rule=REJECTION, name="temperature", **options):
    """Returns how likely counts as far from the target's distribution as those of a run are."""
    counts = count_tokens(drafter, rule, name, **options)
    return goodness_of_fit(counts, expected_distribution(name)).p_value


def check(drafter, rule, name, draft_temperature, first_seed):
    """Asserts that the distribution is right; one program serves all settings."""
    actual = p_value(
        drafter, rule, name, draft_temperature=draft_temperature, first_seed=first_seed,
        switches=needed_switches(list(SETTINGS.values())),
    )  # fmt: skip
    assert actual > FALSE_ALARM


@pytest.mark.parametrize(
    ("rule", "drafter", "settings"),
    [slow_unless(index in QUICK, *cell) for index, cell in enumerate(RIGHT)],
)
def test_samples_follow_the_targets_distribution(rule, drafter, settings):
    """The whole path: noise, drafts, processors, filters, verdicts, caches, loop."""
    first_seed = NUM_ROWS * RIGHT.index((rule, drafter, settings))
    source, draft_temperature = (DRAFTERS | {n: (d, None) for n, (d, _) in OTHERS.items()})[drafter]
    check(source, RULES[rule], settings, draft_temperature, first_seed)


def test_drafts_under_filters_of_their_own_follow_the_targets_distribution():
    """Guards against a cut that only the draw, or only the report to the rule, knows of.

    Negative control: a drafter that reports its distribution without the cut.
    """
    filters = {"draft_filters": (2, 0.7), "name": "top_k"}
    assert p_value(MODEL, **filters) > FALSE_ALARM
    lying = controls.misreporting(MODEL, reported=controls.unprocessed)
    assert p_value(lying, **filters) < FALSE_ALARM


@pytest.mark.parametrize("settings", [slow_unless(s in FEW_SETTINGS, s) for s in SETTINGS])
def test_plain_decoding_follows_the_targets_distribution(settings):
    """What speculation is compared with has to be right by itself."""
    check(None, REJECTION, settings, None, first_seed=NUM_ROWS * len(RIGHT))


def noise_shared_with_the_draft(seed, position, width, vocab_size, is_random):
    """Gives the next token the noise that drew the first draft."""
    noise = acceptance_noise(seed, position, width, vocab_size, is_random)
    keys = round_keys(seed, position, Purpose.DRAFT, 1)[:, 0]
    return noise.replace(gumbel=gumbel_noise(keys, vocab_size, is_random))


def test_reused_noise_is_rejected():
    """Negative control: a bias that shows only jointly over tokens or rounds.

    Of all pairs of keys: test_noise.py.
    """
    noise = REJECTION.noise._replace(acceptance=noise_shared_with_the_draft)
    rule = REJECTION._replace(noise=noise)
    assert p_value(MODEL, rule) < FALSE_ALARM


def test_block_with_noise_of_absolute_positions_is_rejected():
    """Negative control: a round that met uniforms again would bias what follows the first round.

    Deterministic drafts show it best. The first token alone, always of the first round, is right.
    """
    rule = controls.with_absolute_uniforms(BLOCK)
    seeds = NUM_ROWS * np.arange(4)
    counts = sum(count_tokens(LOOKUP, rule, "temperature", first_seed=seed) for seed in seeds)
    distribution = expected_distribution("temperature")
    later = tuple(range(1, NUM_TOKENS))
    assert goodness_of_fit(counts, distribution).p_value < FALSE_ALARM
    assert (
        goodness_of_fit(counts.sum(axis=later), distribution.sum(axis=later)).p_value > FALSE_ALARM
    )


class DroppingDrafter(ModelDrafter):
    """Takes back a sampled draft that looks unlikely, and those after it."""

    def propose(self, params, state, inputs):
        proposal, state = super().propose(params, state, inputs)
        probs = jnp.take_along_axis(proposal.probs, proposal.tokens[..., None], axis=2)[..., 0]
        is_kept = jnp.cumprod((probs > 0.3).astype(jnp.int32), axis=1)
        return proposal.replace(num_tokens=is_kept.sum(axis=1)), state


def greedily(settings):
    """Returns the settings at temperature 0."""
    return settings.replace(temperature=0 * settings.temperature)


MISREPORTING = {
    "hotter": (controls.misreporting(MODEL, drawn=controls.hotter), "temperature"),
    "greedy": (controls.misreporting(MODEL, drawn=greedily), "temperature"),
    "reported unprocessed": (
        controls.misreporting(MODEL, reported=controls.unprocessed), "penalties"
    ),
    "drawn unprocessed": (controls.misreporting(MODEL, drawn=controls.unprocessed), "penalties"),
    "dropping": (
        DroppingDrafter(2, VOCAB, VOCAB, apply=toy_apply, init_cache=toy_cache), "temperature"
    ),
    "greedy ngram": (controls.misreporting(NGRAM, drawn=greedily), "temperature"),
    "bigram": (controls.misreporting(BIGRAM, reported=controls.unprocessed), "penalties"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [slow_unless(n == "reported unprocessed", n) for n in MISREPORTING]
)
def test_drafters_that_misreport_their_distribution_are_rejected(name):
    """Negative control: the distribution must be the one the tokens were really drawn from."""
    drafter, settings = MISREPORTING[name]
    assert p_value(drafter, name=settings) < FALSE_ALARM
