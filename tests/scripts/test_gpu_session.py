"""scripts/gpu_session: its plan, limits of time and journal; a rehearsal leaves its records."""

import hashlib
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import kernels
from jspec.common.errors import InputError
from jspec.common.journal import Journal
from jspec.generation.request import Request, SamplingParams
from jspec.kernels import library
from jspec.kernels.cuda_block import Fused
from jspec.lab.accelerators.compiled import find_accelerator
from jspec.lab.auditing.subject import Check
from jspec.weights.published import MODELS, SMOLLM2
from scripts.gpu_session import __main__ as plan
from scripts.gpu_session import correctness, products, session, subjects, tuning
from scripts.gpu_session.aims import AIMS, UNKNOWN, aim_rows
from scripts.gpu_session.session import LeftOut, OutOfTime, Session, Step, run_steps
from tests.programs import as_users, environment, read_lines, refuse_all, run
from tests.tiny_models import make_generator

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = "scripts.gpu_session"
MISSING = ("beartype", "gguf", "ml_collections", "platformdirs")  # where little but JAX is there


@pytest.fixture
def start(tmp_path):
    """Returns a function that begins a call on the journal of this test."""

    def begin():
        return Session(Journal(tmp_path / "session.jsonl"), time.monotonic(), is_rehearsal=True)

    return begin


def lines_of(folder, kind):
    """Returns the records of that kind in the journal."""
    lines = read_lines(folder / "session.jsonl")
    return [record for record in lines if record["kind"] == kind]


def step(name, run, seconds=60, **options):
    return Step(name, 1, seconds, run, **options)


def plan_text():
    return importlib.import_module(f"{PROGRAM}.__main__").__doc__


