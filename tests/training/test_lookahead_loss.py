"""All groups of look-ahead embeddings at once say what each says by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from jspec.drafters.lookahead import LookaheadConfig
from jspec.models import init_cache, make_apply
from jspec.training.lookahead import LookaheadTraining, anchors_of
from jspec.training.packing import pack
from jspec.training.texts import Text
from tests import tiny_lookahead
from tests.tiny_models import CONFIG, target

STRIDE, LENGTH = 3, 16  # of each text
LOOK = LookaheadConfig(CONFIG.embed_dim, 2)


def packed():
    rng = np.random.default_rng(0)
    texts = [
        Text(tuple(rng.integers(3, 120, 4).tolist()), tuple(rng.integers(3, 120, 12).tolist()))
        for _ in range(4)
    ]
    return texts, pack(texts, 32)


def test_the_loss_is_that_of_calls_on_each_text_by_itself():
    """The mean cross-entropy behind every anchor whose tokens ahead are of the same answer.

    Every embedding gets a gradient.
    """
    texts, rows = packed()
    params = tiny_lookahead.params(LOOK)
    training = LookaheadTraining(num_tokens=2, stride=STRIDE, decay=0.5)
    trainee = training.make_trainee(target(), [])
    grad = jax.jit(jax.value_and_grad(trainee.loss, has_aux=True))
    (value, metrics), grads = grad(params, target().params, rows)
    assert (jnp.abs(grads["embeddings"]).max(axis=1) > 0).all()
    anchors = np.asarray(anchors_of(rows, STRIDE))
    losses = [[], []]
    for index, text in enumerate(texts):
        row, begin = index // 2, LENGTH * (index % 2)
        said = said_behind_every_place(params, [*text.prompt, *text.answer])
        said = scipy.special.log_softmax(said, axis=-1)
        for place in set(range(LENGTH)) & set((anchors[row] - begin).tolist()):
            for step in range(2):
                predicted = place + 2 + step
                if len(text.prompt) <= predicted < LENGTH:
                    distribution = np.exp(said[predicted - 1, 0])
                    losses[step].append(-np.sum(distribution * said[place, 1 + step]))
    expected = [np.mean(one) for one in losses]
    assert min(map(len, losses)) >= 12
    np.testing.assert_allclose(metrics["losses"], expected, rtol=1e-3)
    np.testing.assert_allclose(value, expected[0] + 0.5 * expected[1], rtol=1e-3)


def said_behind_every_place(params, ids):
    """Returns the target's logits at every place and at the embeddings behind it, [t 3 v].

    Each place is a row of one call: the text up to it, the embeddings, and padding.
    """
    table, embeddings = np.asarray(target().params["embedding"]), np.asarray(params["embeddings"])
    inputs = np.zeros([LENGTH, LENGTH + 2, CONFIG.embed_dim], np.float32)
    for place in range(LENGTH):
        block = [table[ids[: place + 1]], embeddings]
        inputs[place, : place + 3] = np.concatenate(block)
    cache = init_cache(CONFIG, batch_size=LENGTH, capacity=LENGTH + 2, dtype=jnp.float32)
    logits = np.asarray(jax.jit(make_apply(CONFIG))(target().params, jnp.asarray(inputs), cache)[0])
    return np.stack([logits[place, place : place + 3] for place in range(LENGTH)])


def test_anchors_follow_from_the_text_and_stay_inside():
    """Every few places, beginning anywhere."""
    _, rows = packed()
    anchors = np.asarray(anchors_of(rows, 5))
    assert anchors.shape == (2, 6)
    assert (np.diff(anchors, axis=1) == 5).all()
    np.testing.assert_array_equal(anchors[:, 0], rows.tokens.sum(axis=1) % 5)
    assert anchors.max() < 32
