"""The kind "functions": chains that are no text, and what guesses save in them."""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.lab import functions
from jspec.lab.experiments.run import run_experiment
from jspec.lab.experiments.spec import GUESSES, FunctionsSpec
from jspec.lab.reports.document import to_markdown
from jspec.lab.reports.report import make_report
from jspec.lab.reports.workdir import read_workdir
from jspec.speculation.functions import speculate
from tests.cases import slow_unless
from tests.lab.experiments.tiny import done_cells


@pytest.fixture
def images(monkeypatch):
    """Gives images with a pattern in the place of scikit-learn's, and tiny networks."""
    noise = np.random.default_rng(0).integers(
        0, 3, (functions._HELD_OUT + 100, functions.NUM_PIXELS)
    )
    made = (noise + 7 * (np.arange(functions.NUM_PIXELS) % 8 > 3)).astype(np.int32)
    monkeypatch.setattr(functions, "load_images", lambda: made)
    monkeypatch.setattr(functions, "_LARGE", (16,))
    functions.make_step.cache_clear()
    with jax.numpy_dtype_promotion("standard"):  # for optax
        yield made
    functions.make_step.cache_clear()


@pytest.mark.usefixtures("images", "quick_figures")
def test_a_run_and_its_report(tmp_path, monkeypatch):
    """Guards against a kind that one of its readers does not know. Its network is not trained."""

    def begin(see, widths, images, num_updates):
        sizes = itertools.pairwise([see(functions.empty_canvas()).size, *widths, 17])
        return [{"kernel": jnp.zeros(size), "bias": jnp.zeros(size[1])} for size in sizes]

    monkeypatch.setattr(functions, "train", begin)
    fields = {"guess": "table", "num_drafts": [3], "num_chains": 2}
    plain = {"kind": "functions", "functions": {"tiny": fields | {"num_steps": 24}}}
    assert run_experiment(plain, str(tmp_path)) == 0
    record = done_cells(tmp_path)["tiny"]
    (row,) = record["rows"]
    assert row[0] == 3
    assert 1 < row[1] <= 4
    assert 0 < row[2] <= 1
    assert np.shape(record["images"]) == np.shape(record["is_guess"]) == (2, 64)
    text = to_markdown(make_report(read_workdir(tmp_path)))
    assert "values per call of g" in text
    assert "figures/images-1.png" in text
    assert "of the pixels are f's guesses" not in text  # it stands in the picture


def test_networks_see_no_pixel_that_is_not_drawn(images):
    """Guards against an image that is known before it is drawn: losses would be too good."""
    canvas = functions.Canvas(jnp.asarray(images[0]), jnp.int32(20))
    later = canvas.replace(pixels=canvas.pixels.at[20:].set(3))
    for see in (functions.see_all, functions.see_neighbours):
        np.testing.assert_array_equal(see(canvas), see(later))
        changed = canvas.replace(pixels=canvas.pixels.at[19].set(16 - canvas.pixels[19]))
        assert (see(canvas) != see(changed)).any()


def test_training_lowers_the_loss(images):
    """The pattern is learnt: half of the pixels have levels 0 to 2, half 7 to 9."""
    _, loss = functions.make_step("small", 200)
    assert loss < 0.75 * np.log(functions.NUM_LEVELS)
    table, of_table = functions.make_step("table", 1)
    assert np.log(3) < of_table < 1.1 * np.log(3) + 0.2
    assert jnp.argmax(table(functions.empty_canvas()).logits) < 3


@pytest.mark.parametrize("name", ["metropolis", slow_unless(False, "langevin")])
def test_chains_on_the_posterior(name, monkeypatch):
    """Laplace's approximation guesses better than a guess that knows nothing."""
    made = functions.make_posterior(0, 500)
    monkeypatch.setattr(functions, "make_posterior", lambda: made)
    kept = []
    for guess in GUESSES[name]:
        chain = functions.make_chain(FunctionsSpec(chain=name, guess=guess))
        options = {"num_steps": 64, "num_drafts": 3, "update": chain.update}
        result = speculate(chain.f, chain.g, chain.state, jax.random.key(2), **options)
        kept.append(int(result.num_accepted) / int(result.num_proposed))
    assert kept[0] > kept[1] + 0.1
    assert kept[0] > 0.6


def test_a_missing_scikit_learn_is_one_line(monkeypatch):
    """It is no dependency of jspec's."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match="pip install scikit-learn"):
        functions.load_images()
