"""Small requests on which other servers were wrong, and their siblings, by their kinds."""

import dataclasses
import json
import re

import jsonschema
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from jspec.common.errors import InputError
from jspec.generation.request import SamplingParams, nth_seed
from jspec.serving.conversation import Message
from jspec.weights import Tokenizer
from tests.serving.served import CHAT, TEXT, Served, events, generated, load_tiny, say
from tests.tiny_models import make_generator

SAY = say("abc")
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def served():
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template += "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    with Served(load_tiny(template), max_queue=9) as server:
        yield server


def ask(served, path, **asked):
    usual = {"messages": SAY} if path == CHAT else {"prompt": "abc"}
    status, reply = served.post(path, usual | {"max_tokens": 30} | asked)
    assert status == 200, reply
    return reply


@pytest.mark.parametrize("pattern", ['^a"b$', r"^a\\b$", "^\t\n\r\b\f$", '^(\t|")+$'])
def test_a_schemas_pattern_is_kept(served, pattern):
    """Of an answer and of a call, by what JSON escapes; others are in test_schema_fuzz.py."""
    schema = {"type": "object", "properties": {"p": {"type": "string", "pattern": pattern}},
              "required": ["p"]}  # fmt: skip
    shaped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked = {"temperature": 1.5, "max_tokens": 99, "seed": 1}
    (choice,) = ask(served, CHAT, response_format=shaped, **asked)["choices"]
    assert choice["finish_reason"] == "stop" or pattern.endswith("+$")
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    (choice,) = ask(served, CHAT, tools=tools, tool_choice="required", **asked)["choices"]
    for call in choice["message"].get("tool_calls", ()):
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
    assert choice["finish_reason"] == "tool_calls" or pattern.endswith("+$")


def test_a_pattern_that_cannot_be_kept_is_refused_with_its_place(served):
    schema = {"type": "object", "properties": {"p": {"type": "string", "pattern": "[^\\s\\S]"}}}
    shaped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    status, reply = served.post(CHAT, {"messages": SAY, "response_format": shaped})
    assert (status, reply["error"]["param"]) == (400, "response_format")
    assert "schema.p.pattern" in reply["error"]["message"]


WORDS = ["<s>", "</s>", "<unk>", "\u2581", "\u2581the", "\u2581world", "\u2581go", "\u2581on",
         "!", "<0xE2>", "<0x82>", "<0xAC>", "the", *"ghnotew"]  # fmt: skip


