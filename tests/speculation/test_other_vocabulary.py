"""Invariant 1 with drafts of another vocabulary: what a drafter reports is what it drew from.

Target and draft are toys whose distributions depend on two of their own tokens. The target writes
a, b, c and ab; the draft a, b, c and d, in another order, and reads ab as a and b. What the drafter
proposes after each context of the target is asked of the drafter itself, and then summed over every
path of three rounds, as in test_lossless.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jspec.drafters.translated_model import TranslatedDrafter, TranslatedParams
from jspec.drafters.vocabulary_map import make_vocabulary_map, most_alike
from jspec.weights.tokenizers.tokenizer import Tokenizer
from tests.cases import slow_unless
from tests.speculation.drive import inputs_of
from tests.speculation.enumeration import as_float32, enumerate_paths, worst_error_of
from tests.speculation.test_lossless import LOSSLESS, TOLERANCE, VISIBLE
from tests.speculation.toys import softmax, toy_apply, toy_cache

VOCAB, WIDTH = 4, 2


def toy_tokenizer(*texts):
    """Returns a tokenizer of just these texts; longer ones are merged of the first two."""
    merges = [(text[0], text[1:]) for text in texts if len(text) > 1]
    backend = Backend(models.BPE({text: i for i, text in enumerate(texts)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, special_tokens={})


TARGET, DRAFT = toy_tokenizer("a", "b", "c", "ab"), toy_tokenizer("d", "c", "a", "b")
READINGS = {0: [2], 1: [3], 2: [1], 3: [2, 3]}
SHARED = {0: 2, 1: 3, 2: 1}  # the draft's ids


@functools.cache
def tables():
    """Returns logits of target and draft, each [previous, last, next] of its own tokens."""
    rng = np.random.default_rng(3)
    target, draft = (2 * rng.normal(size=(VOCAB,) * 3) for _ in range(2))
    draft[1, 1, 2] += 6  # after c c the draft says a, and then b
    draft[1, 2, 3] += 6
    return target, draft


def expected_draft(temperature=1.0):
    """Returns what the draft would say of shared tokens alone, [previous, last, next]."""
    draft_table, result = tables()[1], np.zeros((VOCAB,) * 3)
    for previous in range(VOCAB):
        for last in range(VOCAB):
            context = [*READINGS[previous], *READINGS[last]][-2:]
            logits = draft_table[tuple(context)]
            shared = softmax(logits[list(SHARED.values())], temperature)
            result[previous, last, list(SHARED)] = shared
    return as_float32(result)


@functools.cache
def propose(translation, temperature):
    """Returns the drafter's proposal after every context, [v^2 ...], previous token first."""
    mapped, reading = make_vocabulary_map(TARGET, DRAFT, VOCAB, VOCAB)
    drafter = TranslatedDrafter(
        WIDTH, VOCAB, VOCAB, apply=toy_apply, init_cache=toy_cache, reading=reading,
        translation=translation, num_alike=most_alike(mapped.target_table), max_seq_len=99,
    )  # fmt: skip
    params = TranslatedParams(
        jnp.asarray(tables()[1], jnp.float32), jax.tree.map(jnp.asarray, mapped)
    )
    b = VOCAB**2
    contexts = np.array([[i, j] for i in range(VOCAB) for j in range(VOCAB)], np.int32)

    @jax.jit
    def run(params, seeds):
        state = drafter.init(b, 32)
        # A token before, so that no context begins a text.
        committed = jnp.concatenate([jnp.full([b, 1], 2), contexts[:, :1]], axis=1)
        shown = committed.astype(jnp.int32), jnp.zeros((b, 2, 1)), jnp.ones((b, 2), bool)
        state = drafter.observe(params, state, *shown)
        fields = {"seeds": seeds, "temperature": temperature}
        inputs = inputs_of(contexts[:, 1], WIDTH, WIDTH, **fields)
        return drafter.propose(params, state, inputs)[0]

    return [run(params, jnp.full([b], seed, jnp.uint32)) for seed in range(4)]


