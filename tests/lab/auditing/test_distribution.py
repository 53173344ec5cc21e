"""The test of the emitted distribution, and of the caches: right subjects pass, wrong ones do
not. And the distribution that it expects, against transformers' own processors.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters import DrafterOptions
from jspec.generation.request import SamplingParams
from jspec.lab.auditing import controls
from jspec.lab.auditing.checks import check_caches
from jspec.lab.auditing.distribution import (
    check_distribution,
    fit_rows,
    joint_distribution,
    reference_distribution,
)
from jspec.lab.auditing.rows import Context, first_tokens
from jspec.lab.auditing.subject import cast
from jspec.speculation.acceptance import get_rule
from jspec.speculation.types import StepInfo
from tests.cases import slow_unless
from tests.lab.auditing.subjects import SETTINGS, make_rows, make_subject
from tests.sampling.test_properties import PIPELINES, STOP_IDS, VOCAB, oracle
from tests.tiny_models import target

_NUM_ROWS = 2048
_SUBJECTS = [
    ("rejection", "prompt_lookup"),
    slow_unless(False, "block", "model"),
    slow_unless(False, "coupled", "model"),
]


def one_slot_gone(name, slot):
    """Returns a damage to a cache: one committed slot of a row is 0 in the "keys" or "values"."""
    return lambda cache: cache.replace(
        **{name: tuple(leaf.at[1, :, slot].set(0) for leaf in getattr(cache, name))}
    )


def one_slot_late(name):
    """Returns one after which each token of a row is in the slot of the token after it."""
    return lambda cache: cache.replace(
        **{name: tuple(leaf.at[1].set(jnp.roll(leaf[1], 1, 1)) for leaf in getattr(cache, name))}
    )


DAMAGES = (
    one_slot_gone("keys", 5), one_slot_late("values"), one_slot_gone("values", 7),
    one_slot_late("keys"),
)  # fmt: skip


@pytest.mark.parametrize(("rule", "drafter"), _SUBJECTS)
def test_distribution_and_caches_of_lossless_rules_pass(rule, drafter):
    """2,048 rows of fixed seeds; a right library fails for one in 10^6 choices of them."""
    subject = make_subject(rule, drafter)
    rows = make_rows(subject, rows_per_run=_NUM_ROWS)
    caches = check_caches(rows)
    assert caches.has_passed, caches.detail
    assert set(caches.data) == ({"target", "model"} if drafter == "model" else {"target"})
    distribution, control = check_distribution(rows, _NUM_ROWS)
    assert distribution.has_passed, distribution.detail
    assert distribution.data["num_samples"] == _NUM_ROWS
    assert control.has_passed, control.detail
    for damage in DAMAGES[:2]:  # all of them in bfloat16
        check = check_caches(DisturbedRows(rows, damage))
        assert not check.has_passed, check.detail


@pytest.mark.slow
def test_caches_in_bfloat16_are_told_from_wrong_ones():
    """Rounding stays well within what is accepted there, a wrong slot does not."""
    right = make_subject()
    subject = dataclasses.replace(right, target=cast(right.target, "bfloat16"))
    rows = make_rows(subject)
    caches = check_caches(rows)
    assert caches.data["target"] < 0.03
    for damage in DAMAGES:
        check = check_caches(DisturbedRows(rows, damage))
        assert not check.has_passed, check.detail
        assert check.data["target"] > 0.3


class DisturbedRows:
    """Rows whose target cache is damaged after the rounds."""

    def __init__(self, rows, damage):
        self._rows, self._damage = rows, damage
        self.subject, self.context, self.num_rounds = rows.subject, rows.context, rows.num_rounds

    def run(self, num_rows):
        for infos, state in self._rows.run(num_rows):
            yield infos, state.replace(target_cache=self._damage(state.target_cache))


def test_distribution_of_a_wrong_rule_at_temperature_zero_fails():
    """Flatter logits would not tell; a rule that keeps every draft does not take it."""
    subject = make_subject(settings=dataclasses.replace(SETTINGS, temperature=0.0))
    keeping = controls.keeping_all(get_rule("rejection"))
    rows = make_rows(subject, rule=keeping)
    distribution, control = check_distribution(rows, 128)
    assert not distribution.has_passed, distribution.detail
    assert control.detail.startswith("none: flatter logits")


def test_joint_distribution_multiplies_each_positions_own():
    """Against a product written out; a penalty makes the distribution depend on the path."""
    rng = np.random.default_rng(0)
    context = Context(prompt=[4], first=4, alphabet=[4, 6, 9])
    logits = rng.normal(size=(3, 3, 3, 3))  # after two tokens, at each of three positions
    logits[..., 0, :] = logits[0, 0, 0]  # what comes first depends on nothing
    logits[:, :, 1] = logits[:, :1, 1]  # and the second on the first alone
    settings = SamplingParams(temperature=1.0, presence_penalty=1.0)
    joint = joint_distribution(logits, context, settings, 3)
    np.testing.assert_allclose(joint.sum(), 1)

    def distribution(logits, is_said):
        weights = np.exp(logits - np.array(is_said))
        return weights / weights.sum()

    first, second = (
        distribution(logits[1, 2, 0], [1, 0, 0])[1],
        distribution(logits[1, 2, 1], [1, 1, 0])[2],
    )
    np.testing.assert_allclose(
        joint[1, 2], first * second * distribution(logits[1, 2, 2], [1, 1, 1])
    )


def test_first_tokens_are_those_that_count():
    """Guards against padding after a round's tokens that is taken for text."""
    infos = StepInfo(
        tokens=np.array([[[1, -7, -7], [2, 3, -7]], [[4, 5, 6], [8, -7, -7]]]),
        num_tokens=np.array([[1, 2], [3, 1]]),
        num_proposed=np.zeros([2, 2]),
        num_accepted=np.zeros([2, 2]),
        kind=np.zeros([2, 2]),
    )
    assert first_tokens(infos, 3).tolist() == [[1, 4, 5], [2, 3, 8]]


