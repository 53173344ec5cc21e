"""Text from tokens, of every family of tokenizers: streams, offsets, names, log-probabilities."""

import functools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jspec.generation.request import SamplingParams
from jspec.generation.result import Chunk, Result, Stats, TokenLogprob
from jspec.serving.job import Update
from jspec.serving.replies import ChatReply, TextReply
from jspec.serving.schema import ChatRequest, CompletionRequest
from tests.weights.tokenizers import made

ALL = [*made.MADE, *made.REAL]
_STATS = Stats((), 0, 0.0, 0.0, 0.0, 0.0, 0)
QUICK = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(params=ALL, scope="module")
def pair(request):
    return (made.make if request.param in made.MADE else made.load)(request.param)


@pytest.fixture
def tokenizer(pair):
    return pair[0]


@functools.cache
def odd_ids(tokenizer):
    """Returns those of halves of characters, special and added tokens, and spaces."""
    texts = tokenizer.token_bytes()
    size = len(texts)
    odd = [i for i in range(size) if texts[i] in (b"", b" ") or texts[i] > b"\x7f"]
    return [*odd, 0, 1, 2, *range(max(size - 5, 0), size)]


def ids_of(tokenizer, max_size=24):
    """Any ids, the odd ones more often than others."""
    size, odd = tokenizer.vocab_size, odd_ids(tokenizer)
    return st.lists(st.one_of(st.integers(0, size - 1), st.sampled_from(odd)), max_size=max_size)


@QUICK
@given(data=st.data())
def test_prompt_and_answer_are_the_whole_at_every_cut(tokenizer, data):
    """decode(prompt + answer) without decode(prompt); nothing that was shown is taken back.

    Guards against the answer's first space, stripped as if a text began there.
    """
    ids = data.draw(ids_of(tokenizer))
    whole = tokenizer.decode(ids)
    for cut in range(len(ids) + 1):
        prompt, stream = tokenizer.stream(), tokenizer.stream(ids[:cut])
        said = "".join(map(prompt.push, ids[:cut]))
        assert whole.startswith(said)
        for token_id in ids[cut:]:
            said += stream.push(token_id)
            assert whole.startswith(said)
        assert said + stream.flush() == whole


@QUICK
@given(data=st.data())
def test_the_whole_is_the_librarys(pair, data):
    """But for what is no UTF-8: a library that has read half a character takes others back."""
    tokenizer, backend = pair
    ids = data.draw(ids_of(tokenizer))
    added = backend.get_added_tokens_decoder() if backend else {}
    # Byte-level decoders of the library take the letter é of an added token for a byte.
    ids = [i for i in ids if i not in added or added[i].content != "é"]
    expected = tokenizer.decode(ids) if backend is None else backend.decode(ids)
    if "\ufffd" not in expected + tokenizer.decode(ids):
        is_suffix = '"BPEDecoder"' in backend.to_str() if backend else False
        strip = str.rstrip if is_suffix else str  # a text may go on after its last word
        assert strip(tokenizer.decode(ids)) == strip(expected)


def test_real_texts_come_back_whole(tokenizer, pair):
    """Streamed token by token, after any beginning, where the vocabulary can write them."""
    for text in ("the dog's café, 12 of them", "  two spaces", "😀 東京\n\tdef f(x):"):
        ids = tokenizer.encode(text, add_bos=False)
        if pair[1] is not None and tokenizer.decode(ids) != pair[1].decode(ids):
            continue
        for cut in range(1, len(ids)):
            stream = tokenizer.stream(ids[:cut])
            answer = "".join(map(stream.push, ids[cut:])) + stream.flush()
            assert tokenizer.decode(ids).endswith(answer)


def test_names_tell_ids_apart(tokenizer):
    """Special tokens, bytes of half a character, and two tokens of one text among them."""
    labels = [tokenizer.label(token_id) for token_id in range(tokenizer.vocab_size + 2)]
    assert len({name for name, _ in labels}) == len(labels)
    assert all(labels)
    assert all(known for _, known in labels)


def logprobs_of(data, tokenizer, ids, num_top):
    size = tokenizer.vocab_size
    some = st.lists(st.integers(0, size - 1), min_size=num_top, max_size=num_top, unique=True)
    return [
        TokenLogprob(-1.0, -1.0, [(i, -float(n)) for n, i in enumerate(data.draw(some))])
        for _ in ids
    ]


def num_listed(top_logprobs):
    return [len(entry) for entry in top_logprobs]


def num_expected(ids, logprobs):
    """The likely tokens of each place, and the chosen one where it is none of them."""
    return [
        len({token_id, *(i for i, _ in entry.top)})
        for token_id, entry in zip(ids, logprobs, strict=True)
    ]


def result_of(tokenizer, prompt, ids, logprobs, prompt_logprobs=None):
    stream = tokenizer.stream(prompt)
    text = "".join(map(stream.push, ids)) + stream.flush()
    return Result(prompt, prompt, ids, text, "length", SamplingParams(), _STATS,
                  token_logprobs=logprobs, prompt_logprobs=prompt_logprobs)  # fmt: skip


