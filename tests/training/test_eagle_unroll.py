"""Training-time test: all chains at once say what each says by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.eagle_head import apply_head, fuse
from jspec.models import init_cache
from jspec.models.layers import linear
from jspec.training.eagle_unroll import unroll
from jspec.training.packing import pack
from jspec.training.target_states import TargetStates
from jspec.training.texts import Text
from tests import tiny_eagle

STEPS, LENGTH = 3, 12
_apply_head = jax.jit(apply_head, static_argnums=0)
_unroll = jax.jit(unroll, static_argnums=(0, 4))


@pytest.fixture(scope="module")
def head():
    return tiny_eagle.params()


def rows_of(texts):
    texts = [Text((), tuple(text[0].tolist())) for text in texts]
    return pack(texts, sum(len(text.ids) for text in texts))


def states_of(pair, tokens, features):
    return TargetStates(pair.target["embedding"][tokens], features, None, None)


def logits_of(head, outputs):
    return linear(outputs, head["head"]["head"])


def chain(pair, head, tokens, features, anchor):
    """Returns the logits of the calls of the chain that begins at a pair, teacher-forced.

    What lies behind the newest pair is not seen: all calls are one program.
    """
    pairs, said = np.zeros([1, LENGTH, features.shape[2]], np.float32), []
    pairs[:, : anchor + 1] = features[:, : anchor + 1]
    later = np.pad(tokens[:, 1:], ((0, 0), (0, LENGTH + 1 - tokens.shape[1])))
    embedded = pair.target["embedding"][later]
    empty = init_cache(tiny_eagle.CONFIG.layer, batch_size=1, capacity=LENGTH, dtype=jnp.float32)
    for place in range(anchor, min(anchor + STEPS, tokens.shape[1] - 1)):
        logits, hidden, _ = _apply_head(
            tiny_eagle.CONFIG, head, embedded, jnp.asarray(pairs), empty
        )
        said.append(logits[0, place])
        pairs[:, place + 1] = hidden[:, place]
    return said


def test_every_chain_is_what_drafting_computes(tiny_pair, head):
    """At several places of a row that holds two texts."""
    rng = np.random.default_rng(0)
    texts = [jnp.asarray(rng.integers(0, 61, (1, n)), jnp.int32) for n in (9, LENGTH)]
    features = [tiny_eagle.features_of(tiny_pair, text) for text in texts]
    row = jnp.concatenate(texts, axis=1)
    states = states_of(tiny_pair, row, jnp.concatenate(features, axis=1))
    outputs = _unroll(tiny_eagle.CONFIG, head, rows_of(texts), states, STEPS)
    logits = [logits_of(head, output)[0] for output in outputs]
    for text, of_text, begin in zip(texts, features, (0, 9), strict=True):
        for anchor in (0, 3, 6):
            said = chain(tiny_pair, head, text, fuse(head, of_text), anchor)
            for step, expected in enumerate(said):
                np.testing.assert_allclose(
                    logits[step][begin + anchor], expected, rtol=1e-3, atol=1e-3
                )


def test_gradients_reach_every_parameter(tiny_pair, head):
    """From the loss of the last step alone."""
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 61, (1, 10)), jnp.int32)
    features, rows = tiny_eagle.features_of(tiny_pair, tokens), rows_of([tokens])
    trained = {name: leaf for name, leaf in head.items() if name != "ids"}

    def loss(params):
        states = states_of(tiny_pair, tokens, features)
        outputs = unroll(tiny_eagle.CONFIG, params, rows, states, STEPS)
        return jnp.sum(jax.nn.log_softmax(logits_of(params, outputs[-1]))[:, :, 0])

    grads = jax.jit(jax.grad(loss))(trained)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(grads))
