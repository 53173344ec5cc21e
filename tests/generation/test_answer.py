"""The host's side of an answer: where it ends, what it counts, without any model."""

import dataclasses
import time

import pytest

from jspec.common.timing import compile_clock
from jspec.generation.answer import Answer, Drafts, Round
from jspec.generation.request import Request, SamplingParams
from jspec.generation.result import RoundCounts
from jspec.generation.rows import Row
from jspec.weights.resolver import LoadedModel
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from tests.tiny_models import CONFIG

_EOS = 300


def make_answer(*, max_new_tokens=50, num_draft_tokens=3, **settings):
    """Returns an answer that has just begun; ids are bytes."""
    request = Request("ask", SamplingParams(max_new_tokens=max_new_tokens, **settings))
    row = Row(request.settings, list(b"ask"), (_EOS,), max_length=3 + max_new_tokens)
    config = dataclasses.replace(CONFIG, vocab_size=400, eos_ids=(_EOS,))
    target = LoadedModel(config, {}, ByteTokenizer(400, eos_ids=(_EOS,)), "bytes", "random")
    return Answer(0, request, row, target, num_draft_tokens)


def finish(answer, rounds):
    """Feeds rounds of (tokens, proposed, accepted); returns the result."""
    for tokens, proposed, accepted in rounds:
        assert answer.finish_reason is None
        answer.add_visit(0.0, [Round(list(tokens), None, RoundCounts(proposed, accepted))])
    return answer.take_chunk().result


def test_counts_add_up():
    """Guards against metrics that mean different things in different places."""
    answer = make_answer(max_new_tokens=9)
    answer.add_first(Round([ord("a")]))
    result = finish(answer, [(b"bcde", 3, 3), (b"f", 0, 0), (b"gh", 3, 1), (b"i", 1, 0)])
    stats = result.stats
    assert (bytes(result.token_ids), result.finish_reason) == (b"abcdefghi", "length")
    assert stats.accepted_per_round == (3, 0, 1, 0)
    assert (stats.num_rounds, stats.num_proposed, stats.num_accepted) == (4, 7, 4)
    assert stats.acceptance_rate == 4 / 7
    assert stats.accepted_histogram == [2, 1, 0, 1]
    assert sum(stats.accepted_histogram) == stats.num_rounds
    assert stats.tokens_per_target_call == 8 / 4  # the first token is the prefill's
    assert stats.num_accepted == sum(stats.accepted_per_round)
    assert stats.to_json()["num_target_calls"] == 4


def test_drafts_of_trees_know_their_depth_and_path():
    """Guards against a path taken for the block's first drafts; equal tokens are of one parent."""
    tree = Drafts((5, 6, 7, 6, 8), (-1, -1, 0, 0, 3))
    assert (tree.depth, tree.kept([5, 6, 8]), tree.kept([6]), tree.kept([])) == (
        3,
        [0, 3, 4],
        [1],
        [],
    )
    chain = Drafts((5, 5, 6))
    assert (chain.depth, chain.kept([5, 5])) == (0, [0, 1])
    answer = make_answer()
    answer.add_first(Round([ord("a")]))
    answer.add_visit(0.0, [Round(list(b"bc"), None, RoundCounts(5, 1), tree)])
    answer.add_visit(0.0, [Round([_EOS], None, RoundCounts(0, 0))])
    assert answer.take_chunk().result.stats.tree_depth == 3


@pytest.mark.parametrize(
    ("settings", "ending", "reason", "text"),
    [
        ({}, _EOS, "eos", "abc"),
        ({"stop_token_ids": (ord("X"),)}, ord("X"), "stop", "abcX"),
        ({"stop": ("X",)}, ord("X"), "stop", "abc"),
    ],
)
def test_drafts_past_the_end_count_neither_way(settings, ending, reason, text):
    """Guards invariant 7: an end in the middle of a block of kept drafts, the rest of it
    forgotten.
    """
    answer = make_answer(num_draft_tokens=5, **settings)
    answer.add_first(Round([ord("a")]))
    result = finish(answer, [([*b"bc", ending, *b"de", 0], 5, 5)])
    assert result.token_ids == [*b"abc", ending]
    assert (result.finish_reason, result.text) == (reason, text)
    assert (result.stats.num_proposed, result.stats.accepted_per_round) == (3, (3,))
    assert result.stats.tokens_per_target_call == 3


def test_an_end_that_is_the_first_token():
    """Guards against a round run after the prefill has ended the answer."""
    for first, settings in ((_EOS, {}), (ord("a"), {"stop": ("a",)})):
        answer = make_answer(**settings)
        answer.add_first(Round([first]))
        result = answer.take_chunk().result
        assert (result.token_ids, result.text) == ([first], "")
        assert result.stats.tokens_per_second is None


def test_the_models_end_goes_before_other_reasons():
    """Guards against "length" or "stop" where the model ended by itself with the last token."""
    answer = make_answer(max_new_tokens=1, stop_token_ids=(_EOS,))
    answer.add_first(Round([_EOS]))
    assert answer.finish_reason == "eos"


def test_pieces_hold_stop_beginnings_back_and_add_up():
    """Guards against half of a stop string on the screen, or withheld text that never comes."""
    answer = make_answer(stop=("cde",), max_new_tokens=9)
    answer.add_first(Round([ord("a")]))
    chunks = [answer.take_chunk()]
    for block, accepted in ((b"bc", 1), (b"d", 0), (b"X", 0), (b"yc", 1), (b"de", 2)):
        answer.add_visit(0.0, [Round(list(block), None, RoundCounts(3, accepted))])
        chunks.append(answer.take_chunk())
    assert [chunk.text for chunk in chunks] == ["a", "b", "", "cdX", "y", ""]
    assert [chunk.num_accepted for chunk in chunks] == [0, 1, 0, 0, 1, 2]
    assert [chunk.result is None for chunk in chunks] == [True] * 5 + [False]
    result = chunks[-1].result
    assert "".join(chunk.text for chunk in chunks) == result.text == "abcdXy"
    assert [i for chunk in chunks for i in chunk.token_ids] == result.token_ids


def test_compile_time_is_not_run_time(monkeypatch):
    """Guards against a first answer that looks slow: what was compiled meanwhile is told apart."""
    clock = compile_clock()

    def pass_time(seconds, compiling):
        later = time.perf_counter() + seconds
        monkeypatch.setattr(time, "perf_counter", lambda: later)
        monkeypatch.setattr(clock, "seconds", clock.seconds + compiling)

    pass_time(0, 0)
    answer = make_answer(max_new_tokens=2)
    pass_time(50, 40)
    answer.add_first(Round([ord("a")]))
    pass_time(7, 4)
    answer.add_visit(0.0, [Round(list(b"b"))])
    stats = answer.take_chunk().result.stats
    assert stats.prefill_seconds == pytest.approx(10)
    assert stats.decode_seconds == pytest.approx(3)
    assert stats.compile_seconds == pytest.approx(44)
