"""All checks of an audit, in their order."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jspec.evaluation.auditing.answers import check_parity, check_seeds
from jspec.evaluation.auditing.caches import check_caches
from jspec.evaluation.auditing.context import choose_context
from jspec.evaluation.auditing.distribution import NUM_TOKENS, check_distribution
from jspec.evaluation.auditing.rows import Rows
from jspec.evaluation.auditing.subject import Check, Subject
from jspec.generation.prompts import encode_prompt
from jspec.sampling.noise import SHARED, AcceptanceNoise
from jspec.speculation.acceptance.types import AcceptanceRule, Proposal, Temperatures

_TEXTS = (
    "Why is the sky blue?",
    "Name three rivers and three mountains, then name the three rivers again.",
    "Write a Python function that adds two numbers.",
    "1 2 3 4 1 2 3 4 1 2 3",
)


def run_checks(subject: Subject, *, num_rows: int, max_new_tokens: int) -> Iterator[Check]:
    """Yields the outcome of every check, the cheap ones first.

    Args:
      subject: what is audited.
      num_rows: independent rows of the test of the distribution.
      max_new_tokens: of an answer, for parity and seeds.
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
    if subject.drafter != "none":  # without drafts their distribution says nothing of the drafter
        yield Check(
            "drafts",
            rows.num_proposed > 0,
            f"{rows.num_accepted} of {rows.num_proposed} were accepted in the rounds of these rows",
            {"num_proposed": rows.num_proposed, "num_accepted": rows.num_accepted},
        )


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
        verdict = jax.jit(rule.accept)(target_probs, Proposal(tokens, count, probs), noise)
        if int(verdict.num_accepted[0]) != 0 or int(verdict.next_token[0]) == 0:
            wrong.append(name)
    detail = "a draft of target probability 0 is rejected at u = 0"
    if wrong:
        detail = f"{' and '.join(wrong)} draft of target probability 0 is accepted at u = 0"
    return Check("zero probability", not wrong, detail, {"accepted": wrong})
