"""Seeds: a request's tokens depend on nothing but the request."""

import dataclasses
from typing import Any

from jspec.evaluation.auditing.check import Check
from jspec.evaluation.auditing.subject import Subject
from jspec.generation.request import Request
from jspec.generation.validate_options import settings_read_by


def check_seeds(subject: Subject, prompts: list[list[int]], max_new_tokens: int) -> Check:
    """Compares answers alone, in one batch, and with the host looking in after every round.

    Under the coupled rule also with plain decoding and with another number of drafts. In float32:
    in bfloat16 a batch's passes round differently from one row's.

    Args:
      subject: what is audited.
      prompts: token ids; prompt k gets seed + k.
      max_new_tokens: of each answer.
    """
    settings = dataclasses.replace(subject.settings, max_new_tokens=max_new_tokens, logprobs=False)
    requests = [
        Request(prompt, dataclasses.replace(settings, seed=(settings.seed + k) % 2**32))
        for k, prompt in enumerate(prompts)
    ]
    methods: dict[str, dict[str, Any]] = {
        "in a batch": {"batch_size": len(prompts)},
        "other chunking": {"rounds_per_visit": 1},
    }
    if subject.acceptance == "coupled":
        methods["plain"] = {"drafter": "none"}
        methods["one draft a round"] = {"num_draft_tokens": 1}
    alone = subject.generator()
    same_costs: dict[str, Any] = {"costs": alone.costs}
    expected = [alone.generate(request).token_ids for request in requests]
    num_different = {}
    for name, options in methods.items():
        own: dict[str, Any] = (
            {} if "drafter" in options or "num_draft_tokens" in options else same_costs
        )
        other = subject.generator(**options, **own)
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
    """Returns a request without a draft temperature where that drafter does not read it."""
    settings = settings_read_by(drafter, subject.drafter_options, request.settings)
    return dataclasses.replace(request, settings=settings)
