"""The target's own layers as drafter: what is built, and single proposals."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from jspec.cli.answer_flags import read_drafter
from jspec.common.errors import InputError
from jspec.drafters.layer_skip import FirstLayersDrafter, LayerSubsetDrafter, choose_layers
from jspec.speculation.types import TargetView
from tests import layered
from tests.layered import ALL, FIRST, SUBSET, build
from tests.speculation import drive
from tests.speculation.drive import inputs_of

WIDTH, CAPACITY = 3, 24
LENGTHS = np.array([9, 1, 5, 14])
ROWS = np.arange(len(LENGTHS))
_UNSURE = 0.4


def test_the_first_layers_alone_share_the_targets_cache():
    """Others need their caches, and so do the first in a cascade, whose block may be another's."""
    assert isinstance(build(FIRST, WIDTH), FirstLayersDrafter)
    assert isinstance(build(ALL, WIDTH), FirstLayersDrafter)
    assert isinstance(build((1, 2), WIDTH), LayerSubsetDrafter)
    assert isinstance(build(FIRST, WIDTH, is_member=True), LayerSubsetDrafter)
    cascade = build(FIRST, WIDTH, name="prompt_lookup+layer_skip")
    assert isinstance(cascade.members[1], LayerSubsetDrafter)
    cache = build(SUBSET, WIDTH).init(2, CAPACITY).cache
    assert len(cache.keys) == len(cache.values) == len(SUBSET)


@pytest.mark.parametrize(
    ("layers", "message"),
    [((0, 3), "the target's 3, from 0 to 2; got 0,3"), ((-1, 0), "from 0 to 2; got -1,0"),
     (tuple(range(50)), "the target's 3, from 0 to 2; got the first 50"), ((), "one; got none"),
     ((2, 2), "in rising order, at least one; got 2,2"), ((1, 0), "rising order.* got 1,0")],
)  # fmt: skip
def test_layers_that_cannot_be_are_refused(layers, message):
    """None, outside the model, twice, falling: one line that says what was expected."""
    with pytest.raises(InputError, match=f"expected draft_layers .*{message}") as error:
        build(layers, WIDTH)
    assert "\n" not in str(error.value)


def test_the_default_is_the_first_nine_tenths():
    """Guards against a drafter that needs an option before it can be tried."""
    assert build(None, WIDTH).num_layers == 2  # of 3
    assert choose_layers(None, 30) == tuple(range(27))
    assert choose_layers(None, 1) == (0,)


@pytest.mark.parametrize(
    ("text", "layers"),
    [("8", tuple(range(8))), ("1", (0,)), ("0-0", (0,)), ("0,1,2,29", (0, 1, 2, 29)),
     ("0-5,28,29", (0, 1, 2, 3, 4, 5, 28, 29)), ("2-3,1", (2, 3, 1))],
)  # fmt: skip
def test_the_flag_is_a_number_or_a_list(text, layers):
    """A number is how many; whether the model has them is seen later."""
    flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(draft_layers=text):
        assert read_drafter()[1].draft_layers == layers


_NO_LIST = "draft_layers as a number or a list like 0-5,28,29, with no number above 9999; got '{}'$"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, _NO_LIST.format(re.escape(text))) for text in (
            "", "x", "-1", "1,", "1-2-3", "1.5", "0-99999999", "1000000-", "1000000",
        )),
        ("0", "draft_layers to be at least one layer, got '0'$"),
        ("00", "draft_layers to be at least one layer, got '00'$"),
        ("0,5-2", "ranges of draft_layers from the lower to the higher, got '5-2'$"),
    ],
)  # fmt: skip
def test_other_texts_are_refused(text, message):
    """One line, and no list of a hundred million layers."""
    flags.FLAGS.mark_as_parsed()
    with (
        flagsaver.flagsaver(draft_layers=text),
        pytest.raises(InputError, match=f"^expected {message}"),
    ):
        read_drafter()


@pytest.fixture(scope="module")
def text():
    return np.random.default_rng(0).integers(0, 61, (len(LENGTHS), CAPACITY)).astype(np.int32)


@pytest.fixture(scope="module")
def cache(text):
    """Returns the target's cache, which holds another number of tokens of each row."""
    empty = layered.empty_cache(len(LENGTHS), CAPACITY)
    full = jax.jit(layered.apply)(layered.params(), jnp.asarray(text), empty)[2]
    return full.commit(jnp.asarray(LENGTHS, jnp.int32))


TARGET = types.SimpleNamespace(apply=layered.apply, target=layered.params())


