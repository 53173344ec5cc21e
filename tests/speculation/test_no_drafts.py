"""A round without drafts is a plain step: a verify call of one token, and the same next token."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.speculation.acceptance import get_rule
from jspec.speculation.round import speculative_step
from jspec.speculation.types import Drafter, Proposal
from tests.cases import slow_unless
from tests.speculation.drive import Engine
from tests.speculation.toys import make_tables, toy_apply, toy_cache


class SilentDrafter(Drafter):
    """Never has anything to say."""

    num_draft_tokens, kinds = 3, ()

    def propose(self, params, state, inputs):
        zeros = jnp.zeros([inputs.last_token.shape[0], 3], jnp.int32)
        return Proposal(zeros, zeros[:, 0]), state


@pytest.mark.parametrize(
    ("rule", "temperature"),
    [
        ("greedy", 0.0),
        ("coupled", 1.0),
        slow_unless(False, "block", 1.0),
        slow_unless(False, "rejection", 1.0),
        slow_unless(False, "typical", 1.0),
    ],
)
def test_the_width_of_the_verify_call_changes_no_token(rule, temperature):
    """Invariant 5: a neighbour with drafts makes the call wider; a row without any must not
    notice.
    """
    calls = []

    def counting(table, tokens, cache, **options):
        calls.append(tokens.shape[1])
        return toy_apply(table, tokens, cache, **options)

    texts = []
    for widths in ((), (0,), (0, 1)):
        step = functools.partial(speculative_step, widths=widths)
        engine = Engine(
            counting, toy_cache, (make_tables(seed=3)[0], None), SilentDrafter(), get_rule(rule),
            capacity=32, max_rounds=16, step=step,
        )  # fmt: skip
        calls.clear()
        texts.append(engine.generate([[2, 0, 1], [1]] * 8, temperature=temperature, max_length=18))
        assert min(calls) == (1 if widths else 4)
    for text in texts[1:]:
        assert text.tokens == texts[0].tokens
    assert (np.asarray(texts[0].infos.num_proposed) == 0).all()
