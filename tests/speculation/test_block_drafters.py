"""Invariant 1 of trained drafters: rounds of the real drafter, summed over all of their outcomes.

The target is a tiny decoder of three tokens. For every text of up to so many tokens the drafter's
own `propose` is run once for each path of drafts, its draws being forced to that path. So the sums
are over what it really reports: its distributions, and how many drafts it put forward. Three rounds
are composed; what is missing then is drawn from the target.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.dflash import DflashDrafter
from jspec.drafters.dflash_head import confidence_of, markov_embedding
from jspec.drafters.eagle import ParallelEagleDrafter
from jspec.drafters.eagle_head import EagleConfig
from jspec.drafters.mtp import MtpDrafter
from jspec.models import DecoderConfig, init_cache, make_apply
from jspec.sampling.distribution import sampling_probs
from jspec.speculation.acceptance import get_rule
from jspec.speculation.types import TargetView
from tests import tiny_dflash, tiny_mtp, tiny_peagle
from tests.cases import slow_unless
from tests.speculation.drive import QUICK, inputs_of
from tests.speculation.enumeration import acceptance_probs, next_token_probs
from tests.tiny import random_params

VOCAB, WIDTH, NUM_ROUNDS, NUM_TOKENS, CAPACITY = 3, 2, 3, 5, 16
CONFIG = DecoderConfig(
    vocab_size=VOCAB, embed_dim=8, hidden_dim=12, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=4, max_seq_len=64, num_mtp_layers=1,
)  # fmt: skip
START = (1, 2)
LONGEST = len(START) + NUM_TOKENS - 1  # text after which a round is enumerated
PATHS = np.array(list(itertools.product(range(VOCAB), repeat=WIDTH)), np.uint32)
NUM_TEXTS = VOCAB ** (NUM_TOKENS - 1)
SUBJECTS = (("dflash", 0.0), ("dflash", 0.7), ("markov", 0.0), ("confidence", 0.5),
            ("peagle", 0.0), ("mtp", 0.0), ("mtp", 0.7))  # fmt: skip
ALWAYS = (("rejection", "dflash", 0.7), ("block", "confidence", 0.5), ("block", "mtp", 0.7))
COMPILED = [(name, confidence) for _, name, confidence in ALWAYS]
HEADS = {
    "dflash": {},
    "markov": {"markov_rank": 2, "says_next": True},
    "confidence": {
        "markov_rank": 2, "has_confidence": True, "confidence_reads_markov": True,
        "says_next": True,
    },
}  # fmt: skip


@functools.cache
def target():
    """Returns the target's parameters."""
    return random_params(CONFIG, seed=0, std=0.9)


def forced(logits, settings, rng_keys):
    """Draws what the keys say; returns it with its distribution, see `draw_from_distribution`."""
    token = jax.random.key_data(rng_keys)[..., 1].astype(jnp.int32)
    return token, sampling_probs(logits[:, None], settings)[:, 0]


def make_drafter(name, kind=None, min_confidence=0.0):
    """Returns a drafter that draws what it is told, and its parameters."""
    if name == "mtp":
        options = {"min_confidence": min_confidence, "draw": forced}
        return tiny_mtp.drafter(WIDTH, CONFIG, kind or MtpDrafter, **options), None
    if name == "peagle":
        layer = dataclasses.replace(CONFIG, num_mtp_layers=0)
        config = EagleConfig(layer, VOCAB, (0, 2), has_embedding=True, mask_id=0)
        options = {"min_confidence": min_confidence, "draw": forced, "target": CONFIG}
        drafter = tiny_peagle.drafter(WIDTH, config, kind or ParallelEagleDrafter, **options)
        ids = jnp.arange(VOCAB, dtype=jnp.int32)
        return drafter, tiny_peagle.params(config, std=0.8) | {"ids": ids}
    kind = kind or DflashDrafter
    config = tiny_dflash.make_config(CONFIG, num_layers=1, **HEADS[name])
    drafter = kind(
        WIDTH, VOCAB, VOCAB, min_confidence, draw=forced, config=config, target=CONFIG,
        dtype=jnp.float32,
    )  # fmt: skip
    head = tiny_dflash.params(config, std=0.8)
    if "markov" in head:  # a bias that is felt
        head["markov"] = jax.tree.map(lambda leaf: 2.5 * leaf, head["markov"])
    return drafter, head


