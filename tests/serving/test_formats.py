"""What answers look like over HTTP: JSON by a schema, likely tokens, echoes, calls, rounds."""

import functools
import json
import random
import re

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import openai
import pydantic
import pytest
import scipy.special

from jspec.generation.answer import Drafts
from jspec.generation.request import SamplingParams
from jspec.generation.result import Chunk, RoundCounts
from jspec.models import init_cache
from jspec.serving.job import Job, Update
from jspec.serving.tools import CallReader
from jspec.serving.traces import Traces
from tests.serving.served import CHAT, TEXT, Served, load_tiny, say

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
SAY = say("abc")
TOOLS = [{"type": "function", "function": {"name": "add"}}]
BY_NAME = {
    "add": {"type": "object", "required": ["x", "y"], "properties": {
        "x": {"type": "integer", "minimum": -5, "maximum": 120}, "y": {"enum": ["é", None]}}},
    "on": {"type": "object", "required": ["day"], "properties": {
        "day": {"type": "string", "format": "date"}}},
}  # fmt: skip
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": ["é"]}}\n</tool_call>'


def named(name):
    return {"type": "function", "function": {"name": name}}


@pytest.fixture(scope="module")
def served():
    calls = "{% for c in m.tool_calls or [] %}"
    calls += "({{ c.function.name }}{{ c.function.arguments }}){% endfor %}"
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + calls + "{% endfor %}"
    template += "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    with Served(load_tiny(template), api_key="k") as server:
        yield server


@pytest.fixture
def client(served):
    with served.client("k") as client:
        yield client


def test_an_answer_is_json_by_the_schema_streamed_or_not(served, client):
    """Whatever the seed, and beside one that is not; nothing is compiled for it.

    This test stands first: between tests a process that has grown large forgets its programs.
    """
    programs = num_programs(served)
    ask = client.chat.completions.create
    for seed in range(2):
        asked = {"model": "tiny", "messages": SAY, "seed": seed, "temperature": 1.5,
                 "max_tokens": 100, "response_format": FORMAT}  # fmt: skip
        (choice,) = ask(**asked).choices
        assert choice.finish_reason == "stop"
        value = json.loads(choice.message.content)
        assert type(value["n"]) is int
        assert type(value["ok"]) is bool
        chunks = ask(**asked, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content
    whole = ask(model="tiny", messages=SAY, max_tokens=150, temperature=1, seed=1,
                response_format={"type": "json_object"}).choices[0]  # fmt: skip
    assert whole.message.content[0] == "{"
    if whole.finish_reason == "stop":
        assert isinstance(json.loads(whole.message.content), dict)
    digits = client.completions.create(
        model="tiny", prompt="a", max_tokens=9, extra_body={"pattern": "[0-9]{4}"}
    )
    assert len(digits.choices[0].text) == 4
    assert digits.choices[0].text.isdigit()
    bound = client.completions.create(
        model="tiny", prompt="a", max_tokens=9, extra_body={"pattern": r"^[0-9]{2}\$$"}
    )
    assert re.fullmatch(r"[0-9]{2}\$", bound.choices[0].text)
    assert num_programs(served) == programs


def num_programs(served):
    text = served.request("GET", "/metrics", Authorization="Bearer k")[2].decode()
    return next(line for line in text.splitlines() if line.startswith("jspec:num_compiled"))


@pytest.mark.parametrize(
    ("path", "asked", "param", "part"),
    [
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format",
         'expected a field json_schema, {"name": NAME, "schema": SCHEMA}, with the type'),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"type": "integer", "multipleOf": 2}}}}, "response_format",
         "in the JSON schema at schema, got 'multipleOf'"),
        (CHAT, {"response_format": FORMAT, "pattern": "a"}, "pattern", "got both"),
        (CHAT, {"response_format": FORMAT, "min_tokens": 2}, "min_tokens", "with a pattern"),
        (TEXT, {"pattern": "("}, "pattern", "expected a regular expression"),
        (TEXT, {"pattern": "a$b"}, "pattern", "^, $ and \\b inside it are not supported"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
            "type": "string", "pattern": "^(a|b)*a(a|b){14}$"}
            }}}, "response_format", "expected a smaller JSON schema"),
        (TEXT, {"pattern": "(a|b)*a(a|b){14}"}, "pattern", "at most 4095 states"),
        (TEXT, {"logprobs": 21}, "logprobs", "less than or equal to 20"),
        (TEXT, {"logprobs": 0, "echo": True, "stream": True}, "echo", "without stream"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs",
         "only with logprobs, got top_logprobs 2 without"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        (CHAT, {"tool_choice": named("sub"), "tools": TOOLS}, "tool_choice", "of one of the tools"),
        (CHAT, {"tool_choice": "required", "tools": TOOLS, "pattern": "a"}, "tool_choice",
         "either pattern or tool_choice, got both"),
        (CHAT, {"tool_choice": "required", "tools": [{"type": "function", "function": {
            "name": "f", "parameters": {"type": "array"}}}]}, "tools",
         "tools: the parameters of 'f': expected the type object, got 'array'"),
    ],
)  # fmt: skip
def test_what_cannot_be_given_is_refused(served, path, asked, param, part):
    required = {"prompt": "a"} if path == TEXT else {"messages": SAY}
    status, reply = served.post(path, required | asked, Authorization="Bearer k")
    assert (status, reply["error"]["param"]) == (400, param)
    assert part in reply["error"]["message"]