def test_it_needs_nothing_but_what_jspec_installs():
    """A machine with a GPU has no pytest, may have little but JAX, and cannot download anything."""
    code = (
        f"import sys\nsys.modules |= dict.fromkeys(['pytest', *{MISSING!r}])\n"
        "import scripts.gpu_session.__main__, scripts.gpu_session.torch_step\n"
        f"for name in {MISSING!r}: del sys.modules[name]\n"
        "from absl import flags\n"  # both programs have some of one name
        "for name in list(flags.FLAGS): delattr(flags.FLAGS, name)\n"
        "import scripts.gpu_train.__main__"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_plan_fits_a_quarter_of_an_hour():
    """In all, with the start of the machine, and each part into one call."""
    parts = [sum(step.seconds for step in plan.steps_of(part)) for part in (1, 2)]
    assert plan.START_SECONDS + sum(parts) <= plan.ALL_SECONDS == 900
    assert plan.START_SECONDS + parts[0] <= plan.CALL_SECONDS == 600
    assert parts[1] <= plan.CALL_SECONDS
    names = [step.name for step in plan.STEPS]
    assert len(set(names)) == len(names)
    assert plan.steps_of(None) == plan.STEPS == plan.steps_of(1) + plan.steps_of(2)
    rows = re.findall(r"^\| ([\w ]+) \| (\d+) \|", plan_text(), re.MULTILINE)
    assert rows == [(step.name, str(step.seconds)) for step in plan.STEPS]


def test_a_call_goes_on_where_the_last_one_ended(start, tmp_path):
    """Done steps are not run again; those that failed are."""
    calls = []

    def fail_once(work):
        calls.append("a")
        if calls == ["a"]:
            raise ValueError("broken")
        return "fine"

    def note(work):
        calls.append("b")
        work.record("figure", size=3)
        return "noted"

    steps = step("a", fail_once), step("b", note)
    assert run_steps(start(), steps, until=60) == {"a": "ValueError: broken"}
    assert run_steps(start(), steps, until=60) == {}
    assert run_steps(start(), steps, until=60) == {}
    assert calls == ["a", "b", "a"]
    ends = [(record["step"], record["outcome"]) for record in lines_of(tmp_path, "step")]
    assert ends == [("a", "failed"), ("b", "done"), ("a", "done")]
    assert start().figures("b", "figure")[0]["size"] == 3


def test_a_step_that_fails_or_hangs_stops_no_other(start, tmp_path, monkeypatch):
    """A thread that does not come back writes nothing more; a child that it started is ended."""
    monkeypatch.setattr(session, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(session, "_GRACE", 0.1)
    late, children = [], []

    def hang(work):
        work.record("early", number=1)
        children.append(work.start("no_such_module"))
        time.sleep(1.5)
        try:
            work.record("late", number=2)
        except OutOfTime:
            late.append("refused")
        return "too late"

    def overrun(work):
        while True:
            work.check_time()
            time.sleep(0.05)

    def leave_out(work):
        raise LeftOut("nothing is here")

    steps = (
        step("hangs", hang, 0.4), step("overruns", overrun, 0.4), step("out", leave_out),
        step("raises", lambda work: 1 / 0), step("last", lambda work: "reached"),
    )  # fmt: skip
    problems = run_steps(start(), steps, until=60)
    assert problems == {
        "hangs": "its time was over, and it did not come back", "overruns": "its time was over",
        "raises": "ZeroDivisionError: division by zero",
    }  # fmt: skip
    outcomes = {record["step"]: record["outcome"] for record in lines_of(tmp_path, "step")}
    assert outcomes == {"hangs": "ended", "overruns": "ended", "out": "left out",
                        "raises": "failed", "last": "done"}  # fmt: skip
    time.sleep(1.5)
    assert late == ["refused"]
    assert [record["name"] for record in lines_of(tmp_path, "figure")] == ["early"]
    assert not children[0].is_running()


def test_saved_time_goes_to_later_steps_and_the_call_ends_in_time(start, monkeypatch):
    monkeypatch.setattr(session, "_LEAST_SECONDS", 0.5)
    left = {}

    def see(work):
        left[work.name] = work.left()
        return ""

    steps = step("a", see, 10), step("b", see, 10), step("c", see, 0), step("d", see, 10)
    assert run_steps(start(), steps, until=25) == {}
    assert left == {name: pytest.approx(seconds, abs=1)
                    for name, seconds in {"a": 10, "b": 20, "c": 20, "d": 25}.items()}  # fmt: skip
    begun = start()
    late = step("e", lambda work: time.sleep(1.2) or "", 1.0), step("f", see, 10)
    assert run_steps(begun, late, until=1.4).keys() == {"f"}
    assert begun.outcome("f")["said"] == "the time of this call is over"


def test_jobs_run_at_once_and_those_that_fail_are_said(start):
    """Guards against one compilation after another, and against one that takes all with it."""

    all_together = threading.Barrier(6)

    def compile_all(work):
        jobs = {str(number): lambda: all_together.wait(timeout=60) for number in range(6)}
        return ",".join(sorted(work.together(jobs | {"bad": lambda: 1 / 0})))

    begun = start()
    assert run_steps(begun, [step("a", compile_all)], until=60) == {}
    assert begun.outcome("a")["said"] == "0,1,2,3,4,5"
    assert begun.figures("a", "failed")[0]["job"] == "bad"
    assert begun.figures("a", "compiled")[0]["ended"] == 6


def test_where_rounds_are_wrong_no_speed_is_measured(start, monkeypatch):
    """And where they are wrong in a graph only, later steps run without a graph."""
    monkeypatch.delenv("JSPEC_ONE_GRAPH", raising=False)
    monkeypatch.setenv("JSPEC_ONE_GRAPH", "1")

    def find(verdict):
        return lambda work: work.record("verdict", verdict=verdict) or verdict

    begun, asked = start(), []
    speed = step("speed", lambda work: asked.append(1) or "", needs_right_rounds=True)
    assert run_steps(begun, [step("seeds", find("graph off")), speed], until=60) == {}
    assert (len(asked), session.os.environ["JSPEC_ONE_GRAPH"]) == (1, "0")
    begun.write("figure", "", step="seeds", name="verdict", verdict="wrong")
    assert run_steps(begun, [speed._replace(name="speed again")], until=60) == {}
    assert len(asked) == 1
    assert begun.outcome("speed again")["outcome"] == "left out"


def test_the_end_says_what_is_not_done_and_why(start, capsys):
    """Guards against a status of 1 that says no more."""
    over, begun = "the time of this call is over", start()
    plan._end_call(begun, {"seeds": "its time was over", "models": over, "drafts": over}, 60)
    assert capsys.readouterr().out.endswith(
        "status 1, not done in 60 s: seeds: its time was over; models, drafts: the time of this "
        "call is over; the same command goes on there\n"
    )
    plan._end_call(begun, {}, 60)
    assert capsys.readouterr().out.endswith("s  all steps are done\n")
    assert [record["status"] for record in begun.records] == [1, 0]


def answer(method, tokens, error=None, **changes):
    return {"rule": "coupled", "filters": True, "method": method, "request": 0, "tokens": tokens,
            "error": error} | changes  # fmt: skip


def test_a_wrong_token_is_found_by_its_index():
    """Within an arm, beside the arm without a graph, and where an answer has failed."""
    right = [answer("alone", [1, 2, 3]), answer("in a batch", [1, 2, 3])]
    reference = {correctness.REFERENCE: right}
    assert correctness.faults_of(right, reference) == []
    for tokens, index in (([1, 2, 4], 2), ([1, 2], 2), ([9, 2, 3], 0)):
        (fault,) = correctness.faults_of([right[0], answer("in a batch", tokens)], reference)
        assert (fault["index"], fault["said"]) == (index, "differs from alone")
    silent = [answer("alone", [1, 5, 3]), answer("in a batch", [1, 5, 3])]
    assert [fault["index"] for fault in correctness.faults_of(silent, reference)] == [1, 1]
    (fault,) = correctness.faults_of([answer("alone", [1, 2], "the model gave NaN")], reference)
    assert (fault["index"], fault["said"]) == (2, "the model gave NaN")
    assert correctness.faults_of([answer("alone", [7], rule="rejection")], reference) == []


def judge(numbers=(), wrong=(), problems=(), *, race):
    """Returns the verdict, and what is said, of arms of eight answers, none wrong but those."""
    counts = {arm.name: 8 for arm in correctness.FIRST} | dict(numbers)
    faults = dict.fromkeys(counts, 0) | dict.fromkeys(wrong, 1)
    return correctness.judge(counts, faults, dict(problems), is_shown_by_race=race)


@pytest.mark.parametrize(
    ("wrong", "verdict"),
    [
        ({correctness.OLD}, "settled"),
        (set(), "not reproduced"),
        ({correctness.IN_GRAPH, correctness.OLD}, "graph off"),
        ({correctness.EARLY}, "graph off"),
        ({correctness.REFERENCE}, "wrong"),
    ],
)
def test_the_rules_of_decision(wrong, verdict):
    """Where all arms have answered, whatever the race says."""
    for race in (True, False):
        found, said = judge(wrong=wrong, race=race)
        assert found == verdict
        assert f"{correctness.OLD}: {int(correctness.OLD in wrong)} of 8 wrong" in said


@pytest.mark.parametrize("number", [0, 5])
def test_old_loops_that_do_not_answer_are_not_right(number):
    """Guards against "all right, old loops too" of a process that ran for ever."""
    few = {correctness.OLD: number}
    verdict, said = judge(few, race=False)
    assert verdict == "old loops unknown"
    assert f"old loops gave {'5 of 8 answers' if number else 'no answer'} in time" in said
    verdict, said = judge(few, race=True)
    assert verdict == "settled"
    assert "in time, and race has shown that they start too early" in said
    assert judge(few, {correctness.IN_GRAPH}, race=True)[0] == "graph off"


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        (correctness.IN_GRAPH, "graph off"),
        (correctness.REFERENCE, "unknown"),
        (correctness.OLD, "settled"),
    ],
)
def test_new_loops_that_do_not_give_all_answers_are_not_right(arm, expected):
    """Guards against "settled" by a graph that answered 5 of 112 requests, and then hung."""
    problems = {arm: "it did not end in time"}
    verdict, said = judge({arm: 5}, {correctness.OLD}, problems, race=True)
    assert verdict == expected
    assert arm == correctness.OLD or f"{arm} has not given all of its answers: it did" in said
    # Nor are processes that died at once.
    assert correctness.judge({}, {}, {}, is_shown_by_race=True)[0] == "unknown"


