"""`python -m jspec.train`: from answers to a head that drafts, and what is refused."""

import shutil

import jax
import numpy as np
import pytest

from jspec.drafters import DrafterOptions
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.training.texts import Text
from jspec.weights.resolver import load_model
from tests import programs
from tests.programs import check_refusal
from tests.tiny_models import save_folder
from tests.training.folders import save_texts

_CONFIG = "--config=configs/train_eagle.py"
_SMALL = ["--config.num_held_out=4", "--config.seq_len=48", "--config.batch_size=2",
          "--config.vocab_size=60", "--config.feature_layers=(0,1)", "--config.recipe.num_steps=4",
          "--config.recipe.warmup_steps=1", "--config.recipe.evaluate_every=2",
          "--config.chain_steps=2", "--config.dtype=float32"]  # fmt: skip


@pytest.fixture
def call(monkeypatch, capsys):
    """Returns a function that runs the program in this process: status, output, errors."""

    def run(*arguments):
        with jax.numpy_dtype_promotion("standard"):  # for optax
            return programs.call("jspec.train", monkeypatch, capsys, *arguments)

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_folder(tmp_path_factory.mktemp("models") / "target", num_layers=1)


@pytest.fixture(scope="module")
def answered(folder, tmp_path_factory):
    """Returns the target, requests, what it says to them, and that as a file."""
    model = load_model(str(folder), dtype="float32")
    plain = Generator(model, drafter="none", batch_size=8)
    prompts = np.random.default_rng(0).integers(3, 250, (12, 5)).tolist()
    requests = [Request(prompt, SamplingParams(max_new_tokens=24)) for prompt in prompts]
    answers = plain.generate(requests)
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    texts = [Text(tuple(result.prompt_token_ids), tuple(result.token_ids)) for result in answers]
    save_texts(path, texts)
    return model, requests, answers, path


def check_drafts(answered, draft=None, **options):
    """Checks that a trained drafter drafts, and changes nothing."""
    model, requests, answers, _ = answered
    generator = Generator(model, draft, num_draft_tokens=3, batch_size=8, **options)
    drafted = generator.generate(requests)
    assert [result.token_ids for result in drafted] == [result.token_ids for result in answers]
    assert sum(result.stats.num_proposed for result in drafted) > 0


def test_a_head_is_trained_and_drafts(call, folder, answered, tmp_path):
    """The files are there, the head is exact, and a second run has nothing to do.

    A run that went on with answers that have grown would save a head of other tokens.
    """
    texts, work = tmp_path / "answers.jsonl", tmp_path / "work"
    lines = answered[-1].read_text().splitlines(keepends=True)
    texts.write_text("".join(lines[:-1]))
    flags = [_CONFIG, f"--config.target={folder}", *_SMALL, f"--workdir={work}",
             f"--config.texts=('{texts}',)"]  # fmt: skip
    status, output, _ = call(*flags)
    assert status == 0
    assert "tokens per call on held-out texts" in output
    head = DrafterOptions(draft_head=str(work / "head"))
    check_drafts(answered, drafter="eagle", drafter_options=head)
    assert (work / "figures" / "training.svg").exists()
    assert "nothing to do" in call(*flags)[2]
    check_refusal(*call(*flags, "--config.seq_len=64"))
    shutil.rmtree(work / "head")
    texts.write_text("".join(lines))
    assert "num_texts is 11 there and 12 here" in check_refusal(*call(*flags))
    assert not (work / "head").exists()


def test_what_is_refused_claims_no_folder(call, folder, answered, tmp_path):
    """Guards against a workdir left behind that the corrected config may not use."""
    work = tmp_path / "work"
    flags = [_CONFIG, f"--config.target={folder}", *_SMALL, f"--workdir={work}",
             f"--config.texts=('{answered[-1]}',)"]  # fmt: skip
    check_refusal(*call(*flags[:-1], "--config.texts=('answer.jsonl',)"))
    wanted = "expected --mesh, --coordinator, --num_processes and --process_id together"
    assert wanted in check_refusal(*call(*flags, "--coordinator=localhost:1"))
    assert not work.exists()
    assert "expected answers within seq_len" in check_refusal(*call(*flags, "--config.seq_len=4"))
    assert "feature_layers from 0 to" in check_refusal(
        *call(*flags, "--config.feature_layers=(9,)")
    )
    assert not work.exists()
    assert "a smaller batch_size" in call(*flags, "--config.batch_size=999")[2]
    assert not work.exists()
    work.mkdir()
    check_refusal(*call(*flags, "--config.seq_len=4"))
    assert list(work.iterdir()) == []  # a folder that was there stays


@pytest.mark.slow
def test_a_draft_model_is_trained_and_drafts(call, folder, answered, tmp_path):
    """A folder with the target's tokenizer, which --draft takes; trained on any text, too."""
    text = tmp_path / "book.txt"
    text.write_text("All work and no play makes Jack a dull boy. " * 20)
    status, output, errors = call(
        "--config=configs/train_draft_model.py", f"--config.target={folder}",
        *[flag for flag in _SMALL if "vocab_size" not in flag and "feature" not in flag],
        f"--workdir={tmp_path / 'work'}", f"--config.texts=('{answered[-1]}','{text}')",
        "--config.embed_dim=16", "--config.hidden_dim=24", "--config.num_heads=2",
        "--config.recipe.compute_dtype=bfloat16", "--config.recipe.remat=products",
        "--config.recipe.accumulate=2", "--config.total_variation_weight=0.5",
    )  # fmt: skip
    assert (status, "draft: " in output) == (0, True), errors
    draft = load_model(str(tmp_path / "work" / "draft"), dtype="float32")
    assert (draft.config.num_layers, draft.config.embed_dim, draft.config.head_dim) == (4, 16, 8)
    assert draft.tokenizer.vocabulary() == answered[0].tokenizer.vocabulary()
    check_drafts(answered, draft, drafter="model")


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--config.recipe.num_step=3"], "no field 'recipe.num_step'"),
     (["--config.texts=('nowhere.jsonl',)"], "nowhere.jsonl"),
     (["--config.recipe.num_steps=0"], "num_steps"),
     (["--config.batch_size=0"], "batch_size from 1"),
     (["--config.seq_len=3"], "seq_len from 4"),
     (["--config.drafter=parrot"], "got 'parrot'"),
     ([], "answers.jsonl")],
)  # fmt: skip
def test_refusals(call, folder, tmp_path, flags, message):
    """A line for each."""
    status, output, errors = call(
        _CONFIG, f"--config.target={folder}", f"--workdir={tmp_path / 'work'}", *flags
    )
    assert message in check_refusal(status, output, errors)