@pytest.mark.parametrize("temperature", [slow_unless(False, 0.5), 1.0])
def test_the_reported_distribution_is_the_drafts_own_over_shared_tokens(temperature):
    """Also after its own drafts: the second is reported given the first."""
    expected = expected_draft(temperature)
    firsts = set()
    for proposal in propose("shared", temperature):
        probs = np.asarray(proposal.probs)
        np.testing.assert_allclose(probs[:, 0].reshape(VOCAB, VOCAB, VOCAB), expected, atol=1e-6)
        first, last = np.asarray(proposal.tokens)[:, 0], np.arange(VOCAB**2) % VOCAB
        np.testing.assert_allclose(probs[:, 1], expected[last, first], atol=1e-6)
        assert (np.asarray(proposal.num_tokens) == WIDTH).all()
        assert (probs[..., 3] == 0).all()
        firsts |= set(first.tolist())
    assert firsts == set(SHARED)


def reported():
    """Returns the reported distributions of first drafts, [previous, last, next]."""
    return as_float32(propose("shared", 1.0)[0].probs[:, 0]).reshape((VOCAB,) * 3)


def error_of(rule, paths, target):
    """Returns how far the joint distribution of what is emitted is from the target's, at most."""
    return worst_error_of(LOSSLESS[rule], target, paths)


@pytest.mark.parametrize("name", LOSSLESS)
def test_drafts_of_shared_tokens_are_lossless(name):
    """The target's other tokens come from the residual."""
    target = as_float32(softmax(tables()[0]))
    paths = enumerate_paths(target, reported(), WIDTH)
    assert error_of(name, paths, target) < TOLERANCE


@pytest.mark.parametrize("name", LOSSLESS)
def test_an_intersection_that_is_not_normalised_is_caught(name):
    """Negative control: drawn from shared tokens, reported as the draft's whole distribution."""
    target, drawn = as_float32(softmax(tables()[0])), reported()
    paths = enumerate_paths(target, drawn, WIDTH)
    whole = np.zeros_like(drawn)
    for previous in range(VOCAB):
        for last in range(VOCAB):
            context = [*READINGS[previous], *READINGS[last]][-2:]
            probs = softmax(tables()[1][tuple(context)])
            whole[previous, last, list(SHARED)] = probs[list(SHARED.values())]
    chains = paths.chains
    wrong = whole[chains[:, :WIDTH], chains[:, 1 : 1 + WIDTH]]
    proposal = paths.proposal.replace(probs=jnp.asarray(wrong, jnp.float32))
    assert error_of(name, paths._replace(proposal=proposal), target) > VISIBLE


def spelt():
    """Returns the spelt drafts after each context, [v^2 w], and their numbers."""
    proposal = propose("spelling", 1.0)[0]
    assert proposal.probs is None
    return np.asarray(proposal.tokens), np.asarray(proposal.num_tokens)


def test_what_is_spelt_is_the_drafts_likeliest_text():
    """Of its whole vocabulary: `d` cannot be written and ends a draft, `ab` becomes one token."""
    draft_table = tables()[1]
    tokens, counts = spelt()
    seen = set()
    for row in range(VOCAB**2):
        text = [*READINGS[row // VOCAB], *READINGS[row % VOCAB]]
        said = []
        for _ in range(WIDTH):
            said.append(int(draft_table[text[-2], text[-1]].argmax()))
            text.append(said[-1])
        writable = said[: said.index(0)] if 0 in said else said
        expected = [3] if writable == [2, 3] else [{2: 0, 3: 1, 1: 2}[i] for i in writable]
        assert tokens[row, : counts[row]].tolist() == expected
        seen |= {len(expected), *(["ab"] if expected == [3] else [])}
    assert {0, 2, "ab"} <= seen, seen


@pytest.mark.parametrize("name", LOSSLESS)
def test_spelt_drafts_are_lossless(name):
    """They follow from the text alone: each context has one path, as long as the draft has it."""
    target = as_float32(softmax(tables()[0]))
    tokens, counts = spelt()
    paths = enumerate_paths(target, np.full((VOCAB,) * 3, 1 / VOCAB), WIDTH)
    index, real = paths.index, np.arange(WIDTH) < counts[paths.index][:, None]
    # Of the padding one path stands for all.
    is_own = (paths.chains[:, 2:] == np.where(real, tokens[index], 0)).all(axis=1)
    proposal = paths.proposal.replace(probs=None, num_tokens=jnp.asarray(counts[index], jnp.int32))
    weights = is_own.astype(np.float64)
    assert (np.bincount(index, weights) == 1).all()
    assert error_of(name, paths._replace(weights=weights, proposal=proposal), target) < TOLERANCE