def test_the_race_shows_the_fault_by_both_conditions(start):
    """Only in a graph, and only of a carried condition."""
    begun = start()
    assert not correctness.shows_early_loops(begun)

    def write(condition, arm, wrong):
        begun.write(
            "figure", "", step="race", name="distances", condition=condition, arm=arm, wrong=wrong
        )

    write("carried", "graph", 6)
    write("carried", "no graph", 0)
    assert not correctness.shows_early_loops(begun)
    write("computed", "graph", 0)
    assert correctness.shows_early_loops(begun)
    write("carried", "no graph", 1)
    assert not correctness.shows_early_loops(begun)


class _Process:
    """Prints answers after some seconds each, and then ends, or hangs."""

    def __init__(self, *seconds, hangs=False):
        self._moments = [time.monotonic() + second for second in seconds]
        self._hangs = hangs

    def is_running(self):
        return self._hangs or bool(self._moments)

    def records(self, deadline):
        while self._moments and self._moments[0] <= deadline:
            time.sleep(max(self._moments.pop(0) - time.monotonic(), 0))
            yield {"tokens": []}
        if self.is_running():
            time.sleep(max(deadline - time.monotonic(), 0))


def test_silent_old_loops_are_not_waited_for(start, monkeypatch):
    """Before any other arm has answered, silence means nothing; and others may be silent."""
    monkeypatch.setattr(correctness, "_PATIENCE", 0.3)
    begun = start()
    begun.is_rehearsal = False
    work = session.Work(begun, "seeds", time.monotonic() + 60)
    children = {"slow": _Process(0.5, 1.5), "old": _Process(hangs=True), "fast": _Process(0.6, 0.7)}
    answers = correctness._listen(work, children, {"old"})
    assert {name: len(given) for name, given in answers.items()} == {"slow": 2, "old": 0, "fast": 2}
    assert work.left() > 50
    work = session.Work(begun, "seeds", time.monotonic() + 60)
    answers = correctness._listen(work, {"old": _Process(0.2, 0.4, hangs=True)}, {"old"})
    assert len(answers["old"]) == 2
    work = session.Work(begun, "seeds", time.monotonic() + 1.0)
    assert correctness._listen(work, {"new": _Process(hangs=True)}, {"old"}) == {"new": []}


