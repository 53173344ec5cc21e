"""The host's side of an answer: its text, where it ends, what it counts, without any model."""

import dataclasses
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.common.timing import compile_clock
from jspec.generation.answer import Answer, AnswerText, Drafts, Round
from jspec.generation.request import Request, SamplingParams
from jspec.generation.result import (
    RoundCounts,
    Stats,
    acceptance_by_position,
    by_drafter,
)
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
    assert stats.tokens_per_target_call == 8 / 4  # the first token is the prefill's
    assert stats.to_json()["num_target_calls"] == 4


def test_drafts_of_trees_know_their_depth_and_path():
    """Guards against a path taken for the block's first drafts; equal tokens are of one parent."""
    tree = Drafts((5, 6, 7, 6, 8), (-1, -1, 0, 0, 3))
    assert tree.depth == 3
    assert [tree.kept(path) for path in ([5, 6, 8], [6], [])] == [[0, 3, 4], [1], []]
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
    answer = make_answer(max_new_tokens=1, stop_token_ids=(_EOS,))
    answer.add_first(Round([_EOS]))
    assert answer.finish_reason == "eos"  # and neither "length" nor "stop"


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


_TOKENIZER = ByteTokenizer(256)


def start(*stop, min_new_tokens=0):
    return AnswerText(_TOKENIZER, [97], SamplingParams(stop=stop, min_new_tokens=min_new_tokens))


def run(text, stop):
    """Returns the shown pieces, the stream, and how many tokens it took to end."""
    stream, shown, count = start(*stop), [], 0
    for byte in text.encode():
        count += 1
        stream.push(byte)
        if stream.is_stopped:
            break
        shown.append(stream.take(is_last=False))
    stream.finish()
    shown.append(stream.take(is_last=True))
    return shown, stream, count


@given(st.text("abé", min_size=1, max_size=12), st.lists(st.text("abé", min_size=1, max_size=3)))
def test_text_is_cut_at_the_first_stop_string_to_be_complete(text, stop):
    """Guards against overlapping stops, one inside another, and text shown and taken back."""
    shown, stream, count = run(text, tuple(stop))
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(s) for s in stop)]
    assert stream.is_stopped == bool(ends)
    if ends:
        read = text[: ends[0]]
        assert stream.text == read[: min(read.find(s) for s in stop if s in read)]
        assert count == len(read.encode())
    else:
        assert stream.text == text
    assert "".join(shown) == stream.text


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("aXYb", ("XYZ",), ["a", "", "", "XYb", ""]),
        ("XXYZ", ("XYZ",), ["", "X", "", ""]),
        ("ab", ("b", "ab"), ["", ""]),
        ("ab", (), ["a", "b", ""]),
    ],
)
def test_only_certain_text_is_shown(text, stop, shown):
    """Guards against a stop string's beginning shown, and any more than that held back."""
    assert run(text, stop)[0] == shown


def test_a_stop_string_completed_by_what_was_held_back():
    """Guards against finishing without a look at the decoder's last characters."""
    stream = start("\ufffd")
    stream.push(ord("a"))
    stream.push("é".encode()[0])
    assert not stream.is_stopped
    stream.finish()
    assert stream.text == "a"


@pytest.mark.parametrize(
    ("text", "stop", "least", "expected"),
    [
        ("xexeye", "e", 4, "xexey"),
        ("xexe", "e", 4, "xexe"),
        ("eeeee", "e", 3, "eee"),
        ("abcabc", "abc", 4, "abc"),
        ("abcd", "bcd", 3, "a"),
        ("abcd", "bcd", 0, "a"),
    ],
)
def test_no_stop_string_ends_in_the_tokens_that_must_come(text, stop, least, expected):
    """One that only begins there does: the fewest tokens are there when it is complete."""
    stream = start(stop, min_new_tokens=least)
    for byte in text.encode():
        stream.push(byte)
        if stream.is_stopped:
            break
    assert stream.text == expected


ROUNDS = [
    RoundCounts(3, 3, "lookup"),
    RoundCounts(3, 1, "model"),
    RoundCounts(0, 0),
    RoundCounts(2, 0, "model"),
    RoundCounts(1, 1, "lookup"),
]


def test_acceptance_by_position():
    """Guards against mixed definitions: of all drafts at a position, or of those reached."""
    assert acceptance_by_position(ROUNDS) == [3 / 4, 1 / 3, 1 / 2]
    assert acceptance_by_position(ROUNDS, is_conditional=True) == [3 / 4, 1 / 2, 1]


def test_a_place_whose_turn_never_came_has_no_rate():
    """Guards against 0 / 0, and against 0 where nothing is known."""
    lost = [RoundCounts(3, 0, "a")] * 2
    assert acceptance_by_position(lost, is_conditional=True) == [0.0]
    assert acceptance_by_position(lost) == [0.0, 0.0, 0.0]
    assert acceptance_by_position([RoundCounts(0, 0)]) == []


def test_each_drafter_has_its_own_counts():
    """A silent round belongs to nobody."""
    report = by_drafter(ROUNDS)
    assert list(report) == ["lookup", "model"]
    assert report["lookup"] == {
        "num_rounds": 2, "num_proposed": 4, "num_accepted": 4, "acceptance_rate": 1.0,
    }  # fmt: skip
    assert report["model"] == {
        "num_rounds": 2, "num_proposed": 5, "num_accepted": 1, "acceptance_rate": 1 / 5,
    }  # fmt: skip


def test_a_drafter_that_calls_the_target_takes_two_calls_a_round():
    """Where it proposed; a silent round is a verify call alone."""
    rounds = RoundCounts(2, 2, "lookahead"), RoundCounts(0, 0), RoundCounts(1, 0, "prompt_lookup")
    stats = Stats(rounds, 5, 0.5, 2.0, 1.5, 0.0, 3)
    assert (stats.num_rounds, stats.num_target_calls) == (3, 4)
    assert stats.tokens_per_target_call == stats.to_json()["tokens_per_target_call"] == 5 / 4


def test_rates_of_trees_are_by_depth():
    """Guards against eight drafts of a tree that count as eight positions."""
    rounds = RoundCounts(8, 2, "model"), RoundCounts(8, 1, "model"), RoundCounts(0, 0)
    record = Stats(rounds, 6, 0.5, 2.0, 1.5, 0.0, 8, tree_depth=2).to_json()
    assert record["acceptance_by_position"] == [1, 1 / 2]
    assert record["conditional_acceptance_by_position"] == [1, 1 / 2]
    chain = Stats(rounds, 6, 0.5, 2.0, 1.5, 0.0, 8).to_json()
    assert chain["acceptance_by_position"] == [1, 1 / 2, 0, 0, 0, 0, 0, 0]


def test_totals():
    """Guards against derived numbers that contradict the rounds."""
    stats = Stats(tuple(ROUNDS), 10, 0.5, 2.0, 1.5, 0.0, 3)
    record = stats.to_json()
    assert (stats.num_proposed, stats.num_accepted, record["num_wasted"]) == (9, 5, 4)
    assert record["host_seconds"] == 0.5
    assert record["proposed_per_round"] == [3, 3, 0, 2, 1]
    assert stats.accepted_histogram == [2, 2, 0, 1]
    assert (stats.tokens_per_second, stats.tokens_per_target_call) == (5.0, 2.0)
