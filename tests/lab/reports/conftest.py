"""What the tests of reports share: no drawing, which takes longest, and few samples."""

import pytest

from jspec.lab.analysis import ratios


@pytest.fixture(autouse=True)
def few_samples(monkeypatch, quick_figures):
    """Takes a tenth of the samples for an interval, which have their own tests."""
    monkeypatch.setattr(ratios, "_NUM_SAMPLES", 200)
