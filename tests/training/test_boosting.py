"""Drafts trained in sequence cover more together than drafts trained alike.

Seeds: 0 of the grammar and of the first draft, 1 of the second ones.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.models import init_cache, make_apply
from jspec.training.chain_loss import SCORE
from jspec.training.config import Recipe
from jspec.training.draft_model import DraftModelTraining
from jspec.training.model_loss import COVERED, COVERED_BEFORE, PositionMetrics, boosted_loss
from jspec.training.packing import pack
from jspec.training.run import run_training
from jspec.weights.resolver import load_model
from tests.tiny_models import CONFIG, make_model, peaked_params
from tests.training.folders import save_target, save_texts
from tests.training.grammar import PROMPT_LEN, SEQ_LEN, grammar_target, grammar_texts

RECIPE = Recipe(
    num_steps=150, learning_rate=1e-2, warmup_steps=5, max_norm=5.0, log_every=50, evaluate_every=50
)
_HELD_OUT = 32
_MARGIN = 0.1  # of all places; measured: 0.44 by one alone, 0.49 by two alike, 0.63 boosted


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("boosting")
    first = DraftModelTraining(
        target=save_target(folder / "model", grammar_target()), dtype="float32",
        texts=(save_texts(folder / "texts.jsonl", grammar_texts(192, 2)),),
        num_held_out=_HELD_OUT, seq_len=SEQ_LEN, batch_size=16, recipe=RECIPE,
        num_layers=1, embed_dim=8, hidden_dim=16, num_heads=1, num_kv_heads=1,
    )  # fmt: skip
    later = dataclasses.replace(
        first,
        recipe=dataclasses.replace(RECIPE, seed=1),
        earlier=(str(folder / "first" / "draft"),),
    )
    runs = {"first": first, "boosted": later, "alike": dataclasses.replace(later, known_weight=1.0)}
    by_name = {}
    for name, training in runs.items():
        (folder / name).mkdir()
        by_name[name] = run_training(training, folder / name)
    return by_name, folder


@pytest.mark.slow
def test_a_boosted_pair_covers_more_than_one_and_than_two_trained_alike(outcomes):
    """On held-out texts, by the score; see `_MARGIN`."""
    metrics, _ = outcomes
    alone, boosted_pair = metrics["boosted"][COVERED_BEFORE], metrics["boosted"][COVERED]
    alike = metrics["alike"][COVERED]
    print(f"covered: {alone:.3f} alone, {alike:.3f} by two alike, {boosted_pair:.3f} boosted")
    assert metrics["alike"][COVERED_BEFORE] == alone
    assert metrics["first"]["agreement"][0] == pytest.approx(alone, abs=0.02)  # saved in bfloat16
    assert boosted_pair > max(alone, alike) + _MARGIN
    assert metrics["boosted"][SCORE] > max(metrics["alike"][SCORE], metrics["first"][SCORE])
    assert metrics["boosted"][SCORE] > metrics["boosted"]["own_tokens_per_call"]


def test_marks_are_where_one_of_the_drafts_agrees(tmp_path, capsys):
    """Wherever a text stands in a row, and cut where rows end; no draft runs after that."""
    config = dataclasses.replace(CONFIG, num_layers=1)
    params = [peaked_params(config, disturbance=noise) for noise in (0.0, 0.2, 0.1)]
    models = [make_model(config, params=weights) for weights in params]
    names = [save_target(tmp_path / str(i), model) for i, model in enumerate(models)]
    models = [load_model(name, dtype="float32") for name in names]
    training = DraftModelTraining(
        num_layers=1, dtype="float32", earlier=tuple(names[1:]), seq_len=36, recipe=RECIPE
    )
    texts = grammar_texts(6, 4, 40)
    rows = training.make_fill(models[0], (), texts)(pack(texts[::-1], 36))
    cache = init_cache(config, batch_size=6, capacity=36, dtype=jnp.float32)
    apply = jax.jit(make_apply(config))
    best = [
        np.argmax(apply(draft.params, jnp.asarray(rows.tokens), cache)[0], axis=-1)
        for draft in models
    ]
    wanted = (best[0] == best[1]) | (best[0] == best[2])
    assert 0 < wanted.sum() < wanted.size
    np.testing.assert_array_equal(rows.is_known, wanted)
    share = f"earlier drafts agree with the target at {wanted[:, :-1].mean():.1%} of the texts'"
    assert share in capsys.readouterr().err
    trainee = training.make_trainee(models[0], texts)
    assert trainee.frozen is models[0].params
    _, metrics = jax.jit(trainee.loss)(trainee.params, trainee.frozen, rows)
    scored = wanted[:, PROMPT_LEN - 1 : -1]  # what comes after the prompts
    assert float(metrics[COVERED_BEFORE]) == pytest.approx(scored.mean())


def test_marked_places_do_not_count():
    """By hand: four places, the last of which is not scored."""
    row = lambda *values: jnp.array([values], jnp.float32)  # noqa: E731
    comparison = PositionMetrics(row(1, 2, 4, 100), row(1, 1, 1, 1), row(1, 0, 0, 0) > 0)
    is_scored = jnp.array([[True, True, True, False]])
    is_known = jnp.array([[True, True, False, True]])
    for weight, loss in [(0.0, 4.0), (1.0, 7 / 3), (0.5, 5.5 / 2)]:
        value, metrics = boosted_loss(
            comparison, is_scored, is_known, known_weight=weight, num_steps=3
        )
        assert float(value) == pytest.approx(loss)
    assert float(metrics[COVERED_BEFORE]) == pytest.approx(2 / 3)
    assert float(metrics[COVERED]) == pytest.approx(2 / 3)
    assert float(metrics[SCORE]) == pytest.approx(1 + (2 + 1 + 0) / 3)
    assert float(metrics["own_tokens_per_call"]) == pytest.approx(1 + 1 / 3)
    nothing = jnp.ones_like(is_known)
    assert boosted_loss(comparison, is_scored, nothing, known_weight=0.0, num_steps=1)[0] == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"known_weight": 0.5}, "expected some in earlier"),
     ({"known_weight": 2.0, "earlier": ("a",)}, "known_weight from 0 to 1, got 2.0"),
     ({"earlier": ("nowhere",)}, "no model 'nowhere'")],
)  # fmt: skip
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        DraftModelTraining(num_layers=1, **fields).make_fill(make_model(), (), [])


def test_a_draft_of_another_vocabulary_is_refused(tmp_path):
    """Its argmax would mean another token."""
    config = dataclasses.replace(CONFIG, vocab_size=100)
    stranger = make_model(config, params=peaked_params(config))
    folder = save_target(tmp_path / "other", stranger)
    target = load_model(save_target(tmp_path / "target", make_model()), dtype="float32")
    training = DraftModelTraining(num_layers=1, earlier=(folder,))
    with pytest.raises(InputError, match="different tokenizers"):
        training.make_fill(target, (), grammar_texts(2, 5))
