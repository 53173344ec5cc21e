"""The target's own layers as drafter: what is built, and single proposals."""

import dataclasses
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
from jspec.drafters.options import parse_layers
from jspec.models import make_apply
from jspec.speculation.types import TargetView
from tests import layered, tiny
from tests.drafters import rows
from tests.layered import ALL, FIRST, SUBSET, build
from tests.speculation import drive
from tests.speculation.drive import inputs_of

WIDTH, CAPACITY = 3, 24
LENGTHS = np.array([9, 1, 5, 14])
ROWS = np.arange(len(LENGTHS))
TEXT = np.random.default_rng(0).integers(0, 61, (len(LENGTHS), CAPACITY)).astype(np.int32)
LAST = TEXT[ROWS, LENGTHS]
_UNSURE = 0.4
# A target with scales, caps and a window, which the first layers must see as it does.
CONFIG = dataclasses.replace(
    layered.CONFIG, embedding_scale=7.0, residual_scale=0.7, logits_scale=0.6, logits_softcap=9.0,
    attention_softcap=6.0, window=6, windowed_layers=(0,),
)  # fmt: skip
APPLY = tiny.one_program(make_apply(CONFIG))
TARGET = types.SimpleNamespace(apply=APPLY, target=layered.params())


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


def test_the_flag_is_a_number_or_a_list():
    """A number is how many; whether the model has them is seen later."""
    for text, layers in {
        "8": tuple(range(8)), "1": (0,), "0-0": (0,), "0,1,2,29": (0, 1, 2, 29), "2-3,1": (2, 3, 1),
        "0-5,28,29": (0, 1, 2, 3, 4, 5, 28, 29),
    }.items():  # fmt: skip
        assert parse_layers(text) == layers
    flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(draft_layers="2-3,1"):
        assert read_drafter()[1].draft_layers == (2, 3, 1)


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
    with pytest.raises(InputError, match=f"^expected {message}"):
        parse_layers(text)


@pytest.fixture(scope="module")
def cache():
    """Returns the target's cache, which holds another number of tokens of each row."""
    empty = layered.empty_cache(len(LENGTHS), CAPACITY)
    full = APPLY(layered.params(), jnp.asarray(TEXT), empty)[2]
    return full.commit(jnp.asarray(LENGTHS, jnp.int32))


@functools.cache
def first_layers(vocab_size=61, **options):
    """Returns the drafter of the first layers of the target with scales."""
    target = {"target": CONFIG, "vocab_size": vocab_size}
    return rows.build("layer_skip", WIDTH, draft_layers=FIRST, **target, **options).drafter


def run_propose(cache, limit, **options):
    """Proposes after each row's committed tokens."""
    drafter = first_layers(**options)
    proposal, state = drive.propose(TARGET, drafter, None, (), LAST, limit, 1.0, cache=cache)
    assert state == ()
    return proposal


_first = jax.jit(functools.partial(APPLY, hidden_layers=(len(FIRST),)))
_rest = jax.jit(functools.partial(APPLY, first_layer=len(FIRST)))


def check_prefix(cache, proposal, num_fed):
    """Asserts that the target's call has begun on so many tokens of the block, and no further."""
    prefix = proposal.prefix
    assert prefix.num_layers == len(FIRST)
    assert prefix.cache.length.tolist() == LENGTHS.tolist()
    block = np.concatenate([LAST[:, None], proposal.tokens], axis=1)
    logits, outputs, whole = _first(layered.params(), block, cache)
    outputs = np.asarray(outputs)[:, :num_fed, 0]
    rounding = 1e-6 * np.abs(outputs).max()  # numbers of some 60 were added up
    hidden = np.asarray(prefix.hidden)
    np.testing.assert_allclose(hidden[:, :num_fed], outputs, atol=rounding)
    assert not hidden[:, num_fed:].any()
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
    begun = _rest(layered.params(), prefix.hidden, prefix.cache)[0]
    np.testing.assert_allclose(
        np.asarray(begun)[:, :num_fed], np.asarray(logits)[:, :num_fed], atol=1e-4
    )


@pytest.mark.parametrize("limit", [[3, 0, 1, 2], [0, 1, 1, 0], [0, 0, 0, 0]], ids=str)
def test_a_proposal_is_the_beginning_of_the_targets_call(cache, limit):
    """Also where rows want different numbers of drafts: the others go on with them.

    Where nothing is wanted the last token alone is fed: the verify call needs its hidden state.
    """
    proposal = run_propose(cache, limit)
    assert proposal.num_tokens.tolist() == limit
    check_prefix(cache, proposal, max(limit) + 1)


def test_an_unsure_row_stops_before_it_draws(cache):
    """Fewer drafts are meant than calls were made; what was fed is still whole.

    No padding of the vocabulary is proposed: the drafter cuts it, as the target masks it later.
    """
    proposal = run_propose(cache, 3, draft_confidence=_UNSURE, vocab_size=30)
    counts, probs = np.asarray(proposal.num_tokens), np.asarray(proposal.probs)
    assert 0 in counts
    assert counts.max() > 0
    assert probs.shape == (len(LENGTHS), WIDTH, 61)
    assert (probs[..., 30:] == 0).all()
    assert (np.asarray(proposal.tokens) < 30).all()
    for row, count in enumerate(counts):
        np.testing.assert_allclose(probs[row, :count].sum(axis=-1), 1, rtol=1e-5)
        assert (probs[row, :count].max(axis=-1) >= _UNSURE).all()
        assert count == WIDTH or probs[row, count].max() < _UNSURE
    num_fed = int((np.asarray(proposal.prefix.hidden) != 0).any(axis=(0, 2)).sum())
    assert num_fed > counts.max()
    check_prefix(cache, proposal, num_fed)


def test_the_last_call_is_spared_the_head(cache):
    """Its logits are not read: one product with the head, in the loop, is all there is."""
    run = jax.jit(
        lambda params, cache: first_layers().propose(
            None, (), inputs_of(LAST, WIDTH, WIDTH, view=TargetView(params, APPLY, cache))
        )
    )
    program = run.lower(layered.params(), cache).compile().as_text()
    assert len(re.findall(r"f32\[\d+,61\]\S* (?:dot|custom-call)\(", program)) == 1
