"""scripts/convert_weights.py, as a user runs it."""

import importlib.util
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax.traverse_util import flatten_dict

from jspec.common.errors import InputError
from jspec.drafters.eagle_head import load_eagle, save_eagle
from jspec.drafters.head_folder import round_head
from jspec.kernels.quantized import QuantizedKernel
from jspec.weights import load_model
from jspec.weights.hf import save_hf
from jspec.weights.quantize import dequantize
from jspec.weights.random_weights import random_params
from tests import tiny, tiny_eagle
from tests.programs import check_refusal, run_many
from tests.tiny_models import save_folder
from tests.weights.tokenizers.test_tokenizer import make_tokenizer
from tests.weights.toys import CONFIGS

_ROOT = pathlib.Path(__file__).parents[2]
_CONFIG = CONFIGS["grouped"]
_HAS_TORCH = importlib.util.find_spec("torch") is not None
_REFUSALS = (
    "not overwritten", "no model 'nonsense'", "random weights",
    "cannot read" if _HAS_TORCH else "needs torch", "--format=hf", "found 0",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    params = random_params(_CONFIG, 3, "float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jspec.weights.hf._MAX_FILE_BYTES", 9_000)
        save_hf(folder / "model", _CONFIG, params, tokenizer=make_tokenizer())
    save_eagle(folder / "head", tiny_eagle.CONFIG, tiny_eagle.params())
    if _HAS_TORCH:
        import torch

        torch.save({"fc.weight": torch.ones(2, 3)}, folder / "head.pt")
    return folder


@pytest.fixture(scope="module")
def outcomes(folder):
    """Runs the program on good flags, then on others; returns (status, output, errors) of each."""
    (folder / "full").mkdir()
    (folder / "full" / "mine").write_text("")
    new = f"--output={folder}/new"
    lines = [
        [f"--source={folder}/model", f"--output={folder}/orbax", "--dtype=float32"],
        [f"--source={folder}/model", f"--output={folder}/hf", "--format=hf", "--dtype=float32"],
        [f"--source={folder}/head", f"--output={folder}/small_head", "--dtype=int8"],
        [f"--source={folder}/head.pt", f"--output={folder}/torch", "--dtype=float32"],
        [f"--source={folder}/model", f"--output={folder}/full"],
        ["--source=nonsense", new],
        ["--source=random:llama3.2-1b", new],
        [f"--source={folder}/a.bin", new],
        [f"--source={folder}/a.bin", new, "--format=orbax"],
        [f"--source={folder}/full", new, "--dtype=int8"],
    ]
    return run_many("scripts.convert_weights", lines, env=None)


@pytest.fixture(scope="module")
def converted(folder, outcomes):
    done = [[status, errors] for status, _, errors in outcomes[: 3 + _HAS_TORCH]]
    assert done == [[0, ""]] * (3 + _HAS_TORCH)  # of torch's own file last
    return folder


@pytest.mark.parametrize("made", ["orbax/params", "hf/model.safetensors"])
def test_what_is_written_holds_the_same_model(converted, made):
    """Guards against losing weights, tokenizer or ends of text, and shards of one file."""
    after = converted / made
    assert after.exists()
    before, after = (
        load_model(str(path), dtype="float32") for path in (converted / "model", after.parent)
    )
    assert after.config == before.config
    assert after.tokenizer.vocabulary() == before.tokenizer.vocabulary()
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)


@pytest.mark.slow
def test_the_program_runs_by_itself(folder):
    """As a user runs it; the other tests call what it calls."""
    flags = [f"--source={folder}/model", f"--output={folder}/alone", "--dtype=float32"]
    done = subprocess.run(
        [sys.executable, "scripts/convert_weights.py", *flags],
        capture_output=True, text=True, check=False, cwd=_ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / "alone" / "params").is_dir()


def test_torch_files_become_safetensors(converted):
    """Guards against a program that never reaches the weights-only loader."""
    pytest.importorskip("torch")
    tensors = safetensors.numpy.load_file(converted / "torch" / "model.safetensors")
    np.testing.assert_array_equal(tensors["fc.weight"], np.ones([2, 3], np.float32))


def test_a_head_becomes_half_as_large(converted):
    """Every weight is nearly the same, and what is no matrix exactly; nothing is rounded twice."""
    folders = converted / "head", converted / "small_head"
    sizes = [(folder / "model.safetensors").stat().st_size for folder in folders]
    assert sizes[1] < 0.4 * sizes[0]
    before, after = (load_eagle(folder, tiny.CONFIG, "float32") for folder in folders)
    assert after.config == before.config
    np.testing.assert_array_equal(after.params["ids"], before.params["ids"])
    pairs = zip(
        flatten_dict(before.params).values(), flatten_dict(after.params).values(), strict=True
    )
    kernels = 0
    for exact, stored in pairs:
        is_kernel = isinstance(stored, QuantizedKernel)
        kernels += is_kernel
        restored = dequantize(stored) if is_kernel else stored
        np.testing.assert_allclose(restored, exact, rtol=0, atol=0.51 * np.abs(exact).max() / 127)
    assert kernels == 6
    stored = safetensors.numpy.load_file(converted / "small_head" / "model.safetensors")
    integers = after.params["head"]["head"].values
    np.testing.assert_array_equal(integers, stored["lm_head.weight"])


def test_a_whole_model_is_no_head(tmp_path):
    """Else its weights would be rounded to what nothing loads."""
    save_folder(tmp_path / "model")
    with pytest.raises(InputError, match="expected a trained head, got a whole model"):
        round_head(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_refusals_are_one_line_and_write_nothing(folder, outcomes):
    """Guards against tracebacks, overwriting and half-written folders."""
    for outcome, message in zip(outcomes[-len(_REFUSALS) :], _REFUSALS, strict=True):
        assert message in check_refusal(*outcome)
    assert not (folder / "new").exists()
    assert [path.name for path in (folder / "full").iterdir()] == ["mine"]
