"""Same request, same text: through the server, whatever the company, the drafter and its memory."""

import concurrent.futures
import random

import pytest

from jspec.drafters import DEFAULT_NUM_DRAFT_TOKENS
from tests.serving.served import TEXT, Served, load_tiny

ASKED = [
    {"prompt": "abcabc", "seed": 1, "temperature": 1.0, "max_tokens": 40},
    {"prompt": "one two one two", "seed": 2, "temperature": 0.7, "top_p": 0.9, "max_tokens": 30},
    {"prompt": "xyz", "seed": 3, "temperature": 1.3, "max_tokens": 20, "pattern": "([a-z] ?)+"},
    {"prompt": "z" * 90, "max_tokens": 30},
]


def company(rng):
    asked = {"prompt": "".join(rng.choices("abc one", k=rng.randint(1, 100))), "temperature": 1.5,
             "max_tokens": rng.randint(1, 60), "presence_penalty": rng.random()}  # fmt: skip
    return asked | ({"pattern": "[ab]{3,9}"} if rng.random() < 0.3 else {})


def texts(served, num_at_once, rng):
    """Returns the answers to `ASKED`, each among others so that this many are asked for at once."""
    asked = list(range(len(ASKED))) * 2
    jobs = asked + [None] * (len(asked) * (num_at_once > 1))
    rng.shuffle(jobs)
    with concurrent.futures.ThreadPoolExecutor(num_at_once) as pool:
        bodies = [company(rng) if job is None else ASKED[job] for job in jobs]
        replies = list(pool.map(lambda body: served.post(TEXT, body), bodies))
    assert {status for status, _ in replies} == {200}
    texts_of = {}
    for job, (_, reply) in zip(jobs, replies, strict=True):
        if job is not None:
            texts_of.setdefault(job, set()).add(reply["choices"][0]["text"])
    assert all(len(said) == 1 for said in texts_of.values()), texts_of
    return [said for job in sorted(texts_of) for said in texts_of[job]]


@pytest.mark.slow
def test_an_answer_is_the_same_at_any_load_with_any_drafter():
    """In float32 with the rule `coupled`, as the audit checks it; another seed is another text."""
    expected = None
    for options in (
        {"drafter": "none", "num_draft_tokens": DEFAULT_NUM_DRAFT_TOKENS},
        {},
        {"num_draft_tokens": "auto"},
        {"drafter": "layer_skip", "draft_layers": 1},
    ):
        generator = load_tiny(acceptance="coupled", batch_size=5, **options)
        with Served(generator, max_queue=64) as served:
            for load in (1, 4, 16):
                said = texts(served, load, random.Random(load))
                expected = expected or said
                assert said == expected, (options, load)
            _, reseeded = served.post(TEXT, ASKED[0] | {"seed": 9})
            assert reseeded["choices"][0]["text"] != expected[0]


@pytest.fixture(scope="module")
def served():
    """A server whose drafts are looked up in earlier answers."""
    with Served(load_tiny(drafter="suffix", draft_memory=6), max_queue=64) as served:
        yield served


def num_remembered(served):
    (memory,) = served.scheduler.slots._batch.params.draft
    return int(memory.corpus.num_sorted)


def test_texts_are_the_same_before_and_after_others_have_asked(served):
    """Greedy ones, and sampled ones by their seeds, under `rejection`.

    What was answered while programs were compiled is nobody's, and is forgotten.
    """
    assert num_remembered(served) == 0
    first = [served.post(TEXT, body)[1]["choices"][0]["text"] for body in ASKED]
    assert num_remembered(served) > 50
    for load in (1, 6):
        assert texts(served, load, random.Random(load)) == first


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
    assert num_remembered(served) == 0
    usage = [served.post(TEXT, body)[1]["usage"]["jspec"]["num_rounds"] for _ in range(2)]
    assert 2 * usage[1] < usage[0]
    assert num_remembered(served) == 2 * (60 - 1)