class FixedRows:
    """Rows whose text is given."""

    def __init__(self, tokens, context):
        self._tokens, self.context = np.array(tokens), context

    def run(self, num_rows):
        ones = np.ones([self._tokens.shape[1], num_rows], np.int32)
        yield StepInfo(self._tokens.T[..., None], ones, ones, ones, ones), None


@pytest.mark.parametrize("stranger", [-1, 7, 5000])
def test_a_token_outside_the_alphabet_fails(stranger):
    """Guards against a stranger, or a drafter's failure, that is counted as some other token."""
    context = Context(prompt=[4], first=4, alphabet=[9, 4])
    expected = np.array([[0.2, 0.2], [0.2, 0.4]])
    texts = [[9, 9], [9, 4], [4, 9], [4, 4], [4, 4]] * 40
    assert fit_rows(FixedRows(texts, context), expected, len(texts)).p_value == 1
    texts[3] = [4, stranger]
    assert fit_rows(FixedRows(texts, context), expected, len(texts)).p_value == 0


class DisturbedDrafts(DisturbedRows):
    """Rows whose drafter's cache is damaged after the rounds."""

    def run(self, num_rows):
        for infos, state in self._rows.run(num_rows):
            cache = self._damage(state.draft.cache)
            yield infos, state.replace(draft=state.draft.replace(cache=cache))


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "layers"), [("rejection", (0,)), ("block", (1,))])
def test_distribution_and_caches_of_skipped_layers_pass(rule, layers):
    """2,048 rows of fixed seeds; a right library fails for one in 10^6 choices of them."""
    subject = make_subject(
        rule, "layer_skip", target=target(), drafter_options=DrafterOptions(draft_layers=layers)
    )
    rows = make_rows(subject, rows_per_run=_NUM_ROWS)
    caches = check_caches(rows)
    assert caches.has_passed, caches.detail
    assert set(caches.data) == ({"target"} if layers == (0,) else {"target", "layer_skip"})
    distribution, control = check_distribution(rows, _NUM_ROWS)
    assert distribution.has_passed, distribution.detail
    assert control.has_passed, control.detail
    for disturbed in (DisturbedRows, DisturbedDrafts)[: len(caches.data)]:
        check = check_caches(disturbed(rows, DAMAGES[2]))
        assert not check.has_passed, check.detail


_FILTERS = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.05},
}


@pytest.mark.parametrize("name", [*PIPELINES, *_FILTERS])
def test_reference_equals_transformers(name):
    """Along an output; the alphabet is what is allowed."""
    options = (PIPELINES | _FILTERS)[name]
    settings = SamplingParams(**({"temperature": 1.0} | options))
    alphabet = settings.allowed_token_ids or tuple(range(VOCAB))
    rng = np.random.default_rng(4)
    prompt, output = rng.integers(0, VOCAB, 6).tolist(), rng.integers(0, VOCAB, 9).tolist()
    for i in range(len(output)):
        logits = (4 * rng.normal(size=[VOCAB])).astype(np.float32)
        actual = reference_distribution(
            logits[list(alphabet)], alphabet, settings, prompt=prompt, output=output[:i],
            stop_ids=STOP_IDS,
        )  # fmt: skip
        expected = oracle(logits, prompt, output[:i], options)
        np.testing.assert_allclose(actual, expected[list(alphabet)], atol=1e-6)


def test_temperature_zero_takes_the_likeliest_after_penalties():
    """Guards against the maximum of the raw logits."""
    settings = SamplingParams(temperature=0.0, presence_penalty=1.0, forbidden_token_ids=(7,))
    distribution = reference_distribution(
        np.array([3.0, 2.5, 9.0]), [5, 6, 7], settings, prompt=[], output=[5]
    )
    assert distribution.tolist() == [0, 1, 0]
