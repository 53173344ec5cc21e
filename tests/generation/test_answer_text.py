"""Text from tokens with stop strings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.generation.answer import AnswerText
from jspec.generation.request import SamplingParams
from jspec.weights.tokenizers.tokenizer import ByteTokenizer

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
