"""The hierarchical drafter says what the draft model alone would say, in fewer calls of it."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.drafters import DrafterOptions, make_drafter
from jspec.drafters.hierarchical import HierarchicalDrafter, HierarchicalParams
from jspec.drafters.model import HEAD_IDS, ModelDrafter
from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.generation.request import SamplingParams
from jspec.speculation.control import Control
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from tests.cases import slow_unless
from tests.drafters.rows import build, spec
from tests.speculation.drive import Engine, emitted_in_row, request_settings
from tests.speculation.toys import VOCAB as TOY_VOCAB
from tests.speculation.toys import make_tables, toy_apply, toy_cache

CAPACITY, WIDTH, VOCAB, NUM_ROUNDS = 128, 6, 59, 12
PADDED_VOCAB = 61  # two ids after the shared ones
IDS = np.flatnonzero(np.arange(VOCAB) % 4 != 2)  # that the draft model's head has
PROMPTS = [[7], [4, 9, 23, 4] * 3, [3, 3], list(range(15))]
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9)
PENALTIES = SamplingParams(
    temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={5: 1.0}
)
OF_A_GUESS = SamplingParams(temperature=0.7, frequency_penalty=2.0, logit_bias={5: 14.0})
# Guesses of a cascade with parameters, built by name.
PATTERN = {"name": "pattern+prompt_lookup", "pattern": "[0-8]+99|5+6"}


@dataclasses.dataclass(frozen=True)
class Stubborn(PromptLookupDrafter):
    """Guesses one token for all time."""

    def propose(self, params, state, inputs):
        proposal, state = super().propose(params, state, inputs)
        count = inputs.wanted()
        return proposal.replace(tokens=jnp.full_like(proposal.tokens, 5), num_tokens=count), state


def of_ids(params, *args, **options):
    """A toy whose head is over some ids only."""
    return toy_apply(params["table"], *args, **options)


def play(drafter, params, settings):
    """Returns what each round emitted, proposed and kept, with random numbers of drafts wanted."""
    engine = Engine(toy_apply, toy_cache, params, drafter, capacity=CAPACITY, max_rounds=1)
    state = engine.start(PROMPTS, temperature=settings.temperature)
    state = state.replace(settings=request_settings(settings, PROMPTS, PADDED_VOCAB))
    control = Control.init(len(PROMPTS), kinds=drafter.kinds, numbers=range(WIDTH + 1))
    infos, rng = [], np.random.default_rng(0)
    for _ in range(NUM_ROUNDS):
        forced = jnp.asarray(rng.integers(0, WIDTH + 1, (len(PROMPTS), 1)), jnp.int32)
        state = state.replace(control=control.replace(forced=forced))
        state, info = engine.advance(state, 1)
        is_said = np.arange(WIDTH + 1) < info.num_tokens[..., None]
        tokens = np.where(is_said, info.tokens, -1)
        infos.append((info.num_proposed, info.num_accepted, tokens))
    return [np.concatenate(leaves) for leaves in zip(*infos, strict=True)]


@pytest.mark.parametrize(
    ("settings", "min_confidence", "inner"),
    [
        (PENALTIES, 0.3, PromptLookupDrafter(3)),
        slow_unless(False, GREEDY, 0.0, PromptLookupDrafter(3)),
        slow_unless(False, SAMPLED, 0.0, PromptLookupDrafter(3)),
        slow_unless(False, SAMPLED, 0.3, Stubborn(3)),  # nearly all guesses are wrong
        # Right guesses, of which each makes the next less likely.
        slow_unless(False, OF_A_GUESS, 0.0, Stubborn(3)),
        slow_unless(False, SAMPLED, 0.0, PATTERN),
    ],
)
def test_drafts_are_those_of_the_draft_model(settings, min_confidence, inner):
    """Under `rejection`, where other drafts or distributions give other verdicts and tokens.

    Guards against keys, processors, filters and limits of a wrong offset, of which each row has its
    own, and against another cut of the vocabulary. That the cache has no hole is in
    test_random_rounds.py.
    """
    target, draft = make_tables(vocab=PADDED_VOCAB, peak=3.0)
    params = {"table": draft[..., IDS], HEAD_IDS: jnp.asarray(IDS, jnp.int32)}
    options = {"apply": of_ids, "init_cache": toy_cache, "has_head_ids": True}
    model = ModelDrafter(WIDTH, VOCAB, PADDED_VOCAB, min_confidence, **options)
    inner_params = None
    if isinstance(inner, dict):
        needs = spec(3, vocab_size=VOCAB, pattern=inner["pattern"])
        needs = needs._replace(tokenizer=ByteTokenizer(PADDED_VOCAB), is_member=True)
        inner, inner_params = make_drafter(inner["name"], needs)
    ours = play(
        HierarchicalDrafter(model, inner),
        (target, HierarchicalParams(params, inner_params)),
        settings,
    )
    theirs = play(model, (target, params), settings)
    for left, right in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(left, right)
    proposed, accepted = ours[:2]
    assert proposed.max() >= (4 if min_confidence else WIDTH)
    assert 0 < accepted.sum() < proposed.sum()


@pytest.mark.parametrize("num_guesses", [slow_unless(n == 3, n) for n in (1, 3, 5)])
def test_repetitive_text_takes_fewer_calls(num_guesses):
    """Greedy texts of few tokens soon repeat themselves, and then guesses are right.

    Also that a call gives at most one draft more than it had guesses, and that the cache stays
    right where guesses are kept: a toy's keys are the tokens themselves.
    """
    widths = []

    def counted(table, tokens, cache, **options):
        jax.debug.callback(lambda: widths.append(tokens.shape[1]))
        return toy_apply(table, tokens, cache, **options)

    model = ModelDrafter(WIDTH, TOY_VOCAB, TOY_VOCAB, apply=counted, init_cache=toy_cache)
    drafter = HierarchicalDrafter(model, PromptLookupDrafter(num_guesses))
    table = make_tables(seed=3)[1]
    params = table, HierarchicalParams(table)
    engine = Engine(toy_apply, toy_cache, params, drafter, capacity=CAPACITY, max_rounds=1)
    state, num_calls = engine.start([[7 % TOY_VOCAB]]), []
    text = [7 % TOY_VOCAB, int(state.last_token[0])]
    for _ in range(NUM_ROUNDS):
        jax.effects_barrier()
        widths.clear()
        state, infos = engine.advance(state, 1)
        jax.effects_barrier()
        assert infos.num_accepted[0, 0] == WIDTH
        num_calls.append(widths.count(num_guesses + 2))
        text += emitted_in_row(infos, 0)
    fewest = -(-WIDTH // (num_guesses + 1))
    assert num_calls[-4:] == [fewest] * 4, num_calls
    assert min(num_calls) == fewest
    assert max(num_calls) <= WIDTH
    cache = state.draft.model.cache
    length = int(cache.length[0])
    assert length > len(text) - 3
    assert (cache.keys[0][0, 0, :length, 0] - 1).tolist() == text[:length]


def test_no_more_guesses_than_a_round_can_use():
    """The last draft of a round comes with the guesses before it."""
    for num_drafts, asked, expected in ((5, 3, 3), (5, 4, 4), (5, 9, 4), (1, 4, 1)):
        drafter = build("hierarchical", num_drafts, inner_num_draft_tokens=asked).drafter
        assert drafter.inner.num_draft_tokens == expected


@pytest.mark.parametrize(
    "inner", ["model", "none", "hierarchical", "recycle", "zebra", "model+prompt_lookup"]
)
def test_inner_drafters_with_a_model_are_refused(inner):
    """One line that names what there is."""
    with pytest.raises(InputError, match=rf"among .*prompt_lookup.*'{re.escape(inner)}'"):
        build("hierarchical", inner_drafter=inner)


def test_a_missing_draft_model_is_named():
    """The message names the drafter that was asked for."""
    with pytest.raises(InputError, match=r"'hierarchical' expects a draft model"):
        make_drafter("hierarchical", spec()._replace(draft_config=None))
    with pytest.raises(InputError, match="inner_num_draft_tokens from 1 to 64, got 0"):
        DrafterOptions(inner_num_draft_tokens=0)
