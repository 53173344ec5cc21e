"""The head of DFlash as drafter: its pass, its cache, its drafts and its trees."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from jspec.drafters.spec import Shape
from tests import tiny, tiny_dflash
from tests.drafters.rows import LAST, LENGTHS, TEXT, WIDTH, observe, paths_of, propose
from tests.speculation.drive import drafts_of

CUT = dataclasses.replace(
    tiny_dflash.CONFIG, layer=dataclasses.replace(tiny_dflash.CONFIG.layer, vocab_size=40),
    has_head=True, has_embedding=True,
)  # fmt: skip
CONFIGS = {
    "DFlash": tiny_dflash.CONFIG,
    "cut vocabulary": CUT,
    "a token as mask, next token, causal": dataclasses.replace(
        tiny_dflash.CONFIG, mask_id=60, block_size=4, says_next=True, causal_layers=(0,)
    ),
    "window, scales": dataclasses.replace(
        tiny_dflash.CONFIG,
        layer=dataclasses.replace(
            tiny_dflash.CONFIG.layer, window=20, windowed_layers=(0, 1),
            embedding_scale=2.0, logits_scale=0.5, logits_softcap=3.0,
        ),
        causal_layers=(1,),
    ),
}  # fmt: skip


# Ids of the target that are no padding.
USED = {"DFlash": 50, "cut vocabulary": 20}


def make(name):
    """Returns the drafter of a head, and the head."""
    config = CONFIGS[name]
    drafter = dataclasses.replace(tiny_dflash.drafter(WIDTH, config), vocab_size=USED.get(name, 61))
    return drafter, tiny_dflash.params(config)


def said_of(pair, config, head, row, num_drafts=WIDTH):
    """Returns the logits of a row's drafts by numpy, and what the head reads."""
    length = LENGTHS[row]
    hidden = tiny_dflash.features_of(pair, TEXT[row : row + 1, :length], config)[0]
    return tiny_dflash.reference_logits(
        config, head, tiny.CONFIG, pair.target, hidden, LAST[row], num_drafts
    )


def reference(pair, name, head, row):
    """Returns the logits of a row's drafts by numpy, over all of the target's tokens, [w v]."""
    config, logits = CONFIGS[name], np.full((WIDTH, 61), -np.inf)
    ids = np.asarray(head["ids"]) if config.is_cut else np.arange(61)
    logits[:, ids] = said_of(pair, config, head, row)[0]
    logits[:, USED.get(name, 61) :] = -np.inf
    return logits


@pytest.mark.parametrize("name", CONFIGS)
def test_its_distributions_are_those_of_one_plain_attention(tiny_pair, name):
    """Of rows that lag by 140, 66 and 3 tokens, beside a reference in numpy without a cache.

    Padding of the target's vocabulary is never proposed.
    """
    drafter, head = make(name)
    proposal, state = propose(tiny_pair, drafter, head, observe(tiny_pair, drafter, head), 1.0)
    np.testing.assert_array_equal(state.cache.length, LENGTHS)
    np.testing.assert_array_equal(proposal.num_tokens, [WIDTH] * 3)
    assert (np.asarray(proposal.tokens) < drafter.vocab_size).all()
    for row in range(len(LENGTHS)):
        expected = scipy.special.softmax(reference(tiny_pair, name, head, row), axis=-1)
        np.testing.assert_allclose(proposal.probs[row], expected, rtol=2e-3, atol=1e-5)


MARKOV = dataclasses.replace(
    tiny_dflash.CONFIG, markov_rank=4, says_next=True, has_confidence=True,
    confidence_reads_markov=True,
)  # fmt: skip


def walk(config, head, logits, hidden, first, at_least=0.0):
    """Returns the greedy drafts of a Markov head by numpy, and their estimates."""
    head = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), head)
    ids = np.asarray(head["ids"], int) if config.is_cut else np.arange(61)
    drafts, estimates, token = [], [], first
    for said, read in zip(logits, hidden, strict=True):
        before = head["markov"]["embedding"][token]
        inputs = np.concatenate([read, before]) if config.confidence_reads_markov else read
        weights = head["confidence"]
        estimates.append(scipy.special.expit(weights["kernel"][0] @ inputs + weights["bias"][0]))
        if estimates[-1] < at_least:
            break
        token = int(ids[(said + head["markov"]["kernel"] @ before).argmax()])
        drafts.append(token)
    return drafts, estimates


