"""The hierarchical drafter says what the draft model alone would say, in fewer calls of it."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.drafters import DrafterOptions, DrafterSpec, make_drafter
from jspec.drafters.hierarchical import HierarchicalDrafter, HierarchicalParams
from jspec.drafters.model import ModelDrafter
from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.generation.batch import needed_switches
from jspec.generation.request import SamplingParams
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from tests import tiny
from tests.cases import slow_unless
from tests.speculation.drive import QUICK, assert_committed_equal, inputs_of, request_settings
from tests.speculation.toys import VOCAB as TOY_VOCAB
from tests.speculation.toys import make_tables, toy_apply, toy_cache

CAPACITY, WIDTH, VOCAB, ROWS, NUM_ROUNDS = 128, 6, 59, 4, 12
PADDED_VOCAB = tiny.CONFIG.vocab_size  # two ids behind the shared ones
PROMPTS = [[7], [4, 9, 23, 4] * 5, [3, 3], list(range(17))]
SETTINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0, top_p=0.9),
    "penalties": SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5,
                          logit_bias={5: 1.0}),
}  # fmt: skip
SWITCHES = needed_switches(list(SETTINGS.values()))


def make_pair(apply, num_guesses=3, min_confidence=0.0):
    """Returns the drafter `model` and the hierarchical one over it."""
    model = ModelDrafter(
        WIDTH, VOCAB, PADDED_VOCAB, min_confidence, apply=apply, init_cache=tiny.empty_cache
    )
    return model, HierarchicalDrafter(model, PromptLookupDrafter(num_guesses))


@functools.cache
def make_programs(drafter):
    """Returns the compiled `observe` and `propose`; how tokens are drawn is data."""

    def observe(params, state, tokens, valid):
        return drafter.observe(params, state, tokens, jnp.zeros((*tokens.shape, 1)), valid)

    def propose(params, state, last, limit, position, settings):
        seeds, after = jnp.arange(ROWS), settings.after(last)
        inputs = inputs_of(last, limit, WIDTH, seeds=seeds, position=position, settings=after)
        return drafter.propose(params, state, inputs)

    return [jax.jit(function, compiler_options=QUICK) for function in (observe, propose)]


def padded_texts(texts, width):
    """Returns tokens [b width] and which of them count."""
    tokens = np.zeros([len(texts), width], np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    valid = np.arange(width) < np.array([len(text) for text in texts])[:, None]
    return jnp.asarray(tokens), jnp.asarray(valid)


class Run:
    """A drafter led through rounds by somebody who decides what is committed."""

    def __init__(self, drafter, params, settings):
        self.params = params
        self.settings = request_settings(settings, PROMPTS, PADDED_VOCAB, SWITCHES)
        self.observe, self.propose = make_programs(drafter)
        self.state = drafter.init(ROWS, CAPACITY)
        self.texts = [list(prompt) for prompt in PROMPTS]
        tokens, valid = padded_texts(PROMPTS, 24)
        self.state = self.observe(params, self.state, tokens, valid)

    def draft(self, last, limit):
        """Returns the proposal of a round."""
        position = jnp.asarray([len(text) for text in self.texts], jnp.int32)
        proposal, self.state = self.propose(
            self.params, self.state, jnp.asarray(last), jnp.asarray(limit), position, self.settings
        )
        return proposal

    def commit(self, blocks):
        """Commits each row's first few tokens of the round."""
        tokens, valid = padded_texts(blocks, WIDTH + 1)
        self.state = self.observe(self.params, self.state, tokens, valid)
        self.settings = self.settings.after_all(tokens, valid)
        for text, block in zip(self.texts, blocks, strict=True):
            text.extend(block)


def rounds(rng, runs, limits=None):
    """Leads drafters through the same rounds; yields their proposals.

    Without `limits` they are random, and what the target keeps and says is too. With them the text
    is the draft model's: all drafts are kept, the last one as the next token.
    """
    last = rng.integers(0, VOCAB, ROWS).astype(np.int32)
    for _ in range(NUM_ROUNDS):
        limit = rng.integers(0, WIDTH + 1, ROWS) if limits is None else limits
        proposals = [run.draft(last, np.asarray(limit, np.int32)) for run in runs]
        yield proposals
        tokens, counts = (np.asarray(x) for x in (proposals[0].tokens, proposals[0].num_tokens))
        kept = np.maximum(counts - 1, 0) if limits else rng.integers(0, counts + 1)
        blocks = [[int(last[i]), *tokens[i, : kept[i]].tolist()] for i in range(ROWS)]
        for run in runs:
            run.commit(blocks)
        last = rng.integers(0, VOCAB, ROWS).astype(np.int32)
        if limits:
            last = np.where(counts > 0, tokens[np.arange(ROWS), kept], last)


