"""Trees as others got them wrong: each mistake changes the text, and is seen by it.

Under `coupled` the text is that of plain decoding, token for token, also with penalties. So a wrong
slot, position, mask or state of a processor shows as another text. What only the drafts'
distributions can get wrong is enumerated.
"""

import functools

import jax.numpy as jnp
import pytest

from jspec.generation.request import SamplingParams
from jspec.lab.auditing import controls
from jspec.sampling.settings import process_drafts
from jspec.speculation import round as step
from jspec.speculation.acceptance import get_rule, siblings, traversal
from tests.cases import slow_unless
from tests.speculation.drive import Engine, emitted_in_row, request_settings
from tests.speculation.test_trees import DRAWS, TABLES, TOLERANCE, VISIBLE, VOCAB, error
from tests.speculation.toys import toy_cache
from tests.speculation.tree_toys import SHAPES, ToyTreeDrafter, tree_apply

PENALTIES = SamplingParams(
    temperature=1.0, repetition_penalty=1.6, presence_penalty=0.7, frequency_penalty=0.5
)
ROWS, CAPACITY = 12, 48


def texts(drafter, rule="coupled", apply=tree_apply):
    """Returns the tokens of rows with their own seeds, with penalties."""
    engine = Engine(apply, toy_cache, TABLES, drafter, rule, capacity=CAPACITY)
    prompts = [[0, 1, 2]] * ROWS
    state = engine.start(prompts, temperature=1.0)
    first = state.last_token
    state = state.replace(settings=request_settings(PENALTIES, prompts, VOCAB))
    _, infos = engine.advance(state, 96)
    return [[int(first[row]), *emitted_in_row(infos, row)] for row in range(ROWS)]


@functools.cache
def plain():
    return texts(None)


TREES = ToyTreeDrafter((tuple(SHAPES["bush"]), tuple(SHAPES["comb"])), "best")


def as_a_chain(logits, settings, drafts, parents=None):
    """A sibling's token counts, too: the processors' state is that of the draft before."""
    return process_drafts(logits, settings, drafts)


def without_a_bonus(logits, settings, drafts, parents=None):
    """The distribution after the last draft of a path is left as the model gave it."""
    slots = jnp.arange(logits.shape[1])
    is_leaf = ~(parents[:, None, :] == slots[:, None]).any(axis=-1)
    return jnp.where(is_leaf[..., None], logits, process_drafts(logits, settings, drafts, parents))


def test_the_text_with_penalties_is_that_of_plain_decoding():
    """What the controls change is right without them."""
    assert texts(TREES) == plain()


@pytest.mark.parametrize(
    "wrong",
    [as_a_chain, slow_unless(False, without_a_bonus)],
    ids=["a sibling's penalties", "bonus unprocessed"],
)
def test_a_wrong_round_is_caught(wrong, monkeypatch):
    """Negative controls in the step itself."""
    monkeypatch.setattr(step, "process_drafts", wrong)
    assert texts(TREES) != plain()


@pytest.mark.parametrize(
    "name", [slow_unless(n == "siblings seen", n) for n in controls.CALL_CONTROLS]
)
def test_a_wrong_call_is_caught(name):
    """Negative controls around the target, those of the audit."""
    assert texts(TREES, apply=controls.CALL_CONTROLS[name](tree_apply)) != plain()


@pytest.mark.parametrize(
    "change", [controls.keeping_a_prefix, slow_unless(False, controls.keeping_all)]
)
def test_a_wrong_verdict_is_caught(change):
    """Negative controls: the block's first drafts in place of a path, or its deepest draft."""
    assert texts(TREES, change(get_rule("coupled"))) != plain()


@pytest.mark.slow
def test_a_tree_of_one_node_with_noise_of_its_own_is_caught():
    """Negative control of the noise that a chain and its tree share."""

    def shifted(seed, position, *rest):
        return siblings.tree_noise(seed, position + 1, *rest)

    def run(rule, is_tree):
        class AsChain(ToyTreeDrafter):
            def propose(self, params, state, inputs):
                proposal, state = super().propose(params, state, inputs)
                return proposal.replace(parents=None, max_depth=0), state

        drafter = (ToyTreeDrafter if is_tree else AsChain)((tuple(SHAPES["one"]),), "with")
        engine = Engine(tree_apply, toy_cache, TABLES, drafter, rule, capacity=CAPACITY)
        return engine.generate([[0, 1, 2]] * ROWS, temperature=1.0).tokens

    rule = get_rule("rejection")
    expected = run(rule, is_tree=False)
    assert run(rule, is_tree=True) == expected
    mistaken = rule._replace(tree=rule.tree._replace(noise=shifted))
    assert run(mistaken, is_tree=True) != expected


@pytest.mark.parametrize(
    ("rule", "draw"),
    [
        slow_unless(
            (rule, draw) in ((siblings.RULE, "with"), (traversal.RULE, "without")), rule, draw
        )
        for rule in (siblings.RULE, traversal.RULE)
        for draw in DRAWS
    ],
)
def test_misreported_drafts_are_caught(rule, draw):
    """Negative control: certain children scored as drawn, or another replacement than the true."""
    report = functools.partial(controls.misreported, vocab_size=VOCAB)
    assert error(rule, "siblings", draw) < TOLERANCE
    assert error(rule, "siblings", draw, report=report) > VISIBLE
