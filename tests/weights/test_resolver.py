"""One name for every kind of model."""

import json
import pathlib
import subprocess
import sys

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.generation.generator import Generator
from jspec.models import config as config_module
from jspec.weights import Tokenizer, load_model, resolver
from jspec.weights.hf import save_hf
from jspec.weights.orbax_checkpoint import save_orbax
from jspec.weights.published import MODELS
from jspec.weights.random_weights import random_params
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from tests.weights.tokenizers.test_tokenizer import make_tokenizer
from tests.weights.toys import CONFIGS

_CONFIG = CONFIGS["grouped"]


@pytest.fixture(scope="module")
def params():
    return random_params(_CONFIG, 0, "float32")


@pytest.mark.parametrize("save", [save_hf, save_orbax])
def test_folders_load_with_tokenizer_and_every_end(tmp_path, params, save):
    """Guards against an end of text known only to the tokenizer or the generation config."""
    save(tmp_path / "m", _CONFIG, params, tokenizer=make_tokenizer())
    (tmp_path / "m" / "generation_config.json").write_text('{"eos_token_id": [5, 8]}')
    model = load_model(str(tmp_path / "m"), dtype="float32")
    assert (model.is_random, model.name) == (False, str(tmp_path / "m"))
    assert model.config.eos_ids == (4, 5, 8, 1)
    assert isinstance(model.tokenizer, Tokenizer)
    jax.tree.map(np.testing.assert_array_equal, model.params, params)


def test_a_missing_file_is_not_asked_of_the_hub():
    with pytest.raises(InputError, match=r"absent\.gguf: cannot be read"):
        load_model("some/absent.gguf")


def test_paths_are_names_too(tmp_path, params):
    """Guards against an AttributeError for a pathlib.Path; and for what is none."""
    save_hf(tmp_path / "m", _CONFIG, params, tokenizer=make_tokenizer())
    generator = Generator.load(tmp_path / "m", tmp_path / "m", dtype="float32")
    assert generator.describe()["target"] == generator.describe()["draft"] == str(tmp_path / "m")
    for name in (None, 5):
        with pytest.raises(InputError, match=f"as a text or a path, got {name}"):
            Generator.load(name)


@pytest.fixture
def tiny_preset(monkeypatch):
    """Makes the toy model a preset."""
    monkeypatch.setattr("jspec.weights.resolver.PRESETS", {"tiny": _CONFIG})
    assert "tiny" not in config_module.PRESETS


def test_random_models_are_seeded_and_loud(tiny_preset, capsys):
    """Guards against noise that is taken for a model's answer, and against one seed for all."""
    models = [load_model(name) for name in ("random:tiny", "random:tiny:0", "random:tiny:1")]
    assert capsys.readouterr().err.count("RANDOM WEIGHTS") == 3
    assert all(model.is_random for model in models)
    assert isinstance(models[0].tokenizer, ByteTokenizer)
    jax.tree.map(np.testing.assert_array_equal, models[0].params, models[1].params)
    kernels = [np.asarray(model.params["head"], np.float32) for model in models]
    assert abs(np.corrcoef(kernels[0].ravel(), kernels[2].ravel())[0, 1]) < 0.1


@pytest.mark.parametrize(
    "spec", ["", "/no/such/folder", "a/b/c", "random:x:1", "random:llama3.2-1b:-1", "smollm2"],
)  # fmt: skip
def test_unknown_names_are_answered_with_what_is_accepted(spec):
    """Guards against a mistyped name ending in a traceback or a network request."""
    with pytest.raises(InputError, match=r"expected .*llama3\.2-1b") as error:
        load_model(spec)
    assert "\n" not in str(error.value)


def test_unknown_dtypes_are_refused(tiny_preset):
    """Guards against half precision that the models were never tested in."""
    for dtype in ("float16", jnp.float16):
        with pytest.raises(InputError, match="expected the dtype bfloat16 or float32, got float16"):
            load_model("random:tiny", dtype=dtype)
    assert load_model("random:tiny", dtype=jnp.float32).params["final_norm"]["scale"].dtype == (
        jnp.float32
    )


def test_hub_names_load_from_the_downloaded_folder(tmp_path, params, monkeypatch):
    """Guards against fetching weights in other formats too: only what is read is asked for.

    And against a network that `--offline` has forbidden: then only the hub's cache is looked into.
    """
    save_hf(tmp_path / "m", _CONFIG, params, tokenizer=make_tokenizer())
    asked, is_local = {}, []

    def download(name, allow_patterns, local_files_only):
        asked[name] = allow_patterns
        is_local.append(local_files_only)
        return str(tmp_path / "m")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_model("organisation/model-1.5b").name == "organisation/model-1.5b"
    files = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "a.jinja"]
    patterns = asked["organisation/model-1.5b"]
    assert all(any(pathlib.PurePath(f).match(p) for p in patterns) for f in files)
    assert not any(pathlib.PurePath("pytorch_model.bin").match(p) for p in patterns)
    monkeypatch.setenv("JSPEC_OFFLINE", "1")
    load_model("organisation/model-1.5b")
    assert is_local == [False, True]


def test_a_wrong_value_of_the_offline_variable_is_refused(monkeypatch):
    """Guards against JSPEC_OFFLINE=no, which forbade the network."""
    monkeypatch.setenv("JSPEC_OFFLINE", "no")
    with pytest.raises(InputError, match="expected JSPEC_OFFLINE as 0 or 1, got 'no'"):
        load_model("organisation/absent")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("RepositoryNotFoundError", "check the name"),
        ("GatedRepoError", "accept its licence"),
        ("LocalEntryNotFoundError", "no network"),
        ("HFValidationError", "its name is not one"),
        (None, "RuntimeError: Client error"),
    ],
)
def test_hub_failures_say_what_to_do(monkeypatch, kind, message):
    """Guards against a line as long as a page, and the wrong advice: the kinds inherit.

    And of the real client, which asks for nothing: the tests are offline.
    """
    with pytest.raises(InputError, match=r"absent: no such folder here, .* no network \(or off"):
        load_model("organisation/absent")
    error_class = RuntimeError if kind is None else getattr(huggingface_hub.errors, kind)
    error = error_class.__new__(error_class)
    error.args = ("Client error.\n" * 50,)

    def download(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(InputError, match=message) as failure:
        load_model("organisation/model")
    assert len(str(failure.value)) < 190
    assert "\n" not in str(failure.value)


def test_a_folder_comes_before_a_published_name(tmp_path, monkeypatch):
    """Guards against another model than the one in the folder of that name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resolver, "fetch", lambda name: pytest.fail("fetched"))
    name = next(iter(MODELS))
    (tmp_path / name).mkdir()
    assert resolver.find_model(name) == pathlib.Path(name)


def test_folder_without_tokenizer_is_refused(tmp_path, params):
    """Guards against text encoded by somebody else's tokenizer."""
    save_hf(tmp_path / "m", _CONFIG, params)
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        load_model(str(tmp_path / "m"))


def test_importing_is_cheap():
    """Guards against imports of seconds: each heavy library loads where it is needed."""
    code = "import json, sys, jspec.weights; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"transformers", "torch", "gguf", "safetensors", "tokenizers", "huggingface_hub",
             "jinja2"}  # fmt: skip
    assert not heavy & set(json.loads(done.stdout))