def check_offsets(tokenizer, ids, text, offsets, *, is_whole):
    """Offsets rise, and at each stands its token's text, where that is whole."""
    assert len(offsets) == len(ids)
    assert offsets == sorted(offsets)
    pending = False
    for place, (token_id, offset) in enumerate(zip(ids, offsets, strict=True)):
        assert 0 <= offset <= len(text)
        try:
            is_first = not any(tokenizer.piece(i, False) for i in ids[:place])
            known = tokenizer.piece(token_id, is_first and is_whole).decode()
        except UnicodeDecodeError:
            pending = True
            continue
        if known and not pending:
            assert text[offset:].startswith(known)
        pending = pending and not known


@QUICK
@given(data=st.data())
def test_every_likely_token_is_there_once_and_offsets_point_at_the_text(tokenizer, data):
    """Of completions: echoed or not, streamed or not."""
    prompt = data.draw(ids_of(tokenizer).filter(bool))
    ids = data.draw(ids_of(tokenizer).filter(bool))
    logprobs = logprobs_of(data, tokenizer, ids, 5)
    asked = CompletionRequest(prompt=prompt, logprobs=5)
    reply = TextReply("m", tokenizer, [prompt], [""], asked)
    (choice,) = reply.whole([result_of(tokenizer, prompt, ids, logprobs)], 0).model_dump(
        exclude_unset=True
    )["choices"]
    expected_logprobs = choice["logprobs"]
    assert num_listed(expected_logprobs["top_logprobs"]) == num_expected(ids, logprobs)
    if tokenizer.stream(prompt).is_begun and not tokenizer.stream(prompt).is_inside_character:
        check_offsets(
            tokenizer, ids, choice["text"], expected_logprobs["text_offset"], is_whole=False
        )
    streamed, offsets = TextReply("m", tokenizer, [prompt], [""], asked), []
    for token_id, entry in zip(ids, logprobs, strict=True):
        update = Update(None, Chunk(0, "", [token_id], 0), [False], [entry], [], [], 0.0)
        (part,) = streamed.chunk(0, update, False).model_dump(exclude_unset=True)["choices"]
        offsets += part["logprobs"]["text_offset"]
    assert offsets == expected_logprobs["text_offset"]
    before = tokenizer.stream()
    echo = "".join(map(before.push, prompt))
    asked = CompletionRequest(prompt=prompt, logprobs=5, echo=True)
    reply = TextReply("m", tokenizer, [prompt], [echo], asked)
    of_prompt = logprobs_of(data, tokenizer, prompt[1:], 5)
    result = result_of(tokenizer, prompt, ids, logprobs, of_prompt)
    (choice,) = reply.whole([result], 0).model_dump(exclude_unset=True)["choices"]
    assert choice["text"] == tokenizer.decode([*prompt, *ids])
    offsets = choice["logprobs"]["text_offset"]
    check_offsets(tokenizer, [*prompt, *ids], choice["text"], offsets, is_whole=True)
    expected = num_expected([*prompt[1:], *ids], [*of_prompt, *logprobs])
    assert num_listed(choice["logprobs"]["top_logprobs"][1:]) == expected


@QUICK
@given(data=st.data())
def test_every_likely_token_of_a_chat_has_a_name_of_its_own(tokenizer, data):
    ids = data.draw(ids_of(tokenizer, 4).filter(bool))
    logprobs = logprobs_of(data, tokenizer, ids, 5)
    asked = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 5}
    )
    reply = ChatReply("m", tokenizer, [[1]], [""], asked)
    (choice,) = reply.whole([result_of(tokenizer, [1], ids, logprobs)], 0).model_dump(
        exclude_unset=True
    )["choices"]
    for one in choice["logprobs"]["content"]:
        assert len({top["token"] for top in one["top_logprobs"]}) == 5
        assert one["bytes"]


def test_special_tokens_in_a_prompt_are_counted_where_they_are_written(pair):
    """The text of an echo is the prompt as it came; BOS, which nobody wrote, is not in it."""
    tokenizer, backend = pair
    if backend is None or "<|im_end|>" not in tokenizer.vocabulary():
        pytest.skip("no such token")
    end = tokenizer.vocabulary()["<|im_end|>"]
    first = tokenizer.encode("the", add_bos=False)
    text = tokenizer.decode(first) + "<|im_end|>"
    ids = [*first, end] if tokenizer.bos_id is None else [tokenizer.bos_id, *first, end]
    asked = CompletionRequest(prompt=text, logprobs=0, echo=True)
    reply = TextReply("m", tokenizer, [ids], [text], asked)
    some = [TokenLogprob(-1.0, -1.0)] * len(ids)
    result = result_of(tokenizer, ids, first, some[: len(first)], some[1:])
    (choice,) = reply.whole([result], 0).model_dump(exclude_unset=True)["choices"]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[ids.index(end)] == len(text) - len("<|im_end|>")
    assert offsets[len(ids)] == len(text)