@functools.cache
def compiled(apply):
    return jax.jit(apply)


def log_softmax(served, ids):
    """By one program: what lies behind the ids is not seen."""
    target = served.generator.target
    cache = init_cache(target.config, batch_size=1, capacity=256, dtype=np.float32)
    padded = jnp.asarray([[*ids, *[0] * (200 - len(ids))]], jnp.int32)
    logits, _, _ = compiled(served.generator.engine.apply)(target.params, padded, cache)
    return scipy.special.log_softmax(np.asarray(logits)[0, : len(ids)], axis=-1)


def test_likely_tokens_are_those_of_a_plain_log_softmax(served, client):
    """Chat, 20 at each place, streamed or not. Control: the place before has others."""
    ids = served.post("/tokenize", {"messages": SAY}, Authorization="Bearer k")[1]["tokens"]
    settings = SamplingParams(max_new_tokens=12, temperature=1.0, seed=2)
    (result,) = served.generator.generate([ids], settings)
    expected = log_softmax(served, [*ids, *result.token_ids])[len(ids) - 1 : -1]
    asked = {"model": "tiny", "messages": SAY, "max_tokens": 12, "temperature": 1, "seed": 2,
             "logprobs": True, "top_logprobs": 20}  # fmt: skip
    ask = client.chat.completions.create
    whole = ask(**asked).choices[0].logprobs.content
    chunks = [chunk.choices[0].logprobs for chunk in ask(**asked, stream=True)]
    assert [token for chunk in chunks if chunk for token in chunk.content] == whole
    assert len(whole) == len(expected) == 12
    best = np.sort(expected, axis=1)[:, ::-1][:, :20]
    shown = np.array([[top.logprob for top in token.top_logprobs] for token in whole])
    np.testing.assert_allclose(shown, best, atol=1e-4)
    assert np.abs(shown[1:] - best[:-1]).max() > 0.1
    for token, token_id, row in zip(whole, result.token_ids, expected, strict=True):
        assert token.logprob == pytest.approx(row[token_id], abs=1e-4)
        label = served.generator.target.tokenizer.label
        assert token.top_logprobs[0].token == label(int(row.argmax()))[0]
    fewer = ask(**(asked | {"top_logprobs": 3})).choices[0].logprobs.content
    assert [token.top_logprobs for token in fewer] == [token.top_logprobs[:3] for token in whole]
    none = ask(**(asked | {"top_logprobs": 0})).choices[0].logprobs.content
    assert all(token.top_logprobs == [] for token in none)


