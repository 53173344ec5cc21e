"""The notebooks of the documentation: they run from top to bottom, and show what they gave."""

import copy
import os
import pathlib

import nbclient
import nbformat
import pytest

from jspec.common.user_cache import cache_dir
from jspec.weights.published import MODELS, SMOLLM2
from tests.cases import slow_unless
from tests.programs import as_users, environment
from tests.tiny_models import save_folder

FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "notebooks"
NAMES = ["first_steps", "rule_of_your_own", "train_a_head"]
_TIMEOUT = 600  # seconds for a cell, with other programs on the machine


def read(name):
    """Returns a notebook."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_of(notebook):
    """Returns the cells of code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds_of(notebook):
    """Returns of each cell of code what it shows: text, or the types of a picture."""
    return [
        sorted({output.get("name") or " ".join(sorted(output.data)) for output in cell.outputs})
        for cell in code_of(notebook)
    ]


def execute(notebook, env, folder):
    """Returns the notebook as it is after a run in its own process."""
    fresh = copy.deepcopy(notebook)
    for cell in code_of(fresh):
        cell.outputs, cell.execution_count = [], None
    client = nbclient.NotebookClient(
        fresh, timeout=_TIMEOUT, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=env)  # raises what a cell raises
    return fresh


def with_model(notebook, model):
    """Returns the notebook with another model in the place of SmolLM2."""
    changed = copy.deepcopy(notebook)
    for cell in code_of(changed):
        cell.source = cell.source.replace(f'"{SMOLLM2}"', repr(str(model)))
    return changed


@pytest.mark.parametrize("name", [slow_unless(name == "rule_of_your_own", name) for name in NAMES])
def test_it_runs_and_shows_what_is_stored(name, compile_cache, tmp_path):
    """Guards against code that no longer works, and outputs that another version of it gave.

    SmolLM2 is replaced by a tiny model: these tests need no network and no file.
    """
    notebook, folder = read(name), save_folder(tmp_path / "model")
    run = with_model(notebook, folder)
    assert (run == notebook) == (name != "first_steps")
    done = execute(run, environment(compile_cache, tmp_path / "home"), tmp_path)
    assert kinds_of(done) == kinds_of(notebook)


@pytest.mark.slow
def test_the_first_steps_with_the_real_model(compile_cache, tmp_path):
    """The texts and counts that are stored, to the letter."""
    if not (cache_dir() / "models" / MODELS[SMOLLM2].file).is_file():
        pytest.skip("the model is not in the cache")
    variables = {"HF_HUB_OFFLINE": "1", "JAX_COMPILATION_CACHE_DIR": str(compile_cache)}
    notebook = read("first_steps")
    done = execute(notebook, as_users({**os.environ, **variables}), tmp_path)
    for cell, stored in zip(code_of(done), code_of(notebook), strict=True):
        texts = ["".join(output.get("text", "") for output in c.outputs) for c in (cell, stored)]
        assert texts[0] == texts[1], stored.source


@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored_is_one_whole_run(name):
    """Guards against cells run out of order, failed ones, and warnings that a reader would see."""
    cells = code_of(read(name))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {kind for shown in kinds_of(read(name)) for kind in shown}
    assert kinds == {"stdout", "image/png text/plain"}


def test_all_are_tested_and_in_the_documentation():
    """Guards against a notebook that nobody runs or finds."""
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES
    pages = (FOLDER.parents[1] / "mkdocs.yml").read_text()
    assert [name for name in NAMES if f"notebooks/{name}.ipynb" not in pages] == []
