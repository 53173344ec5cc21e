"""Invariants 1, 2 and 8 of the drafters that toy tables cannot serve, in batches, with penalties.

As in test_statistics.py, but the target is a tiny Llama of five tokens, whose layers can draft, and
half of the rows have a longer prompt than the others. Each half is compared with its own exact
distribution. Seeds are fixed; by chance alone some of the right cells would fail for one in 10^5
choices of them.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters import DrafterOptions, DrafterSpec, make_drafter
from jspec.drafters.blockwise import BlockwiseConfig, BlockwiseDrafter
from jspec.drafters.cascade import CascadeDrafter
from jspec.drafters.eagle import EagleDrafter
from jspec.drafters.eagle_head import EagleConfig
from jspec.drafters.lookahead import LookaheadConfig, LookaheadDrafter
from jspec.drafters.medusa import MedusaConfig, MedusaDrafter
from jspec.drafters.tables import table_params
from jspec.generation.batch import needed_switches
from jspec.lab.analysis.goodness import goodness_of_fit
from jspec.lab.auditing import controls
from jspec.lab.auditing.distribution import joint_distribution, path_logits
from jspec.lab.auditing.rows import Context, first_tokens
from jspec.models import DecoderConfig, init_cache, make_apply
from jspec.speculation.acceptance import get_rule
from jspec.speculation.control import Control, drafters_of
from jspec.speculation.round import speculative_step
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from tests import tiny_blockwise, tiny_dflash, tiny_eagle, tiny_lookahead, tiny_medusa
from tests.speculation.drive import Engine, request_settings
from tests.speculation.test_statistics import BIGRAM, COUNTS, NGRAM, SETTINGS
from tests.speculation.toys import VOCAB
from tests.tiny import random_params
from tests.tiny_models import make_model

NUM_ROWS, ROWS_A_RUN = 20_000, 5_000
NUM_TOKENS = 5  # of the joint distribution, and as many rounds: each emits at least one
NUMBERS = (0, 1, 3, 7)  # of drafts, where rows choose or are told one
CAPACITY = 64
CONFIG = DecoderConfig(
    vocab_size=VOCAB, embed_dim=16, hidden_dim=16, num_layers=3, num_heads=2, num_kv_heads=1,
    head_dim=8, max_seq_len=CAPACITY, num_mtp_layers=1,
)  # fmt: skip
ALPHABET = list(range(VOCAB))
CONTEXTS = (Context([2, 0, 1, 2, 0, 3], 1, ALPHABET), Context([4, 1, 0], 2, ALPHABET))
PROMPTS = [CONTEXTS[row % 2].prompt for row in range(ROWS_A_RUN)]
FIRST_TOKENS = [CONTEXTS[row % 2].first for row in range(ROWS_A_RUN)]
PENALTIES = SETTINGS["penalties"]
SWITCHES = needed_switches([PENALTIES])
FIRST, OTHERS = (0, 1), (0, 2)
# Behind nearly every token one of these begins, and the rest of it is forced.
PATTERN = r"(?:\x00\x02\x01|\x01\x03\x00|\x02\x00\x04|\x03\x01\x02)"


class Case(NamedTuple):
    """A drafter, and who says how many drafts are wanted.

    Attributes:
      drafter: it.
      params: its parameters.
      numbers: what a row's number is among; none if it is fixed.
      is_told: each round another number of each row, and of each kind of proposal; else the row
        chooses, by costs that differ from row to row.
    """

    drafter: Any
    params: Any = None
    numbers: tuple[int, ...] = ()
    is_told: bool = False


CASES = ("pattern", "first layers", "other layers", "told", "auto", "cascade", "medusa",
         "blockwise", "lookahead", "lookahead cascade", "eagle", "eagle cascade",
         "dflash", "mtp")  # fmt: skip
METHODS = {"penalties": PENALTIES, "temperature": SETTINGS["temperature"]}
RULES = {"pattern": "rejection", "first layers": "block", "other layers": "rejection",
         "told": "rejection", "auto": "block", "cascade": "rejection"}  # fmt: skip
MORE = [("pattern", "block"), ("first layers", "rejection"), ("other layers", "block"),
        ("told", "block"), ("auto", "rejection"), ("auto", "coupled"), ("cascade", "block"),
        ("cascade", "coupled")]  # fmt: skip
HEADS = {"medusa": "rejection", "blockwise": "block", "lookahead": "rejection",
         "lookahead cascade": "block", "eagle": "block", "eagle cascade": "rejection",
         "dflash": "block", "mtp": "rejection"}  # fmt: skip
RIGHT = [
    (name, rule, method)
    for name, rule in [*RULES.items(), *MORE, *HEADS.items()]
    for method in METHODS
]
RULES |= HEADS
FALSE_ALARM = 1e-5 / (len(RIGHT) * len(CONTEXTS))


@functools.cache
def models():
    """Returns parameters of the target and of a draft, after checking that they prove anything."""
    target = random_params(CONFIG, seed=0, std=0.5)
    noise = random_params(CONFIG, seed=1, std=0.5)
    draft = jax.tree.map(lambda a, b: a + 0.15 * b, target, noise)
    texts = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (64, 12)), jnp.int32)

    def distributions(params, layers=None):
        cache = empty_cache(*texts.shape)
        return np.asarray(jax.nn.softmax(make_apply(CONFIG, layers)(params, texts, cache)[0]))

    table = distributions(target)
    assert -(table * np.log(table)).sum(axis=-1).mean() <= 0.7 * np.log(VOCAB)
    for other in (
        distributions(draft),
        distributions(target, FIRST),
        distributions(target, OTHERS),
    ):
        assert 0.2 <= 0.5 * np.abs(table - other).sum(axis=-1).mean() <= 0.8
    return target, draft


def empty_cache(batch_size, capacity):
    """Returns an empty float32 cache."""
    return init_cache(CONFIG, batch_size=batch_size, capacity=capacity, dtype=jnp.float32)


@functools.cache
def make_case(name):
    """Returns the case of that name."""

    def build(drafter, width, **options):
        spec = DrafterSpec(
            width, CONFIG, VOCAB, CONFIG, jnp.float32, models()[1], DrafterOptions(**options),
            is_member=name == "cascade", tokenizer=ByteTokenizer(VOCAB),
        )  # fmt: skip
        return make_drafter(drafter, spec)

    if name == "cascade":  # of three widths; a table that is asked when the layers are unsure
        layers = build("layer_skip", 3, draft_layers=FIRST, draft_confidence=0.6).drafter
        drafter = CascadeDrafter((NGRAM, layers, dataclasses.replace(BIGRAM, num_draft_tokens=1)))
        params = None, None, table_params(COUNTS, "bigram")
        return Case(drafter, params, numbers=(0, 1, 2, 3), is_told=True)
    built = {
        "pattern": lambda: build("pattern", 3, pattern=PATTERN),
        "first layers": lambda: build("layer_skip", 3, draft_layers=FIRST),
        "other layers": lambda: build("layer_skip", 3, draft_layers=OTHERS),
        "told": lambda: build("prompt_lookup", NUMBERS[-1]),
        "auto": lambda: build("model", NUMBERS[-1]),
        "medusa": make_medusa,
        "blockwise": make_blockwise,
        "lookahead": make_lookahead,
        "lookahead cascade": make_lookahead_cascade,
        "eagle": make_eagle,
        "eagle cascade": make_eagle_cascade,
        "dflash": make_dflash,
        "mtp": lambda: build("mtp", 3),
    }[name]()
    numbers = {"told": NUMBERS, "auto": NUMBERS, "eagle cascade": (0, 1, 2, 3)}.get(name, ())
    return Case(*built, numbers=numbers, is_told=name in ("told", "eagle cascade"))


def make_medusa():
    """Returns heads that are the target's head, disturbed."""
    config = MedusaConfig(CONFIG.embed_dim, VOCAB, num_heads=3)
    params = tiny_medusa.params(config, models()[0]["head"], std=0.5)
    return MedusaDrafter(3, VOCAB, CONFIG.vocab_size, config=config, target=CONFIG), params


