"""The head of DFlash as drafter: its pass, its cache, and its drafts through the whole step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from jspec.common.errors import InputError
from jspec.drafters import DrafterOptions, DrafterSpec, make_drafter
from jspec.drafters.dflash_head import save_dflash
from jspec.drafters.spec import Shape
from tests import tiny, tiny_dflash
from tests.cases import slow_unless
from tests.drafters.rows import LENGTHS, WIDTH, observe
from tests.speculation.drive import propose

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


def reference(pair, config, head, text, row):
    """Returns the logits of a row's drafts by numpy, over all of the target's tokens, [w v]."""
    length = LENGTHS[row]
    hidden = tiny_dflash.features_of(pair, text[row : row + 1, :length], config)[0]
    said, _ = tiny_dflash.reference_logits(
        config, head, tiny.CONFIG, pair.target, hidden, text[row, length], WIDTH
    )
    if not config.is_cut:
        return said
    logits = np.full((WIDTH, 61), -np.inf)
    logits[:, np.asarray(head["ids"])] = said
    return logits


@pytest.mark.parametrize("name", CONFIGS)
def test_its_distributions_are_those_of_one_plain_attention(tiny_pair, text, last, name):
    """Of rows that lag by 140, 66 and 3 tokens, beside a reference in numpy without a cache."""
    config = CONFIGS[name]
    drafter, head = tiny_dflash.drafter(WIDTH, config), tiny_dflash.params(config)
    state = observe(tiny_pair, drafter, head)
    proposal, state = propose(tiny_pair, drafter, head, state, last, [WIDTH] * 3, temperature=1.0)
    np.testing.assert_array_equal(state.cache.length, LENGTHS)
    for row in range(len(LENGTHS)):
        expected = scipy.special.softmax(reference(tiny_pair, config, head, text, row), axis=-1)
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
def test_dsparks_heads_say_what_numpy_says(tiny_pair, text, last, reads_markov, is_cut):
    """Each draft is biased by the one before, and a row stops where the estimate is too low."""
    config = dataclasses.replace(MARKOV, confidence_reads_markov=reads_markov)
    if is_cut:
        config = dataclasses.replace(config, layer=CUT.layer, has_head=True)
    head = tiny_dflash.params(config)
    drafter = tiny_dflash.drafter(WIDTH, config)
    state = observe(tiny_pair, drafter, head)
    free, _ = propose(tiny_pair, drafter, head, state, last, [WIDTH] * 3)
    said, estimates = [], []
    for row, length in enumerate(LENGTHS):
        hidden = tiny_dflash.features_of(tiny_pair, text[row : row + 1, :length])[0]
        said.append(tiny_dflash.reference_logits(
            config, head, tiny.CONFIG, tiny_pair.target, hidden, text[row, length], WIDTH
        ))  # fmt: skip
        drafts, sure = walk(config, head, *said[-1], last[row])
        assert free.tokens[row].tolist() == drafts
        estimates.append(sure)
    least = float(np.median(estimates))
    careful = dataclasses.replace(drafter, min_confidence=least)
    proposal, _ = propose(tiny_pair, careful, head, state, last, [WIDTH] * 3)
    expected = [len(walk(config, head, *pair, last[row], least)[0])
                for row, pair in enumerate(said)]  # fmt: skip
    np.testing.assert_array_equal(proposal.num_tokens, expected)
    assert careful.may_be_silent
    assert len(set(expected)) > 1


@pytest.mark.parametrize(("used", "name"), [(50, "DFlash"), (20, "cut vocabulary")])
def test_the_padding_of_a_vocabulary_is_never_proposed(tiny_pair, text, last, used, name):
    """Ids that no tokenizer has, at the end of the target's table."""
    config = CONFIGS[name]
    drafter = dataclasses.replace(tiny_dflash.drafter(WIDTH, config), vocab_size=used)
    head = tiny_dflash.params(config)
    state = observe(tiny_pair, drafter, head)
    proposal, _ = propose(tiny_pair, drafter, head, state, last, [WIDTH] * 3, temperature=1.0)
    assert (np.asarray(proposal.tokens) < used).all()
    assert (np.asarray(proposal.probs)[..., used:] == 0).all()
    np.testing.assert_array_equal(proposal.num_tokens, [WIDTH] * 3)


