"""What no statistic can see: the smallest uniform, put in by hand."""

import jax
import jax.numpy as jnp

from jspec.evaluation.auditing.check import Check
from jspec.sampling.noise import SHARED, AcceptanceNoise
from jspec.speculation.acceptance.types import AcceptanceRule, Proposal

_VOCAB = 3


def check_edges(rule: AcceptanceRule) -> Check:
    """Checks that a draft of target probability 0 is refused even where the uniform is 0.

    `<=` in the place of `<` would differ about once in 2^23 draws.

    Args:
      rule: what is audited.
    """
    target_probs = jnp.array([[[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]])
    noise = AcceptanceNoise(jnp.zeros([1, 1]), jnp.zeros([1, _VOCAB]))
    if rule.noise is SHARED:
        noise = AcceptanceNoise(None, jnp.zeros([1, 2, _VOCAB]))
    tokens, count = jnp.zeros([1, 1], jnp.int32), jnp.ones([1], jnp.int32)
    sampled = jnp.array([[[0.9, 0.1, 0.0]]])
    wrong = []
    for name, probs in (("a sampled", sampled), ("a deterministic", None)):
        verdict = jax.jit(rule.accept)(target_probs, Proposal(tokens, count, probs), noise)
        if int(verdict.num_accepted[0]) != 0 or int(verdict.next_token[0]) == 0:
            wrong.append(name)
    return Check(
        "zero probability",
        not wrong,
        f"{' and '.join(wrong)} draft of target probability 0 is kept at u = 0"
        if wrong
        else "a draft of target probability 0 is refused at u = 0",
        {"kept": wrong},
    )
