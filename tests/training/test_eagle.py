"""A head of EAGLE-3 in training: how it begins, and from which head it goes on.

Training-time test: all chains at once say what each says by itself.

Seeds: 0 of the order of the texts and the heads' parameters.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.drafters.eagle_head import (
    EagleConfig,
    apply_head,
    fuse,
    init_eagle_params,
    load_eagle,
    save_eagle,
)
from jspec.drafters.head_folder import round_head
from jspec.models import init_cache
from jspec.models.layers import linear
from jspec.training.config import Recipe
from jspec.training.eagle import EagleTraining, unroll
from jspec.training.packing import pack
from jspec.training.target_states import TargetStates
from jspec.training.texts import Text
from tests import tiny_eagle
from tests.cases import slow_unless
from tests.tiny_models import CONFIG, make_model, target
from tests.training.grammar import grammar_batches, grammar_texts

LAYERS = (0, 1)
OWN, EARLIER = range(0, 40), range(20, 50)  # tokens that two heads can propose
RECIPE = Recipe(
    num_steps=24, learning_rate=1e-2, warmup_steps=4, max_norm=5.0, log_every=6, evaluate_every=6
)


def frozen():
    return target().params


@functools.cache
def trainee_of(ids, **fields):
    fields = {"feature_layers": LAYERS, "chain_steps": 2} | fields
    training = EagleTraining(vocab_size=len(ids), recipe=RECIPE, **fields)
    return training.make_trainee(target(), [Text((), tuple(ids))])


@pytest.mark.parametrize("freeze_head", [slow_unless(False, False), True])
def test_a_head_begins_as_a_layer_of_the_target(freeze_head):
    """Every parameter is there; what is frozen gets no gradient, and only that."""
    ids = tuple(np.unique([text.answer for text in grammar_texts(128, 2)]).tolist())
    trainee = trainee_of(ids, freeze_head=freeze_head)
    layer = dataclasses.replace(CONFIG, num_layers=1, vocab_size=len(ids), tie_embeddings=False)
    config = EagleConfig(layer, CONFIG.vocab_size, LAYERS, CONFIG.num_layers)
    shapes = jax.eval_shape(lambda key: init_eagle_params(config, key), jax.random.key(0))
    del shapes["ids"]
    assert jax.tree.map(jnp.shape, trainee.params) == jax.tree.map(jnp.shape, shapes)
    layer, head = frozen()["layers_0"], trainee.params["head"]
    width = CONFIG.embed_dim
    np.testing.assert_array_equal(head["attention"]["qkv"][..., width:], layer["attention"]["qkv"])
    np.testing.assert_array_equal(head["mlp"]["down"], layer["mlp"]["down"])
    np.testing.assert_array_equal(head["head"], frozen()["head"][jnp.array(ids)])
    rows = grammar_batches(4)[0][0]
    gradient = jax.jit(jax.grad(lambda params: trainee.loss(params, frozen(), rows)[0]))
    largest = jax.tree.map(lambda leaf: float(jnp.abs(leaf).max()), gradient(trainee.params))
    assert (largest["head"].pop("head") == 0) == freeze_head
    assert min(jax.tree.leaves(largest)) > 0


def target_like(**fields):
    return make_model(dataclasses.replace(CONFIG, **fields))


def test_a_head_keeps_only_what_it_can_hold():
    """Of a layer with biases and norms that a head's layer has not."""
    odd = target_like(qkv_bias=True, qk_norm="head", norms="both")
    trainee = EagleTraining(vocab_size=4).make_trainee(odd, [Text((), (3, 1, 4, 5))])
    names = {"embedding_norm", "feature_norm", "attention", "mlp_norm", "mlp", "final_norm", "head"}
    assert trainee.params["head"].keys() == names
    assert trainee.params["head"]["attention"].keys() == {"qkv", "out"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"norms": "post", "family": "olmo2"}, "layer 0, which has no norms before its halves"),
     ({"num_experts": 3, "num_experts_per_token": 1, "expert_dim": 8, "family": "mixtral"},
      "layer 0, which has experts")],
)  # fmt: skip
def test_layers_that_no_head_can_begin_as_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        EagleTraining(vocab_size=4).make_trainee(target_like(**fields), [Text((), (3, 1, 4, 5))])


