"""Are the answers right? Loops of a CUDA graph, answers made in several ways, exact distributions.

    python -m scripts.gpu_session.correctness ARM    prints the token ids of each answer of an arm

An arm is a way of compiling the program of rounds. Three steps use them:

- race: the smallest program in which a loop of a graph may start too early. An outer loop computes
  for a while and then decides whether an inner loop makes a trip. In a graph XLA gives a loop whose
  condition compiles to no kernel, as one does that is only carried, no predecessor: it would start
  at once, on a stale condition. The first run of a program is no graph.
- seeds: four processes at once, each of one arm. An answer is made alone and again, in a batch,
  with a host that looks in after every round, and by plain decoding if the rule is `coupled`; all
  of them have to be equal, token for token, in float32, and equal to those without a graph. Old
  loops that start too early can run for ever: their process is ended once it is silent.
- audit: the distribution of rounds, the caches, and greedy parity.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec import kernels
from jspec.generation.graph_trial import check_one_graph
from jspec.generation.request import Request, SamplingParams
from jspec.lab.auditing.checks import check_caches, check_parity
from jspec.lab.auditing.distribution import NUM_TOKENS, check_distribution
from jspec.lab.auditing.rows import Rows, choose_context
from jspec.lab.auditing.subject import Check, Subject
from jspec.weights.published import SMOLLM2
from jspec.weights.resolver import LoadedModel, load_model
from scripts.gpu_session.session import LATE, Child, LeftOut, Session, Work
from scripts.gpu_session.subjects import has_model, peaked_subject

GRAPH: dict[str, Any] = dict(kernels.one_graph_options())
NO_GRAPH: dict[str, Any] = {"xla_gpu_enable_command_buffer": ""}
SERIALISED: dict[str, Any] = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}
# Its name differs between versions of XLA.
NO_EARLY_LAUNCH: dict[str, Any] = {"xla_gpu_enable_pdl": False, "xla_gpu_enable_pdl_launch": False}


class Arm(NamedTuple):
    """A way of running rounds.

    Attributes:
      name: in the journal.
      options: XLA's, of the program of rounds.
      has_carried_loops: whether its loops are the old ones, whose condition is a carried value.
      variables: of the environment.
    """

    name: str
    options: Mapping[str, Any]
    has_carried_loops: bool = False
    variables: Mapping[str, str] = {}


FIRST = (
    Arm("no graph", NO_GRAPH),
    Arm("graph", GRAPH),
    Arm("old loops, graph", GRAPH, has_carried_loops=True),
    Arm("graph, no early launch", GRAPH | NO_EARLY_LAUNCH),
)
"""The four that run at once: "no graph" is what the others are compared with."""


def _graph_of(*kinds: str) -> dict[str, Any]:
    kernels = "FUSION", "CUBLAS", "CUBLASLT", "CUSTOM_CALL", "CUDNN"
    return GRAPH | {"xla_gpu_enable_command_buffer": ",".join((*kernels, *kinds))}


# Where the new loops are wrong in a graph only: which part of a graph it takes.
WHY_A_GRAPH = (
    Arm("graph, serialised", GRAPH | SERIALISED),
    Arm("graph of products and fusions", _graph_of()),
    Arm("graph without loops", _graph_of("CONDITIONAL")),
    Arm("graph without branches", _graph_of("WHILE")),
)
# Where they are wrong without a graph, too: which kernels it takes.
_NO_TILING = "--xla_gpu_autotune_level=0"
WHY_AT_ALL = (
    Arm("XLA's kernels alone", NO_GRAPH, variables={"JSPEC_KERNELS": "xla", "JSPEC_CUDNN": "0"}),
    Arm("no products of Triton", NO_GRAPH,
        variables={"XLA_FLAGS": f"{_NO_TILING} --xla_gpu_enable_triton_gemm=false"}),
    Arm("no cuBLAS", NO_GRAPH,
        variables={"XLA_FLAGS": f"{_NO_TILING} --xla_gpu_cublas_fallback=false"}),
    Arm("one stream", NO_GRAPH | NO_EARLY_LAUNCH, variables={"CUDA_LAUNCH_BLOCKING": "1"}),
)  # fmt: skip


def known(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the options that this XLA knows."""
    return {name: value for name, value in options.items() if _is_known(name, value)}


