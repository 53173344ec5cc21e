"""Texts of rows that a drafter has seen without having drafted for them."""

import pytest

from tests.drafters import rows


@pytest.fixture(scope="module")
def text():
    """Returns the tokens of all rows, [3 s]."""
    return rows.TEXT


@pytest.fixture(scope="module")
def last():
    """Returns each row's newest token."""
    return rows.LAST
