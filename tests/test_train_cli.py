"""`python -m jspec.train`: from answers to a head that drafts, and what is refused."""

import sys

import numpy as np
import pytest
from absl.testing import flagsaver

from jspec.drafters import DrafterOptions
from jspec.generator import Generator
from jspec.request import Request, Settings
from jspec.training.texts import Text, write_texts
from jspec.weights.resolver import load_model
from tests.programs import check_refusal
from tests.tiny_models import save_folder

_CONFIG = "--config=configs/train_eagle.py"
_SMALL = ["--config.num_held_out=4", "--config.seq_len=48", "--config.batch_size=2",
          "--config.vocab_size=60", "--config.feature_layers=(1,2)", "--config.recipe.num_steps=4",
          "--config.recipe.warmup_steps=1", "--config.recipe.evaluate_every=2",
          "--config.dtype=float32"]  # fmt: skip


@pytest.fixture
def call(monkeypatch, capsys):
    """Returns a function that runs the program in this process: status, output, errors."""
    import jax

    from jspec import cli, train

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["train", *map(str, arguments)])
        capsys.readouterr()
        status = 0
        with flagsaver.flagsaver(), jax.numpy_dtype_promotion("standard"):
            try:
                cli.run_main(train.main)
            except SystemExit as error:
                status = error.code or 0
        return (status, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_folder(tmp_path_factory.mktemp("models") / "target")


def test_a_head_is_trained_and_drafts(call, folder, tmp_path):
    """The files are there, the head is exact, and a second run has nothing to do."""
    model = load_model(str(folder), dtype="float32")
    plain = Generator(model, drafter="none", batch_size=8)
    prompts = np.random.default_rng(0).integers(3, 250, (12, 5)).tolist()
    requests = [Request(prompt, Settings(max_new_tokens=24)) for prompt in prompts]
    answers = plain.generate(requests)
    texts = [Text(tuple(one.prompt_token_ids), tuple(one.token_ids)) for one in answers]
    write_texts(tmp_path / "answers.jsonl", texts)
    flags = [_CONFIG, f"--config.target={folder}", *_SMALL, f"--workdir={tmp_path / 'work'}",
             f"--config.texts=('{tmp_path / 'answers.jsonl'}',)"]  # fmt: skip
    status, output, _ = call(*flags)
    assert status == 0
    assert "tokens a call on held-out texts" in output
    head = str(tmp_path / "work" / "head")
    options = DrafterOptions(draft_head=head)
    eagle = Generator(
        model, drafter="eagle", num_draft_tokens=3, drafter_options=options, batch_size=8
    )
    drafted = eagle.generate(requests)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in answers]
    assert sum(one.stats.num_proposed for one in drafted) > 0
    assert "nothing to do" in call(*flags)[2]
    check_refusal(*call(*flags, "--config.seq_len=64"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--config.recipe.num_step=3"], "no field 'recipe.num_step'"),
     (["--config.texts=('nowhere.jsonl',)"], "nowhere.jsonl"),
     (["--config.recipe.num_steps=0"], "num_steps"),
     ([], "answers.jsonl")],
)  # fmt: skip
def test_refusals(call, folder, tmp_path, flags, message):
    """One line each."""
    status, output, errors = call(
        _CONFIG, f"--config.target={folder}", f"--workdir={tmp_path / 'work'}", *flags
    )
    assert message in check_refusal(status, output, errors)
