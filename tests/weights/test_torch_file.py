"""PyTorch's own files: tensors come out as they are, and nothing in them is run."""

import os
import pathlib
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jspec.common.errors import InputError
from jspec.drafters.eagle_head import load_eagle, save_eagle
from jspec.weights.torch_file import convert_torch, find_torch_files, read_torch
from tests import tiny, tiny_eagle

torch = pytest.importorskip("torch")


class Evil:
    """A pickle that leaves a file behind when it is opened."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch '{self.mark}'",)


def tensors():
    return {
        "fc.weight": torch.arange(6.0).reshape(2, 3).t(),  # not contiguous
        "norm.weight": torch.nn.Parameter(torch.tensor([1.5, -2.0], dtype=torch.bfloat16)),
        "half": torch.tensor([0.25], dtype=torch.float16),
        "d2t": torch.tensor([0, 3, 7]),
        "t2d": torch.tensor([True, False]),
    }


@pytest.mark.parametrize("is_zip", [True, False])
def test_tensors_come_out_as_they_are(tmp_path, is_zip):
    """In both of torch's formats, bfloat16 too."""
    torch.save(tensors(), tmp_path / "a.bin", _use_new_zipfile_serialization=is_zip)
    tensors_read = read_torch(tmp_path / "a.bin")
    assert tensors_read["norm.weight"].dtype == jnp.bfloat16
    for name, tensor in tensors().items():
        wanted = tensor.detach().to(torch.float64).numpy()
        np.testing.assert_array_equal(tensors_read[name].astype(np.float64), wanted)
    assert {str(tensors_read[name].dtype) for name in ("half", "d2t", "t2d")} == {
        "float16",
        "int64",
        "bool",
    }


def test_a_published_head_is_converted(tmp_path):
    """From .bin to a folder that loads as the same head, in the type asked for."""
    save_eagle(tmp_path / "head", tiny_eagle.CONFIG, tiny_eagle.params())
    loaded = safetensors.numpy.load_file(tmp_path / "head" / "model.safetensors")
    (tmp_path / "old").mkdir()
    state = {name: torch.from_numpy(value.copy()) for name, value in loaded.items()}
    torch.save(state, tmp_path / "old" / "pytorch_model.bin")
    config = (tmp_path / "head" / "config.json").read_text()
    (tmp_path / "old" / "config.json").write_text(config)
    (tmp_path / "old" / "training_args.bin").write_bytes(b"not read")
    files = find_torch_files(tmp_path / "old")
    assert files == find_torch_files(tmp_path / "old" / "pytorch_model.bin")
    convert_torch(files, tmp_path / "new", "float32")
    before, after = (load_eagle(tmp_path / n, tiny.CONFIG, "float32") for n in ("head", "new"))
    jax.tree.map(np.testing.assert_array_equal, before.params, after.params)
    convert_torch(files, tmp_path / "half", "bfloat16")
    half = safetensors.numpy.load_file(tmp_path / "half" / "model.safetensors")
    assert half["fc.weight"].dtype == jnp.bfloat16
    assert half["d2t"].dtype == np.int64


def test_several_files_are_one_model(tmp_path):
    """And no tensor may be in two of them."""
    for name, keys in [("1-of-2", ("half", "d2t")), ("2-of-2", ("fc.weight",))]:
        part = {key: tensors()[key] for key in keys}
        torch.save(part, tmp_path / f"pytorch_model-0000{name}.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    convert_torch(find_torch_files(tmp_path), tmp_path / "new", "float32")
    joined = safetensors.numpy.load_file(tmp_path / "new" / "model.safetensors")
    assert joined.keys() == {"half", "d2t", "fc.weight"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.safetensors"]
    torch.save({"half": tensors()["half"]}, tmp_path / "pytorch_model-3.bin")
    with pytest.raises(InputError, match="half is in two files"):
        convert_torch(find_torch_files(tmp_path), tmp_path / "again", "float32")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("form", ["zip", "plain pickle"])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, form):
    """The same file does harm when it is opened as a pickle."""
    mark, path = tmp_path / "harm", tmp_path / "evil.bin"
    content = {"fc.weight": Evil(mark)}
    if form == "plain pickle":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path)
    with pytest.raises(InputError, match=r"asks for (posix|nt)\.system: refused") as caught:
        convert_torch(find_torch_files(path), tmp_path / "new", "float32")
    assert "\n" not in str(caught.value)
    assert not mark.exists()
    assert not (tmp_path / "new").exists()
    if form == "plain pickle":
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert mark.exists()


def test_files_that_hold_something_else_are_refused(tmp_path):
    path = tmp_path / "a.pt"
    for content, message in [
        ([torch.zeros(1)], "expected tensors by name, got list"),
        ({"epoch": 3}, "expected epoch to be a tensor, got int"),
        ({3: torch.zeros(1)}, "the key 3"),
        ({"a": torch.zeros(1, dtype=torch.complex64)}, "a: expected a dense tensor"),
    ]:
        torch.save(content, path)
        with pytest.raises(InputError, match=message):
            read_torch(path)
    torch.save(tensors(), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"a\.pt: truncated or damaged") as caught:
        read_torch(path)
    assert "\n" not in str(caught.value)
    path.write_bytes(b"words\n" * 20)
    with pytest.raises(InputError, match="got something else or a damaged one"):
        read_torch(path)
    with pytest.raises(InputError, match=r"cannot read .*nowhere\.pt: No such file"):
        read_torch(tmp_path / "nowhere.pt")


def test_without_torch_a_line_says_what_to_install(tmp_path, monkeypatch):
    """It is no dependency of jspec."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match="needs torch: pip install torch"):
        read_torch(tmp_path / "a.bin")


def test_what_a_source_means(tmp_path):
    """A folder with safetensors is a model as before; several unknown files need a choice."""
    assert find_torch_files(pathlib.Path("smollm2-135m-instruct")) == []
    (tmp_path / "b.pt").touch()
    assert find_torch_files(tmp_path) == [tmp_path / "b.pt"]
    (tmp_path / "a.pt").touch()
    with pytest.raises(InputError, match=r"expected one file of weights, found a\.pt, b\.pt"):
        find_torch_files(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert find_torch_files(tmp_path) == []