def test_a_check_is_recorded_as_soon_as_it_is_known(start):
    """Guards against an audit whose time was over before it had recorded anything."""
    begun, checks = start(), []

    def make():
        yield Check("first", True, "", {})
        assert [record["check"] for record in begun.figures("audit", "check")] == ["first"]
        raise ValueError("broken")

    work = session.Work(begun, "audit", time.monotonic() + 60)
    with pytest.raises(ValueError, match="broken"):
        correctness._record_checks(work, make, checks)
    assert [check.name for check in checks] == ["first"]


def test_the_graph_is_that_of_the_product():
    with kernels.compiling_for("gpu"):
        assert kernels.run_options() == correctness.GRAPH


def test_old_loops_carry_their_condition(monkeypatch):
    """They compute the same, and their condition is an element of the carry: no operation."""
    arm = correctness.Arm("old", {}, has_carried_loops=True)

    def count(start):
        return jax.lax.while_loop(lambda n: n < 10, lambda n: n + 3, start)

    before = jax.lax.while_loop, kernels.run_options
    new = jax.make_jaxpr(count)(1)
    with correctness.rounds_compiled_with(arm):
        assert int(count(1)) == 10
        old = jax.make_jaxpr(lambda start: count(start))(1)
        assert kernels.run_options() == {}
    assert (jax.lax.while_loop, kernels.run_options) == before
    loops = [
        next(eqn for eqn in program.eqns if eqn.primitive.name == "while") for program in (new, old)
    ]
    assert [len(loop.params["cond_jaxpr"].eqns) for loop in loops] == [1, 0]


def test_an_arms_options_are_those_of_the_rounds(monkeypatch):
    """Guards against arms that all run the same program."""
    monkeypatch.setattr(correctness, "known", dict)
    request = Request([1, 2, 3], SamplingParams(max_new_tokens=4))
    with (
        correctness.rounds_compiled_with(correctness.Arm("odd", {"xla_no_such_option": 1})),
        pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"),
    ):
        make_generator("none").generate(request)


def test_options_that_this_xla_does_not_know_are_left_out():
    assert correctness.known(correctness.GRAPH | {"xla_gpu_no_such_option": 1}) == correctness.GRAPH


@pytest.mark.compile_gpu
def test_the_race_shows_an_empty_condition(tmp_path):
    """Compiled for an H100: where it is carried it has no kernel, and where computed it has."""
    code = (
        "import sys\nfrom tests.scripts.test_gpu_session import count_empty_conditions\n"
        "print(count_empty_conditions(sys.argv[1]))"
    )
    env = as_users(os.environ) | {"JAX_PLATFORMS": "cpu"}  # there is no GPU
    counts = [
        int(subprocess.check_output([sys.executable, "-c", code, condition], env=env, cwd=ROOT))
        for condition in ("carried", "computed")
    ]
    assert counts[0] > counts[1] == 0


