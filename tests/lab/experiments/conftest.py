"""What the tests of experiments share."""

import pytest

from tests.lab.experiments.tiny import TEMPLATE, plain_config, write_prompts
from tests.tiny_models import save_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny chat model of one layer, as each run compiles its own programs."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    return save_folder(path, template=TEMPLATE, num_layers=1)


@pytest.fixture
def prompts_file(tmp_path):
    return write_prompts(tmp_path / "prompts.jsonl")


@pytest.fixture
def config(folder, prompts_file):
    """Returns a function that gives a small config with changes."""
    return lambda **changes: plain_config(folder, prompts_file, **changes)