def make_blockwise():
    """Returns heads that are the target's head, disturbed."""
    config = BlockwiseConfig(CONFIG.embed_dim, hidden_dim=8, num_heads=3)
    return BlockwiseDrafter(
        3, VOCAB, CONFIG.vocab_size, config=config, target=CONFIG
    ), tiny_blockwise.params(config)


def make_lookahead():
    """Returns embeddings without training: the first draft is the target's own all the same."""
    params = tiny_lookahead.params(LookaheadConfig(CONFIG.embed_dim, num_tokens=2), std=0.5)
    return LookaheadDrafter(3, VOCAB, VOCAB), params


def make_lookahead_cascade():
    """Returns them behind n-grams: rows of one round are drafted for in both methods."""
    drafter, params = make_lookahead()
    return CascadeDrafter((NGRAM, drafter)), (None, params)


def make_eagle():
    """Returns a head without training, which cannot propose one of the five tokens."""
    layer = dataclasses.replace(CONFIG, num_layers=1, vocab_size=VOCAB - 1)
    config = EagleConfig(layer, VOCAB, (0, 2, CONFIG.num_layers))
    return EagleDrafter(
        3, VOCAB, config.target_vocab_size, config=config, dtype=jnp.float32
    ), tiny_eagle.params(config=config)


def make_dflash():
    """Returns a head without training."""
    config = tiny_dflash.make_config(CONFIG)
    return tiny_dflash.drafter(3, config, CONFIG), tiny_dflash.params(config)


def make_eagle_cascade():
    """Returns it behind n-grams: in many a round it has to catch up."""
    drafter, params = make_eagle()
    return CascadeDrafter((NGRAM, drafter)), (None, params)