def assert_same(ours, theirs):
    """Asserts that two proposals are equal as far as they are meant."""
    np.testing.assert_array_equal(ours.num_tokens, theirs.num_tokens)
    is_meant = np.arange(WIDTH) < np.asarray(ours.num_tokens)[:, None]
    np.testing.assert_array_equal(
        np.where(is_meant, ours.tokens, 0), np.where(is_meant, theirs.tokens, 0)
    )
    np.testing.assert_allclose(
        np.asarray(ours.probs)[is_meant], np.asarray(theirs.probs)[is_meant], atol=1e-5
    )


def check_state(run, params, apply):
    """Asserts that the draft's cache is a fresh prefill's, and that no memory holds a draft."""
    texts, valid = padded_texts(run.texts, CAPACITY)
    lengths = np.asarray(valid.sum(axis=1))
    model, inner = run.state
    assert (np.asarray(model.cache.length) <= lengths).all()
    assert_committed_equal(
        model.cache,
        jax.jit(apply)(params, texts, tiny.empty_cache(ROWS, CAPACITY))[2],
        atol=1e-3,  # of numbers up to 10; a wrong slot is off by about 1
    )
    for history in (model.history, inner):
        assert history.length.tolist() == lengths.tolist()
        np.testing.assert_array_equal(np.where(valid, history.tokens, 0), texts)


@pytest.mark.parametrize(
    ("name", "min_confidence"),
    [
        slow_unless((name, confidence) == ("penalties", 0.3), name, confidence)
        for name in SETTINGS
        for confidence in (0.0, 0.3)
    ],
)
def test_drafts_are_those_of_the_draft_model(tiny_pair, name, min_confidence):
    """Token for token and distribution for distribution, over rounds of random limits and verdicts.

    Guards against keys, processors, filters and limits of a wrong offset, of which each row has its
    own, and against holes: both drafters are led through the same history.
    """
    model, hierarchical = make_pair(tiny_pair.apply, min_confidence=min_confidence)
    runs = [
        Run(model, tiny_pair.draft, SETTINGS[name]),
        Run(hierarchical, HierarchicalParams(tiny_pair.draft), SETTINGS[name]),
    ]
    counts = []
    for theirs, ours in rounds(np.random.default_rng(0), runs):
        assert_same(ours, theirs)
        counts += ours.num_tokens.tolist()
    assert {0, 1, 2} <= set(counts)
    assert max(counts) >= (WIDTH if min_confidence == 0 else 4)
    check_state(runs[1], tiny_pair.draft, tiny_pair.apply)


