"""The model drafter: other vocabularies, catching up after a silence, a context, a smaller head."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.drafters import DrafterOptions, make_drafter
from jspec.drafters.cascade import CascadeDrafter
from jspec.drafters.hierarchical import HierarchicalDrafter, HierarchicalParams
from jspec.drafters.memory import CATCH_UP_WIDTH, tokens_read
from jspec.drafters.model import HEAD_IDS, ModelDrafter, draft_ids, with_draft_vocabulary
from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.generation.batch import rolled_back
from jspec.lab.auditing import controls
from jspec.lab.auditing.distribution import FALSE_ALARM, check_distribution
from jspec.lab.auditing.rows import build_drafter
from jspec.models.layers import head_kernel
from jspec.speculation.control import Control
from jspec.weights.quantize import dequantize, quantize
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from tests import tiny
from tests.cases import slow_unless
from tests.drafters.rows import build, show, spec
from tests.lab.auditing.subjects import make_rows, make_subject
from tests.speculation.drive import Engine, propose
from tests.speculation.toys import softmax, toy_apply, toy_cache

VOCAB, WIDTH = 61, 3


def toy(vocab_size=VOCAB, target_vocab_size=VOCAB):
    """Returns the drafter over a toy, whose keys are the tokens that it was fed, plus one."""
    sizes = WIDTH, vocab_size, target_vocab_size
    return ModelDrafter(*sizes, apply=toy_apply, init_cache=toy_cache)


@pytest.mark.parametrize("draft_vocab", [5, 8], ids=["draft unpadded", "draft padded further"])
def test_padding_of_the_vocabulary_is_never_proposed(draft_vocab):
    """Members of one family pad differently; distributions come at the target's width, 0 on the
    padding.
    """
    shared, target_vocab = 5, 7
    table = np.random.default_rng(0).normal(size=(draft_vocab,) * 3).astype(np.float32)
    table[..., shared:] += 50  # what the draft would rather say
    drafter, last = toy(shared, target_vocab), np.arange(20) % shared
    state = show(drafter, drafter.init(20, 16), [[1, 2]] * 20)
    for temperature in (0.0, 1.0):
        proposal, _ = propose(None, drafter, table, state, last, WIDTH, temperature)
        assert proposal.probs.shape == (20, WIDTH, target_vocab)
        assert (np.asarray(proposal.tokens) < shared).all()
        assert (np.asarray(proposal.probs)[..., shared:] == 0).all()
        np.testing.assert_allclose(proposal.probs.sum(axis=-1), 1, rtol=1e-5)
    # The real distribution, renormalised over the shared part.
    expected = softmax(table[2, last][:, :shared])
    np.testing.assert_allclose(proposal.probs[:, 0, :shared], expected, rtol=1e-4)


# Catching up.

CAPACITY = 2 * CATCH_UP_WIDTH + 60
LENGTHS = np.array([2 * CATCH_UP_WIDTH + 30, CATCH_UP_WIDTH + 1, 1])
ROWS = np.arange(3)
TEXT = np.random.default_rng(0).integers(0, VOCAB, (3, CAPACITY))
TABLE = np.random.default_rng(1).normal(size=(VOCAB,) * 3).astype(np.float32)
DRAFTER = toy()


def check_cached(state):
    """Asserts that the slots that count as cached hold the text's tokens."""
    held = np.asarray(state.cache.keys[0])[:, 0, :, 0] - 1
    for row, length in enumerate(state.cache.length.tolist()):
        assert held[row, :length].tolist() == TEXT[row, :length].tolist()


def run(state, lengths):
    """Returns what is proposed after so many tokens of each row, and its state, after checks."""
    proposal, state = propose(None, DRAFTER, TABLE, state, TEXT[ROWS, lengths], WIDTH)
    assert state.cache.length.tolist() == lengths.tolist()
    check_cached(state)
    first = TABLE[TEXT[ROWS, lengths - 1], TEXT[ROWS, lengths]].argmax(axis=-1)
    np.testing.assert_array_equal(proposal.tokens[:, 0], first)
    return proposal, state


