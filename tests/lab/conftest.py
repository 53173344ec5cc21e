"""What tests that draw figures share."""

import io

import PIL.Image
import pytest
from matplotlib.figure import Figure


@pytest.fixture
def quick_figures(monkeypatch):
    """Leaves the drawing out, which takes longest: figures have their own tests."""
    pixel = io.BytesIO()
    PIL.Image.new("RGB", (1, 1)).save(pixel, format="png")
    files = {"svg": b"<svg></svg>", "png": pixel.getvalue()}
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, file, format, **_: file.write(files[format])
    )


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
