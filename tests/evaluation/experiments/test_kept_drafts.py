"""How often drafts are kept: what is known beforehand."""

import pytest

from jspec.drafters import DrafterOptions
from jspec.evaluation.experiments.kept_drafts import measure_kept_drafts
from jspec.generation.request import Request, Settings
from tests.tiny_models import target


def test_a_model_keeps_its_own_drafts():
    """Alpha is 1 and every draft is accepted; of uniform drafts, as few as alpha says.

    Guards against distributions that are read a token off, and against drafts past an answer's end,
    which nobody looked at, taken for refused ones. Twelve answers of 20 tokens, seeds 0 to 11.
    """
    requests = [Request([65, 66], Settings(20, 1.0, seed=seed)) for seed in range(12)]
    found = measure_kept_drafts(
        requests, target(), target(), ["model", "random"], DrafterOptions(),
        num_draft_tokens=2, batch_size=4,
    )  # fmt: skip
    model, random = found["drafters"]["model"], found["drafters"]["random"]
    assert found["num_answers"] == 12
    assert 12 < found["num_tokens"] <= 12 * 19
    assert model["alpha"]["value"] == pytest.approx(1, abs=1e-5)
    assert model["kept"]["value"] == 1
    assert model["tokens_of_alpha"] == pytest.approx(3, abs=1e-4)
    assert 2.5 < model["tokens_per_target_call"]["value"] <= 3
    assert random["alpha"]["value"] < 0.5
    assert random["kept"]["low"] <= random["alpha"]["high"]
    assert random["alpha"]["low"] <= random["kept"]["high"]
