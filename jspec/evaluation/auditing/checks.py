"""All checks of an audit but that of the emitted distribution, in their order."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters import member_names, needs_draft_model
from jspec.drafters.layer_skip import choose_layers
from jspec.drafters.tree_options import TreeOptions
from jspec.evaluation.analysis.divergence import EXCUSED_GAPS, make_logits_after, parting_gaps
from jspec.evaluation.auditing.controls import tree_controls
from jspec.evaluation.auditing.distribution import (
    FALSE_ALARM,
    NUM_TOKENS,
    check_distribution,
    fit_rows,
    joint_distribution,
    path_logits,
)
from jspec.evaluation.auditing.rows import Rows, choose_context, first_tokens
from jspec.evaluation.auditing.subject import Check, Subject
from jspec.generation.generator import Generator
from jspec.generation.prompts import encode_prompt
from jspec.generation.request import Request
from jspec.generation.result import check_answered
from jspec.generation.validate_options import settings_read_by
from jspec.models import KVCache, init_cache, make_apply
from jspec.sampling.noise import SHARED, AcceptanceNoise
from jspec.speculation.acceptance.tree import tree_of
from jspec.speculation.acceptance.types import (
    AcceptanceRule,
    Proposal,
    Temperatures,
    as_tree,
)
from jspec.weights.resolver import LoadedModel

_TEXTS = (
    "Why is the sky blue?",
    "Name three rivers and three mountains, then name the three rivers again.",
    "Write a Python function that adds two numbers.",
    "1 2 3 4 1 2 3 4 1 2 3",
)
# Of the largest key or value: a wrong slot is off by about 1.
_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
_NUM_ROWS = 4
_NO_TREE = {field.name: field.default for field in dataclasses.fields(TreeOptions)}


def run_checks(subject: Subject, *, num_rows: int, max_new_tokens: int) -> Iterator[Check]:
    """Yields the outcome of every check, the cheap ones first.

    The distribution is tested on `num_rows` independent rows; parity and seeds are those of answers
    of `max_new_tokens`.
    """
    yield check_edges(subject.rule)
    prompts = [encode_prompt(subject.target, text, chat=None, system=None) for text in _TEXTS]
    if subject.rule.temperatures is not Temperatures.POSITIVE:
        for dtype in ("float32", "bfloat16"):
            yield check_parity(subject, dtype, prompts, max_new_tokens)
    yield check_seeds(subject, prompts, max_new_tokens)
    rows = Rows(subject, choose_context(subject.target, subject.settings), NUM_TOKENS)
    yield check_caches(rows)
    yield from check_distribution(rows, num_rows)
    if subject.has_tree and rows.settings.temperature > 0:
        yield check_tree_controls(rows, num_rows)
    if subject.drafter != "none":  # without drafts their distribution says nothing of the drafter
        yield Check(
            "drafts",
            rows.num_accepted > 0,  # else nobody knows what the rule does with those it accepts
            f"{rows.num_accepted} of {rows.num_proposed} were accepted in the rounds of these rows",
            {"num_proposed": rows.num_proposed, "num_accepted": rows.num_accepted},
        )


def check_tree_controls(rows: Rows, num_rows: int) -> Check:
    """Checks that the test of the distribution rejects rules that are wrong on trees."""
    subject, context = rows.subject, rows.context
    logits = path_logits(subject.target, context, NUM_TOKENS)
    expected = joint_distribution(logits, context, rows.settings, NUM_TOKENS)
    p_values = {}
    for name, rule in tree_controls(subject.rule).items():
        wrong = Rows(subject, context, NUM_TOKENS, rule=rule)
        p_values[name] = fit_rows(wrong, expected, num_rows).p_value
    listed = ", ".join(f"{name}: p = {p_value:.2g}" for name, p_value in p_values.items())
    detail = f"{listed} (expected below {FALSE_ALARM:g})"
    return Check("tree controls", max(p_values.values()) < FALSE_ALARM, detail, p_values)


def check_edges(rule: AcceptanceRule) -> Check:
    """Checks that a draft of target probability 0 is rejected even if the uniform is 0.

    No statistic can see this: `<=` in place of `<` would differ about once in 2^23 draws.
    """
    target_probs = jnp.array([[[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]])
    noise = AcceptanceNoise(jnp.zeros([1, 1]), jnp.zeros([1, 3]))
    if rule.noise is SHARED:
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
        if any(int(one.num_accepted[0]) != 0 or int(one.next_token[0]) == 0 for one in verdicts):
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
        subject.settings, temperature=0.0, draft_temperature=None, max_new_tokens=max_new_tokens,
        logprobs=False,
    )  # fmt: skip
    requests = [Request(prompt, settings) for prompt in prompts]
    speculative = subject.generator(dtype)
    answers = speculative.generate(requests)
    check_answered(answers)
    found = [result.token_ids for result in answers]
    plain = subject.generator(dtype, drafter="none", acceptance="rejection")
    expected = [result.token_ids for result in plain.generate(requests)]
    gaps = parting_gaps(prompts, found, expected, make_logits_after(speculative.target))
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
        own = settings_read_by(generator.drafter, subject.drafter_options, settings)
        return [
            Request(prompt, dataclasses.replace(own, seed=(own.seed + k) % 2**32))
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
        chain = dataclasses.replace(subject.drafter_options, **_NO_TREE)
        methods["one draft a round"] = {"num_draft_tokens": 1, "drafter_options": chain}
    num_different = {}
    for name, options in methods.items():
        other = subject.generator(**options)
        pairs = zip(other.generate(requests_to(other)), expected, strict=True)
        num_different[name] = sum(result.token_ids != ids for result, ids in pairs)
    counts = ", ".join(f"{name}: {count} differ" for name, count in num_different.items())
    detail = f"{len(prompts)} answers alone against: {counts}"
    return Check("seeds", not any(num_different.values()), detail, num_different)


def check_caches(rows: Rows) -> Check:
    """Compares the committed slots of the target's cache, and of the drafters' own caches.

    The cache of a trained head is left out: a prefill of the text alone does not make it.
    """
    subject, context = rows.subject, rows.context
    infos, state = next(rows.run(1))
    tokens = first_tokens(infos, rows.num_rounds)[:_NUM_ROWS]
    texts = np.array([[*context.prompt, context.first, *row] for row in tokens], np.int32)
    errors = {"target": _largest_error(subject.target, state.target_cache, texts)}
    names = member_names(subject.drafter)
    members = state.draft if len(names) > 1 else (state.draft,)
    for name, own in zip(names, members, strict=True):
        model, layers = (subject.draft if needs_draft_model(name) else None), None
        if name == "layer_skip":
            model, asked_for = subject.target, subject.drafter_options.draft_layers
            layers = choose_layers(asked_for, model.config.num_layers)
        cache = getattr(own, "cache", None)
        if model is not None and isinstance(cache, KVCache):
            errors[name] = _largest_error(model, cache, texts, layers)
    tolerance = _TOLERANCES[subject.dtype]
    listed = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    detail = f"largest difference from a fresh prefill: {listed} of the largest entry"
    detail += f" (expected below {tolerance:g})"
    return Check("caches", max(errors.values()) < tolerance, detail, errors)


def _largest_error(
    model: LoadedModel, cache: KVCache, texts: np.ndarray, layers: Sequence[int] | None = None
) -> float:
    """Returns the largest difference in the slots of texts [b t], relative to the largest entry.

    `layers` of the model have run; None means all.
    """
    batch_size, width = texts.shape
    dtype = model.params["embedding"].dtype
    config = dataclasses.replace(model.config, num_layers=len(cache.keys))
    empty = init_cache(config, batch_size=batch_size, capacity=width, dtype=dtype)
    fresh = jax.jit(make_apply(model.config, layers))(model.params, texts, empty)[2]
    length = np.asarray(cache.length)[:batch_size]
    is_committed = (np.arange(width) < length[:, None])[:, None, :, None]
    worst = 0.0
    for ours, theirs in zip(cache.keys + cache.values, fresh.keys + fresh.values, strict=True):
        theirs = np.asarray(theirs, np.float32)[:, :, :width]
        ours = np.asarray(ours, np.float32)[:batch_size, :, :width]
        difference = np.abs(np.where(is_committed, ours - theirs, 0)).max()
        worst = max(worst, float(difference / np.abs(theirs).max()))
    return worst