def test_a_row_of_which_nothing_is_wanted_lags(tiny_pair, text, last):
    """Its cache stays where it was, its neighbour's does not, and it proposes nothing.

    All drafts that are wanted at temperature 0 are the likeliest tokens.
    """
    drafter, head = tiny_dflash.drafter(WIDTH), tiny_dflash.params()
    state = observe(tiny_pair, drafter, head)
    np.testing.assert_array_equal(
        drafter.lag(state, jnp.zeros([3], jnp.int32)), LENGTHS - [4, 4, 3]
    )
    free, _ = propose(tiny_pair, drafter, head, state, last, [WIDTH] * 3)
    expected = reference(tiny_pair, tiny_dflash.CONFIG, head, text, 2).argmax(axis=-1)
    np.testing.assert_array_equal(free.tokens[2], expected)
    proposal, state = propose(tiny_pair, drafter, head, state, last, [0, 2, 0])
    np.testing.assert_array_equal(proposal.num_tokens, [0, 2, 0])
    np.testing.assert_array_equal(state.cache.length, [0, LENGTHS[1], 0])


def test_what_lies_behind_the_context_is_never_read(tiny_pair, text, last):
    """Old blocks of masks and rejected tokens stay in memory: poison there changes nothing.

    Poison in the context, the negative control, does.
    """
    drafter, head = tiny_dflash.drafter(WIDTH), tiny_dflash.params()
    state = observe(tiny_pair, drafter, head)
    limits = [WIDTH] * 3
    clean, state = propose(tiny_pair, drafter, head, state, last, limits, temperature=1.0)

    def poisoned(offset):
        def spoil(leaf):
            slots = jnp.arange(leaf.shape[2]) >= jnp.asarray(LENGTHS)[:, None] + offset
            return jnp.where(slots[:, None, :, None], 77.0, leaf)

        cache = state.cache.replace(
            keys=tuple(map(spoil, state.cache.keys)), values=tuple(map(spoil, state.cache.values))
        )
        spoilt = state.replace(cache=cache, features=spoil(state.features))
        return propose(tiny_pair, drafter, head, spoilt, last, limits, temperature=1.0)[0].probs

    np.testing.assert_array_equal(poisoned(0), clean.probs)
    assert np.abs(poisoned(-1) - clean.probs).max() > 0.01


@pytest.mark.parametrize(("says_next", "most"), [(False, 2), (True, 3)])
def test_there_are_no_more_drafts_than_a_block_has(tmp_path, says_next, most):
    """Three slots say two drafts of DFlash, and three of DSpark."""
    config = dataclasses.replace(tiny_dflash.CONFIG, block_size=3, says_next=says_next)
    save_dflash(tmp_path / "head", config, tiny_dflash.params(config))
    options = DrafterOptions(draft_head=str(tmp_path / "head"))
    for wanted in (1, 7):
        spec = DrafterSpec(wanted, tiny.CONFIG, 61, None, jnp.float32, options=options)
        drafter = make_drafter("dflash", spec).drafter
        assert drafter.num_draft_tokens == drafter.kinds[0].most == min(wanted, most)


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


@pytest.mark.parametrize("name", [slow_unless(False, "DFlash"), "cut vocabulary", "Markov"])
def test_its_tree_is_the_best_by_products_of_marginals(tiny_pair, text, last, name):
    """Of one pass, without feeding any draft (DDTree)."""
    config = MARKOV if name == "Markov" else CONFIGS[name]
    head, depth, size, branches = tiny_dflash.params(config, std=0.2), 3, 7, 3
    plain = tiny_dflash.drafter(size, config)
    drafter = dataclasses.replace(plain, shape=Shape(size, depth, branches))
    state = observe(tiny_pair, drafter, head)
    proposal, _ = propose(tiny_pair, drafter, head, state, last, [size] * 3)
    ids = np.asarray(head["ids"]) if config.is_cut else np.arange(61)

    def bias(token):
        if not config.markov_rank:
            return 0.0
        markov = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), head["markov"])
        return markov["kernel"] @ markov["embedding"][token]

    for row, length in enumerate(LENGTHS):
        hidden = tiny_dflash.features_of(tiny_pair, text[row : row + 1, :length], config)[0]
        logits, _ = tiny_dflash.reference_logits(
            config, head, tiny.CONFIG, tiny_pair.target, hidden, text[row, length], depth
        )
        drafts, parents = proposal.tokens[row].tolist(), proposal.parents[row].tolist()
        paths = []
        for draft, parent in zip(drafts, parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), draft))
        assert set(paths) == best_first(logits, bias, ids, text[row, length], size, branches)
    assert max(map(len, paths)) > 1


def test_a_tree_is_no_deeper_than_a_block(tmp_path):
    """One line says how deep it may be."""
    config = dataclasses.replace(tiny_dflash.CONFIG, block_size=3)
    save_dflash(tmp_path / "head", config, tiny_dflash.params(config))
    options = DrafterOptions(draft_head=str(tmp_path / "head"), tree_depth=3)
    spec = DrafterSpec(6, tiny.CONFIG, 61, None, jnp.float32, options=options)
    with pytest.raises(InputError, match="expected tree_depth of at most 2, the drafts of the"):
        make_drafter("dflash", spec)
