"""What the tests of experiments share."""

import pytest

from tests.lab.experiments.tiny import TEMPLATE, TINY_PROMPTS, plain_config
from tests.programs import write_lines
from tests.tiny_models import save_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny chat model of one layer, as each run compiles its own programs."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    return save_folder(path, template=TEMPLATE, num_layers=1)


@pytest.fixture
def config(folder, tmp_path):
    """Returns a function that gives a small config with changes."""
    prompts = write_lines(tmp_path / "prompts.jsonl", TINY_PROMPTS)
    return lambda **changes: plain_config(folder, prompts, **changes)
