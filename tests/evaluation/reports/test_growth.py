"""Where a way is said to pay, as batches or answers grow."""

import pytest

from jspec.evaluation.reports.growth_chapters import where_it_pays


@pytest.mark.parametrize(
    ("paying", "said"),
    [([], "never clearly pays"), ([8, 16, 32], "clearly pays at all of them"),
     ([16, 32], "clearly pays from answers of 16 tokens on"),
     ([8], "clearly pays up to answers of 8 tokens"),
     ([16], "clearly pays at answers of 16 tokens only"),
     ([32], "clearly pays at answers of 32 tokens only, the largest measured"),
     ([8, 32], "clearly pays at answers of 8, 32 tokens only")],
)  # fmt: skip
def test_what_lies_between_is_not_passed_over(paying, said):
    """Guards against "from 8 on" where only 8 pays."""
    assert where_it_pays("answers of {} tokens", paying, [8, 16, 32]) == said
