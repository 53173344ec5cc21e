"""Do answers hang on anything but the request? Four processes at once, each with other loops.

    python -m scripts.gpu_session.seeds ARM    one of them: prints each answer's token ids

An answer is made alone and again, in a batch, with a host that looks in after every round, and by
plain decoding if the rule is `coupled`; all of them have to be equal, token for token, in float32,
and equal to those of the arm without a graph.
"""

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jspec.generation.request import Request, SamplingParams
from scripts.gpu_session.arms import (
    FIRST,
    WHY_A_GRAPH,
    WHY_AT_ALL,
    Arm,
    arm_of,
    rounds_compiled_with,
)
from scripts.gpu_session.session import LeftOut, Work
from scripts.gpu_session.subjects import peaked_subject

REFERENCE, GRAPH, OLD, EARLY = (arm.name for arm in FIRST)
_RULES = "coupled", "rejection"
_SETTINGS = SamplingParams(temperature=1.2, top_p=0.99, repetition_penalty=1.1)
_PROMPTS = ("Why is the sky blue?", "Name three rivers, then name them again.",
            "Write a function that adds two numbers.", "1 2 3 4 1 2 3 4 1 2 3")  # fmt: skip
# Right is right by any tiling, and trying tilings takes longest.
_NO_TILING = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}

Answer = dict[str, Any]  # rule, filters, method, request, tokens, error


def run(work: Work) -> str:
    """Runs the four arms, and judges."""
    answers = _run_arms(work, FIRST)
    # Of an arm whose process ended without an answer nothing is known.
    faults = {name: faults_of(own, answers) for name, own in answers.items() if own}
    verdict, said = judge(faults)
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
    answers = _run_arms(work, (*first, *arms))
    wrong = {name: len(faults_of(own, answers)) for name, own in answers.items()}
    right = [name for name, own in answers.items() if own and not wrong[name]]
    return f"right: {', '.join(right) or 'none'}; wrong answers: {wrong}"


def _run_arms(work: Work, arms: Sequence[Arm]) -> dict[str, list[Answer]]:
    """Runs arms at once, each in a process; returns their answers, and records their faults."""
    children = {}
    for arm in arms:
        variables = _NO_TILING | dict(arm.variables)
        rehearsed = ["--rehearse"] if work.is_rehearsal else []
        children[arm.name] = work.start("seeds", arm.to_text(), *rehearsed, **variables)
    answers: dict[str, list[Answer]] = {}
    for name, child in children.items():
        answers[name] = list(child.records(work.deadline - 2))
        child.wait(1)
        work.record("answers", arm=name, number=len(answers[name]), problem=child.problem())
        child.end()
    for name, own in answers.items():
        faults = faults_of(own, answers)
        work.record("faults", arm=name, number=len(faults), faults=faults[:8])
    return answers


def faults_of(own: Sequence[Answer], arms: Mapping[str, Sequence[Answer]]) -> list[Answer]:
    """Returns where an arm's answers fail, or differ from each other or from the reference's.

    Each with the index of the first token that is wrong.
    """
    expected = {_key(one): one["tokens"] for one in own if one["method"] == "alone"}
    reference = {
        _key(one): one["tokens"] for one in arms.get(REFERENCE, ()) if one["method"] == "alone"
    }
    faults = []
    for one in own:
        about = {key: one.get(key) for key in ("rule", "filters", "method", "request")}
        if one["error"]:
            faults.append(about | {"index": len(one["tokens"]), "said": one["error"]})
            continue
        for title, tokens in (
            ("alone", expected.get(_key(one))),
            (REFERENCE, reference.get(_key(one))),
        ):
            if tokens is not None and (index := first_difference(one["tokens"], tokens)) >= 0:
                faults.append(about | {"index": index, "said": f"differs from {title}"})
                break
    return faults


def _key(answer: Answer) -> tuple[Any, ...]:
    return answer.get("rule"), answer.get("filters"), answer.get("request")


def first_difference(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """Returns the index of the first token that differs, a missing one included; -1: none does."""
    for index, (token, other) in enumerate(itertools.zip_longest(tokens, expected)):
        if token != other:
            return index
    return -1


def judge(faults: Mapping[str, Sequence[Answer]]) -> tuple[str, str]:
    """Returns the verdict by the rules of decision, and what it means; see `__main__`.

    A verdict is "settled", "not reproduced", "graph off", "wrong" or "unknown".
    """
    wrong = {name: len(own) for name, own in faults.items()}
    counts = ", ".join(f"{name}: {count} wrong" for name, count in wrong.items())
    if REFERENCE not in wrong or GRAPH not in wrong:
        return "unknown", f"too few arms ended: {counts}"
    if wrong[REFERENCE]:
        return "wrong", f"wrong without a graph, too: the rest of the time goes there ({counts})"
    if wrong[GRAPH]:
        return "graph off", f"wrong with a graph only: the graph stays off ({counts})"
    if wrong.get(OLD):
        return "settled", f"old loops are wrong and new ones right: that was it ({counts})"
    return "not reproduced", f"all right, old loops too: the fault did not show ({counts})"


def answers_of(arm: Arm, *, is_rehearsal: bool) -> Iterator[Answer]:
    """Yields the answers of one arm; each program of rounds is compiled as the arm says."""
    filters = [_SETTINGS, dataclasses.replace(_SETTINGS, top_p=1.0)]
    if is_rehearsal:  # with little to compile
        filters = [SamplingParams(temperature=_SETTINGS.temperature)]
    with rounds_compiled_with(arm):
        for rule, settings in itertools.product(_RULES, filters):
            yield from _answers_by(rule, settings, is_rehearsal)


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


def main(argv: Sequence[str]) -> None:
    """Prints the answers of the arm that a session passes on."""
    begin = time.monotonic()
    for answer in answers_of(arm_of(argv[0]), is_rehearsal="--rehearse" in argv):
        print(json.dumps(answer | {"seconds": round(time.monotonic() - begin, 1)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
