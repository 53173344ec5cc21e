"""A head goes on from another one: its layer as it was, and its tokens where both propose them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.drafters.heads.eagle_checkpoint import load_eagle
from jspec.drafters.heads.folder import round_head
from jspec.training.eagle import EagleTraining, eagle_config, make_eagle_trainee
from tests.tiny_models import CONFIG
from tests.training.grammar import grammar_target, grammar_texts

LAYERS = (0, 1)
OWN, EARLIER = np.arange(0, 40), np.arange(20, 50)  # tokens that the two heads can propose


def trainee_of(ids, earlier=None):
    """Returns a head that has not learned anything yet."""
    config = eagle_config(CONFIG, vocab_size=len(ids), feature_layers=LAYERS)
    return make_eagle_trainee(
        grammar_target(), config, ids, num_steps=2, decay=0.8, seed=0, earlier=earlier
    )


@pytest.fixture
def folder(tmp_path):
    """Returns a folder with a head unlike the target."""
    trainee = trainee_of(EARLIER)
    trainee.save(jax.tree.map(lambda leaf: leaf + 0.25, trainee.params), tmp_path / "head")
    return tmp_path / "head"


@pytest.mark.parametrize("is_rounded", [False, True])
def test_parameters_are_those_of_the_earlier_head(folder, is_rounded):
    """To bfloat16, or to half a step of int8."""
    trainee, tolerance = trainee_of(OWN), 0.01
    expected = jax.tree.map(lambda leaf: leaf + 0.25, trainee.params)
    num_new = EARLIER[0] - OWN[0]
    expected["head"]["head"] = expected["head"]["head"].at[:num_new].add(-0.25)
    if is_rounded:
        round_head(folder, folder.with_name("rounded"))
        folder = folder.with_name("rounded")
    found = trainee_of(OWN, earlier=load_eagle(folder, CONFIG, jnp.float32)).params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance), found, expected)


def test_a_config_takes_the_earlier_heads_layers(folder):
    """Not the usual ones; others are refused."""
    texts = grammar_texts(8, 2)
    training = EagleTraining(vocab_size=40, init_head=str(folder))
    given = dataclasses.replace(training, feature_layers=LAYERS)
    found, expected = (one.make_trainee(grammar_target(), texts) for one in (training, given))
    assert found.layers == expected.layers
    others = dataclasses.replace(training, feature_layers=(1, 2))
    with pytest.raises(InputError, match=r"expected a head that reads layers \[1, 2\]"):
        others.make_trainee(grammar_target(), texts)


def test_another_layer_is_refused(folder):
    """One of another shape, where the shapes of what is computed from it would not fit."""
    earlier = load_eagle(folder, CONFIG, jnp.float32)
    head = earlier.params["head"]
    mlp = jax.tree.map(lambda leaf: leaf[:1], head["mlp"])
    other = earlier._replace(params=earlier.params | {"head": head | {"mlp": mlp}})
    with pytest.raises(InputError, match="expected a layer like the target's"):
        trainee_of(OWN, earlier=other)
