"""The Generator compiled as users have it: sums may be fused otherwise in calls of other widths."""

import pytest

from tests.test_generator import GREEDY, SAMPLED, make_requests, tokens
from tests.tiny_models import shared_generator

pytestmark = pytest.mark.usefixtures("optimised")


def test_drafts_and_neighbours_change_no_token():
    """Laws 2 and 5 in float32: greedy text is plain decoding's, and a row alone says the same."""
    plain, drafted = shared_generator("none"), shared_generator("model")
    batched = shared_generator("model", batch_size=3)
    greedy, sampled = make_requests(GREEDY), make_requests(SAMPLED)
    alone = [drafted.generate(request) for request in greedy]
    assert tokens(alone) == [plain.generate(request).token_ids for request in greedy]
    assert sum(one.stats.num_accepted for one in alone) > 0
    assert tokens(batched.generate(greedy)) == tokens(alone)
    drawn = [drafted.generate(request) for request in sampled]
    assert tokens(batched.generate(sampled)) == tokens(drawn)
