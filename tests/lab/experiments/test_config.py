"""Config files, and the configs that ship."""

import json
import pathlib
import re

import pytest

from jspec.common.errors import InputError
from jspec.generation.prompts import read_prompts
from jspec.lab.experiments.cells import choose_prompts, make_cells
from jspec.lab.experiments.config import (
    defaults,
    find_config,
    load_config,
    method,
    ordered,
    pair,
    to_plain,
)
from jspec.lab.experiments.spec import read_experiment

_FOLDER = pathlib.Path("configs")
CONFIGS = sorted(set(_FOLDER.glob("*.py")) - set(_FOLDER.glob("train_*.py")))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configs_that_ship(path):
    """Guards against a config that says what the library does not know, and one without cells."""
    experiment = read_experiment(to_plain(load_config(str(path))))
    prompts = choose_prompts(experiment) if experiment.needs_prompts else {}
    cells = make_cells(experiment, list(prompts))
    assert cells
    assert len({cell.name for cell in cells}) == len(cells)
    assert experiment.title
    if experiment.kind == "generate":
        first = next(iter(experiment.methods.values()))
        assert first.drafter == "none"
    text = path.read_text(encoding="utf-8")
    assert re.search(rf"--config=configs/{path.name}\b", text.split('"""')[1])


@pytest.mark.parametrize("name", ["prompts", "code_prompts", "table_prompts"])
def test_the_prompts_that_ship(name):
    """Guards against a broken line, and a table counted on what is measured."""
    prompts = [prompt.text for prompt in read_prompts(f"configs/{name}.jsonl")]
    assert len(set(prompts)) == len(prompts) >= 10
    if name == "table_prompts":
        assert set(prompts).isdisjoint(p.text for p in read_prompts("configs/prompts.jsonl"))


def test_the_order_of_methods_is_kept():
    """Guards against ConfigDict's own order: the first method is the baseline of all ratios."""
    config = defaults()
    config.methods = ordered(
        {"z": method("none"), "a": method("ngram", 2), "T=0.7": method("random")}
    )
    plain = to_plain(config)
    assert list(plain["methods"]) == ["z", "a", "T=0.7"]
    assert list(read_experiment(plain).methods) == ["z", "a", "T=0.7"]
    assert plain["methods"]["a"]["num_draft_tokens"] == 2
    assert plain["methods"]["a"]["lenience"] == 1.0


def test_fields_of_two_types_can_be_overridden():
    """Guards against a number of drafts that cannot become "auto", nor a draft a name."""
    config = defaults()
    config.methods = ordered({"a": method("prompt_lookup", 3)})
    config.lock()
    config.methods.a.num_draft_tokens = "auto"
    config.methods.a.drafter = "model"
    config.methods.a.draft = "folder"
    read_method = read_experiment(to_plain(config)).methods["a"]
    assert (read_method.num_draft_tokens, read_method.draft) == ("auto", "folder")
    with pytest.raises(TypeError):
        config.max_new_tokens = "many"


def test_methods_and_pairs_have_all_their_fields():
    """Guards against a config.json in which a reader must guess."""
    config = defaults()
    config.methods = ordered({"a": {"drafter": "ngram"}})
    config.predict = ordered({"x": pair("llama3.1-8b", "llama3.2-1b", bandwidth=1e12)})
    plain = to_plain(config)
    assert plain["methods"]["a"] == {
        "drafter": "ngram", "num_draft_tokens": "auto", "draft": None, "draft_quantization": "none",
        "acceptance": "rejection", "lenience": 1.0, "options": {},
    }  # fmt: skip
    assert (plain["predict"]["x"]["bandwidth"], plain["predict"]["x"]["flop_rate"]) == (1e12, None)
    assert plain["predict"]["x"]["alphas"]
    config.predict = ordered({"x": {"alphas": object()}})
    with pytest.raises(InputError, match="expected a config of plain values"):
        to_plain(config)


