"""The Generator compiled as users have it: sums may be fused otherwise in calls of other widths."""

import pytest

from tests.generation.test_generator import GREEDY, make_requests, tokens
from tests.tiny_models import shared_generator

pytestmark = [pytest.mark.usefixtures("optimised"), pytest.mark.slow]


def test_drafts_and_neighbours_change_no_token():
    """Invariants 2 and 5 in float32: drafted text, three rows at a time, is plain decoding's,
    alone.
    """
    plain, drafted = shared_generator("none"), shared_generator("model", batch_size=3)
    requests = make_requests(GREEDY)
    results = drafted.generate(requests)
    assert tokens(results) == [plain.generate(request).token_ids for request in requests]
    assert sum(result.stats.num_accepted for result in results) > 0
