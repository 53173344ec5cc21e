"""On a GPU: the laws that its other kernels, layouts and donated buffers could break."""

import jax
import pytest

from jspec.request import Request, Settings
from tests.tiny_models import make_generator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("optimised"),
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_greedy_output_is_plain_decodings(batch_size):
    """Guards law 2 against TF32, which would round one token and several differently. Float32."""
    prompts = [[1 + (7 * i + i * i) % 127 for i in range(n)] for n in (5, 40, 70)]
    requests = [Request(prompt, Settings(max_new_tokens=60)) for prompt in prompts]
    expected = [r.token_ids for r in make_generator("none").generate(requests)]
    assert sum(map(len, expected)) > 60
    for drafter in ("prompt_lookup", "self"):
        results = make_generator(drafter, batch_size=batch_size).generate(requests)
        assert [r.token_ids for r in results] == expected
        assert sum(r.stats.num_accepted for r in results) > 0  # otherwise nothing was tested
        proposed = sum(r.stats.num_proposed for r in results)
        assert drafter != "self" or sum(r.stats.num_accepted for r in results) == proposed