@pytest.mark.parametrize("length", [1, 64, 100])
def test_an_echo_has_the_log_probabilities_of_the_prompt(served, client, length):
    """Of one token, a chunk, and more than a chunk; though the prompt was read before."""
    ids = [3 + (7 * n) % 250 for n in range(length)]
    asked = {"model": "tiny", "prompt": ids, "max_tokens": 2, "temperature": 0}
    plain = client.completions.create(**asked).choices[0]
    (choice,) = client.completions.create(**asked, echo=True, logprobs=3).choices
    shown = choice.logprobs
    assert choice.text.endswith(plain.text)
    assert len(shown.tokens) == length + 2
    assert shown.token_logprobs[0] is shown.top_logprobs[0] is None
    (result,) = served.generator.generate([ids], SamplingParams(max_new_tokens=2))
    whole = [*ids, *result.token_ids]
    expected = log_softmax(served, whole)[:-1]
    known = expected[np.arange(len(expected)), whole[1:]]
    np.testing.assert_allclose(shown.token_logprobs[1:], known, atol=1e-4)
    best = [max(top.values()) for top in shown.top_logprobs[1:]]
    np.testing.assert_allclose(best, expected.max(axis=1), atol=1e-4)
    # OpenAI's API has the token itself, too, where it is not among the likeliest.
    sizes = list(map(len, shown.top_logprobs[1:]))
    is_added = known < np.sort(expected, axis=1)[:, -3]
    assert sizes[-2:] == [3, 3], "at temperature 0 the token is the likeliest"
    for token, value, top in zip(
        shown.tokens[1:], shown.token_logprobs[1:], shown.top_logprobs[1:], strict=True
    ):
        assert top[token] == value
    assert (np.array(sizes) <= 3 + is_added).all()
    assert max(sizes) == (4 if is_added.any() else 3)


def test_what_rounds_did_can_be_asked_for_afterwards(served, client):
    """The tokens add up to the answer; drafts that were kept are those that were emitted."""
    asked = {"model": "tiny", "prompt": "abcabcabc", "max_tokens": 40, "temperature": 0, "n": 2}
    reply = client.completions.create(**asked)
    path = f"/v1/jspec/trace/{reply.id}"
    assert served.request("GET", path)[0] == 401
    status, _, data = served.request("GET", path, Authorization="Bearer k")
    answers = json.loads(data)["answers"]
    assert (status, len(answers)) == (200, 2)
    result = served.generator.generate("abcabcabc", SamplingParams(max_new_tokens=40), chat=False)
    for answer in answers:
        ids, kinds = [answer["first_token_id"]], set()
        for one in answer["rounds"]:
            count = one["num_accepted"]
            assert one["draft_ids"][:count] == one["accepted_ids"]
            assert (one["drafter"] == "prompt_lookup") == bool(one["draft_ids"])
            ids += one["accepted_ids"] + [one["next_id"]] * (one["next_id"] is not None)
            kinds.add(one["next"])
            if one["next"] == "residual":
                assert one["next_id"] != one["draft_ids"][count]
        assert ids == result.token_ids
        assert kinds == {"bonus", "residual"}
        assert answer["finish_reason"] == "length"
    assert served.request("GET", "/v1/jspec/trace/x", Authorization="Bearer k")[0] == 404


def test_traces_forget_the_oldest():
    """Many short answers as well as a long answer: what is kept is bounded."""
    traces = Traces(max_rounds=10)
    for number in range(50):
        job, count = Job(None, None, None, reply_id=str(number)), number % 4
        traces.observe(Update(job, Chunk(0, "", [1], 0), [], [], [], [], 0.0))
        counts, drafts = [RoundCounts(1, 0, "x")] * count, [Drafts((7,))] * count
        traces.observe(Update(job, Chunk(0, "", [2] * count, 0), [], [], counts, drafts, 0.0))
    remembered = [number for number in range(50) if traces.find(str(number))]
    assert remembered[-1] == 49
    assert (
        sum(1 + number % 4 for number in remembered)
        <= 10
        < sum(1 + number % 4 for number in range(remembered[0] - 1, 50))
    )
    assert [traced["next_id"] for traced in traces.find("49")["answers"][0]["rounds"]] == [2]


