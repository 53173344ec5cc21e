"""What tests of reports share."""

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def figures(monkeypatch):
    """Returns a list to which every drawn figure comes, so that a test can look at its data."""
    drawn = []
    save = Figure.savefig

    def keep(figure, *args, **kwargs):
        if figure not in drawn:
            drawn.append(figure)
        return save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return drawn
