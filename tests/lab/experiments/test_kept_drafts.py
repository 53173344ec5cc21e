"""How often drafts are kept: what is known beforehand."""

import pytest

from jspec.drafters import DrafterOptions
from jspec.generation.request import Request, SamplingParams
from jspec.lab.experiments.kept_drafts import measure_kept_drafts
from tests.tiny_models import target


def test_all_layers_keep_their_own_drafts():
    """Alpha is 1 and every draft is accepted; of uniform drafts, as few as alpha says.

    Guards against distributions that are read a token off. Twelve answers of 20 tokens, seeds 0
    to 11.
    """
    requests = [Request([65, 66], SamplingParams(20, 1.0, seed=seed)) for seed in range(12)]
    options = DrafterOptions(draft_layers=(0, 1))
    found = measure_kept_drafts(requests, target(), ["layer_skip", "random"], options)
    layers, random = found["drafters"]["layer_skip"], found["drafters"]["random"]
    assert found["num_answers"] == 12
    assert 12 < found["num_tokens"] <= 12 * 19
    assert layers["alpha"]["value"] == pytest.approx(1, abs=1e-5)
    assert layers["kept"]["value"] == 1
    assert layers["tokens_of_alpha"] == pytest.approx(2, abs=1e-4)
    assert 1.7 < layers["tokens_per_target_call"]["value"] <= 2
    assert random["alpha"]["value"] < 0.5
    assert random["kept"]["low"] <= random["alpha"]["high"]
    assert random["alpha"]["low"] <= random["kept"]["high"]
