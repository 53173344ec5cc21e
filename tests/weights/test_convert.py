"""scripts/convert_weights.py, as a user runs it."""

import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy
import torch
from flax.traverse_util import flatten_dict

from jspec.common.errors import InputError
from jspec.drafters.heads.eagle_checkpoint import load_eagle, save_eagle
from jspec.drafters.heads.folder import round_head
from jspec.kernels.quantized import QuantizedKernel
from jspec.weights import load_model
from jspec.weights.hf import save_hf
from jspec.weights.quantize import dequantize
from jspec.weights.random_weights import random_params
from tests import tiny, tiny_eagle
from tests.tiny_models import save_folder
from tests.weights.tokenizers.test_tokenizer import make_tokenizer
from tests.weights.toys import CONFIGS

_SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "convert_weights.py"
_CONFIG = CONFIGS["grouped"]


def _run(*flags):
    return subprocess.run(
        [sys.executable, str(_SCRIPT), *flags], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "m"
    params = random_params(_CONFIG, 3, "float32")
    save_hf(folder, _CONFIG, params, tokenizer=make_tokenizer(), max_shard_bytes=9_000)
    return folder


@pytest.mark.parametrize("name", ["orbax", "hf"])
def test_converted_model_is_the_same(source, tmp_path, name):
    """Guards against losing weights, tokenizer or ends of text on the way."""
    output = tmp_path / "out"
    done = _run(f"--source={source}", f"--output={output}", f"--format={name}", "--dtype=float32")
    assert (done.returncode, done.stderr) == (0, "")
    before, after = (load_model(str(path), dtype="float32") for path in (source, output))
    assert after.source == name
    assert after.config == before.config
    assert after.tokenizer.vocabulary() == before.tokenizer.vocabulary()
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)


def test_torch_files_become_safetensors(tmp_path):
    """Guards against a program that never reaches the weights-only loader."""
    torch.save({"fc.weight": torch.ones(2, 3)}, tmp_path / "head.pt")
    done = _run(f"--source={tmp_path}/head.pt", f"--output={tmp_path}/out", "--dtype=float32")
    assert (done.returncode, done.stderr) == (0, "")
    found = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(found["fc.weight"], np.ones([2, 3], np.float32))


def test_a_head_becomes_half_as_large(tmp_path):
    """It loads as before, every weight nearly the same; what is no matrix is exactly so."""
    save_eagle(tmp_path / "head", tiny_eagle.CONFIG, tiny_eagle.params())
    done = _run(f"--source={tmp_path}/head", f"--output={tmp_path}/out", "--dtype=int8")
    assert (done.returncode, done.stderr) == (0, "")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("head", "out")]
    assert sizes[1] < 0.4 * sizes[0]
    before, after = (
        load_eagle(tmp_path / name, tiny.CONFIG, "float32") for name in ("head", "out")
    )
    assert after.config == before.config
    np.testing.assert_array_equal(after.params["ids"], before.params["ids"])
    pairs = zip(
        flatten_dict(before.params).values(), flatten_dict(after.params).values(), strict=True
    )
    kernels = 0
    for one, other in pairs:
        is_kernel = isinstance(other, QuantizedKernel)
        kernels += is_kernel
        found = dequantize(other) if is_kernel else other
        np.testing.assert_allclose(found, one, rtol=0, atol=0.51 * np.abs(one).max() / 127)
    assert kernels == 6


def test_a_head_in_int8_keeps_its_integers(tmp_path):
    """What is read, computed in and written down is one thing: nothing is rounded twice."""
    save_eagle(tmp_path / "head", tiny_eagle.CONFIG, tiny_eagle.params())
    round_head(tmp_path / "head", tmp_path / "out")
    stored = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    head = load_eagle(tmp_path / "out", tiny.CONFIG, "bfloat16").params["head"]
    assert isinstance(head["head"], QuantizedKernel)
    np.testing.assert_array_equal(head["head"].values, stored["lm_head.weight"])
    down = stored["midlayer.mlp.down_proj.weight"]
    np.testing.assert_array_equal(head["mlp"]["down"].values, down)


def test_a_whole_model_is_no_head(tmp_path):
    """Else its weights would be rounded to what nothing loads."""
    save_folder(tmp_path / "model")
    with pytest.raises(InputError, match="expected a trained head, got a whole model"):
        round_head(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_refusals_are_one_line_and_write_nothing(source, tmp_path):
    """Guards against tracebacks, overwriting and half-written folders."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    for flags, message in [
        ((f"--source={source}", f"--output={tmp_path}/full"), "not overwritten"),
        (("--source=nonsense", f"--output={tmp_path}/new"), "no model 'nonsense'"),
        (("--source=random:llama3.2-1b", f"--output={tmp_path}/new"), "random weights"),
        ((f"--source={tmp_path}/a.bin", f"--output={tmp_path}/new"), "cannot read"),
        (
            (f"--source={tmp_path}/a.bin", f"--output={tmp_path}/new", "--format=orbax"),
            "--format=hf",
        ),
        ((f"--source={tmp_path}/full", f"--output={tmp_path}/new", "--dtype=int8"), "found 0"),
    ]:
        done = _run(*flags)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert message in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
