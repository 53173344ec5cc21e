"""The reference's distribution against transformers' own processors."""

import numpy as np
import pytest

from jspec.generation.request import SamplingParams
from jspec.lab.auditing.distribution import reference_distribution
from tests.sampling.test_properties import PIPELINES, STOP_IDS, VOCAB, oracle

_FILTERS = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.05},
}


@pytest.mark.parametrize("name", [*PIPELINES, *_FILTERS])
def test_reference_equals_transformers(name):
    """Along an output; the alphabet is what is allowed."""
    options = (PIPELINES | _FILTERS)[name]
    settings = SamplingParams(**({"temperature": 1.0} | options))
    alphabet = settings.allowed_token_ids or tuple(range(VOCAB))
    rng = np.random.default_rng(4)
    prompt, output = rng.integers(0, VOCAB, 6).tolist(), rng.integers(0, VOCAB, 9).tolist()
    for i in range(len(output)):
        logits = (4 * rng.normal(size=[VOCAB])).astype(np.float32)
        actual = reference_distribution(
            logits[list(alphabet)], alphabet, settings, prompt=prompt, output=output[:i],
            stop_ids=STOP_IDS,
        )  # fmt: skip
        expected = oracle(logits, prompt, output[:i], options)
        np.testing.assert_allclose(actual, expected[list(alphabet)], atol=1e-6)


def test_temperature_zero_takes_the_likeliest_after_penalties():
    """Guards against the maximum of the raw logits."""
    settings = SamplingParams(temperature=0.0, presence_penalty=1.0, forbidden_token_ids=(7,))
    distribution = reference_distribution(
        np.array([3.0, 2.5, 9.0]), [5, 6, 7], settings, prompt=[], output=[5]
    )
    assert distribution.tolist() == [0, 1, 0]
