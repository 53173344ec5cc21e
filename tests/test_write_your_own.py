"""The page "Write your own", followed to the letter by a user outside the package."""

import inspect
import pathlib
import re
import shutil

import pytest

import jspec
from jspec.cli.program import _import_all
from jspec.common.errors import InputError
from jspec.drafters import DRAFTERS, DrafterOptions
from jspec.drafters.registry import REGISTRY, register_drafter
from jspec.lab.reports.document import to_markdown
from jspec.lab.reports.report import make_report
from jspec.lab.reports.workdir import read_workdir
from jspec.speculation.acceptance import RULES, get_rule, register_rule
from tests.lab.experiments.tiny import TINY_PROMPTS
from tests.programs import check_refusal, environment, run, write_lines
from tests.speculation.enumeration import all_counts, worst_error
from tests.speculation.test_lossless import distributions
from tests.tiny_models import save_folder, target

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "write_your_own.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    """The page's examples in one file."""
    path = tmp_path_factory.mktemp("own") / "my_module.py"
    path.write_text("\n".join(BLOCKS[:3]))
    return path


@pytest.fixture
def own(module):
    """The module's names, registered in this process, and forgotten afterwards."""
    names = {}
    exec(compile(module.read_text(), str(module), "exec"), names)
    yield names
    REGISTRY.pop("repeat", None)
    REGISTRY.pop("either", None)
    RULES.pop("matching", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model."""
    return save_folder(tmp_path_factory.mktemp("model"), num_layers=1)


COMMANDS = {
    "jspec.generate": ("--drafter=prompt_lookup+repeat", "--prompt=aaaa", "--max_new_tokens=8"),
    "jspec.audit": (
        "--drafter=repeat", "--temperature=0.8", "--num_rows=1024", "--max_new_tokens=8",
    ),
    "jspec.benchmark": (
        "--drafters=none,repeat:2", "--temperature=0.8", "--num_prompts=2", "--max_new_tokens=8",
        "--repeats=1", "--notransformers", f"--prompts_file={ROOT}/configs/prompts.jsonl",
    ),
}  # fmt: skip
SAID = {
    "jspec.generate": r"repeat \d+ of \d+",  # on standard error: drafts by member
    "jspec.audit": r"(?s)(?=.*\blossless: ).*rule matching",
    "jspec.benchmark": r"jspec repeat:2 .* \d+\.\d% ",
}


@pytest.mark.slow
@pytest.mark.parametrize("program", COMMANDS)
def test_programs_know_them(program, module, folder, compile_cache, tmp_path):
    """By --import, and what they print names them."""
    status, output, errors = run(
        program, f"--import={module}", f"--target={folder}", "--acceptance=matching",
        "--num_draft_tokens=2", "--dtype=float32", *COMMANDS[program],
        env=environment(compile_cache, tmp_path), timeout=300,
    )  # fmt: skip
    assert status == 0, errors
    assert re.search(SAID[program], output + errors), output + errors


def test_an_experiment_and_its_report_know_them(module, folder, compile_cache, tmp_path):
    """With the page's config; the report needs no --import."""
    (tmp_path / "own.py").write_text(BLOCKS[3])
    prompts = write_lines(tmp_path / "prompts.jsonl", TINY_PROMPTS)
    work, module = tmp_path / "runs", shutil.copy(module, tmp_path)
    line = [
        f"--import={module}", f"--config={tmp_path}/own.py", f"--workdir={work}",
        f"--config.target={folder}", "--config.dtype=float32", "--config.max_seq_len=200",
        f"--config.prompts_file={prompts}",
    ]  # fmt: skip
    env = environment(compile_cache, tmp_path)
    status, output, errors = run("jspec.experiment", *line, env=env, timeout=300)
    assert status == 0, errors
    assert "4 of 4 cells are done" in output
    text = to_markdown(make_report(read_workdir(work)))
    assert "| `own` | repeat | 2 | - | matching | yes |" in text
    with open(module, "a") as file:
        file.write("\n# another drafter\n")
    changed = run("jspec.experiment", *line, env=env, timeout=300)
    assert "a drafter or rule of your own has changed since" in check_refusal(*changed)


def test_the_rule_of_the_page_is_lossless(own):
    """By enumeration over three rounds, with rows that have fewer drafts."""
    target_probs, draft_probs = (distributions(1.0)[i] for i in range(2))
    for kind in ("sampled", "deterministic"):
        rule = own["RULE"]
        assert worst_error(rule, target_probs, draft_probs, 2, kind, counts_of=all_counts) < 1e-6


def test_objects_serve_as_well_as_names(own):
    """A Generator takes an entry and a rule; the seeds are the request's."""
    entry = jspec.DrafterEntry("again", own["build"], "again")
    generator = jspec.Generator(target(), drafter=entry, acceptance=own["RULE"], num_draft_tokens=2)
    again = jspec.DrafterEntry("again", own["build"], "again")  # a notebook's cell run twice
    assert jspec.Generator(target(), drafter=again).drafter == "again"
    assert "again" not in DRAFTERS  # which only `register_drafter` changes
    by_name = jspec.Generator(target(), drafter="repeat", acceptance="matching", num_draft_tokens=2)
    settings = jspec.SamplingParams(max_new_tokens=60, temperature=0.4, seed=3)
    answers = [program_name.generate("aaaa", settings) for program_name in (generator, by_name)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].stats.num_accepted > 0
    assert generator.describe()["acceptance"] == "own rule"


def test_the_tree_of_the_page_is_one(own):
    """What is said is plain decoding's, whose drafts may be those of any branch."""
    entry = jspec.DrafterEntry(
        "own", own["build_either"], "", options={"tree_depth", "tree_branches"}
    )
    settings = jspec.SamplingParams(max_new_tokens=60)
    plain = jspec.Generator(target(), drafter="none").generate("aaaa", settings)
    tree = DrafterOptions(tree_depth=2)
    generator = jspec.Generator(target(), drafter=entry, num_draft_tokens=9, drafter_options=tree)
    assert generator.num_draft_tokens == 6
    answer = generator.generate("aaaa", settings)
    assert answer.token_ids == plain.token_ids
    assert max(answer.stats.accepted_per_round) == answer.stats.tree_depth == 2


def test_a_name_is_taken_once(own):
    """Guards against a rule or a drafter that silently replaces another."""
    register_rule("matching", own["RULE"])  # the same again
    taken = "'{}' is already registered: choose another name, or register nothing and give the {}"
    with pytest.raises(InputError, match=taken.format("block", "AcceptanceRule")):
        register_rule("block", own["RULE"])
    with pytest.raises(InputError, match=taken.format("eagle", "DrafterEntry")):
        register_drafter(jspec.DrafterEntry("eagle", own["build"], ""))
    with pytest.raises(InputError, match="expected rule to be an AcceptanceRule, got 3"):
        inspect.unwrap(register_rule)("x", 3)  # which the tests' check of types would refuse
    for name in ("a+b", "", 3):
        with pytest.raises(InputError, match="expected a drafter's name without '\\+', got "):
            jspec.DrafterEntry(name, own["build"], "")
    for names in ({"tree_dept"}, DrafterOptions, "tree_depth"):
        with pytest.raises(InputError, match="expected the names of options of 'own' among"):
            jspec.DrafterEntry("own", own["build"], "", options=names)
    assert get_rule("block") is not own["RULE"]
    assert "repeat" in DRAFTERS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "^--import=FILE: no such file$"),
        ("1 / 0", "^--import=FILE: ZeroDivisionError: division by zero$"),
        ("def f(:", "^--import=FILE: SyntaxError"),
        ("import jspec\nraise jspec.InputError('mine')", "^--import=FILE: InputError: mine$"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(text, message, tmp_path):
    """Whatever the user's code raises."""
    path = tmp_path / "own.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=message.replace("FILE", str(path))) as caught:
        _import_all([str(path)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("odd", ["", "own.txt", "folder/own", "./own", ".own", "folder.py"])
def test_what_is_no_module_is_named(odd, tmp_path, monkeypatch):
    """Guards against Python's own words for a path that it takes for a package."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.txt").write_text("x = 1")
    (tmp_path / "folder.py").mkdir()
    expected = "no such file" if odd == "folder.py" else "expected a module's name or a .py file"
    with pytest.raises(InputError, match=f"^--import={odd}: {expected}"):
        _import_all([odd])