def run_propose(text, cache, limit, **options):
    """Proposes after each row's committed tokens."""
    drafter, last = build(FIRST, WIDTH, **options), text[ROWS, LENGTHS]
    proposal, state = drive.propose(TARGET, drafter, None, (), last, limit, 1.0, cache=cache)
    assert state == ()
    return last, proposal


def check_prefix(cache, last, proposal, num_fed):
    """Asserts that the target's call has begun on so many tokens of the block, and no further."""
    prefix = proposal.prefix
    assert prefix.num_layers == len(FIRST)
    assert prefix.cache.length.tolist() == LENGTHS.tolist()
    block = jnp.concatenate([last[:, None], proposal.tokens], axis=1)[:, :num_fed]
    call = functools.partial(layered.apply, hidden_layers=(len(FIRST),))
    logits, outputs, whole = jax.jit(call)(layered.params(), block, cache)
    rounding = 1e-6 * np.abs(outputs).max()  # numbers of some 60 were added up
    np.testing.assert_allclose(prefix.hidden[:, :num_fed], outputs[:, :, 0], atol=rounding)
    assert not np.asarray(prefix.hidden[:, num_fed:]).any()
    slots = LENGTHS[:, None] + np.arange(num_fed)
    for name in ("keys", "values"):
        ours, before, theirs = (getattr(x, name) for x in (prefix.cache, cache, whole))
        for layer in range(3):
            wanted = theirs if layer in FIRST else before
            np.testing.assert_allclose(
                np.asarray(ours[layer])[ROWS[:, None], :, slots],
                np.asarray(wanted[layer])[ROWS[:, None], :, slots],
                atol=3e-5,
            )
    return logits


@pytest.mark.parametrize("limit", [[3, 0, 1, 2], [0, 1, 1, 0], [3, 3, 3, 3]], ids=str)
def test_a_proposal_is_the_beginning_of_the_targets_call(text, cache, limit):
    """Also where rows want different numbers of drafts: the others go on with them."""
    last, proposal = run_propose(text, cache, limit)
    assert proposal.num_tokens.tolist() == limit
    logits = check_prefix(cache, last, proposal, max(limit) + 1)
    verify = functools.partial(layered.apply, first_layer=len(FIRST))
    begun = jax.jit(verify)(layered.params(), proposal.prefix.hidden, proposal.prefix.cache)
    np.testing.assert_allclose(begun[0][:, : max(limit) + 1], logits, atol=1e-4)


def test_where_nothing_is_wanted_the_last_token_alone_is_fed(text, cache):
    """The verify call needs its hidden state; a plain step costs no more."""
    last, proposal = run_propose(text, cache, [0, 0, 0, 0])
    assert not proposal.num_tokens.any()
    check_prefix(cache, last, proposal, 1)


def test_an_unsure_row_stops_before_it_draws(text, cache):
    """Fewer drafts are meant than calls were made; what was fed is still whole."""
    last, proposal = run_propose(text, cache, [3, 3, 3, 3], draft_confidence=_UNSURE)
    counts = np.asarray(proposal.num_tokens)
    assert 0 in counts
    assert counts.max() > 0
    highest = np.asarray(proposal.probs).max(axis=-1)
    for row, count in enumerate(counts):
        assert (highest[row, :count] >= _UNSURE).all()
        assert count == WIDTH or highest[row, count] < _UNSURE
    num_fed = int((np.asarray(proposal.prefix.hidden) != 0).any(axis=(0, 2)).sum())
    assert num_fed > counts.max()
    check_prefix(cache, last, proposal, num_fed)


def test_padding_of_the_vocabulary_is_never_proposed(text, cache):
    """The target's own padding is masked outside of its layers; the drafter cuts its padding."""
    _, proposal = run_propose(text, cache, [3, 3, 3, 3], vocab_size=5)
    assert proposal.probs.shape == (len(LENGTHS), WIDTH, 61)
    assert (np.asarray(proposal.tokens) < 5).all()
    assert (np.asarray(proposal.probs)[..., 5:] == 0).all()
    np.testing.assert_allclose(proposal.probs.sum(axis=-1), 1, rtol=1e-5)


def test_the_last_call_is_spared_the_head(text, cache):
    """Its logits are not read: one product with the head, in the loop, is all there is."""
    drafter = build(FIRST, WIDTH)
    run = jax.jit(
        lambda params, cache: drafter.propose(
            None, (), inputs_of(text[ROWS, LENGTHS], WIDTH, WIDTH, view=TargetView(
                params, layered.apply, cache)),
        )
    )  # fmt: skip
    program = run.lower(layered.params(), cache).compile().as_text()
    assert len(re.findall(r"f32\[\d+,61\]\S* (?:dot|custom-call)\(", program)) == 1