@functools.cache
def _is_known(name: str, value: Any) -> bool:
    try:
        jax.jit(lambda x: x + 1, compiler_options={name: value})(1.0)
    except jax.errors.JaxRuntimeError:
        return False
    return True


@contextlib.contextmanager
def rounds_compiled_with(arm: Arm) -> Iterator[None]:
    """Within it `Generator` compiles rounds as the arm says, whatever a trial of the graph says."""
    before = kernels.run_options, kernels.awaits_graph_trial, jax.lax.while_loop
    options = known(arm.options)
    kernels.run_options = lambda: dict(options)
    kernels.awaits_graph_trial = lambda: False  # which would compile for a while
    if arm.has_carried_loops:
        jax.lax.while_loop = _carried(jax.lax.while_loop)
    try:
        yield
    finally:
        kernels.run_options, kernels.awaits_graph_trial, jax.lax.while_loop = before


def _carried(while_loop: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the loop as jspec's once were: its condition is computed in its body, and carried.

    Then XLA finds no kernel in the condition. The outermost loop, over rounds, always compared two
    numbers, and still does.
    """

    def loop(cond_fun: Callable[..., Any], body_fun: Callable[..., Any], init_val: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") == "jspec.speculation.plain":
            return while_loop(cond_fun, body_fun, init_val)

        def body(carry: Any) -> Any:
            value = body_fun(carry[1])
            return cond_fun(value), value

        return while_loop(lambda carry: carry[0], body, (cond_fun(init_val), init_val))[1]

    return loop


_RACE_ARMS = {
    "graph": GRAPH,
    "no graph": NO_GRAPH,
    "graph, serialised": GRAPH | SERIALISED,
    "graph, no early launch": GRAPH | NO_EARLY_LAUNCH,
}
_CONDITIONS = "carried", "computed"
_RACE_RUNS = 6
_PRODUCTS = 24  # which take a while
_TRIPS = 5
_FARTHEST = 1e-2  # values are at most 1, and those of a trip too few or too many far from right


def make_program(condition: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the program, (values [r i], kernel [i i]) -> values, of a kind of condition."""
    is_carried = condition == "carried"

    def inner(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros_like(carry[0]), jnp.cos(carry[1]) * 1.5 + 1.0

    def is_wanted(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return carry[0].any() if is_carried else carry[0] > 0

    def run(values: jax.Array, kernel: jax.Array) -> jax.Array:
        def turn(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            index, values = carry
            for _ in range(_PRODUCTS):
                # In full float32, so that another tiling changes nothing that counts.
                product = jnp.matmul(values, kernel, precision="highest")
                values = jnp.tanh(product) + 0.1 * values
            is_positive = jnp.sum(values * values) + index.astype(jnp.float32) > 0
            wanted = is_positive[None] if is_carried else is_positive.astype(jnp.int32)
            _, values = jax.lax.while_loop(is_wanted, inner, (wanted, values))
            return index + 1, values / (1 + jnp.max(jnp.abs(values)))

        return jax.lax.while_loop(lambda carry: carry[0] < _TRIPS, turn, (jnp.int32(0), values))[1]

    return run


def run_race(work: Work) -> str:
    """Runs both programs in every arm, each time on new memory, and compares with no graph."""
    width = 64 if work.is_rehearsal else 512
    values = np.random.default_rng(0).normal(size=(64, width)).astype(np.float32)
    kernel = np.random.default_rng(1).normal(size=(width, width)).astype(np.float32) / width**0.5
    programs: dict[str, Any] = {
        f"{condition}; {arm}": jax.jit(make_program(condition), compiler_options=known(options))
        for condition in _CONDITIONS
        for arm, options in (_RACE_ARMS | {"reference": NO_GRAPH}).items()
    }
    lowered = {name: program.lower(values, kernel) for name, program in programs.items()}
    compiled = work.together({name: source.compile for name, source in lowered.items()})
    wrong: dict[str, int] = {}
    for condition in _CONDITIONS:
        reference = np.asarray(compiled[f"{condition}; reference"](values, kernel))
        for arm, options in _RACE_ARMS.items():
            name = f"{condition}; {arm}"
            if name not in compiled:
                continue
            distances = [
                float(np.abs(np.asarray(compiled[name](values + 0, kernel)) - reference).max())
                for _ in range(_RACE_RUNS)
            ]
            wrong[name] = sum(not source <= _FARTHEST for source in distances)  # NaN is wrong, too
            work.record(
                "distances", condition=condition, arm=arm, distances=distances, wrong=wrong[name],
                unknown=sorted(options.keys() - known(options).keys()),
            )  # fmt: skip
    return decide_race(wrong)


def decide_race(wrong: dict[str, int]) -> str:
    """Returns what the numbers of wrong runs say, by condition and arm."""
    counts = {name: count for name, count in wrong.items() if count}
    listed = ", ".join(f"{name} ({count} of {_RACE_RUNS})" for name, count in counts.items())
    if any("; no graph" in name for name in counts):
        return f"wrong without a graph, too: {listed}"
    if wrong.get("computed; graph"):
        return f"a computed condition is no cure: {listed}"
    if wrong.get("carried; graph"):
        return f"a carried condition starts its loop too early, a computed one does not: {listed}"
    if listed:
        return f"wrong in some arms only: {listed}"
    return "no run is wrong: this program does not show it here"


def shows_early_loops(session: Session) -> bool:
    """Returns whether in the race's graph carried conditions were wrong, and all else was right."""
    wrong = {
        (figure["condition"], figure["arm"]): figure["wrong"]
        for figure in session.figures("race", "distances")
    }
    right = ("carried", "no graph"), ("computed", "graph")
    return bool(wrong.get(("carried", "graph"))) and all(wrong.get(pair) == 0 for pair in right)


REFERENCE, IN_GRAPH, OLD, EARLY = (arm.name for arm in FIRST)
_RULES = "coupled", "rejection"
_SETTINGS = SamplingParams(temperature=1.2, top_p=0.99, repetition_penalty=1.1)
_PROMPTS = ("Why is the sky blue?", "Name three rivers, then name them again.",
            "Write a function that adds two numbers.", "1 2 3 4 1 2 3 4 1 2 3")  # fmt: skip
# Right is right by any tiling, and trying tilings takes longest.
_WITHOUT_TILING = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}
_PATIENCE = 20  # seconds of silence after which old loops are ended: they keep the GPU busy

Answer = dict[str, Any]  # rule, filters, method, request, tokens, error


def run_seeds(work: Work) -> str:
    """Runs the four arms, and judges."""
    answers, problems = _run_arms(work, FIRST)
    alone = {name: _tokens_alone(arm_answers).keys() for name, arm_answers in answers.items()}
    # The others are compared with its answers alone: it need not have given more in time.
    if alone[IN_GRAPH] <= alone[REFERENCE] and problems.get(REFERENCE) == LATE:
        del problems[REFERENCE]
    numbers = {name: len(arm_answers) for name, arm_answers in answers.items()}
    wrong = {name: len(faults_of(arm_answers, answers)) for name, arm_answers in answers.items()}
    is_shown = shows_early_loops(work.session)
    verdict, said = judge(numbers, wrong, problems, is_shown_by_race=is_shown)
    work.record("verdict", verdict=verdict, said=said)
    return said


def explain(work: Work) -> str:
    """Runs further arms where the new loops are wrong, in the time that other steps have saved."""
    verdict = work.session.verdict()
    arms = {"graph off": WHY_A_GRAPH, "wrong": WHY_AT_ALL}.get(verdict)
    if arms is None:
        raise LeftOut(f"nothing to explain: {verdict}")
    # Where everything is wrong, the arms have only themselves to be compared with.
    first = FIRST[:1] if verdict == "graph off" else ()
    answers, _ = _run_arms(work, (*first, *arms))
    wrong = {name: len(faults_of(arm_answers, answers)) for name, arm_answers in answers.items()}
    right = [name for name, arm_answers in answers.items() if arm_answers and not wrong[name]]
    return f"right: {', '.join(right) or 'none'}; wrong answers: {wrong}"


def _run_arms(work: Work, arms: Sequence[Arm]) -> tuple[dict[str, list[Answer]], dict[str, str]]:
    """Returns the answers of each arm, and why it has not given all of them, where it has not."""
    children, problems = {}, {}
    for arm in arms:
        variables = _WITHOUT_TILING | dict(arm.variables)
        rehearsed = ["--rehearse"] if work.is_rehearsal else []
        children[arm.name] = work.start(
            "correctness", json.dumps(arm._asdict()), *rehearsed, **variables
        )
    answers = _listen(work, children, {arm.name for arm in arms if arm.has_carried_loops})
    for name, child in children.items():
        number, seconds = len(answers[name]), [answer["seconds"] for answer in answers[name]]
        problem, last = child.problem(), max(seconds, default=None)
        if problem is not None:
            problems[name] = problem
        work.record("answers", arm=name, number=number, seconds=last, problem=problem)
        child.end()
    for name, arm_answers in answers.items():
        faults = faults_of(arm_answers, answers)
        work.record("faults", arm=name, number=len(faults), faults=faults[:8])
    return answers, problems


def _listen(
    work: Work, children: Mapping[str, Child], may_hang: Collection[str]
) -> dict[str, list[Answer]]:
    """Returns what the processes print until they end, or nearly all of the step's time is over.

    Once any has answered, no more is expected of those that may hang and are silent for too long.
    """
    answers: dict[str, list[Answer]] = {name: [] for name in children}
    patience = math.inf if work.is_rehearsal else _PATIENCE
    running, heard = list(children), dict[str, float]()  # when each has answered last
    first = math.inf
    while running and work.left() > 2:
        for name in tuple(running):
            child = children[name]
            has_ended = not child.is_running()  # asked before its last lines are read
            news = list(child.records(time.monotonic() + (1 if has_ended else 0.1)))
            now = time.monotonic()
            if news:
                answers[name] += news
                heard[name], first = now, min(first, now)
            is_silent = now - heard.get(name, first) > patience
            if has_ended or (is_silent and name in may_hang):
                running.remove(name)
    return answers


def faults_of(answers: Sequence[Answer], arms: Mapping[str, Sequence[Answer]]) -> list[Answer]:
    """Returns where an arm's answers fail, or differ from each other or from the reference's.

    Each with the index of the first token that is wrong.
    """
    expected = {"alone": _tokens_alone(answers), REFERENCE: _tokens_alone(arms.get(REFERENCE, ()))}
    faults = []
    for answer in answers:
        about = {key: answer.get(key) for key in ("rule", "filters", "method", "request")}
        if answer["error"]:
            faults.append(about | {"index": len(answer["tokens"]), "said": answer["error"]})
            continue
        for title, tokens_of in expected.items():
            tokens = tokens_of.get(_key(answer))
            if tokens is not None and (index := first_difference(answer["tokens"], tokens)) >= 0:
                faults.append(about | {"index": index, "said": f"differs from {title}"})
                break
    return faults


def _tokens_alone(answers: Sequence[Answer]) -> dict[tuple[Any, ...], list[int]]:
    return {_key(answer): answer["tokens"] for answer in answers if answer["method"] == "alone"}


def _key(answer: Answer) -> tuple[Any, ...]:
    return answer.get("rule"), answer.get("filters"), answer.get("request")


def first_difference(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """Returns the index of the first token that differs, a missing one included; -1: none does."""
    for index, (token, expected_token) in enumerate(itertools.zip_longest(tokens, expected)):
        if token != expected_token:
            return index
    return -1


def judge(
    numbers: Mapping[str, int],
    wrong: Mapping[str, int],
    problems: Mapping[str, str],
    *,
    is_shown_by_race: bool,
) -> tuple[str, str]:
    """Returns the verdict by the rules of decision, and what it means; see `__main__`.

    Args:
      numbers: of each arm's answers.
      wrong: how many of them are.
      problems: why arms have not given all answers that they should have.
      is_shown_by_race: whether the smallest program has shown the fault of the old loops.

    Returns:
      "settled", "not reproduced", "old loops unknown", "graph off", "wrong" or "unknown"; a line.
    """
    counts = ", ".join(f"{name}: {wrong[name]} of {numbers[name]} wrong" for name in numbers)
    # Of an arm whose process ended without an answer nothing is known.
    if not numbers.get(REFERENCE) or not numbers.get(IN_GRAPH):
        return "unknown", f"too few arms have answered ({counts})"
    if wrong[REFERENCE]:
        return "wrong", f"wrong without a graph, too: the rest of the time goes there ({counts})"
    if wrong[IN_GRAPH] or wrong.get(EARLY):
        return "graph off", f"wrong with a graph only: the graph stays off ({counts})"
    for name, verdict in ((REFERENCE, "unknown"), (IN_GRAPH, "graph off"), (EARLY, "graph off")):
        if name in problems:
            said = f"{name} has not given all of its answers: {problems[name]}"
            return verdict, f"{said} ({counts})"
    if wrong.get(OLD):
        return "settled", f"old loops are wrong and new ones right: that was it ({counts})"
    if numbers.get(OLD, 0) >= numbers[IN_GRAPH]:
        return "not reproduced", f"all right, old loops too: the fault did not show ({counts})"
    answer = f"{numbers[OLD]} of {numbers[IN_GRAPH]} answers" if numbers.get(OLD) else "no answer"
    known = f"new loops are right; old loops gave {answer} in time"
    if is_shown_by_race:
        return "settled", f"{known}, and race has shown that they start too early ({counts})"
    return "old loops unknown", f"{known}: nothing is known of them ({counts})"


def give_answers(arm: Arm, give: Callable[[Answer], object], *, is_rehearsal: bool) -> None:
    """Gives the answers of one arm; each program of rounds is compiled as the arm says.

    Each rule and each kind of filters has its own thread, since compiling takes longest.
    """
    filters = [_SETTINGS, dataclasses.replace(_SETTINGS, top_p=1.0)]
    if is_rehearsal:  # with little to compile
        filters = [SamplingParams(temperature=_SETTINGS.temperature)]
    kinds = list(itertools.product(_RULES, filters))
    lock = threading.Lock()

    def give_all(rule: str, settings: SamplingParams) -> None:
        for answer in _answers_by(rule, settings, is_rehearsal):
            with lock:
                give(answer)

    with rounds_compiled_with(arm), concurrent.futures.ThreadPoolExecutor(len(kinds)) as pool:
        for future in [pool.submit(give_all, *kind) for kind in kinds]:
            future.result()


def _answers_by(rule: str, settings: SamplingParams, is_rehearsal: bool) -> Iterator[Answer]:
    subject = peaked_subject(rule, settings)
    length = 8 if is_rehearsal else 24
    requests = [
        Request(list(text.encode()), dataclasses.replace(settings, seed=k, max_new_tokens=length))
        for k, text in enumerate(_PROMPTS)
    ]
    methods: dict[str, dict[str, Any]] = {"alone": {}}
    if not is_rehearsal:
        methods["in a batch"] = {"batch_size": len(requests)}
        methods["a visit a round"] = {"rounds_per_visit": 1}
    if rule == "coupled":
        methods["plain"] = {"drafter": "none"}
    for name, options in methods.items():
        generator = subject.generator(**options)
        size = options.get("batch_size", 1)
        # A second time: a graph is made by a program's second run, and has to follow its memory in
        # the later ones.
        for suffix in ("", ", again"):
            for begin in range(0, len(requests), size):
                for k, result in enumerate(generator.generate(requests[begin : begin + size])):
                    yield {
                        "rule": rule,
                        "filters": settings.top_p < 1,
                        "method": name + suffix,
                        "request": begin + k,
                        "tokens": list(result.token_ids),
                        "error": result.error,
                    }


_ROWS = 4096


def run_audit(work: Work) -> str:
    """Audits `rejection` with a draft model, and SmolLM2 with its head if its file is there."""
    check_one_graph()  # once, before threads make programs of rounds
    work.record("graph", is_one_graph=kernels.run_options() is not None)
    num_rows = 256 if work.is_rehearsal else _ROWS
    settings = _SETTINGS
    if work.is_rehearsal:  # with little to compile
        settings = SamplingParams(temperature=_SETTINGS.temperature)
    subject = peaked_subject("rejection", settings)
    context = choose_context(subject.target, subject.settings)
    prompts = _encode_prompts(subject.target)

    def rows() -> Rows:
        return Rows(subject, context, NUM_TOKENS)

    jobs: dict[str, Callable[[], Iterable[Check]]] = {
        "distribution": lambda: check_distribution(rows(), num_rows),
        "caches": lambda: [check_caches(rows())],
        "parity": lambda: [check_parity(subject, "float32", prompts, 24)],
    }
    if not has_model(SMOLLM2):
        work.record("left out", check="SmolLM2", reason="its file is not in jspec's cache")
    elif importlib.util.find_spec("gguf") is None:
        work.record("left out", check="SmolLM2", reason="the package gguf is not installed")
    else:
        jobs["SmolLM2"] = _check_smollm2
    checks: list[Check] = []
    recording = {
        name: functools.partial(_record_checks, work, make_checks, checks)
        for name, make_checks in jobs.items()
    }
    results = work.together(recording, "checked", share=0.95)
    failed = [check.name for check in checks if not check.has_passed]
    missing = sorted(jobs.keys() - results.keys())
    work.record("verdict", failed=failed, missing=missing)
    if failed or missing:
        return f"failed: {', '.join(failed) or 'none'}; not in time: {', '.join(missing) or 'none'}"
    return f"all {len(checks)} checks pass"


def _record_checks(
    work: Work, make_checks: Callable[[], Iterable[Check]], checks: list[Check]
) -> None:
    """Records each check at once, whatever becomes of the others, and adds it to the list."""
    for check in make_checks():
        work.record("check", check=check.name, has_passed=check.has_passed, detail=check.detail)
        checks.append(check)


def _check_smollm2() -> Iterator[Check]:
    target = load_model(SMOLLM2)
    subject = Subject(target, None, "prompt_lookup+eagle", 2, "rejection", SamplingParams())
    prompts = _encode_prompts(target)
    for dtype in ("float32", "bfloat16"):
        check = check_parity(subject, dtype, prompts, 48)
        yield dataclasses.replace(check, name=f"SmolLM2, {check.name}")


def _encode_prompts(model: LoadedModel) -> list[list[int]]:
    return [model.tokenizer.encode(text) for text in _PROMPTS[:2]]


def main(argv: Sequence[str]) -> None:
    """Prints the answers of the arm that a session passes on."""
    begin = time.monotonic()

    def give(answer: Answer) -> None:
        print(json.dumps(answer | {"seconds": round(time.monotonic() - begin, 1)}), flush=True)

    give_answers(Arm(**json.loads(argv[0])), give, is_rehearsal="--rehearse" in argv)


if __name__ == "__main__":
    main(sys.argv[1:])
