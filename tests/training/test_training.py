"""A head learns from a target trained on a grammar, and a killed run ends like an undisturbed one.

Seeds: 0 of the grammar and the order of its texts, 1 of the head's parameters.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.drafters.heads.eagle_module import init_eagle_params
from jspec.training.eagle import eagle_config, make_eagle_trainee
from jspec.training.loop import train
from jspec.training.recipe import Recipe
from jspec.training.texts import most_frequent
from jspec.training.trainee import SCORE
from tests.tiny_models import CONFIG
from tests.training.grammar import grammar_batches, grammar_target, grammar_texts

BATCH = 4
_POISON = 3  # an id of no text
RECIPE = Recipe(
    num_steps=200, learning_rate=1e-2, warmup_steps=4, max_norm=5.0, log_every=50, evaluate_every=50
)


@pytest.fixture(scope="module", autouse=True)
def promotion():
    """Optax raises floats to whole powers."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def frozen():
    """Returns the target's parameters."""
    return grammar_target().params


@pytest.fixture(scope="module")
def parts():
    """Returns a trainee, its batches and held-out rows."""
    ids = most_frequent(grammar_texts(128, 2), CONFIG.vocab_size, 40)
    config = eagle_config(CONFIG, vocab_size=len(ids), feature_layers=(1, 2))
    trainee = make_eagle_trainee(grammar_target(), config, ids, num_steps=3, decay=0.8, seed=0)
    untrained = init_eagle_params(config, jax.random.key(1))
    del untrained["ids"]
    trainee = trainee._replace(params=untrained)  # that knows nothing of the target
    return trainee, *grammar_batches(BATCH)


@pytest.mark.parametrize("freeze_head", [False, True])
def test_a_head_begins_as_a_layer_of_the_target(freeze_head):
    """Every parameter is there; what is frozen gets no gradient, and nothing else lacks one."""
    ids = most_frequent(grammar_texts(128, 2), CONFIG.vocab_size, 40)
    config = eagle_config(CONFIG, vocab_size=len(ids), feature_layers=(0, 1))
    trainee = make_eagle_trainee(
        grammar_target(), config, ids, num_steps=2, decay=0.8, seed=0, freeze_head=freeze_head
    )
    shapes = jax.eval_shape(lambda key: init_eagle_params(config, key), jax.random.key(0))
    del shapes["ids"]
    assert jax.tree.map(jnp.shape, trainee.params) == jax.tree.map(jnp.shape, shapes)
    layer, head = frozen()["layers_0"], trainee.params["head"]
    width = CONFIG.embed_dim
    np.testing.assert_array_equal(head["attention"]["qkv"][..., width:], layer["attention"]["qkv"])
    np.testing.assert_array_equal(head["mlp"]["down"], layer["mlp"]["down"])
    np.testing.assert_array_equal(head["head"], frozen()["head"][ids])
    rows = grammar_batches(BATCH)[0][0]
    gradient = jax.jit(jax.grad(lambda params: trainee.loss(params, frozen(), rows)[0]))
    grads = gradient(trainee.params)
    largest = jax.tree.map(lambda leaf: float(jnp.abs(leaf).max()), grads)
    assert (largest["head"].pop("head") == 0) == freeze_head
    assert min(jax.tree.leaves(largest)) > 0


class Killed(Exception):
    """Stands for a signal."""


class Killing:
    """Batches of which one kills the run."""

    def __init__(self, batches, at):
        self.batches, self.at = batches, at

    def __getitem__(self, index):
        if index == self.at:
            raise Killed
        return self.batches[index]


def metrics_of(folder):
    """Returns the lines of metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(parts, tmp_path_factory):
    """Returns the outcome of a whole run and its folder."""
    trainee, batches, held_out = parts
    folder = tmp_path_factory.mktemp("undisturbed")
    return train(trainee, frozen(), batches, held_out, RECIPE, folder), folder


def test_it_learns(parts, undisturbed):
    """Held-out texts: more tokens a call than untrained, and a smaller loss."""
    (_, metrics), folder = undisturbed
    lines = metrics_of(folder)
    losses = [line["loss"] for line in lines if "loss" in line]
    scores = [line["held_out"][SCORE] for line in lines if "held_out" in line]
    assert [line["step"] for line in lines if "loss" in line] == [50, 100, 150, 200]
    assert losses[-1] < 0.9 * losses[0]
    trainee, _, held_out = parts
    evaluate = jax.jit(trainee.evaluate)
    untrained = [evaluate(trainee.params, frozen(), rows) for rows in held_out]
    before = sum(float(sums[SCORE]) for sums, _ in untrained) / sum(float(n) for _, n in untrained)
    assert metrics[SCORE] == max(scores) > before + 1.0


def test_a_killed_run_ends_like_an_undisturbed_one(parts, undisturbed, tmp_path):
    """Killed between two checkpoints: the same parameters to the bit, and each line once."""
    trainee, batches, held_out = parts
    with pytest.raises(Killed):
        train(trainee, frozen(), Killing(batches, 127), held_out, RECIPE, tmp_path)
    params, metrics = train(trainee, frozen(), batches, held_out, RECIPE, tmp_path)
    (wanted, wanted_metrics), folder = undisturbed
    jax.tree.map(np.testing.assert_array_equal, params, wanted)
    assert metrics == wanted_metrics
    assert metrics_of(tmp_path) == metrics_of(folder)


def test_a_loss_that_is_no_number_stops_the_run(parts, tmp_path):
    """It says at which step and batch, and the last good checkpoint stays."""
    trainee, batches, held_out = parts
    sound = trainee.loss

    def loss(params, frozen, rows):
        value, metrics = sound(params, frozen, rows)
        return jnp.where(rows.tokens[0, 0] == _POISON, jnp.nan, value), metrics

    rows = batches[17]._replace(tokens=batches[17].tokens.copy())
    rows.tokens[0, 0] = _POISON
    others = Replacing(batches, 17, rows)
    recipe = dataclasses.replace(RECIPE, evaluate_every=5)
    with pytest.raises(InputError, match="the loss of step 18, batch 17, is nan"):
        train(trainee._replace(loss=loss), frozen(), others, held_out, recipe, tmp_path)
    assert max(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == 15


class Replacing(Killing):
    """Batches of which one is another."""

    def __init__(self, batches, at, rows):
        super().__init__(batches, at)
        self.rows = rows

    def __getitem__(self, index):
        return self.rows if index == self.at else self.batches[index]