def count_empty_conditions(condition):
    """Returns how many loops of the race have a condition without kernels."""
    (device,) = find_accelerator("h100").devices()
    sharding = jax.sharding.SingleDeviceSharding(device)
    sizes = (64, 512), (512, 512)
    shapes = [jax.ShapeDtypeStruct(size, jnp.float32, sharding=sharding) for size in sizes]
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        program = jax.jit(correctness.make_program(condition))
        program.lower(*shapes).compile(compiler_options=correctness.GRAPH | options)
        paths = pathlib.Path(folder).glob("*thunk_sequence*.txt")
        text = "".join(path.read_text() for path in paths)
    assert "kWhile" in text
    return len(re.findall(r"condition:\s*\n\s*No thunks", text))


def test_the_race_decides_late_whether_its_loop_runs():
    """The inner loop makes a trip each time: without it the values would be others."""
    values = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32)
    kernel = jnp.asarray(np.random.default_rng(1).normal(size=(16, 16)), jnp.float32) / 4
    results, others = (
        jax.jit(correctness.make_program(condition))(values, kernel)
        for condition in ("carried", "computed")
    )
    np.testing.assert_allclose(results, others)
    assert float(jnp.abs(results).max()) <= 1
    # cos(x) * 1.5 + 1 over its largest: most values are positive, which tanh alone gives half of.
    assert float((results > 0).mean()) > 0.6


def test_what_the_race_says():
    decide = correctness.decide_race
    assert "too early" in decide({"carried; graph": 5, "computed; graph": 0})
    assert "no cure" in decide({"carried; graph": 5, "computed; graph": 1})
    assert "without a graph, too" in decide({"carried; no graph": 1, "carried; graph": 5})
    assert "no run is wrong" in decide({"carried; graph": 0})


def test_candidates_multiply_alike():
    rng = np.random.default_rng(0)
    shapes = (5, 64), (48, 64), (64,), (5, 24)
    rows, weights, norm, residual = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    fused = Fused(norm, 1e-5, activation="silu", residual=residual)
    expected = products.candidates()["xla"](rows, weights, fused)
    outputs = products.candidates()["xla, 16 rows"](rows, weights, fused)
    assert expected.shape == (5, 24)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)


def test_aims_without_a_figure_are_unknown(start):
    """And each has a place for its figure: nothing is made up."""
    begun = start()
    assert [measured for *_, measured in aim_rows(begun)] == [UNKNOWN] * len(AIMS)
    rounds = {"rounds_a_visit": 16, "share_of_bandwidth": 0.61, "model": "1b"}
    for rows, speed, choice in ((1, 100.0, "xla"), (8, 650.0, "xla"), (1, 130.0, "attention")):
        figure = rounds | {"rows": rows, "tokens_a_second": speed, "choice": choice}
        begun.write("figure", "", step="models", name="rounds", milliseconds=1.0, **figure)
    measured = {title: text for title, _, text in aim_rows(begun)}
    assert measured["plain, of the bandwidth that the machine reaches, XLA's products"] == (
        "1b 61% by xla"
    )
    assert measured["the same, CUDA C++"] == UNKNOWN
    assert measured["8 and 32 rows, tokens a second of one row's"] == "1b, 8 rows 6.5 by xla"


def write_parts(folder, content, number):
    size = -(-len(content) // number)
    for index in range(number):
        part = content[index * size : (index + 1) * size]
        (folder / f"{MODELS[SMOLLM2].file}.{index:02}").write_bytes(part)


def test_a_model_is_joined_and_checked(tmp_path, monkeypatch):
    """In the order of its parts, by length and checksum; nothing half-written stays."""
    content = bytes(range(256)) * 40
    small = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    model = session.dataclasses.replace(MODELS[SMOLLM2], **small)
    monkeypatch.setattr(subjects, "MODELS", {SMOLLM2: model})
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "cache"))
    parts, goal = tmp_path / "parts", tmp_path / "cache" / "models" / model.file
    parts.mkdir()
    assert subjects.join_models(parts) == []
    write_parts(parts, content, 3)
    last = parts / f"{model.file}.02"
    whole = last.read_bytes()
    last.unlink()
    (line,) = subjects.join_models(parts)
    assert "left out: expected 10240 bytes, got" in line
    assert not goal.exists()
    last.write_bytes(whole[:-1] + b"x")
    with pytest.raises(InputError, match="SHA-256"):
        subjects.join_models(parts)
    assert list(goal.parent.iterdir()) == []
    last.write_bytes(whole)
    assert subjects.join_models(parts) == [f"{SMOLLM2}: put together from 3 parts"]
    assert goal.read_bytes() == content
    assert subjects.has_model(SMOLLM2)
    assert subjects.join_models(parts) == [f"{SMOLLM2}: is in the cache already"]
    with pytest.raises(InputError, match="expected a folder in --models"):
        subjects.join_models(tmp_path / "none")