@pytest.fixture(scope="module")
def lagging():
    """Returns a state that has observed much, in rounds of five tokens, and proposed nothing."""
    state = DRAFTER.init(3, CAPACITY)
    for start in range(0, LENGTHS.max(), 5):
        state = show(DRAFTER, state, TEXT[:, start : start + 5], np.clip(LENGTHS - start, 0, 5))
    return state


@pytest.mark.parametrize("missing", [1, 9])
def test_the_last_missing_token_is_read(missing):
    """Guards against one token too few: a wider call or a neighbour's often reads it by chance.

    Here every row misses the same number, which leaves one token for its own call.
    """
    lengths = np.full(3, missing + 1)
    run(show(DRAFTER, DRAFTER.init(3, CAPACITY), TEXT[:, : missing + 1]), lengths)


def test_silence_between_proposals_leaves_no_hole(lagging):
    """Back from a fallback to plain decoding, on rows that missed 158, 65 and 1 tokens.

    Drafts that were fed and then overtaken by plain decoding must not count as cached.
    """
    _, state = run(lagging, LENGTHS)
    slots = LENGTHS[:, None] + np.arange(4)
    state = show(DRAFTER, state, np.take_along_axis(TEXT, slots, axis=1), [4, 1, 4])
    slots += np.array([[4], [1], [4]])
    state = show(DRAFTER, state, np.take_along_axis(TEXT, slots, axis=1), [4, 4, 0])
    lengths = LENGTHS + np.array([8, 5, 4])
    assert (np.asarray(state.cache.length) <= lengths).all()
    check_cached(state)
    run(state, lengths)


def test_drafts_of_an_earlier_round_are_forgotten(lagging):
    """In a silence the text may say again what was fed once: that does not make it cached.

    A repetition of `last` is enough, and greedy texts are full of them.
    """
    _, state = run(lagging, LENGTHS)
    block = np.repeat(TEXT[ROWS, LENGTHS][:, None], 4, axis=1)
    state = show(DRAFTER, state, block, [1, 1, 1])
    cached = state.cache.length.tolist()
    state = show(DRAFTER, state, block, [1, 2, 4])
    assert state.cache.length.tolist() == cached


def test_only_drafts_that_were_kept_stay_cached(lagging):
    """The round commits [last, d1, x]: two fed tokens stay; the third was something else."""
    proposal, state = run(lagging, LENGTHS)
    drafts = np.asarray(proposal.tokens)
    block = np.stack([TEXT[ROWS, LENGTHS], drafts[:, 0], (drafts[:, 1] + 1) % VOCAB], axis=1)
    after = show(DRAFTER, state, block, [3, 2, 0])
    assert (after.cache.length - state.cache.length).tolist() == [2, 2, 0]
    assert (after.history.length - state.history.length).tolist() == [3, 2, 0]


# What it says that it has yet to read.

LOOKUP = PromptLookupDrafter(WIDTH)
MEMBERS = {
    "model": (DRAFTER, TABLE),
    "hierarchical": (HierarchicalDrafter(DRAFTER, LOOKUP), HierarchicalParams(TABLE)),
    "cascade": (CascadeDrafter((LOOKUP, DRAFTER)), (None, TABLE)),
}


def lags(drafter, state, kind=0):
    return drafter.lag(state, jnp.broadcast_to(jnp.asarray(kind, jnp.int32), 2)).tolist()


