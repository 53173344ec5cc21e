"""A draft model that reads the last part of a long text only (`draft_context`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters import DrafterOptions, DrafterSpec, make_drafter
from jspec.generation.request import Request, SamplingParams
from jspec.speculation.types import RoundInputs, TargetView
from tests import layered, tiny
from tests.speculation.drive import settings_of
from tests.tiny_models import make_generator

CONTEXT, WIDTH, CAPACITY = 8, 4, 64
TEXTS = [list(range(3, 30)), [7, 1, 3, 9]]
PLACES = {
    "model": {},
    "model tree": {"tree_depth": 2, "tree_branches": 2},
    "hierarchical": {},
}


def make(name, context):
    draft = tiny.random_params(layered.CONFIG, seed=1, std=0.4)
    options = DrafterOptions(draft_context=context, **PLACES[name])
    spec = DrafterSpec(
        WIDTH, layered.CONFIG, layered.CONFIG.vocab_size, layered.CONFIG, jnp.float32,
        draft, options,
    )  # fmt: skip
    return make_drafter(name.removesuffix(" tree"), spec)


def draft_after(built, texts, wanted=WIDTH):
    """Returns the proposal after texts whose last token is the newest, and the state."""
    drafter, params = built
    width = max(map(len, texts)) - 1
    tokens = np.zeros([len(texts), width], np.int32)
    valid = np.zeros([len(texts), width], bool)
    for row, text in enumerate(texts):
        tokens[row, : len(text) - 1], valid[row, : len(text) - 1] = text[:-1], True
    state = drafter.init(len(texts), CAPACITY)
    hidden = jnp.zeros([*tokens.shape, 0, layered.CONFIG.embed_dim])
    state = drafter.observe(params, state, jnp.asarray(tokens), hidden, jnp.asarray(valid))
    inputs = RoundInputs(
        jnp.array([text[-1] for text in texts], jnp.int32),
        limit=lambda kind: jnp.full_like(kind, wanted),
        rng_keys=jax.random.split(jax.random.key(0), (len(texts), WIDTH)),
        settings=settings_of(len(texts), 1.0),
        view=TargetView(None, layered.apply, None),
    )
    return drafter.propose(params, state, inputs)


@pytest.mark.parametrize("name", PLACES)
def test_it_drafts_as_after_the_last_part_alone(name):
    """Guards against a wrong first token, shifted positions, and keys of what was skipped."""
    proposal, state = draft_after(make(name, CONTEXT), TEXTS)
    tails = [text[-CONTEXT - 2 :] for text in TEXTS]
    expected, _ = draft_after(make(name, 0), tails)
    np.testing.assert_array_equal(proposal.tokens, expected.tokens)
    np.testing.assert_allclose(proposal.probs, expected.probs, rtol=1e-4, atol=1e-6)
    model = state.model if name == "hierarchical" else state
    assert model.first.tolist() == [len(TEXTS[0]) - len(tails[0]), 0]
    assert model.cache.length.tolist() == [len(tail) - 1 for tail in tails]


def test_the_whole_text_gives_other_drafts():
    """The control of the test above: what is skipped matters to this model."""
    short, _ = draft_after(make("model", CONTEXT), TEXTS)
    whole, _ = draft_after(make("model", 0), TEXTS)
    assert np.abs(np.asarray(short.probs - whole.probs)[0]).max() > 1e-3
    np.testing.assert_allclose(short.probs[1], whole.probs[1], rtol=1e-4, atol=1e-6)


def test_a_row_that_wants_nothing_skips_nothing():
    """It still lags behind its whole text, by what it would read."""
    built = make("model", CONTEXT)
    _, state = draft_after(built, TEXTS, wanted=0)
    assert state.first.tolist() == [0, 0]
    assert state.cache.length.tolist() == [0, 0]
    lag = built.drafter.lag(state, jnp.zeros([2], jnp.int32))
    assert lag.tolist() == [CONTEXT, CONTEXT]  # 8, and 2 tokens in a call of 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_of_plain_decoding(temperature):
    """With the coupled rule at any temperature, by drafts after a part of a growing text."""
    requests = [
        Request(list(range(5, 40)), SamplingParams(20, temperature=temperature, seed=3)),
        Request([9, 2], SamplingParams(20, temperature=temperature, seed=4)),
    ]
    rule = {"acceptance": "coupled", "batch_size": 2}
    plain = make_generator("none", **rule).generate(requests)
    drafted = make_generator(
        "self", **rule, drafter_options=DrafterOptions(draft_context=CONTEXT)
    ).generate(requests)
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert sum(result.stats.num_accepted for result in drafted) > 5
