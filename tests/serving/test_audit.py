"""The audit through the server: what many clients get over HTTP follows the target."""

import concurrent.futures

import numpy as np
import pytest

from jspec.generation.request import SamplingParams
from jspec.lab.analysis.goodness import goodness_of_fit
from jspec.lab.auditing.distribution import joint_distribution, path_logits
from jspec.lab.auditing.rows import Context
from tests.serving.served import Served
from tests.tiny_models import make_generator, target

pytestmark = pytest.mark.slow

LETTERS, PROMPT, NUM_TOKENS = "abcd", "abcabd", 4
SETTINGS = {"temperature": 1.2, "top_p": 0.95}
NUM_SAMPLES, FALSE_ALARM = 2_000, 1e-6
_AT_ONCE, _N = 4, 40  # requests, and answers of each


def expected_distribution():
    """Returns the joint distribution of an answer's tokens, computed apart from what samples."""
    ids = list(map(ord, PROMPT))
    context = Context(ids[:-1], ids[-1], list(map(ord, LETTERS)))
    logits = path_logits(target(), context, NUM_TOKENS)
    return joint_distribution(logits, context, SamplingParams(**SETTINGS), NUM_TOKENS)


def count(served):
    counts = np.zeros([len(LETTERS)] * NUM_TOKENS)

    def ask(number):
        body = {"prompt": list(map(ord, PROMPT)), "n": _N, "seed": number * _N, **SETTINGS,
                "max_tokens": NUM_TOKENS, "allowed_token_ids": list(map(ord, LETTERS))}  # fmt: skip
        status, reply = served.post("/v1/completions", body)
        assert status == 200
        return [choice["text"] for choice in reply["choices"]]

    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        for texts in pool.map(ask, range(NUM_SAMPLES // _N)):
            for text in texts:
                counts[tuple(map(LETTERS.index, text))] += 1
    return counts


def fit(**options):
    generator = make_generator("model", batch_size=8, num_draft_tokens=2, **options)
    with Served(generator, max_queue=_AT_ONCE * _N) as served:
        counts = count(served)
        accepted = sum(
            a_round.num_accepted for update in served.updates for a_round in update.rounds
        )
    assert counts.sum() == NUM_SAMPLES
    assert accepted > NUM_SAMPLES / 10, "drafts say something"
    return goodness_of_fit(counts, expected_distribution())


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_answers_follow_the_target(rule):
    """Eight at a time, each among others that come and go; 256 texts, two drafts a round."""
    assert fit(acceptance=rule).p_value > FALSE_ALARM


def test_a_lossy_rule_is_noticed():
    """The control."""
    assert fit(acceptance="typical").p_value < FALSE_ALARM