@functools.cache
def make_round(name, kind, min_confidence):
    """Returns a function from texts to every path's proposal and target distributions.

    All texts of a call are of one length, which is data as their number is: see `enumerated`.
    """
    drafter, head = make_drafter(name, kind, min_confidence)
    apply, params = make_apply(CONFIG), target()

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(texts, length):
        b = texts.shape[0]
        empty = init_cache(CONFIG, batch_size=b, capacity=CAPACITY, dtype=jnp.float32)
        # The newest token is consumed by no model yet.
        known, last = texts[:, :-1], jnp.take(texts, length - 1, axis=1)
        _, hidden, cache = apply(params, known, empty, hidden_layers=drafter.hidden_layers)
        cache = cache.commit(jnp.broadcast_to(length - 1, b))
        is_known = jnp.broadcast_to(jnp.arange(known.shape[1]) < length - 1, known.shape)
        state = drafter.observe(head, drafter.init(b, CAPACITY), known, hidden, is_known)
        paths = jnp.tile(jnp.asarray(PATHS), (b // len(PATHS), 1))
        keys = jax.random.wrap_key_data(jnp.stack([jnp.zeros_like(paths), paths], axis=-1))
        inputs = inputs_of(last, WIDTH, WIDTH, temperature=1.0)
        view = TargetView(params, apply, cache)
        proposal, _ = drafter.propose(head, state, inputs._replace(rng_keys=keys, view=view))
        drafts = paths.astype(jnp.int32)
        logits, _, _ = apply(params, jnp.concatenate([last[:, None], drafts], 1), cache)
        # Of a row that has stopped any path stands for all.
        return proposal.replace(tokens=drafts), jax.nn.softmax(logits)

    return run


def enumerated(name, kind, min_confidence, texts):
    """Returns proposals and distributions of every path after each text, and rows of padding."""
    rows = np.zeros([NUM_TEXTS, LONGEST], np.int32)
    rows[: len(texts), : len(texts[0])] = texts
    run = make_round(name, kind, min_confidence)
    return run(np.repeat(rows, len(PATHS), axis=0), jnp.int32(len(texts[0])))


def outcomes(rule, name, texts, kind, min_confidence):
    """Yields (text, emitted tokens, probability) of one round after each text, all of a length."""
    rows = np.repeat(np.asarray(texts, np.int32), len(PATHS), axis=0)
    proposal, probs = enumerated(name, kind, min_confidence, texts)
    counts, drawn = np.asarray(proposal.num_tokens), np.asarray(proposal.tokens)
    said = np.take_along_axis(np.asarray(proposal.probs, float), drawn[..., None], 2)[..., 0]
    # Where nothing was drawn, there is no distribution: all paths behind it are the same.
    is_drawn = np.asarray(proposal.probs).sum(axis=-1) > 0
    weights = np.where(is_drawn, said, 1 / VOCAB).prod(axis=1)
    accept = np.asarray(acceptance_probs(rule, probs, proposal), float)
    accept = np.where(np.arange(WIDTH) < counts[:, None], accept, 0)
    at_least = np.cumprod(np.pad(accept, ((0, 0), (1, 0)), constant_values=1.0), axis=1)
    exactly = at_least * (1 - np.pad(accept, ((0, 0), (0, 1))))
    for kept in range(WIDTH + 1):
        num_kept = np.full(len(counts), kept, np.int32)
        after = np.asarray(next_token_probs(rule, probs, proposal, num_kept), float)
        after *= (weights * exactly[:, kept])[:, None]
        for index, row in enumerate(rows):
            if weights[index] * exactly[index, kept] == 0:
                continue
            for token in range(VOCAB):
                yield tuple(row), (*drawn[index, :kept].tolist(), token), after[index, token]


@functools.cache
def target_joint(num_tokens):
    """Returns the target's own distribution of the tokens after START, as {tokens: probability}."""
    texts = np.array(list(itertools.product(range(VOCAB), repeat=num_tokens)), np.int32)
    rows = jnp.asarray(np.concatenate([np.tile(START, (len(texts), 1)), texts], axis=1), jnp.int32)
    empty = init_cache(CONFIG, batch_size=len(rows), capacity=CAPACITY, dtype=jnp.float32)
    probs = np.asarray(jax.nn.softmax(make_apply(CONFIG)(target(), rows, empty)[0]), float)
    place = np.arange(len(START) - 1, len(START) - 1 + num_tokens)
    said = np.take_along_axis(probs[:, place], texts[..., None], axis=2)[..., 0]
    return dict(zip(map(tuple, texts.tolist()), said.prod(axis=1), strict=True))


def worst_error(rule, name, kind=None, min_confidence=0.0):
    """Returns how far the first tokens' joint distribution is from the target's, at most."""
    rule = get_rule(rule) if isinstance(rule, str) else rule
    pending, finished = {START: 1.0}, {}
    for _ in range(NUM_ROUNDS):
        after = {}
        for _, group in itertools.groupby(sorted(pending, key=len), key=len):
            group = [text for text in group if pending[text] > 0]
            for text, emitted, prob in outcomes(rule, name, group, kind, min_confidence):
                whole = (*text, *emitted)
                longer = after if len(whole) < len(START) + NUM_TOKENS else finished
                whole = whole[: len(START) + NUM_TOKENS]
                longer[whole] = longer.get(whole, 0.0) + pending[text] * prob
        pending = after
    joint = dict.fromkeys(target_joint(NUM_TOKENS), 0.0)
    for text, prob in finished.items():
        joint[text[len(START) :]] += prob
    for text, prob in pending.items():  # the rest is the target's
        known = text[len(START) :]
        share = {full: p for full, p in target_joint(NUM_TOKENS).items()
                 if full[: len(known)] == known}  # fmt: skip
        for full, p in share.items():
            joint[full] += prob * p / sum(share.values())
    assert abs(sum(joint.values()) - 1) < 1e-5, "every outcome is counted once"
    return max(abs(joint[text] - p) for text, p in target_joint(NUM_TOKENS).items())


CASES = [
    slow_unless((rule, name, confidence) in ALWAYS, rule, name, confidence)
    for rule in ("rejection", "block", "k_seq")
    for name, confidence in SUBJECTS
]


@pytest.mark.parametrize(("rule", "name", "confidence"), CASES)
def test_every_rule_emits_the_targets_distribution(rule, name, confidence):
    """To 1e-6 over three rounds; with a confidence, rows stop at 0, 1 and 2 drafts."""
    assert worst_error(rule, name, min_confidence=confidence) < 1e-6


@pytest.mark.parametrize(
    ("name", "confidence"), [slow_unless(one in COMPILED, *one) for one in SUBJECTS]
)
def test_the_sums_are_over_what_they_are_about(name, confidence):
    """A confidence stops rows at every number; drafts of one pass are independent."""
    texts = np.array(list(itertools.product(range(VOCAB), repeat=3)), np.int32)
    proposal, _ = enumerated(name, None, confidence, texts)
    rows = slice(len(texts) * len(PATHS))
    counts = set(np.asarray(proposal.num_tokens)[rows].tolist())
    assert counts == ({0, 1, 2} if confidence else {WIDTH})
    second = np.asarray(proposal.probs)[rows, 1].reshape(len(texts), len(PATHS), VOCAB)
    is_there = second.sum(axis=-1, keepdims=True) > 0
    spread = np.where(is_there, second, 0).max(axis=1) - np.where(is_there, second, 1).min(axis=1)
    assert (spread.max() > 0.05) == (name not in ("dflash", "peagle"))


class PeeksAtDrafts:
    """The natural but wrong drafter: it takes back a draft that it drew, as it looks unlikely."""

    def propose(self, params, state, inputs):
        proposal, state = super().propose(params, state, inputs)
        drawn = jnp.take_along_axis(proposal.probs, proposal.tokens[..., None], axis=2)[..., 0]
        kept = jnp.cumprod(drawn >= 0.3, axis=1, dtype=jnp.int32).sum(axis=1)
        return proposal.replace(num_tokens=jnp.minimum(proposal.num_tokens, kept)), state


class Peeking(PeeksAtDrafts, DflashDrafter):
    """Of a block."""


class PeekingMtp(PeeksAtDrafts, MtpDrafter):
    """Of a chain."""


class PeekingHead(DflashDrafter):
    """Its confidence head reads the draft itself in the place of the one before."""

    def propose(self, params, state, inputs):
        free, wanted = DflashDrafter(**vars(self) | {"min_confidence": 0.0}), inputs.wanted()
        cache = free.empty_block(params, state, inputs, wanted).cache
        block = free.read_block(params, state, inputs, wanted, cache)
        proposal, state = free.propose(params, state, inputs)
        is_kept = jnp.ones_like(wanted, bool)
        kept = jnp.zeros_like(wanted)
        for index in range(WIDTH):
            drawn = markov_embedding(params, proposal.tokens[:, index, None])[:, 0]
            sure = confidence_of(self.config, params, block.hidden[:, index], drawn)
            is_kept &= sure >= self.min_confidence
            kept += is_kept.astype(jnp.int32)
        return proposal.replace(num_tokens=jnp.minimum(proposal.num_tokens, kept)), state


@pytest.mark.parametrize(
    ("wrong", "name"),
    [(Peeking, "dflash"), slow_unless(False, PeekingMtp, "mtp"), (PeekingHead, "confidence")],
)
def test_confidence_from_drawn_tokens_is_seen(wrong, name):
    """Negative control: a draft may be looked at before it is drawn, and not after."""
    assert worst_error("rejection", name, wrong, min_confidence=0.5) > 1e-3