@pytest.mark.parametrize("name", ["model", "cascade", slow_unless(False, "hierarchical")])
def test_a_drafter_lags_until_it_drafts(name):
    """The prompt, less what the first call of a round reads anyway; nothing after a round.

    A lookup has nothing to read; the model behind it has the prompt, until its turn comes.
    """
    drafter, params = MEMBERS[name]
    state = show(drafter, drafter.init(2, 96), [[7, 1, 3], range(15)], params=params)
    kind = len(drafter.kinds) - 1
    assert lags(drafter, state, kind) == [8, 16]  # 2 and 14 tokens, in calls of 8
    if name == "cascade":
        assert lags(drafter, state, kind - 1) == [0, 0]
        assert lags(drafter, state, [kind, 0]) == [8, 0]
    _, state = propose(None, drafter, params, state, [40, 50], WIDTH)
    assert lags(drafter, state, kind) == [0, 0]


def test_a_row_has_fed_no_more_than_its_own_drafts():
    """What a neighbour wanted beyond them does not count, nor what a silent row was fed."""
    state = DRAFTER.init(2, 16)
    fed, num_tokens = jnp.array([[5, 6, 7], [5, 6, 7]], jnp.int32), jnp.array([1, 3], jnp.int32)
    after = DRAFTER.remember(state, state.cache, fed, num_tokens, jnp.array([True, False]))
    assert after.fed.tolist() == [[5, -1, -1], [-1, -1, -1]]


def test_a_model_catches_up_in_calls():
    """Wide calls while more than 16 tokens are missing, then narrow ones: what they cost counts."""
    places = {0: 0, 1: 8, 8: 8, 9: 16, 16: 16, 17: 64, 64: 64, 80: 80, 81: 128, 200: 200}
    assert tokens_read(jnp.array([*places])).tolist() == [*places.values()]
    state = DRAFTER.init(2, 256)
    history = state.history.replace(length=jnp.array([10, 82], jnp.int32))
    assert lags(DRAFTER, state.replace(history=history)) == [16, 128]


@pytest.mark.parametrize("name", ["model", slow_unless(False, "hierarchical")])
def test_a_neighbour_that_wants_more_changes_nothing(name):
    """What a row has yet to read decides what it drafts: it must not depend on the batch.

    The target drafts for itself: one draft of the first row is kept, and 1 or 3 of the second's.
    """
    drafter, params = MEMBERS[name]
    engine = Engine(toy_apply, toy_cache, (TABLE, params), drafter, max_rounds=1)
    control = Control.init(2, kinds=drafter.kinds, numbers=(0, 1, WIDTH))
    outcomes = []
    for other in (1, WIDTH):
        state = engine.start([[7, 1, 3], list(range(15))])
        for numbers in ([1, other], [0, 0], [0, 0]):
            forced = jnp.asarray(numbers, jnp.int32)[:, None]
            state = state.replace(control=control.replace(forced=forced))
            state, infos = engine.advance(state, 1)
            assert infos.num_accepted[0].tolist() == numbers
        model = state.draft.model if name == "hierarchical" else state.draft
        outcomes.append((model.cache.length[0].item(), lags(drafter, state.draft)[0]))
    assert outcomes[0] == outcomes[1]


# A context: the text's last tokens only.

CONTEXT = 5
READ = [1 + n * n % 59 for n in range(40)]


@functools.cache
def reader(pair, context, **tree):
    return build("model", draft=pair.draft, draft_context=context, **tree)


def after(built, text, state=None, temperature=1.0):
    """Returns proposal and state after more of a text, whose last token is the newest."""
    state = built.drafter.init(1, 64) if state is None else state
    padded = [*text[:-1], *[0] * (19 - len(text))]
    state = show(built.drafter, state, [padded], [len(text) - 1])
    return propose(None, built.drafter, built.params, state, text[-1:], WIDTH, temperature)


