"""On a GPU: the laws that its other kernels, layouts and donated buffers could break.

They hold on a CPU, too, where `-m gpu` runs them to see that they can run.
"""

import dataclasses

import pytest

from jspec.auditing.checks import run_checks
from jspec.auditing.subject import cast
from jspec.request import Request, Settings
from tests.auditing.subjects import make_subject
from tests.tiny_models import make_generator

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("optimised")]


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_an_audit_finds_nothing(rule, dtype):
    """The joint law of what compiled rounds emit, parity, seeds, caches; wrong targets are refused.

    The models have opinions. False alarms: one in a million for each test of a law.
    """
    subject = make_subject(rule, "model")
    pair = {"target": cast(subject.target, dtype), "draft": cast(subject.draft, dtype)}
    subject = dataclasses.replace(subject, **pair)
    assert subject.dtype == dtype
    checks = list(run_checks(subject, num_rows=4096, max_new_tokens=24))
    assert {"emitted law", "negative control", "seeds", "caches"} <= {
        check.name for check in checks
    }
    assert [check for check in checks if not check.has_passed] == []
