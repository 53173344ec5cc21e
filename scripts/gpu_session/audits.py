"""Are the answers exact? The distribution of rounds, the caches, and greedy parity."""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

from jspec.generation.graph_trial import check_one_graph
from jspec.generation.request import SamplingParams
from jspec.kernels import run_options
from jspec.lab.auditing.caches import check_caches
from jspec.lab.auditing.checks import check_parity
from jspec.lab.auditing.distribution import NUM_TOKENS, check_distribution
from jspec.lab.auditing.rows import Rows, choose_context
from jspec.lab.auditing.subject import Check, Subject
from jspec.weights.published import SMOLLM2
from jspec.weights.resolver import load_model
from scripts.gpu_session.session import Work
from scripts.gpu_session.subjects import has_model, peaked_subject

_SETTINGS = SamplingParams(temperature=1.2, top_p=0.99, repetition_penalty=1.1)
_ROWS = 4096
_PROMPTS = "Why is the sky blue?", "Name three rivers, then name them again."


def run(work: Work) -> str:
    """Audits `rejection` with a draft model, and SmolLM2 with its head if its file is there."""
    check_one_graph()  # once, before threads make programs of rounds
    work.record("graph", is_one_graph=run_options() is not None)
    num_rows = 256 if work.is_rehearsal else _ROWS
    settings = _SETTINGS
    if work.is_rehearsal:  # with little to compile
        settings = SamplingParams(temperature=_SETTINGS.temperature)
    subject = peaked_subject("rejection", settings)
    context = choose_context(subject.target, subject.settings)

    def rows() -> Rows:
        return Rows(subject, context, NUM_TOKENS)

    jobs: dict[str, Callable[[], Any]] = {
        "distribution": lambda: check_distribution(rows(), num_rows),
        "caches": lambda: [check_caches(rows())],
        "parity": lambda: [check_parity(subject, "float32", _encoded(subject), 24)],
    }
    if not has_model(SMOLLM2):
        work.record("left out", check="SmolLM2", reason="its file is not in jspec's cache")
    elif importlib.util.find_spec("gguf") is None:
        work.record("left out", check="SmolLM2", reason="the package gguf is not installed")
    else:
        jobs["SmolLM2"] = _check_smollm2
    results = work.together(jobs, "checked", share=0.95)
    checks = [check for found in results.values() for check in found]
    for check in checks:
        work.record("check", check=check.name, has_passed=check.has_passed, detail=check.detail)
    failed = [check.name for check in checks if not check.has_passed]
    missing = sorted(jobs.keys() - results.keys())
    work.record("verdict", failed=failed, missing=missing)
    if failed or missing:
        return f"failed: {', '.join(failed) or 'none'}; not in time: {', '.join(missing) or 'none'}"
    return f"all {len(checks)} checks pass"


def _check_smollm2() -> list[Check]:
    """Compares the greedy answers of SmolLM2 with its head with plain ones, in both dtypes."""
    target = load_model(SMOLLM2)
    subject = Subject(target, None, "prompt_lookup+eagle", 2, "rejection", SamplingParams())
    prompts = [target.tokenizer.encode(text) for text in _PROMPTS]
    checks = [check_parity(subject, dtype, prompts, 48) for dtype in ("float32", "bfloat16")]
    return [dataclasses.replace(check, name=f"SmolLM2, {check.name}") for check in checks]


def _encoded(subject: Subject) -> list[list[int]]:
    return [subject.target.tokenizer.encode(text) for text in _PROMPTS]