@pytest.mark.parametrize(
    ("tree", "temperature"),
    [({}, 1.0), slow_unless(False, {"tree_depth": 2, "tree_branches": 1}, 0.0)],
)
def test_it_drafts_as_if_the_text_began_there(tiny_pair, tree, temperature):
    """Guards against a slot taken for its token's place in the text."""
    recent, whole = (reader(tiny_pair, context, **tree) for context in (CONTEXT, 0))
    proposal, state = after(recent, READ[:20], temperature=temperature)
    expected, _ = after(whole, READ[20 - CONTEXT - 2 : 20], temperature=temperature)
    other, _ = after(whole, READ[:20], temperature=temperature)
    np.testing.assert_array_equal(proposal.tokens, expected.tokens)
    if not tree:
        np.testing.assert_allclose(proposal.probs, expected.probs, atol=1e-6)
        assert np.abs(np.asarray(proposal.probs) - np.asarray(other.probs)).max() > 1e-3
    assert state.cache.first.tolist() == [18 - CONTEXT]
    assert state.cache.end.tolist() == [19]


def test_it_reads_on_where_it_began(tiny_pair):
    """What was not read meanwhile is: an answer that was paused may have no part of it left."""
    built = reader(tiny_pair, CONTEXT)
    _, state = after(built, READ[:20])
    first = state.cache.first.tolist()
    _, state = after(built, READ[19:23], state)
    assert state.cache.first.tolist() == first
    missed = show(built.drafter, state, [[*READ[22:36], *[0] * 5]], [14])
    lag = built.drafter.lag(missed, jnp.zeros(1, jnp.int32))
    assert lag == tokens_read(jnp.array([14]))
    _, state = after(built, READ[22:37], state)
    assert state.cache.first.tolist() == first
    assert state.cache.end.tolist() == [36]


def test_texts_that_are_short_or_cut_short_are_read_from_their_beginning(tiny_pair):
    """A conversation's next answer is that of a fresh start, wherever the last cache began."""
    _, state = after(reader(tiny_pair, CONTEXT), READ[:4])
    assert (state.cache.first.tolist(), state.cache.end.tolist()) == ([0], [3])
    _, state = after(reader(tiny_pair, CONTEXT), READ[:20])
    _, cut = jax.jit(rolled_back)(tiny.empty_cache(1, 4), state, 18)
    assert (cut.cache.begin.tolist(), cut.cache.length.tolist()) == ([-1], [0])


@pytest.mark.parametrize("name", ["model", "hierarchical"])
def test_pages_are_not_shared(tiny_pair, name):
    """Guards against a page of one text's middle given to another text's beginning."""
    for context in (0, CONTEXT):
        drafter = build(name, draft=tiny_pair.draft, draft_context=context).drafter
        assert drafter.has_slot_per_token == (context == 0)


# A head over the most frequent tokens.

SIZE = 30


def with_ends(pair, **options):
    """Returns what a drafter is built from, of which a text ends late in the ids."""
    config = dataclasses.replace(tiny.CONFIG, eos_ids=(0, 55))
    fields = {"draft": pair.draft, "target": config, "vocab_size": 58}
    tokenizer = ByteTokenizer(61, bos_id=None, eos_ids=(0,))
    return spec(**fields, **options)._replace(draft_config=config, tokenizer=tokenizer)


def test_the_most_frequent_and_the_first_ids_and_the_ends_are_kept(tiny_pair, tmp_path):
    """Without the ends no draft would end a text; an end beyond the shared ids does not exist.

    By count, then by id: of "22311(()" the digits 1 and 2 and the bracket ( precede the others.
    """
    assert draft_ids(3, 10, {1, 7, 5, 12}).tolist() == [0, 1, 2, 5, 7]
    assert draft_ids(10, 10, {9}).tolist() == list(range(10))
    assert draft_ids(4, 10, {9}, frequent=[7, 11, 1, 5]).tolist() == [0, 1, 5, 7, 9]
    assert draft_ids(2, 10, set(), frequent=[7, 1, 5]).tolist() == [1, 7]
    path = tmp_path / "text.txt"
    path.write_text("22311(()")
    options = {"draft_vocab_size": 3, "draft_vocab_text": str(path)}
    params = with_draft_vocabulary(with_ends(tiny_pair, **options)).draft_params
    assert params[HEAD_IDS].tolist() == [0, *b"(12", 55]