@pytest.fixture(scope="module")
def stripping():
    """A server whose tokenizer strips the first space of a text, as Llama 2's does."""
    backend = Backend(models.BPE({word: i for i, word in enumerate(WORDS)}, [], unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    backend.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer = Tokenizer(backend, special_tokens={"bos_token": "<s>"})
    tiny = load_tiny()
    model = dataclasses.replace(tiny.target, tokenizer=tokenizer)
    generator = make_generator("prompt_lookup", model, batch_size=1, num_draft_tokens=3)
    generator.engine = tiny.engine  # programs do not depend on the tokenizer
    with Served(generator) as server:
        yield server


GO_ON = [0, WORDS.index("\u2581go"), WORDS.index("\u2581on")]


@pytest.mark.parametrize(("token_id", "text"), [(4, " the the the"), (3, "   "), (12, "thethethe")])
def test_an_answers_first_space_is_kept(stripping, token_id, text):
    """decode(prompt + answer) without decode(prompt): echoed, streamed, by Generator, offsets."""
    asked = {"prompt": GO_ON, "max_tokens": 3, "allowed_token_ids": [token_id]}
    assert ask(stripping, TEXT, **asked)["choices"][0]["text"] == text
    (choice,) = ask(stripping, TEXT, **asked, echo=True, logprobs=1)["choices"]
    assert choice["text"] == "go on" + text
    step = len(text) // 3
    assert choice["logprobs"]["text_offset"] == [0, 0, 2, 5, 5 + step, 5 + 2 * step]
    streamed = events(stripping.request("POST", TEXT, asked | {"stream": True})[2])
    assert "".join(one["choices"][0]["text"] for one in streamed) == text
    settings = SamplingParams(max_new_tokens=3, allowed_token_ids=(token_id,))
    assert stripping.generator.generate([GO_ON], settings)[0].text == text
    chunks = [chunk.text for chunk in stripping.generator.stream(GO_ON, settings)]
    assert "".join(chunks) == text
    written = ask(stripping, TEXT, **(asked | {"prompt": "go on", "echo": True}))
    assert written["choices"][0]["text"] == "go on" + text


def test_one_slot_reuses_prompts_too(stripping):
    """Its batch has one row, which holds no cache while a prompt is read."""
    asked = {"prompt": [1 + n * n % 97 for n in range(140)], "max_tokens": 20, "temperature": 0.9}
    replies = [ask(stripping, TEXT, **asked, seed=1) for _ in range(2)]
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in replies]
    assert cached == [0, 128]
    assert replies[0]["choices"] == replies[1]["choices"]
    ids = asked["prompt"]
    settings = SamplingParams(max_new_tokens=20, temperature=0.9, seed=1)
    expected = stripping.generator.generate([ids], settings)[0]
    assert replies[0]["choices"][0]["text"] == expected.text


def test_a_pattern_with_a_space_in_front_is_answered_with_it(stripping):
    for pattern, text in ((" the world", " the world"), ("the!", "the!"), (" go on{2}", " go onn")):
        asked = {"prompt": GO_ON, "max_tokens": 12, "pattern": pattern}
        assert ask(stripping, TEXT, **asked)["choices"][0]["text"] == text
    (choice,) = ask(stripping, TEXT, prompt=GO_ON, allowed_token_ids=[4, 5], stop=" world",
                    max_tokens=40, temperature=3 / 2, seed=1)["choices"]  # fmt: skip
    assert re.fullmatch("( the)*", choice["text"])
    for prompt, part in (([0], "special tokens alone"), ([*GO_ON, 9, 10], "half a one")):
        status, reply = stripping.post(TEXT, {"prompt": prompt, "pattern": " the"})
        assert (status, reply["error"]["param"]) == (400, "prompt")
        assert part in reply["error"]["message"]


@pytest.mark.parametrize("prompt", ["Bye.</s>", "a€", [5, 1, 0, 7]])
def test_every_likely_token_is_named_once(served, prompt):
    """Special tokens by their own text, bytes of half a character by their bytes."""
    asked = {"ignore_eos": True, "max_tokens": 3, "logprobs": 20, "prompt": prompt}
    (choice,) = ask(served, TEXT, **asked)["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [20] * 3
    (choice,) = ask(served, TEXT, **asked, echo=True)["choices"]
    shown = choice["logprobs"]
    for token, top in zip(shown["tokens"][1:], shown["top_logprobs"][1:], strict=True):
        assert token in top, "the prompt's token comes in addition"
        assert len(top) in (20, 21)
    (choice,) = ask(served, CHAT, logprobs=True, top_logprobs=20, max_tokens=3)["choices"]
    for one in choice["logprobs"]["content"]:
        assert len({top["token"] for top in one["top_logprobs"]}) == 20


@pytest.mark.parametrize("asked", [{"n": 4}, {"prompt": ["abc"] * 2, "n": 2, "seed": -3}], ids=str)
def test_answers_of_a_request_are_independent(served, asked):
    """No two of them alike, and each comes again with the seed that the reply tells."""
    asked = asked | {"temperature": 1.5, "max_tokens": 20}
    reply = ask(served, TEXT, **asked)
    texts, seeds = [one["text"] for one in reply["choices"]], reply["usage"]["jspec"]["seeds"]
    assert len(set(texts)) == len(set(seeds)) == 4
    if "seed" in asked:
        assert seeds == [nth_seed(asked["seed"], k) for k in range(4)]
        assert [one["text"] for one in ask(served, TEXT, **asked)["choices"]] == texts
    else:
        assert ask(served, TEXT, **asked)["usage"]["jspec"]["seeds"] != seeds
    alone = ask(served, TEXT, temperature=1.5, max_tokens=20, seed=seeds[3])["choices"][0]["text"]
    assert alone == texts[3]


def test_seeds_rise_and_wrap_around():
    assert [nth_seed(2**63 - 2, k) for k in range(3)] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [nth_seed(5, k) for k in (0, 1)] == [5, 6]


def test_no_stop_string_ends_an_answer_before_its_fewest_tokens(served):
    """vLLM's meaning, streamed or not; `ignore_eos` leaves stop strings as they are."""
    text = ask(served, TEXT, max_tokens=30, ignore_eos=True)["choices"][0]["text"]
    for stop, least in ((text[0], 10), (text[2:4], 3), (list(text[:3]), 30)):
        asked = {"stop": stop, "min_tokens": least, "max_tokens": 30, "ignore_eos": True}
        reply = ask(served, TEXT, **asked)
        assert reply["usage"]["completion_tokens"] >= least
        shown = reply["choices"][0]["text"]
        assert text.startswith(shown)
        assert len(shown) >= least - 2
        streamed = events(
            served.request("POST", TEXT, {"prompt": "abc", "stream": True} | asked)[2]
        )
        assert "".join(one["choices"][0]["text"] for one in streamed) == shown
    reply = ask(served, TEXT, stop=text[0], ignore_eos=True)
    assert reply["usage"]["completion_tokens"] == 1
    assert reply["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "function",
    [
        {"name": "f"},
        {"name": "f", "parameters": {"type": "object", "properties": {}}},
        {"name": "f", "parameters": {"type": "object", "additionalProperties": False}},
    ],
    ids=str,
)
def test_a_function_without_parameters_is_called_with_none(served, function):
    reply = ask(served, CHAT, tools=[{"type": "function", "function": function}], max_tokens=80,
                tool_choice="required", temperature=1.5)  # fmt: skip
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert [one["function"]["arguments"] for one in choice["message"]["tool_calls"]] == ["{}"]


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_null_is_the_default(served, path):
    """Of fields of all types, and of fields that this server does not know."""
    names = ("n", "top_p", "temperature", "trace", "stop", "logit_bias", "suffix", "service_tier")
    assert ask(served, path, **dict.fromkeys(names))["choices"] == ask(served, path)["choices"]


def test_a_top_p_of_nothing_takes_the_most_likely_token(served):
    greedy = ask(served, TEXT, temperature=0)["choices"][0]["text"]
    reply = ask(served, TEXT, temperature=1.5, top_p=0, seed=3, n=2)
    assert {one["text"] for one in reply["choices"]} == {greedy}
    settings = SamplingParams(temperature=1.5, top_p=0.0, max_new_tokens=30)
    ids = served.generator.encode_prompt("abc", chat=False)
    assert generated(served.generator, ids, settings).text == greedy


def test_any_seed_of_64_bits_is_taken(served):
    asked = {"temperature": 1.5, "max_tokens": 20}
    seeds = [-1, 2**32, 2**63 - 1, -(2**63), 0]
    texts = [ask(served, TEXT, seed=seed, **asked)["choices"][0]["text"] for seed in seeds]
    assert len(set(texts)) == len(texts), "each is another one"
    assert ask(served, TEXT, seed=-1, **asked)["choices"][0]["text"] == texts[0]
    settings = SamplingParams(temperature=1.5, max_new_tokens=20, seed=-1)
    ids = served.generator.encode_prompt("abc", chat=False)
    assert generated(served.generator, ids, settings).text == texts[0]


@pytest.mark.parametrize(
    "asked",
    [{"logprobs": 0}, {"prompt": [5, 6, 7], "n": 2}, {"prompt": ["ab", "c"], "logprobs": 2},
     {"stop": "a"}, {"stream": True}],
    ids=str,
)  # fmt: skip
def test_an_echo_may_have_no_new_token(served, asked):
    asked = {"prompt": "abc", "max_tokens": 0, "echo": True} | asked
    if asked.get("stream"):
        chunks = events(served.request("POST", TEXT, asked)[2])
        assert "".join(choice["choices"][0]["text"] for choice in chunks) == "abc"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        return
    reply = ask(served, TEXT, **asked)
    assert reply["usage"]["completion_tokens"] == 0
    longer = ask(served, TEXT, **(asked | {"max_tokens": 1}))
    for choice, longer_choice in zip(reply["choices"], longer["choices"], strict=True):
        assert choice["finish_reason"] == "length"
        assert longer_choice["text"].startswith(choice["text"])
        if (shown := choice["logprobs"]) is not None:
            count = len(shown["tokens"])
            assert shown["token_logprobs"] == longer_choice["logprobs"]["token_logprobs"][:count]
            assert count == len(longer_choice["logprobs"]["tokens"]) - 1
            assert shown["token_logprobs"][0] is None


CALLED = [*SAY, {"role": "assistant", "content": None, "tool_calls": [
    {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
    {"role": "tool", "tool_call_id": "1", "content": "42"}, *SAY]  # fmt: skip


def test_a_message_that_the_template_drops_is_refused(served):
    for path in (CHAT, "/tokenize"):
        status, reply = served.post(path, {"messages": CALLED})
        assert (status, reply["error"]["param"]) == (400, "messages")
        assert "tool_calls in messages[1]" in reply["error"]["message"]


@pytest.mark.parametrize(
    ("template", "messages", "place"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", CALLED, "tool_calls in messages[1]"),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
         [{"role": "system", "content": "Be kind."}, *SAY], "role 'system' in messages[0]"),
        ("{% for m in messages if m.role != 'tool' %}{{ m.content }}{{ m.tool_calls }}{% endfor %}",
         CALLED, "role 'tool' in messages[2]"),
        ("{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls }}{% else %}{{ m.content }}"
         "{% endif %}{% endfor %}", [*SAY, CALLED[1] | {"content": "Let me see."}],
         "role 'assistant' in messages[1]"),
        ("{{ messages[-1].content }}", [*SAY, {"role": "assistant", "content": "b"}, *SAY],
         "messages[0]"),
    ],
)  # fmt: skip
def test_what_a_template_drops_is_named(template, messages, place):
    tokenizer = Tokenizer(Backend(models.BPE()), special_tokens={}, chat_template=template)
    plain = [Message.model_validate(one).plain() for one in messages]
    with pytest.raises(InputError, match=re.escape(place)):
        tokenizer.chat_prompt(plain)
    tokenizer.chat_template = "{% for m in messages %}{{ m }}{% endfor %}"
    assert "abc" in tokenizer.chat_prompt(plain)


@pytest.mark.parametrize("most", [1, 20])
def test_half_a_call_is_no_content(served, most):
    """Of a call that must be made, cut anywhere, streamed or not."""
    asked = {"tools": [TOOL], "tool_choice": "required", "max_tokens": most}
    (choice,) = ask(served, CHAT, **asked)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert not choice["message"].get("tool_calls")
    chunks = events(served.request("POST", CHAT, {"messages": SAY, "stream": True} | asked)[2])
    assert not "".join(one["choices"][0]["delta"].get("content", "") for one in chunks)


def test_a_stop_token_beyond_the_vocabulary_is_refused_by_both(served):
    generator, ids = make_generator("none"), [0, 500]
    with pytest.raises(InputError, match="stop_token_ids from 0 to"):
        generator.generate("abc", SamplingParams(stop_token_ids=tuple(ids)), chat=False)
    status, reply = served.post(TEXT, {"prompt": "abc", "stop_token_ids": ids})
    assert (status, reply["error"]["param"]) == (400, "stop_token_ids")