@pytest.mark.parametrize(("reads_markov", "is_cut"), [(True, False), (False, True)])
def test_dsparks_heads_say_what_numpy_says(tiny_pair, reads_markov, is_cut):
    """Each draft is biased by the one before, and a row stops where the estimate is too low."""
    config = dataclasses.replace(MARKOV, confidence_reads_markov=reads_markov)
    if is_cut:
        config = dataclasses.replace(config, layer=CUT.layer, has_head=True)
    head = tiny_dflash.params(config)
    said = [said_of(tiny_pair, config, head, row) for row in range(len(LENGTHS))]
    pairs = list(zip(said, LAST, strict=True))
    least = float(np.median([walk(config, head, *one, last)[1] for one, last in pairs]))
    drafter = tiny_dflash.drafter(WIDTH, config, min_confidence=least)
    proposal, _ = propose(tiny_pair, drafter, head, observe(tiny_pair, drafter, head))
    expected = [walk(config, head, *one, last, least)[0] for one, last in pairs]
    assert drafts_of(proposal) == expected
    assert drafter.may_be_silent
    assert len(set(map(len, expected))) > 1
    assert max(map(len, expected)) > 1


def test_a_row_of_which_nothing_is_wanted_lags(tiny_pair):
    """Its cache stays where it was, its neighbour's does not, and it proposes nothing.

    All drafts that are wanted at temperature 0 are the likeliest tokens.
    """
    drafter, head = make("DFlash")
    state = observe(tiny_pair, drafter, head)
    lag = drafter.lag(state, jnp.zeros([3], jnp.int32))
    np.testing.assert_array_equal(lag, LENGTHS - [4, 4, 3])
    free, _ = propose(tiny_pair, drafter, head, state)
    expected = reference(tiny_pair, "DFlash", head, 2).argmax(axis=-1)
    np.testing.assert_array_equal(free.tokens[2], expected)
    proposal, state = propose(tiny_pair, drafter, head, state, limit=[0, 2, 0])
    np.testing.assert_array_equal(proposal.num_tokens, [0, 2, 0])
    np.testing.assert_array_equal(state.cache.length, [0, LENGTHS[1], 0])


def test_what_lies_behind_the_context_is_never_read(tiny_pair):
    """Old blocks of masks and rejected tokens stay in memory: poison there changes nothing.

    Poison in the context, the negative control, does.
    """
    drafter, head = make("DFlash")
    clean, state = propose(tiny_pair, drafter, head, observe(tiny_pair, drafter, head), 1.0)

    def poisoned(offset):
        def spoil(leaf):
            slots = np.arange(leaf.shape[2]) >= LENGTHS[:, None] + offset
            return jnp.asarray(np.where(slots[:, None, :, None], np.float32(77.0), leaf))

        cache = state.cache.replace(
            keys=tuple(map(spoil, state.cache.keys)), values=tuple(map(spoil, state.cache.values))
        )
        spoilt = state.replace(cache=cache, features=spoil(state.features))
        return np.asarray(propose(tiny_pair, drafter, head, spoilt, 1.0)[0].probs)

    np.testing.assert_array_equal(poisoned(0), clean.probs)
    assert np.abs(poisoned(-1) - clean.probs).max() > 0.01


def test_a_block_has_one_slot_that_drafts_nothing():
    """Three slots say two drafts of DFlash, and three of DSpark."""
    config = dataclasses.replace(tiny_dflash.CONFIG, block_size=3)
    assert config.most_drafts == 2
    assert dataclasses.replace(config, says_next=True).most_drafts == 3


def best_first(logits, bias, ids, root, num_nodes, branches):
    """Returns the paths of the best nodes by numpy: products of the levels' probabilities."""
    paths, level = [], [((), 0.0)]
    for said in logits:
        wider = []
        # As many of a level are gone on from as there are branches.
        for path, score in sorted(level, key=lambda node: -node[1])[:branches]:
            biased = scipy.special.log_softmax(said + bias(path[-1] if path else root))
            best = np.argsort(-biased, kind="stable")[:branches]
            wider += [((*path, int(ids[token])), score + biased[token]) for token in best]
        paths += wider
        level = wider
    return {path for path, _ in sorted(paths, key=lambda node: -node[1])[:num_nodes]}


@pytest.mark.parametrize("name", ["cut vocabulary", "Markov"])
def test_its_tree_is_the_best_by_products_of_marginals(tiny_pair, name):
    """Of one pass, without feeding any draft (DDTree)."""
    config = MARKOV if name == "Markov" else CONFIGS[name]
    head, depth, size, branches = tiny_dflash.params(config, std=0.2), 3, 7, 3
    drafter = tiny_dflash.drafter(size, config, shape=Shape(size, depth, branches))
    state = observe(tiny_pair, drafter, head)
    proposal, _ = propose(tiny_pair, drafter, head, state, limit=size)
    ids = np.asarray(head["ids"]) if config.is_cut else np.arange(61)

    def bias(token):
        if not config.markov_rank:
            return 0.0
        markov = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), head["markov"])
        return markov["kernel"] @ markov["embedding"][token]

    for row in range(len(LENGTHS)):
        logits, _ = said_of(tiny_pair, config, head, row, depth)
        paths = paths_of(proposal, row)
        assert set(paths) == best_first(logits, bias, ids, LAST[row], size, branches)
        assert max(map(len, paths)) > 1
