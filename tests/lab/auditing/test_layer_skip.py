"""The audit of a target that drafts with its own layers: distribution and caches, right and
damaged.
"""

import pytest

from jspec.drafters import DrafterOptions
from jspec.lab.auditing.checks import check_caches
from jspec.lab.auditing.distribution import check_distribution
from tests.cases import slow_unless
from tests.lab.auditing.subjects import make_rows, make_subject
from tests.lab.auditing.test_distribution import DisturbedRows, values_of_one_slot
from tests.tiny_models import target

_NUM_ROWS = 2048


class DisturbedDrafts(DisturbedRows):
    """Rows whose drafter's cache is damaged after the rounds."""

    def run(self, num_rows):
        for infos, state in self._rows.run(num_rows):
            cache = self._damage(state.draft.cache)
            yield infos, state.replace(draft=state.draft.replace(cache=cache))


@pytest.mark.parametrize(
    ("rule", "layers"),
    [("rejection", (0,)), slow_unless(False, "block", (1,))],
)
def test_distribution_and_caches_pass(rule, layers):
    """2,048 rows of fixed seeds; a right library fails for one in 10^6 choices of them."""
    subject = make_subject(
        rule, "layer_skip", target=target(), drafter_options=DrafterOptions(draft_layers=layers)
    )
    rows = make_rows(subject, rows_per_run=_NUM_ROWS)
    caches = check_caches(rows)
    assert caches.has_passed, caches.detail
    assert set(caches.data) == ({"target"} if layers == (0,) else {"target", "layer_skip"})
    distribution, control = check_distribution(rows, _NUM_ROWS)
    assert distribution.has_passed, distribution.detail
    assert control.has_passed, control.detail
    for disturbed in (DisturbedRows, DisturbedDrafts)[: len(caches.data)]:
        check = check_caches(disturbed(rows, values_of_one_slot))
        assert not check.has_passed, check.detail
