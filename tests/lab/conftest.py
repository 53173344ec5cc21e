"""What the tests of the lab share: compiled programs, and a look at drawn figures."""

import io

import PIL.Image
import pytest
from matplotlib.figure import Figure

from jspec.generation.engine import Engine

_MOST_ENGINES = 8


@pytest.fixture(scope="module", autouse=True)
def shared_engines():
    """Has Generators of one method share their programs, as compiling takes longest.

    Weights are data: models of one name and form run the same programs.
    """
    engines = {}

    def make(target, drafter, rule, numbers=(), params=None):
        dtype = target.params["embedding"].dtype
        key = target.name, target.config, target.quantization, dtype, drafter, rule, tuple(numbers)
        if key not in engines:
            if len(engines) >= _MOST_ENGINES:
                engines.pop(next(iter(engines)))
            engines[key] = Engine(target, drafter, rule, numbers, params)
        return engines[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jspec.generation.generator.Engine", make)
        yield


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
