"""Heads that have learned a grammar keep the distribution of their target, which has learned it
before.
"""

import jax
import pytest

from jspec.drafters import DrafterOptions
from jspec.evaluation.auditing.checks import run_checks
from jspec.generation.request import Settings
from jspec.training.blockwise import BlockwiseTraining
from jspec.training.eagle import EagleTraining
from jspec.training.lookahead import LookaheadTraining
from jspec.training.loop import train
from jspec.training.medusa import MedusaTraining
from jspec.training.recipe import Recipe
from jspec.training.trainee import SCORE
from tests.evaluation.auditing.subjects import make_subject
from tests.training.grammar import grammar_batches, grammar_target, grammar_texts

RECIPE = Recipe(
    num_steps=120, learning_rate=1e-2, warmup_steps=4, max_norm=5.0, log_every=60, evaluate_every=60
)
KINDS = {
    "eagle": EagleTraining(vocab_size=40, feature_layers=(0, 1), chain_steps=3, recipe=RECIPE),
    "medusa": MedusaTraining(num_heads=3, recipe=RECIPE),
    "blockwise": BlockwiseTraining(num_heads=3, recipe=RECIPE),
    "lookahead": LookaheadTraining(num_tokens=2, stride=2, recipe=RECIPE),
}
_RULES = {0.0: "greedy", 1.0: "rejection"}
_PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
# Tokens a call on held-out texts, at least; seed 0. A look-ahead takes two calls a round.
_LEAST = {"eagle": 1.3, "medusa": 1.3, "blockwise": 1.3, "lookahead": 1.1}


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tmp_path_factory):
    """Returns a kind and the folder of its head; optax raises floats to whole powers."""
    folder = tmp_path_factory.mktemp(request.param)
    with jax.numpy_dtype_promotion("standard"):
        trainee = KINDS[request.param].make_trainee(grammar_target(), grammar_texts(128, 2))
        params, metrics = train(
            trainee, grammar_target().params, *grammar_batches(16), RECIPE, folder
        )
    assert metrics[SCORE] > _LEAST[request.param]
    trainee.save(params, folder / "head")
    return request.param, folder / "head"


@pytest.mark.slow
@pytest.mark.parametrize("temperature", _RULES)
def test_it_is_lossless(trained, temperature):
    """Every check of the audit passes, with penalties, and drafts were kept on the way."""
    drafter, head = trained
    subject = make_subject(
        _RULES[temperature], drafter, target=grammar_target(), num_draft_tokens=3,
        drafter_options=DrafterOptions(draft_head=str(head)),
        settings=Settings(temperature=temperature, **_PENALTIES),
    )  # fmt: skip
    checks = {one.name: one for one in run_checks(subject, num_rows=1024, max_new_tokens=16)}
    assert {"emitted distribution", "negative control", "caches", "drafts"} <= set(checks)
    failed = [f"{name}: {one.detail}" for name, one in checks.items() if not one.has_passed]
    assert failed == []
    assert checks["drafts"].data["num_accepted"] > 0
