"""Checks of whole answers: greedy parity with plain decoding, and seeds."""

import dataclasses
from typing import Any

from jspec.evaluation.analysis.divergence import EXCUSED_GAPS, find_divergence, make_logits_after
from jspec.evaluation.auditing.subject import Check, Subject
from jspec.generation.request import Request
from jspec.generation.validate_options import settings_read_by


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
    found = [result.token_ids for result in speculative.generate(requests)]
    plain = subject.generator(dtype, drafter="none", acceptance="rejection")
    expected = [result.token_ids for result in plain.generate(requests)]
    logits_after = make_logits_after(speculative.target)
    pairs = zip(prompts, found, expected, strict=True)
    parted = [find_divergence(*texts, logits_after) for texts in pairs]
    gaps = [divergence.gap for divergence in parted if divergence is not None]
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
    requests = [
        Request(prompt, dataclasses.replace(settings, seed=(settings.seed + k) % 2**32))
        for k, prompt in enumerate(prompts)
    ]
    alone = subject.generator()
    expected = [alone.generate(request).token_ids for request in requests]
    methods: dict[str, dict[str, Any]] = {
        "in a batch": {"batch_size": len(prompts), "costs": alone.costs},
        "other chunking": {"rounds_per_visit": 1, "costs": alone.costs},
    }
    if subject.acceptance == "coupled":
        methods["plain"] = {"drafter": "none"}
        methods["one draft a round"] = {"num_draft_tokens": 1}
    num_different = {}
    for name, options in methods.items():
        other = subject.generator(**options)
        results = other.generate([_as_read_by(other.drafter, subject, one) for one in requests])
        pairs = zip(results, expected, strict=True)
        num_different[name] = sum(result.token_ids != ids for result, ids in pairs)
    return Check(
        "seeds",
        not any(num_different.values()),
        f"{len(prompts)} answers alone against: "
        + ", ".join(f"{name}: {count} differ" for name, count in num_different.items()),
        num_different,
    )


def _as_read_by(drafter: str, subject: Subject, request: Request) -> Request:
    """Returns a request without a draft temperature if the drafter does not read it."""
    settings = settings_read_by(drafter, subject.drafter_options, request.settings)
    return dataclasses.replace(request, settings=settings)