@functools.cache
def make_engine(name, rule="rejection", is_wrong=False):
    """Returns the compiled rounds of a case; "plain" decodes plainly."""
    options = {"capacity": CAPACITY, "max_rounds": 1}
    apply = make_apply(CONFIG)
    if name == "plain":
        return Engine(apply, empty_cache, (models()[0], None), **options)
    case, rule = make_case(name), get_rule(rule)
    widths = case.numbers or ((0,) if case.drafter.may_be_silent else ())
    return Engine(
        apply, empty_cache, (models()[0], case.params), case.drafter,
        controls.without_residual(rule) if is_wrong else rule,
        step=functools.partial(speculative_step, widths=widths), **options,
    )  # fmt: skip


def run(engine, state, num_rounds, case=None, rng=None):
    """Runs rounds; returns their infos."""
    control, chunks = None, []
    if case is not None and case.numbers:
        b, kinds = len(state.last_token), case.drafter.kinds
        control = Control.init(b, kinds=kinds, numbers=case.numbers)
        slopes = rng.uniform(0.02, 1, (b, len(drafters_of(kinds)), 1))
        costs = 1 + slopes * np.array(case.numbers)
        reading = rng.choice([0, 0.01, 0.1], (b, len(drafters_of(kinds))))
        costs, reading = jnp.asarray(costs, jnp.float32), jnp.asarray(reading, jnp.float32)
        state = state.replace(control=control.replace(costs=costs, reading=reading))
    for _ in range(num_rounds):
        if case is not None and case.is_told:
            forced = jnp.asarray(rng.choice(case.numbers, control.forced.shape), jnp.int32)
            state = state.replace(control=control.replace(forced=forced))
        state, infos = engine.advance(state, 1)
        chunks.append(infos)
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *chunks)


def sample(engine, name, settings, first_seed, num_rows=NUM_ROWS):
    """Yields the infos of rows behind both contexts, alternating."""
    rng = np.random.default_rng(first_seed)
    for first in range(first_seed, first_seed + num_rows, ROWS_A_RUN):
        seeds = np.arange(first, first + ROWS_A_RUN)
        state = engine.start(PROMPTS, seeds=seeds, temperature=settings.temperature)
        state = state.replace(
            last_token=jnp.asarray(FIRST_TOKENS, jnp.int32),
            settings=request_settings(settings, PROMPTS, VOCAB, SWITCHES),
        )
        yield run(engine, state, NUM_TOKENS, make_case(name), rng)


@functools.cache
def expected_distribution(index, method):
    """Returns the exact joint distribution of the tokens after a context."""
    target = make_model(CONFIG, params=models()[0])
    logits = path_logits(target, CONTEXTS[index], NUM_TOKENS)
    return joint_distribution(logits, CONTEXTS[index], METHODS[method], NUM_TOKENS)


def smallest_p_value(all_infos, method):
    """Returns the smaller of the two contexts' p-values."""
    counts = np.zeros([len(CONTEXTS), *[VOCAB] * NUM_TOKENS])
    for infos in all_infos:
        tokens = first_tokens(infos, NUM_TOKENS)
        for index in range(len(CONTEXTS)):
            np.add.at(counts[index], tuple(tokens[index :: len(CONTEXTS)].T), 1)
    distributions = [expected_distribution(index, method) for index in range(len(CONTEXTS))]
    return min(goodness_of_fit(*pair).p_value for pair in zip(counts, distributions, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule", "method"), RIGHT)
def test_samples_follow_the_targets_distribution(name, rule, method):
    """Rows of different lengths, and in most cases of different numbers of drafts, in one batch."""
    first_seed = NUM_ROWS * RIGHT.index((name, rule, method))
    infos = list(sample(make_engine(name, rule), name, METHODS[method], first_seed))
    assert smallest_p_value(infos, method) > FALSE_ALARM
    check_drafts(make_case(name), infos)


def check_drafts(case, all_infos):
    """Asserts that drafts were kept and refused, and that rows did what the case is about."""
    infos = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *all_infos)
    proposed, accepted = infos.num_proposed, infos.num_accepted
    assert 0 < accepted.sum() < proposed.sum()
    if not case.numbers:
        return
    assert set(proposed.flat) >= set(case.numbers)
    assert ((proposed != proposed[0]).any(axis=0)).mean() > 0.3, "rows change their numbers"
    num_rounds = (infos.num_tokens.cumsum(axis=0) < NUM_TOKENS).sum(axis=0) + 1
    assert (num_rounds >= 3).mean() > 0.3, "the tokens looked at take several rounds"
    names = [kind.drafter for kind in case.drafter.kinds]
    is_kept = accepted > 0
    assert {names[kind] for kind in infos.kind[is_kept]} == set(names), "all members have a turn"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_resampling_from_the_target_is_rejected(name):
    """Negative control of every case: the residual left out."""
    engine = make_engine(name, is_wrong=True)
    # Rows that choose draft less: what they may lose by trying is limited.
    num_rows = NUM_ROWS if name == "auto" else ROWS_A_RUN
    infos = sample(engine, name, PENALTIES, 0, num_rows)
    assert smallest_p_value(infos, "penalties") < FALSE_ALARM
