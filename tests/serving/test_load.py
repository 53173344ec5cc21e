"""Same seed, same text: through the server, at any load, whatever the company and the drafter."""

import concurrent.futures
import random

import pytest

from jspec.drafters import DEFAULT_NUM_DRAFT_TOKENS
from tests.serving.served import Served, load_tiny

TEXT = "/v1/completions"
ASKED = [
    {"prompt": "abcabc", "seed": 1, "temperature": 1.0, "max_tokens": 40},
    {"prompt": "one two one two", "seed": 2, "temperature": 0.7, "top_p": 0.9, "max_tokens": 30},
    {"prompt": "xyz", "seed": 3, "temperature": 1.3, "max_tokens": 20, "pattern": "([a-z] ?)+"},
    {"prompt": "z" * 90, "max_tokens": 30},
]


def company(rng):
    """Returns a request of somebody else, which samples."""
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


def check_loads(loads, drafters, batch_size):
    """Checks that texts are the same at all loads with all drafters; another seed is another."""
    expected = None
    for name, options in drafters.items():
        generator = load_tiny(acceptance="coupled", batch_size=batch_size, **options)
        with Served(generator, max_queue=64) as served:
            for load in loads:
                said = texts(served, load, random.Random(load))
                expected = expected or said
                assert said == expected, (name, load)
            _, reseeded = served.post(TEXT, ASKED[0] | {"seed": 9})
            assert reseeded["choices"][0]["text"] != expected[0]


def test_an_answer_is_the_same_alone_and_in_company():
    check_loads([1, 6], {"lookup": {}}, 3)


@pytest.mark.slow
def test_an_answer_is_the_same_at_any_load_with_any_drafter():
    """In float32 with the rule `coupled`, as the audit checks it without a server."""
    drafters = {
        "none": {"drafter": "none", "num_draft_tokens": DEFAULT_NUM_DRAFT_TOKENS},
        "lookup": {},
        "auto": {"num_draft_tokens": "auto"},
        "layers": {"drafter": "layer_skip", "draft_layers": 1},
    }
    check_loads([1, 4, 16], drafters, 5)