def test_a_config_file_may_take_an_argument():
    """Guards against a pair of one's own that needs one's own config file."""
    config = load_config("configs/predict.py:llama3.1-8b,llama3.2-1b")
    assert list(config.predict) == ["mine"]
    for text in ("x", "x,", ",x"):
        with pytest.raises(InputError, match=f"TARGET,DRAFT after the colon, got '{text}'"):
            load_config(f"configs/predict.py:{text}")
    with pytest.raises(InputError, match=r"smoke\.py: expected no text after the colon, got 'x'"):
        load_config("configs/smoke.py:x")


@pytest.mark.parametrize(
    ("name", "published", "num_drafts"),
    [("llama32_1b_3b", "meta-llama/", 8), ("coder_pair", "qwen2.5-coder", 3)],
)
def test_a_config_of_a_pair_takes_another_pair(name, published, num_drafts):
    """Guards against one method that still wants the published weights, and against their title."""
    models = "random:llama3.2-3b", "random:llama3.2-1b:7"
    plain = to_plain(load_config(f"configs/{name}.py:{','.join(models)}"))
    experiment = read_experiment(plain)
    assert experiment.target == models[0]
    assert experiment.title == f"{models[1]} for {models[0]}"
    methods = experiment.methods.values()
    drafts = [method.draft for method in methods if method.drafter.endswith("model")]
    assert drafts == [models[1]] * num_drafts
    usual = to_plain(load_config(f"configs/{name}.py"))
    assert list(usual["methods"]) == list(plain["methods"])
    assert published in json.dumps(usual)
    assert published not in json.dumps(plain)


@pytest.mark.parametrize(
    ("target", "kind"),
    [("qwen2.5-coder-1.5b-instruct", "packed"), ("a/m.gguf", "packed"), ("a/folder", "none")],
)
def test_only_files_of_packed_weights_stay_packed(target, kind):
    """Guards against a Hugging Face folder that is refused, as it holds none."""
    plain = to_plain(load_config(f"configs/trees.py:{target},b"))
    assert read_experiment(plain).target_quantization == kind


BROKEN = {
    "": r"expected a function get_config\(\), got none",
    "def get_config(): return 3": r"expected get_config\(\) to return a ConfigDict, got int",
    "def get_config(:": "SyntaxError",
    "import no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    "def get_config(): raise OSError('a\\nb')": "OSError: a b",
    "def get_config(): return 1 / 0": "ZeroDivisionError",
    "from jspec.lab.experiments.config import defaults\n"
    "def get_config():\n"
    "  c = defaults(); c.num_prompts = 'x'; return c": "TypeError",
}  # fmt: skip


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_config_file_is_one_line(tmp_path, content):
    """Guards against tracebacks of the user's file."""
    path = tmp_path / "broken.py"
    path.write_text(content)
    with pytest.raises(InputError, match=BROKEN[content]) as caught:
        load_config(str(path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["smoke", "configs/smoke.py"])
def test_jspecs_own_configs_have_names(name, tmp_path, monkeypatch):
    """Guards against configs and prompts that are found in a checkout alone; one's own come first.

    The file of a package, and that of a checkout where none is installed.
    """
    expected = (_FOLDER / "smoke.py").resolve()
    shipped_prompts = list(read_prompts("configs/prompts.jsonl"))
    monkeypatch.chdir(tmp_path)
    assert pathlib.Path(find_config(name)) == expected
    assert list(read_prompts("configs/prompts.jsonl")) == shipped_prompts
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/smoke.py").write_text("raise ValueError")
    (tmp_path / "configs/prompts.jsonl").write_text('{"prompt": "mine"}')
    (tmp_path / "smoke.py").write_text("raise ValueError")
    assert pathlib.Path(find_config(name)).resolve().is_relative_to(tmp_path)
    assert [prompt.text for prompt in read_prompts("configs/prompts.jsonl")] == ["mine"]
    package = tmp_path / "site-packages/jspec"
    (package / "configs").mkdir(parents=True)
    (package / "configs/trees.py").write_text("")
    monkeypatch.setattr("jspec.common.shipped._PACKAGE", package)
    assert pathlib.Path(find_config("trees")) == package / "configs/trees.py"
