"""A draft model of another vocabulary: what it proposes, what its cache holds, and who may use it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.common.errors import InputError
from jspec.drafters import DrafterOptions, make_drafter
from jspec.generation.drafter_spec import make_spec
from jspec.models import init_cache, make_apply
from jspec.weights.tokenizers.byte_tokenizer import ByteTokenizer
from jspec.weights.tokenizers.tokenizer import learn_bpe
from tests import tiny_models
from tests.speculation.drive import Engine, assert_committed_equal, emitted_in_row
from tests.tiny_models import CONFIG, make_model, peaked_params

WIDTH, CAPACITY = 4, 120
TEXT = "the cat sat on the mat. the dog sat on the cat. a rat ate the hat of the dog. "
PROMPTS = [b"the cat sat", b"a rat", b" on the", b"dog. the \xf0\x9f"]


@functools.cache
def tokenizers():
    """Returns two tokenizers with other ids, and texts that they cut differently."""
    bpe = learn_bpe([TEXT] * 9, 330, bos="<s>", eos="</s>")
    return {"bpe": bpe, "bytes": ByteTokenizer(300, eos_ids=(299,))}


@functools.cache
def model(name, seed=0):
    """Returns a tiny model over that tokenizer, with peaked distributions."""
    tokenizer = tokenizers()[name]
    ends = tuple(tokenizer.eos_ids)
    size = tokenizer.vocab_size
    config = dataclasses.replace(CONFIG, vocab_size=size, eos_ids=ends, num_layers=1 + (seed > 0))
    params = peaked_params(config, seed)
    # Both like the same bytes, or nothing would be kept: the ends of rows are left to the limit.
    liking = np.zeros([size, 1], np.float32)
    for i in range(size):
        piece = tokenizer.piece(i, False)
        liking[i] = 1.6 if piece and set(piece) <= set(TEXT.encode()) else 0.4
    params = {**params, "head": params["head"] * liking}
    return make_model(config, params=params, tokenizer=tokenizer, name=f"{name} {seed}")


def spec_of(target, draft, **options):
    """Returns what a drafter over that pair is built from."""
    return make_spec(target, draft, "model", DrafterOptions(**options), WIDTH)


@functools.cache
def engine_of(target, draft, rule="rejection", **options):
    """Returns the compiled rounds of a pair."""
    target, draft = model(target), model(draft, 1)
    built = make_drafter("model", spec_of(target, draft, **options))
    empty = functools.partial(empty_cache, target)
    params = target.params, built.params
    return Engine(make_apply(target.config), empty, params, built.drafter, rule, capacity=CAPACITY)


def empty_cache(loaded, batch_size, capacity):
    """Returns a model's empty cache."""
    return init_cache(loaded.config, batch_size=batch_size, capacity=capacity, dtype=jnp.float32)


def reading_of(engine, draft):
    """Returns the tokens that the draft reads in each row, [b s], and their numbers."""
    drafter, text = engine.drafter, draft.text
    width = draft.cache.capacity
    begin = jnp.zeros_like(text.history.length)
    window = jax.jit(lambda tables, text: text.window(tables, drafter.reading, begin, width))
    return window(engine.params.draft.tables, text), text.length(drafter.reading)


@functools.cache
def fresh_prefill(target, draft):
    """Returns a function from draft tokens [b s] to the draft's cache of one pass over them."""
    loaded = model(draft, 1)
    apply = make_apply(loaded.config)
    return jax.jit(lambda tokens: apply(loaded.params, tokens, empty_cache(loaded, *tokens.shape))[2])


MODES = [("shared", 0.0), ("shared", 1.0), ("spelling", 0.0), ("spelling", 1.0), ("auto", (0.0, 1.0, 0.0, 1.0))]
PAIRS = [("bpe", "bytes"), ("bytes", "bpe")]


@pytest.mark.parametrize(("translation", "temperature"), MODES, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_caches_equal_a_fresh_prefill_after_every_round(pair, translation, temperature):
    """In every slot that counts as cached, whatever was kept, spelt or cut anew.

    And the draft reads the bytes that the target has said, no more and no less.
    """
    engine = engine_of(*pair, draft_translation=translation)
    ours, theirs = (tokenizers()[name] for name in pair)
    prompts = [ours.encode(text.decode(errors="ignore")) for text in PROMPTS]
    state = engine.start(prompts, temperature=temperature, max_length=[90, 95, 100, 105])
    texts = [[*p, t] for p, t in zip(prompts, state.last_token.tolist(), strict=True)]
    accepted, num_cached = [], []
    for _ in range(12):
        state, infos = engine.advance(state, 1)
        texts = [text + emitted_in_row(infos, row) for row, text in enumerate(texts)]
        tokens, lengths = reading_of(engine, state.draft)
        for row, text in enumerate(texts):
            said = b"".join(ours.piece(i, False) for i in text[:-1])
            read = np.asarray(tokens)[row, : lengths[row]].tolist()
            assert b"".join(theirs.piece(i, False) for i in read) == said
        cache = state.draft.cache
        assert (np.asarray(cache.length) <= np.asarray(lengths)).all()
        assert_committed_equal(cache, fresh_prefill(*pair)(tokens))
        accepted.append(infos.num_accepted[0])
        num_cached.append(np.asarray(lengths - cache.length))
    assert len(np.unique(accepted)) > 2, "rounds should differ"
    # Usually only a last draft, and what is joined anew, is read again.
    assert np.mean(num_cached) < 2.5


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_draft_itself_as_target_keeps_everything_it_spells(pair):
    """Of one vocabulary in two orders: every draft of a model for itself is kept."""
    del pair
