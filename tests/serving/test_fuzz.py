"""Requests that a machine makes from the schema that the server shows: it is true, and no 500."""

import hypothesis
import pytest

from tests.serving.served import Served, load_tiny

schemathesis = pytest.importorskip("schemathesis")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Served(load_tiny(tmp_path_factory.mktemp("model")), max_queue=200) as server:
        yield server


@pytest.fixture(scope="module")
def api(served):
    return schemathesis.openapi.from_url(f"http://127.0.0.1:{served.port}/openapi.json")


schema = schemathesis.pytest.from_fixture("api")


@pytest.mark.slow
@schema.parametrize()
@hypothesis.settings(
    max_examples=300, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
def test_the_schema_is_true(case):
    """Good requests and bad ones: the statuses and shapes are those of the schema."""
    from schemathesis import checks

    names = ("not_a_server_error", "status_code_conformance", "response_schema_conformance",
             "negative_data_rejection")  # fmt: skip
    case.call_and_validate(checks=[checks.CHECKS.get_one(name) for name in names], timeout=60)
