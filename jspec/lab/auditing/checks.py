"""All checks of an audit but that of the emitted distribution, in their order."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jspec.generation.generator import Generator
from jspec.generation.logits_after import make_logits_after
from jspec.generation.options import settings_read_by
from jspec.generation.prompts import encode_prompt
from jspec.generation.request import Request
from jspec.generation.result import check_answered
from jspec.lab.analysis.divergence import EXCUSED_GAPS, parting_gaps
from jspec.lab.auditing.caches import check_cache_control, check_caches
from jspec.lab.auditing.controls import CALL_CONTROLS, tree_controls
from jspec.lab.auditing.distribution import (
    FALSE_ALARM,
    NUM_TOKENS,
    check_distribution,
    fit_rows,
    joint_distribution,
    path_logits,
)
from jspec.lab.auditing.rows import Rows, choose_context, make_request
from jspec.lab.auditing.subject import Check, Subject
from jspec.sampling.noise import AcceptanceNoise
from jspec.speculation.acceptance.tree import tree_of
from jspec.speculation.types import AcceptanceRule, Proposal, Temperatures, as_tree

_TEXTS = (
    "Why is the sky blue?",
    "Name three rivers and three mountains, then name the three rivers again.",
    "Write a Python function that adds two numbers.",
    "1 2 3 4 1 2 3 4 1 2 3",
)


def run_checks(
    subject: Subject,
    *,
    num_rows: int,
    max_new_tokens: int,
    say: Callable[[str], None] = lambda what: None,
) -> Iterator[Check]:
    """Yields the outcome of every check, the cheap ones first.

    The distribution is tested on `num_rows` independent rows; parity and seeds are those of answers
    of `max_new_tokens`. `say` is called with the name of what begins, as most of it compiles for a
    while.
    """
    yield check_edges(subject.rule)
    prompts = [encode_prompt(subject.target, text, chat=None, system=None) for text in _TEXTS]
    if subject.rule.temperatures is not Temperatures.POSITIVE:
        for dtype in ("float32", "bfloat16"):
            say(f"greedy parity, {dtype}")
            yield check_parity(subject, dtype, prompts, max_new_tokens)
    say("seeds")
    yield check_seeds(subject, prompts, max_new_tokens)
    say("caches")
    rows = Rows(subject, choose_context(subject.target, subject.settings), NUM_TOKENS)
    yield check_caches(rows)
    say("emitted distribution")
    yield from check_distribution(rows, num_rows)
    if subject.has_tree and rows.settings.temperature > 0:
        yield from check_tree_controls(rows, num_rows, say)
    if subject.drafter != "none":  # without drafts their distribution says nothing of the drafter
        yield Check(
            "drafts",
            rows.num_accepted > 0,  # else nobody knows what the rule does with those it accepts
            f"{rows.num_accepted} of {rows.num_proposed} were accepted in the rounds of these rows",
            {"num_proposed": rows.num_proposed, "num_accepted": rows.num_accepted},
        )


def check_tree_controls(rows: Rows, num_rows: int, say: Callable[[str], None]) -> Iterator[Check]:
    """Yields for each mistake on trees whether the checks of distribution or caches reject it."""
    subject, context = rows.subject, rows.context
    logits = path_logits(subject.target, context, NUM_TOKENS)
    expected = joint_distribution(logits, context, rows.settings, NUM_TOKENS)
    controls = tree_controls(subject.rule, rows.drafter, subject.target.config.vocab_size)
    for number, (name, changes) in enumerate(controls.items(), 1):
        title = f"tree control, {name}"
        say(f"{title} ({number} of {len(controls)})")
        wrong = Rows(subject, context, NUM_TOKENS, **changes)
        if name in CALL_CONTROLS:
            yield check_cache_control(title, wrong, num_rows)
            continue
        p_value = fit_rows(wrong, expected, num_rows).p_value
        detail = f"p = {p_value:.2g} (expected below {FALSE_ALARM:g})"
        yield Check(title, p_value < FALSE_ALARM, detail, {"p_value": p_value})


def check_edges(rule: AcceptanceRule) -> Check:
    """Checks that a draft of target probability 0 is rejected even if the uniform is 0.

    No statistic can see this: `<=` in place of `<` would differ about once in 2^23 draws.
    """
    target_probs = jnp.array([[[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]])
    noise = AcceptanceNoise(jnp.zeros([1, 1]), jnp.zeros([1, 3]))
    if rule.noise.is_shared:
        noise = AcceptanceNoise(None, jnp.zeros([1, 2, 3]))
    tokens, count = jnp.zeros([1, 1], jnp.int32), jnp.ones([1], jnp.int32)
    sampled = jnp.array([[[0.9, 0.1, 0.0]]])
    wrong = []
    for name, probs in (("a sampled", sampled), ("a deterministic", None)):
        chain = Proposal(tokens, count, probs)
        verdicts = [jax.jit(rule.accept)(target_probs, chain, noise)]
        if rule.tree is not None:
            tree = tree_of(branch := as_tree(chain))
            verdicts.append(rule.tree.accept(target_probs, branch, tree, noise))
        if any(
            int(verdict.num_accepted[0]) != 0 or int(verdict.next_token[0]) == 0
            for verdict in verdicts
        ):
            wrong.append(name)
    detail = "a draft of target probability 0 is rejected at u = 0"
    if wrong:
        detail = f"{' and '.join(wrong)} draft of target probability 0 is accepted at u = 0"
    return Check("zero probability", not wrong, detail, {"accepted": wrong})


def check_parity(
    subject: Subject, dtype: str, prompts: list[list[int]], max_new_tokens: int
) -> Check:
    """Compares greedy answers to prompts, token ids, with plain decoding's, in a dtype.

    A difference is excused only if the target's logits of the two tokens, computed in one pass over
    everything before them, are closer than `EXCUSED_GAPS`.
    """
    settings = dataclasses.replace(
        subject.settings.without_draft_sampling(), temperature=0.0, max_new_tokens=max_new_tokens,
        logprobs=False,
    )  # fmt: skip
    requests = [make_request(subject.target, prompt, settings) for prompt in prompts]
    speculative = subject.generator(dtype)
    answers = speculative.generate(requests)
    check_answered(answers)
    drafted = [result.token_ids for result in answers]
    plain = subject.generator(dtype, drafter="none", acceptance="rejection")
    expected = [result.token_ids for result in plain.generate(requests)]
    gaps, logits_after = list[float](), make_logits_after(speculative.target)
    for request, answer, rival in zip(requests, drafted, expected, strict=True):
        if answer != rival:
            row = speculative.make_row(request)
            judge = functools.partial(logits_after, source=row.source)
            gaps += parting_gaps([row.prompt], [answer], [rival], judge)
    bound = EXCUSED_GAPS[dtype]
    num_tokens = sum(map(len, expected))
    data = {"num_answers": len(prompts), "num_tokens": num_tokens, "gaps": gaps, "bound": bound}
    detail = f"{len(prompts) - len(gaps)} of {len(prompts)} answers equal ({num_tokens} tokens)"
    if gaps:
        listed = ", ".join(f"{gap:.2g}" for gap in gaps)
        detail += f"; top-two gaps where they part: {listed} (excused below {bound:g})"
    return Check(f"greedy parity, {dtype}", all(gap < bound for gap in gaps), detail, data)


def check_seeds(subject: Subject, prompts: list[list[int]], max_new_tokens: int) -> Check:
    """Checks that a request's tokens depend on nothing but the request.

    Answers alone are compared with those in one batch, and with those of a host that looks in after
    every round; under the coupled rule also with plain decoding and another number of drafts. In
    float32: in bfloat16 a batch's passes round differently from one row's. Prompt k has seed + k.
    """
    settings = dataclasses.replace(subject.settings, max_new_tokens=max_new_tokens, logprobs=False)

    def requests_to(generator: Generator) -> list[Request]:
        read = settings_read_by(generator.drafter, subject.drafter_options, settings)
        return [
            make_request(
                subject.target, prompt, dataclasses.replace(read, seed=(read.seed + k) % 2**32)
            )
            for k, prompt in enumerate(prompts)
        ]

    alone = subject.generator()
    expected = [alone.generate(request).token_ids for request in requests_to(alone)]
    methods: dict[str, dict[str, Any]] = {
        "in a batch": {"batch_size": len(prompts), "costs": alone.costs},
        "other chunking": {"rounds_per_visit": 1, "costs": alone.costs},
    }
    if subject.acceptance == "coupled":
        methods["plain"] = {"drafter": "none"}
        chain = subject.drafter_options.without_tree()
        methods["one draft a round"] = {"num_draft_tokens": 1, "drafter_options": chain}
    num_different = {}
    for name, options in methods.items():
        generator = subject.generator(**options)
        pairs = zip(generator.generate(requests_to(generator)), expected, strict=True)
        num_different[name] = sum(result.token_ids != ids for result, ids in pairs)
    counts = ", ".join(f"{name}: {count} differ" for name, count in num_different.items())
    detail = f"{len(prompts)} answers alone against: {counts}"
    return Check("seeds", not any(num_different.values()), detail, num_different)