def test_what_cannot_be_is_an_error(tiny_pair, tmp_path):
    """In one line that names the file or the numbers; no text is silently ignored."""
    path = tmp_path / "text.txt"
    options = {"draft_vocab_size": 3, "draft_vocab_text": str(path)}
    with pytest.raises(InputError, match=r"text\.txt: No such file"):
        with_draft_vocabulary(with_ends(tiny_pair, **options))
    path.write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"text\.txt: expected UTF-8"):
        with_draft_vocabulary(with_ends(tiny_pair, **options))
    with pytest.raises(InputError, match="draft_vocab_size with draft_vocab_text"):
        DrafterOptions(draft_vocab_text="a.txt")
    with pytest.raises(InputError, match=r"at most 58, .* got 59"):
        with_draft_vocabulary(with_ends(tiny_pair, draft_vocab_size=59))


@pytest.mark.parametrize(("kind", "is_tied"), [(None, False), ("int4", True)])
def test_the_head_has_those_rows_of_the_whole_head(tiny_pair, kind, is_tied):
    """Of an embedding that is tied, and of rounded matrices, too."""
    whole = with_ends(tiny_pair, draft_vocab_size=SIZE)
    config = dataclasses.replace(whole.draft_config, tie_embeddings=is_tied)
    params, name = dict(whole.draft_params), "embedding" if is_tied else "head"
    if kind is not None:
        params[name] = quantize(params[name], (name,), kind, "float32")
    cut = with_draft_vocabulary(whole._replace(draft_config=config, draft_params=params))
    heads = (head_kernel(one.draft_config, one.draft_params) for one in (
        whole._replace(draft_config=config, draft_params=params), cut))  # fmt: skip
    every, few = ((dequantize(head) if kind else head) for head in heads)
    np.testing.assert_array_equal(few, np.asarray(every)[[*range(SIZE), 55]])


def test_the_distribution_is_the_models_own_over_those_tokens(tiny_pair):
    """Renormalised over the tokens kept, 0 elsewhere; padding of the vocabulary stays out, too."""
    drafter, params = make_drafter("model", with_ends(tiny_pair, draft_vocab_size=SIZE))
    text = READ[:5]
    state = show(drafter, drafter.init(1, 64), [text[:-1]])
    proposal, _ = propose(None, drafter, params, state, text[-1:], WIDTH, 1.0)
    actual, ids = np.asarray(proposal.probs[0, 0]), [*range(SIZE), 55]
    logits = np.asarray(tiny.full_logits(tiny_pair, tiny_pair.draft, jnp.array([text])))[0, -1]
    np.testing.assert_allclose(actual[ids], softmax(logits[ids]), atol=1e-5)
    assert np.delete(actual, ids).sum() == 0
    assert 0.02 < softmax(logits)[ids].sum() < 0.98, "nothing to prove"


@pytest.mark.slow
def test_claiming_the_whole_distribution_is_rejected():
    """Negative control: drawn among few tokens, reported with the probabilities of all."""
    subject = make_subject("rejection", "model", drafter_options=DrafterOptions())
    right = make_subject("rejection", "model", drafter_options=DrafterOptions(draft_vocab_size=104))
    rows = make_rows(right, rows_per_run=2048)
    check, _ = check_distribution(rows, 2048)
    assert check.has_passed, check.detail
    num_ids = sorted(rows.context.alphabet)[2]  # two of the four tokens that may follow
    wrong = controls.claiming_all(build_drafter(subject).drafter, num_ids=num_ids)
    rows = make_rows(subject, rows_per_run=8192, drafter=wrong)
    check, _ = check_distribution(rows, 8192)
    assert not check.has_passed, check.detail
    assert check.data["p_value"] < FALSE_ALARM