def test_a_trace_tells_a_trees_path():
    """What comes next is a bonus token after a leaf alone, wherever the leaf lies."""
    traces, job = Traces(), Job(None, None, None, reply_id="r")
    traces.observe(Update(job, Chunk(0, "", [1], 0), [], [], [], [], 0.0))
    counts, drafts = [RoundCounts(3, 1, "x")], [Drafts((5, 6, 7), (-1, -1, 0))]
    for ids in ([6, 4], [5, 4]):
        traces.observe(Update(job, Chunk(0, "", ids, 0), [], [], counts, drafts, 0.0))
    second, third = traces.find("r")["answers"][0]["rounds"]
    assert (second["parents"], second["kept"], second["next"]) == ([-1, -1, 0], [1], "bonus")
    assert (third["kept"], third["accepted_ids"], third["next"]) == ([0], [5], "residual")


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (CALL, "", ["add"]),
        (f"I add.\n{CALL}\n{CALL}\n", "I add.\n", ["add", "add"]),
        (CALL.removesuffix("</tool_call>"), "", ["add"]),
        (f"{CALL} and so on", " and so on", ["add"]),
        (f"Let me see. {CALL} done", "Let me see.  done", ["add"]),
        ("<tool_call>\n{broken\n</tool_call>", "<tool_call>\n{broken\n</tool_call>", []),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>x',
         '<tool_call>{"name": 1, "arguments": {}}</tool_call>x', []),
        *((f"<tool_call>{bad}</tool_call>", f"<tool_call>{bad}</tool_call>", [])
          for bad in (r'{"name": "\ud83d", "arguments": {}}',
                      '{"name": "a", "arguments": {"x": NaN}}')),
        ("a < b, <tool", "a < b, <tool", []),
        ("  plain \n text \n", "  plain \n text \n", []),
        ("", "", []),
    ],
)  # fmt: skip
def test_calls_are_taken_out_of_the_text_whatever_its_pieces(text, content, names):
    """In any pieces the same as in one; nothing is said that is taken back."""
    rng = random.Random(0)
    for most in (len(text) + 1, 1, 3, 7, 11):
        reader, said, calls, begin = CallReader(), "", [], 0
        while begin < len(text):
            size = min(rng.randint(1, most) if most <= 11 else most, len(text) - begin)
            delta = reader.push(text[begin : begin + size], is_last=False)
            said, calls, begin = (
                said + delta.get("content", ""),
                calls + delta.get("tool_calls", []),
                begin + size,
            )
        delta = reader.push("", is_last=True)
        said, calls = said + delta.get("content", ""), calls + delta.get("tool_calls", [])
        assert said == content
        assert [call["function"]["name"] for call in calls] == names
        assert [call["index"] for call in calls] == list(range(len(names)))
        for call in calls:
            assert json.loads(call["function"]["arguments"]) == {"x": 1, "y": ["é"]}


@pytest.mark.parametrize(
    "arguments",
    ['{"city":"a</tool_call>b"}', '{"city": "</tool_call>"}', '{"a": ["<tool_call>", {"b": "}"}]}',
     r'{"s": "\"}</tool_call>\\"}', '{"x": 0.12345678901234567890123}', '{"x": 1e400}',
     '{"x": -0.0, "y":  [1E5 ,1.10]}', '{"n": 123456789012345678901234567890}',
     r'{"s": "\u00e9\/é"}'],
)  # fmt: skip
@pytest.mark.parametrize("is_forced", [False, True])
def test_a_call_ends_with_its_object_and_keeps_the_models_own_text(arguments, is_forced):
    """Tags in its texts, numbers beyond a float, escapes and spaces; in any pieces."""
    text = f'<tool_call>\n{{"name":"get_weather","arguments":{arguments}}}\n</tool_call>'
    for size in (len(text), 1, 5):
        reader, calls = CallReader(is_forced=is_forced), []
        pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
        for piece in [*pieces, ""]:
            delta = reader.push(piece, is_last=not piece)
            assert "content" not in delta
            calls += delta.get("tool_calls", [])
        assert [call["function"] for call in calls] == [
            {"name": "get_weather", "arguments": arguments}
        ]


def test_calls_come_back_as_calls_unless_they_are_not_wanted(served, client):
    """Written by the model, whose answer a pattern makes certain here; streamed or not."""
    pattern = r'Well, <tool_call>\{"name": "add", "arguments": \{"x": [0-9]\}\}</tool_call>'
    asked = {"model": "tiny", "messages": SAY, "tools": TOOLS, "max_tokens": 120,
             "extra_body": {"pattern": pattern}}  # fmt: skip
    (choice,) = client.chat.completions.create(**asked).choices
    (call,) = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason) == ("Well, ", "tool_calls")
    assert call.function.name == "add"
    assert 0 <= json.loads(call.function.arguments)["x"] <= 9
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Well, "
    (streamed,) = [one for chunk in chunks for one in chunk.delta.tool_calls or ()]
    assert (streamed.function.name, streamed.function.arguments) == (
        call.function.name, call.function.arguments
    )  # fmt: skip
    assert chunks[-1].finish_reason == "tool_calls"
    (free,) = client.chat.completions.create(**asked, tool_choice="none").choices
    assert (free.message.tool_calls, free.finish_reason) == (None, "stop")
    assert free.message.content.startswith("Well, <tool_call>")
    # A client goes on with the message that it was given.
    client.chat.completions.create(
        **(asked | {"max_tokens": 2, "messages": [*SAY, choice.message]})
    )


