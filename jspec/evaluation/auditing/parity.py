"""Greedy parity: speculative text is plain decoding's text, with the gap wherever they part."""

import dataclasses

from jspec.evaluation.analysis.divergence import EXCUSED_GAPS, find_divergence, make_logits_after
from jspec.evaluation.auditing.check import Check
from jspec.evaluation.auditing.subject import Subject
from jspec.generation.request import Request


def check_parity(
    subject: Subject, dtype: str, prompts: list[list[int]], max_new_tokens: int
) -> Check:
    """Compares greedy answers of the subject with plain decoding's.

    A difference is excused only where the target's logits of the two tokens, computed in one pass
    over everything before, are closer than `EXCUSED_GAPS`.

    Args:
      subject: what is audited.
      dtype: "float32" or "bfloat16".
      prompts: token ids.
      max_new_tokens: of each answer.
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
    detail = f"{len(prompts) - len(gaps)} of {len(prompts)} answers equal ({num_tokens} tokens)"
    if gaps:
        listed = ", ".join(f"{gap:.2g}" for gap in gaps)
        detail += f"; top-two gaps where they part: {listed} (excused below {bound:g})"
    return Check(
        f"greedy parity, {dtype}",
        all(gap < bound for gap in gaps),
        detail,
        {"num_answers": len(prompts), "num_tokens": num_tokens, "gaps": gaps, "bound": bound},
    )