def test_a_head_proposes_the_most_frequent_tokens():
    """Of answers; ties go to the smaller id, and they come rising."""
    texts = [Text((9, 9, 9), (5, 5, 2)), Text((), (7, 2, 1))]
    trainee = EagleTraining(vocab_size=3).make_trainee(target(), texts)
    np.testing.assert_array_equal(
        trainee.params["head"]["head"], frozen()["head"][jnp.array([1, 2, 5])]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with a head unlike the target, and beside it the same rounded to int8."""
    folder = tmp_path_factory.mktemp("earlier") / "head"
    trainee = trainee_of(EARLIER)
    trainee.save(jax.tree.map(lambda leaf: leaf + 0.25, trainee.params), folder)
    round_head(folder, folder.with_name("rounded"))
    return folder


@pytest.mark.parametrize("name", [slow_unless(False, "head"), "rounded"])
def test_a_head_goes_on_from_an_earlier_one(folder, name):
    """Its layer as it was, and its tokens where both propose them: to bfloat16 or half an int8."""
    expected = jax.tree.map(lambda leaf: leaf + 0.25, trainee_of(OWN).params)
    num_new = EARLIER[0] - OWN[0]
    expected["head"]["head"] = expected["head"]["head"].at[:num_new].add(-0.25)
    params = trainee_of(OWN, init_head=str(folder.with_name(name))).params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.01), params, expected)


def test_a_config_takes_the_earlier_heads_layers(folder):
    """Not the usual ones; others are refused."""
    given, taken = (
        trainee_of(OWN, init_head=str(folder), feature_layers=one) for one in (LAYERS, ())
    )
    assert given.layers == taken.layers
    with pytest.raises(InputError, match=r"expected a head that reads layers \[1, 2\]"):
        trainee_of(OWN, init_head=str(folder), feature_layers=(1, 2))


@pytest.mark.parametrize("width", [CONFIG.hidden_dim // 2, CONFIG.hidden_dim * 2])
def test_a_head_of_another_width(width, tmp_path):
    """It begins with the target's first units, is saved as it is, and its width is kept later."""
    trainee = trainee_of(OWN, hidden_dim=width)
    units, theirs = (layer["mlp"] for layer in (trainee.params["head"], frozen()["layers_0"]))
    kept = min(width, CONFIG.hidden_dim)
    np.testing.assert_array_equal(units["down"][:, :kept], theirs["down"][:, :kept])
    np.testing.assert_array_equal(units["gate_up"][:, :kept], theirs["gate_up"][:, :kept])
    trainee.save(trainee.params, tmp_path / "head")
    later = trainee_of(OWN, init_head=str(tmp_path / "head"))
    assert later.params["head"]["mlp"]["down"].shape == (CONFIG.embed_dim, width)
    np.testing.assert_allclose(later.params["head"]["mlp"]["down"], units["down"], atol=0.01)
    with pytest.raises(InputError, match="of hidden_dim if that is given"):
        trainee_of(OWN, hidden_dim=width + 8, init_head=str(tmp_path / "head"))


def test_another_layer_is_refused(folder, monkeypatch):
    """One of another shape, where the shapes of what is computed from it would not fit."""
    earlier = load_eagle(folder, CONFIG, jnp.float32)
    head = earlier.params["head"]
    mlp = jax.tree.map(lambda leaf: leaf[:1], head["mlp"])
    changed = earlier._replace(params=earlier.params | {"head": head | {"mlp": mlp}})
    monkeypatch.setattr("jspec.training.eagle.load_eagle", lambda *_: changed)
    with pytest.raises(InputError, match="expected a layer like the target's"):
        trainee_of.__wrapped__(OWN, init_head=str(folder))


@pytest.mark.parametrize("extra", [{"mask_id": 3}, {"has_embedding": True}], ids=str)
def test_a_head_of_p_eagle_is_refused(tmp_path, extra):
    """It would lose its mask and its embedding, and be written as a head of EAGLE-3."""
    layer = dataclasses.replace(CONFIG, num_layers=1, vocab_size=len(OWN), tie_embeddings=False)
    config = EagleConfig(layer, CONFIG.vocab_size, LAYERS, **extra)
    save_eagle(tmp_path / "head", config, init_eagle_params(config, jax.random.key(0)))
    with pytest.raises(InputError, match="the embedding of a P-EAGLE, which are not trained"):
        trainee_of(OWN, init_head=str(tmp_path / "head"))


STEPS, LENGTH = 3, 12
_apply_head = jax.jit(apply_head, static_argnums=0)


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
    """At several places of a row that holds two texts.

    The last step alone gives every parameter a gradient.
    """
    rng = np.random.default_rng(0)
    texts = [jnp.asarray(rng.integers(0, 61, (1, n)), jnp.int32) for n in (9, LENGTH)]
    features = [tiny_eagle.features_of(tiny_pair, text) for text in texts]
    row = jnp.concatenate(texts, axis=1)
    states = states_of(tiny_pair, row, jnp.concatenate(features, axis=1))
    rows, trained = rows_of(texts), {name: head[name] for name in head if name != "ids"}

    def loss(params):
        outputs = unroll(tiny_eagle.CONFIG, params, rows, states, STEPS)
        return jnp.sum(jax.nn.log_softmax(logits_of(params, outputs[-1]))[:, :, 0]), outputs

    grads, outputs = jax.jit(jax.grad(loss, has_aux=True))(trained)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(grads))
    logits = [logits_of(head, output)[0] for output in outputs]
    for text, of_text, begin in zip(texts, features, (0, 9), strict=True):
        for anchor in (0, 3, 6):
            said = chain(tiny_pair, head, text, fuse(head, of_text), anchor)
            for step, expected in enumerate(said):
                np.testing.assert_allclose(
                    logits[step][begin + anchor], expected, rtol=1e-3, atol=1e-3
                )