def test_tools_and_calls_reach_the_chat_template(served, client):
    """As Qwen's templates take them: functions as they are, arguments parsed."""
    function = {"name": "add", "arguments": '{"x": 71}'}
    call = {"id": "1", "type": "function", "function": function}
    messages = [
        *SAY,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "9"},
    ]
    asked = {"messages": messages, "tools": TOOLS}
    _, reply = served.post("/tokenize", asked, Authorization="Bearer k")
    text = served.generator.target.tokenizer.decode(reply["tokens"])
    assert text == "[user]abc[assistant](add{'x': 71})[tool]9[add]"
    counts = [
        client.chat.completions.create(
            model="tiny", max_tokens=3, tool_choice=choice, **asked
        ).usage.prompt_tokens
        for choice in ("auto", "none")
    ]
    assert counts == [len(reply["tokens"]), len(reply["tokens"]) - len("[add]")]


def test_a_call_that_must_be_made_satisfies_its_parameters(client):
    """Of any tool or of a certain tool, whatever the seed; in streams as well."""
    tools = [{"type": "function", "function": {"name": name, "parameters": own}}
             for name, own in BY_NAME.items()]  # fmt: skip
    for seed, choice in enumerate(["required", named("add"), named("on")]):
        asked = {"model": "tiny", "messages": SAY, "tools": tools, "max_tokens": 120, "seed": seed,
                 "temperature": 1.5, "tool_choice": choice}  # fmt: skip
        (whole,) = client.chat.completions.create(**asked).choices
        (call,) = whole.message.tool_calls
        assert (whole.message.content, whole.finish_reason) == (None, "tool_calls")
        jsonschema.validate(
            json.loads(call.function.arguments), BY_NAME[call.function.name],
            format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
        )  # fmt: skip
        chunks = client.chat.completions.create(**asked, stream=True)
        (streamed,) = [one for c in chunks for one in c.choices[0].delta.tool_calls or ()]
        assert streamed.function.arguments == call.function.arguments
        assert choice in ("required", named(call.function.name))


def test_calls_one_at_a_time_and_functions_as_the_client_makes_them(client):
    """Which are strict; with `parallel_tool_calls` false the first call alone comes back."""

    class Add(pydantic.BaseModel):
        x: int

    call = r'<tool_call>\{"name": "Add", "arguments": \{"x": [0-9]\}\}</tool_call>'
    asked = {"model": "tiny", "messages": SAY, "tools": [openai.pydantic_function_tool(Add)],
             "max_tokens": 150, "extra_body": {"pattern": f"{call}\n{call}"}}  # fmt: skip
    for is_parallel, count in ((True, 2), (False, 1)):
        arguments = asked | {"parallel_tool_calls": is_parallel}
        message = client.chat.completions.create(**arguments).choices[0].message
        assert (message.content, len(message.tool_calls)) == (None, count)
        chunks = client.chat.completions.create(**arguments, stream=True)
        assert sum(len(chunk.choices[0].delta.tool_calls or ()) for chunk in chunks) == count
    forced = asked | {"tool_choice": "required", "extra_body": {}}
    (call,) = client.chat.completions.create(**forced).choices[0].message.tool_calls
    assert type(Add.model_validate_json(call.function.arguments).x) is int


def test_the_best_of_as_many_as_are_wanted_are_all(client):
    asked = {"model": "tiny", "prompt": "a", "max_tokens": 5, "temperature": 1, "seed": 1, "n": 2}
    choices = [client.completions.create(**asked, **more).choices for more in ({}, {"best_of": 2})]
    assert [choice.text for choice in choices[0]] == [choice.text for choice in choices[1]]
