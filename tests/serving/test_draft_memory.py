"""Earlier answers looked up by a server: no text changes, whoever asks with whom."""

import concurrent.futures
import random

import pytest

from tests.serving.served import Served, load_tiny

TEXT = "/v1/completions"
ASKED = [
    {"prompt": "abcabc", "max_tokens": 40},
    {"prompt": "one two one two", "max_tokens": 30},
    {"prompt": "xyz", "max_tokens": 40, "temperature": 0.9, "seed": 3},
    {"prompt": "z" * 90, "max_tokens": 30},
]


@pytest.fixture(scope="module")
def served():
    generator = load_tiny(drafter="suffix", draft_memory=6)
    with Served(generator, max_queue=64) as served:
        yield served


def memory_of(served):
    (memory,) = served.scheduler.slots._batch.params.draft
    return memory


def ask_all(served, rng):
    """Returns the answers to all that is asked, twice and at once."""
    bodies = list(range(len(ASKED))) * 2
    rng.shuffle(bodies)
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        replies = list(pool.map(lambda index: served.post(TEXT, ASKED[index]), bodies))
    assert {status for status, _ in replies} == {200}
    texts = {}
    for index, (_, reply) in zip(bodies, replies, strict=True):
        texts.setdefault(index, set()).add(reply["choices"][0]["text"])
    assert all(len(said) == 1 for said in texts.values()), texts
    return [said for index in sorted(texts) for said in texts[index]]


def test_texts_are_the_same_before_and_after_others_have_asked(served):
    """Greedy ones, and sampled ones by their seeds, under `rejection`.

    What was answered while programs were compiled is nobody's, and is forgotten.
    """
    assert int(memory_of(served).corpus.num_sorted) == 0
    first = [served.post(TEXT, body)[1]["choices"][0]["text"] for body in ASKED]
    assert int(memory_of(served).corpus.num_sorted) > 50
    for seed in range(2):
        assert ask_all(served, random.Random(seed)) == first


def test_a_known_answer_takes_far_fewer_calls_and_one_given_up_is_none(served):
    """The same request again; one whose client has left is not kept."""
    served.scheduler.slots.clear()
    body = {"prompt": "say it", "max_tokens": 60}
    served.gate.clear()  # in the middle of the answer
    connection = served.open(TEXT, body | {"stream": True})
    served.wait_until(lambda: served.scheduler.num_running == 1)
    (job, _), *_ = served.scheduler._running.values()
    connection.close()
    served.wait_until(lambda: job.is_cancelled)
    served.gate.set()
    served.wait_until(lambda: not served.scheduler.is_busy)
    assert int(memory_of(served).corpus.num_sorted) == 0
    usage = [served.post(TEXT, body)[1]["usage"]["jspec"]["num_rounds"] for _ in range(2)]
    assert 2 * usage[1] < usage[0]
    assert int(memory_of(served).corpus.num_sorted) == 2 * (60 - 1)