@pytest.mark.parametrize("num_guesses", [slow_unless(n == 3, n) for n in (1, 3, 5)])
def test_repetitive_text_takes_fewer_calls(num_guesses):
    """Greedy texts of a distribution of two tokens soon repeat themselves, and then guesses are
    right.

    Also that a call gives at most one draft more than it had guesses, and that the cache stays
    right where guesses are kept: a toy's keys are the tokens themselves.
    """
    widths = []

    def counted(table, tokens, cache, **options):
        jax.debug.callback(lambda: widths.append(tokens.shape[1]))
        return toy_apply(table, tokens, cache, **options)

    model = ModelDrafter(WIDTH, TOY_VOCAB, PADDED_VOCAB, apply=counted, init_cache=toy_cache)
    drafter = HierarchicalDrafter(model, PromptLookupDrafter(num_guesses))
    table = make_tables(seed=3)[1]
    run = Run(drafter, HierarchicalParams(table), SETTINGS["greedy"])
    num_calls = []
    for _ in rounds(np.random.default_rng(0), [run], limits=[WIDTH, 0, 0, 0]):
        jax.effects_barrier()
        num_calls.append(widths.count(num_guesses + 2))
        widths.clear()
    fewest = -(-WIDTH // (num_guesses + 1))
    assert num_calls[-4:] == [fewest] * 4, num_calls
    assert min(num_calls) == fewest
    assert max(num_calls) <= WIDTH
    cache, text = run.state.model.cache, run.texts[0]
    length = int(cache.length[0])
    assert length > len(text) - 2
    assert (cache.keys[0][0, 0, :length, 0] - 1).tolist() == text[:length]


@dataclasses.dataclass(frozen=True)
class Stubborn(PromptLookupDrafter):
    """Guesses one token for all time."""

    def propose(self, params, state, inputs):
        proposal, state = super().propose(params, state, inputs)
        count = inputs.wanted()
        return proposal.replace(tokens=jnp.full_like(proposal.tokens, 5), num_tokens=count), state


def test_wrong_guesses_change_nothing(tiny_pair):
    """An inner drafter that always guesses, and nearly always wrongly, costs calls only."""
    model, _ = make_pair(tiny_pair.apply)
    runs = [
        Run(model, tiny_pair.draft, SETTINGS["sampled"]),
        Run(
            HierarchicalDrafter(model, Stubborn(3)),
            HierarchicalParams(tiny_pair.draft),
            SETTINGS["sampled"],
        ),
    ]
    for theirs, ours in rounds(np.random.default_rng(1), runs):
        assert_same(ours, theirs)
    check_state(runs[1], tiny_pair.draft, tiny_pair.apply)


def test_processors_see_the_guesses_before(tiny_pair):
    """Right guesses under a penalty: each one makes the next of the same token less likely."""
    settings = SamplingParams(temperature=0.7, frequency_penalty=2.0, logit_bias={5: 14.0})
    model, _ = make_pair(tiny_pair.apply)
    guessing = HierarchicalDrafter(model, Stubborn(3))
    runs = [
        Run(model, tiny_pair.draft, settings),
        Run(guessing, HierarchicalParams(tiny_pair.draft), settings),
    ]
    num_right = 0
    for theirs, ours in rounds(np.random.default_rng(1), runs):
        assert_same(ours, theirs)
        num_right += (np.asarray(theirs.tokens) == 5).sum()
    assert num_right > 20


def test_a_cascade_with_parameters_may_guess(tiny_pair):
    """Built by name: it finds the tables of `pattern`, and its state follows the drafts."""
    options = DrafterOptions(inner_drafter="pattern+prompt_lookup", pattern="[0-8]+99|5+6")
    spec = DrafterSpec(WIDTH, tiny.CONFIG, VOCAB, tiny.CONFIG, jnp.float32, tiny_pair.draft,
                       options, tokenizer=ByteTokenizer(PADDED_VOCAB))  # fmt: skip
    runs = [
        Run(built.drafter, built.params, SETTINGS["sampled"])
        for built in (make_drafter(name, spec) for name in ("model", "hierarchical"))
    ]
    for theirs, ours in rounds(np.random.default_rng(2), runs):
        assert_same(ours, theirs)


SPEC = DrafterSpec(5, tiny.CONFIG, VOCAB, tiny.CONFIG, jnp.float32)


def test_no_more_guesses_than_a_round_can_use():
    """The last draft of a round comes with the guesses before it."""

    def num_guesses(num_draft_tokens, inner_num_draft_tokens):
        options = DrafterOptions(inner_num_draft_tokens=inner_num_draft_tokens)
        spec = SPEC._replace(num_draft_tokens=num_draft_tokens, options=options)
        return make_drafter("hierarchical", spec).drafter.inner.num_draft_tokens

    assert [num_guesses(*pair) for pair in ((5, 3), (5, 4), (5, 9), (1, 4))] == [3, 4, 4, 1]


@pytest.mark.parametrize(
    "inner", ["model", "none", "hierarchical", "recycle", "zebra", "model+prompt_lookup"]
)
def test_inner_drafters_with_a_model_are_refused(inner):
    """One line that names what there is."""
    spec = SPEC._replace(options=DrafterOptions(inner_drafter=inner))
    with pytest.raises(InputError, match=rf"among .*prompt_lookup.*'{re.escape(inner)}'"):
        make_drafter("hierarchical", spec)


def test_a_missing_draft_model_is_named():
    """The message names the drafter that was asked for."""
    with pytest.raises(InputError, match=r"'hierarchical' expects a draft model"):
        make_drafter("hierarchical", SPEC._replace(draft_config=None))
    with pytest.raises(InputError, match="inner_num_draft_tokens from 1 to 64, got 0"):
        DrafterOptions(inner_num_draft_tokens=0)