def test_bad_input_is_refused_in_a_line(compile_cache, tmp_path):
    """Before anything is measured or written."""
    foreign, rehearsal = tmp_path / "other", tmp_path / "measured"
    for folder in (foreign, rehearsal):
        folder.mkdir()
    (foreign / "notes.txt").touch()
    record = {"kind": "call", "call": 1, "is_rehearsal": False}
    (rehearsal / "session.jsonl").write_text(json.dumps(record) + "\n")
    expected = {
        ("--part=3",): "part",
        ("--until=x", "--rehearse"): "until",
        (): "a GPU that JAX can use, or --rehearse",
        ("--models=/no/such/folder",): "a folder in --models",
        (f"--results={foreign}",): "an empty folder or one with session.jsonl",
        ("--rehearse", "--models=/no/such/folder"): "a folder in --models",
        ("--rehearse", f"--results={foreign}"): "an empty folder or one with session.jsonl",
        ("--rehearse", f"--results={rehearsal}"): "a journal of a rehearsal",
        ("--rehearse", "everything"): "flags only",
    }
    env = environment(compile_cache, tmp_path / "home") | {"JAX_PLATFORMS": "cpu"}
    refuse_all(f"{PROGRAM}.__main__", expected, env=env)
    assert len((rehearsal / "session.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.skipif(library.find_nvcc() is None, reason="no nvcc")
def test_tuning_compiles_and_says_what_fails(tmp_path, monkeypatch):
    """Without a GPU the program ends with a line, and so do a wrong variant and a missing nvcc."""
    program = tuning.build(str(tmp_path), *tuning.VARIANTS[0])
    if jax.default_backend() != "gpu":
        with pytest.raises(InputError, match=r"failed: .*a stream: "):
            tuning.run(program)
    with pytest.raises(InputError, match=r"nvcc failed: .*error"):
        tuning.build(str(tmp_path), 0, 2)
    monkeypatch.setattr(library, "find_nvcc", lambda: None)
    with pytest.raises(InputError, match="expected nvcc on the PATH"):
        tuning.build(str(tmp_path), 4, 2)


@pytest.mark.slow
def test_a_rehearsal_leaves_a_record_of_every_step(compile_cache, tmp_path):
    """With tiny models, in five minutes where nothing else runs; and a second call runs nothing."""
    env = as_users(environment(compile_cache, tmp_path / "home")) | {"JAX_PLATFORMS": "cpu"}
    arguments = "--rehearse", f"--results={tmp_path / 'out'}"
    status, printed, errors = run(PROGRAM, *arguments, env=env, timeout=1500)
    assert status == 0, printed + errors
    ends = {record["step"]: record["outcome"] for record in lines_of(tmp_path / "out", "step")}
    assert ends.pop("why") == "left out"
    assert ends == {step.name: "done" for step in plan.STEPS if step.name != "why"}
    (call,) = lines_of(tmp_path / "out", "call")
    assert {"commit", "date", "versions", "device", "command"} <= call.keys()
    figures = lines_of(tmp_path / "out", "figure")
    names = [(record["step"], record["name"]) for record in figures]
    assert set(names) >= {
        ("race", "distances"), ("seeds", "verdict"), ("audit", "check"), ("products", "layer"),
        ("products", "product"), ("models", "rounds"), ("models", "call"), ("models", "host"),
        ("drafts", "drafts"), ("torch", "torch"), ("aims", "aim"),
    }  # fmt: skip
    by_arm = {
        record["arm"]: record["number"]
        for record, name in zip(figures, names, strict=True)
        if name == ("seeds", "answers")
    }
    assert set(by_arm) == {arm.name for arm in correctness.FIRST}
    assert len(set(by_arm.values())) == 1
    assert min(by_arm.values()) > 0
    assert names.count(("aims", "aim")) == len(AIMS)
    status, printed, _ = run(PROGRAM, *arguments, env=env, timeout=300)
    assert printed.count("is in the journal already") == len(ends)
