"""What a server refuses, and clients that leave, push or wait: no 500, and nobody is harmed."""

import asyncio
import contextlib
import hmac
import http.client
import json
import time

import pytest

from jspec.serving.http_errors import Guard
from tests.serving.served import CHAT, TEXT, Served, events, load_tiny, say

_MAX_BODY = 150_000
LONG = {"prompt": "abc", "max_tokens": 180, "temperature": 0, "min_tokens": 180}
FEW = LONG | {"max_tokens": 30, "min_tokens": 30}  # more than a visit gives
SAY = say("a")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def read(connection):
    """Returns the whole body of a reply, and closes the connection."""
    with contextlib.closing(connection):
        return connection.getresponse().read()


@pytest.fixture(scope="module")
def generator():
    return load_tiny()


@pytest.fixture(scope="module")
def served(generator):
    with Served(generator, max_body=_MAX_BODY) as server:
        yield server


@pytest.fixture
def held(served):
    """The server, whose device stops after the next update until the test ends."""
    served.gate.clear()
    yield served
    served.gate.set()
    served.wait_until(lambda: not served.scheduler.is_busy)


@pytest.mark.parametrize(
    ("path", "body", "param", "part"),
    [
        (TEXT, b'{"prompt": }', None, "expected a JSON object, got broken JSON: Expecting value at "
         "character 11"),
        (TEXT, b'{"prompt": "\xff"}', None, "in UTF-8, got the byte 0xff at position 12: "
         "invalid start byte"),
        (TEXT, b'{"prompt": "a', None, "Unterminated string starting at character 11"),
        # Python 3.13 reads 9,000.
        (TEXT, b"[" * 100_000, None, "got one that is nested too deeply"),
        (TEXT, b'{"prompt": ' + b"7" * 5000 + b"}", None, "limit (4300 digits)"),
        (TEXT, b"", None, "expected a JSON object, got nothing"),
        (TEXT, {}, "prompt", "expected a field 'prompt'"),
        (TEXT, b"[1]", None, "expected a JSON object, got [1]"),
        (TEXT, {"prompt": ""}, "prompt", "expected at least 1 character, got ''"),
        (TEXT, {"prompt": []}, "prompt", "at least 1"),
        (TEXT, {"prompt": [[]]}, "prompt[0]", "at least 1"),
        (TEXT, {"prompt": 7}, "prompt", "got 7"),
        (TEXT, {"prompt": [99999]}, "prompt", "from 0 to 257"),
        (TEXT, {"prompt": [2**70]}, "prompt[0]", "less than"),
        (TEXT, {"prompt": "x" * 300, "max_tokens": 3}, "prompt", "the context's 200, got 30"),
        (TEXT, {"prompt": "x" * 300}, "prompt", "fewer tokens than the context's 200, got 30"),
        (TEXT, {"prompt": ["a", 5]}, "prompt[1]", "expected a valid string, got 5"),
        (TEXT, {"prompt": [5, "a"]}, "prompt[1]", "expected a valid integer, got 'a'"),
        (TEXT, {"prompt": [5, -1]}, "prompt[1]", "greater than or equal to 0, got -1"),
        (TEXT, {"prompt": [[5], []]}, "prompt[1]", "expected at least 1 item, got []"),
        (TEXT, {"prompt": [[5], "a"]}, "prompt[1]", "expected a valid list, got 'a'"),
        (TEXT, {"prompt": ["a"] * 129}, "prompt", "expected at most 128 items, got 129"),
        (TEXT, {"prompt": {}}, "prompt", "expected a text, texts, token ids or lists of token ids"),
        (TEXT, {"prompt": ["a", "x" * 300]}, "prompt[1]", "prompt[1]: expected a prompt of fewer"),
        (TEXT, {"prompt": [[5], [999]]}, "prompt[1]", "prompt[1]: expected prompt token ids from"),
        (TEXT, {"prompt": "\ud800"}, "prompt", "Unicode text, got half of a surrogate pair in"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix", "fields that this server knows"),
        (TEXT, {"prompt": "a", "best_of": 2}, "best_of", "as many as n, 1, got 2"),
        (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens", "of at least 1 without echo"),
        (TEXT, {"prompt": "a", "max_tokens": -1, "echo": True}, "max_tokens", "or equal to 0"),
        (CHAT, {"messages": SAY, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        (TEXT, {"prompt": "a", "max_tokens": "5"}, "max_tokens", "expected a valid integer"),
        (TEXT, {"prompt": "a", "max_tokens": 2, "min_tokens": 3}, "min_tokens", "max_tokens, 2"),
        (TEXT, {"prompt": "a", "temperature": -1}, "temperature", "greater than or equal to 0"),
        (TEXT, {"prompt": "a", "temperature": True}, "temperature", "expected a valid number"),
        (TEXT, b'{"prompt": "a", "temperature": NaN}', "temperature", "got nan"),
        (TEXT, b'{"prompt": "a", "temperature": 1e999}', "temperature", "got inf"),
        (TEXT, {"prompt": "a", "top_p": -0.1}, "top_p", "greater than or equal to 0"),
        (TEXT, {"prompt": "a", "n": 129}, "n", "less than or equal to 128"),
        (TEXT, {"prompt": "a", "n": 8}, "n", "prompts times n up to 7, got 8: there are 3 "
         "slots and 4 places to wait"),
        (TEXT, {"prompt": ["a"] * 8}, "prompt", "prompts times n up to 7, got 8"),
        (TEXT, {"prompt": "a", "seed": 2**63}, "seed", "less than or equal to 92233720368547758"),
        (TEXT, {"prompt": "a", "seed": -(2**63) - 1}, "seed", "greater than or equal to -922"),
        (TEXT, {"prompt": "a", "seed": 1.5}, "seed", "expected a valid integer"),
        (TEXT, {"prompt": None}, "prompt", "expected a field 'prompt', got none"),
        (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}, "stream": False},
         "stream_options", "only with stream"),
        (TEXT, {"prompt": "a", "stream_options": {}, "stream": None}, "stream_options",
         "only with stream"),
        (CHAT, {"messages": SAY, "stream_options": {"include_usage": False}}, "stream_options",
         "only with stream"),
        (CHAT, {"messages": SAY, "tool_choice": "auto"}, "tool_choice", "only with tools"),
        (CHAT, {"messages": SAY, "parallel_tool_calls": True}, "parallel_tool_calls",
         "only with tools"),
        (TEXT, {"prompt": "a", "stop": ""}, "stop", "at least 1 character"),
        (TEXT, {"prompt": "a", "logit_bias": 3}, "logit_bias", "expected a JSON object, got 3"),
        (TEXT, {"prompt": "a", "stop": ["\udc00"]}, "stop[0]", "Unicode text"),
        (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias.x",
         "expected a string that matches '^[0-9]{1,9}$', got 'x'"),
        (TEXT, {"prompt": "a", "logit_bias": {"300": 1}}, "logit_bias", "from 0 to 257"),
        (TEXT, {"prompt": "a", "logit_bias": {"3": 101}}, "logit_bias.3", "less than"),
        (TEXT, {"prompt": "a", "presence_penalty": 3}, "presence_penalty", "less than"),
        (TEXT, {"prompt": "a", "stop_token_ids": [*range(2, 10)]}, "stop_token_ids", "at most 8"),
        (TEXT, {"prompt": "a", "stop_token_ids": [2, 999]}, "stop_token_ids",
         "to 257, got some from 2 to 999"),
        (TEXT, {"prompt": "a", "stream_options": {"foo": 1}}, "stream_options.foo", "this server"),
        (TEXT, {"prompt": "a", "pattern": "[0-9]{2}", "ignore_eos": True}, "ignore_eos",
         "no ignore_eos with a pattern"),
        (TEXT, {"prompt": "a", "speculation": {"num_draft_tokens": 0}}, "speculation", "auto"),
        (TEXT, {"prompt": "a", "speculation": {"drafter": "none"}}, "speculation",
         "num_draft_tokens 3 and drafter 'prompt_lookup', which are fixed"),
        (TEXT, {"prompt": "a", "\ud800": 1}, None, "whose name has half of a surrogate pair"),
        (TEXT, {"prompt": "a", "stop": ["a"] * 17}, "stop", "expected at most 16 items, got 17"),
        (CHAT, {"messages": []}, "messages", "expected at least 1 item, got []"),
        (CHAT, {"messages": [{"role": "king", "content": "a"}]}, "messages[0].role", "'system'"),
        (CHAT, {"messages": [{"role": "user", "content": 1}]}, "messages[0].content", "expected"),
        (CHAT, {"messages": [*SAY, *SAY, SAY[0] | {"foo": 1}]}, "messages[2].foo",
         "that this server knows, got 'messages[2].foo'"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0].type", "expected 'text', got 'image_url'"),
        (TEXT, {"prompt": "a", "max_tokens": 200}, "max_tokens", "tokens together up to 200"),
        (CHAT, {"messages": SAY, "tools": []}, "tools", "at least 1"),
        (CHAT, {"messages": SAY, "tools": [{"type": "function", "function": {}}]},
         "tools[0].function.name", "expected a field 'tools[0].function.name'"),
        (CHAT, {"messages": SAY, "tools": [TOOL, TOOL]}, "tools",
         "got tools[0] and tools[1] of 'f'"),
        (CHAT, {"messages": SAY, "tools": [{"type": "function", "function": {"name": 'a b"'}}]},
         "tools[0].function.name", "expected a string that matches"),
        (CHAT, {"messages": SAY, "tools": [TOOL]}, "tools", "leaves them out"),
        (CHAT, {"messages": SAY, "tool_choice": "any"}, "tool_choice",
         "'none', 'auto' or 'required'"),
        (CHAT, {"messages": [*SAY, {"role": "user"}]}, "messages[1]",
         "messages[1]: expected content in a message of the role user, got none"),
        (CHAT, {"messages": [*SAY, {"role": "user", "content": "a\ud800"}]}, "messages[1].content",
         "Unicode text, got half of a surrogate pair in"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]},
         "messages[0]", "tool_calls only in the assistant's messages"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": {
            "name": "f", "arguments": "[1"}}]}]}, "messages[0].tool_calls[0].function.arguments",
         "as a JSON object, got '[1'"),
        (CHAT, {"messages": SAY, "response_format": {"type": "grammar"}}, "response_format.type",
         "'text', 'json_object' or 'json_schema'"),
        (CHAT, {"messages": SAY, "response_format": {"type": "text", "json_schema": {
            "name": "f", "schema": {}}}}, "response_format", "no json_schema with the type text"),
        (CHAT, {"messages": SAY, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens",
         "or both with the same number; got 3 and 4"),
        ("/tokenize", {}, None, "either prompt or messages"),
    ],
)  # fmt: skip
def test_bad_input_says_what_was_expected(served, path, body, param, part):
    status, reply = served.post(path, body)
    error = reply["error"]
    assert status == 400, error
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert part in error["message"]
    assert "Traceback" not in error["message"]
    assert len(error["message"]) < 500


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/nothing", None, 404, None),
        ("GET", TEXT, None, 405, None),
        ("POST", "/health", {}, 405, None),
        ("POST", TEXT, {"prompt": "a", "model": "gpt-5"}, 404, "model_not_found"),
        ("POST", "/tokenize", {"prompt": "a", "model": "gpt-5"}, 404, "model_not_found"),
        ("GET", "/v1/models/gpt-5", None, 404, "model_not_found"),
        ("POST", TEXT, {"prompt": "a" * 300}, 400, "context_length_exceeded"),
        ("POST", TEXT, {"prompt": "a", "max_tokens": 200}, 400, "context_length_exceeded"),
        ("POST", TEXT, {"prompt": "a" * _MAX_BODY}, 413, None),
    ],
)
def test_other_refusals_have_the_same_shape(served, method, path, body, status, code):
    answered, _, reply = served.request(method, path, body)
    assert (answered, json.loads(reply)["error"]["code"]) == (status, code)


def test_headers_say_what_a_client_can_do(served):
    """Which methods there are, and that a body which is no JSON by its header may be none."""
    assert served.request("HEAD", "/health")[1]["allow"] == "GET"
    body, headers = b'{"prompt": "a"}', {"Content-Type": "application/x-www-form-urlencoded"}
    status, reply = served.post(TEXT, body, **headers)
    assert status == 400
    assert "got the header Content-Type: application/x-www-form" in reply["error"]["message"]


def test_a_body_without_a_length_is_limited_too(served):
    """Guards against a client that sends for ever, in chunks."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    headers = {"Content-Type": "application/json"}
    connection.request(
        "POST", TEXT, iter([b"x" * (_MAX_BODY // 2 + 1)] * 2), headers, encode_chunked=True
    )
    assert connection.getresponse().status == 413
    connection.close()


def test_a_full_queue_sends_clients_away_with_a_time(held):
    """3 slots and 4 places to wait: the eighth must come again; n counts; nobody else is harmed."""
    connections = [held.open(TEXT, FEW) for _ in range(7)]
    held.wait_until(lambda: held.scheduler.num_waiting + held.scheduler.num_running == 7)
    status, headers, reply = held.request("POST", TEXT, FEW)
    assert (status, json.loads(reply)["error"]["code"]) == (429, "queue_full")
    assert int(headers["retry-after"]) >= 1
    assert held.request("POST", TEXT, FEW | {"stream": True})[0] == 429
    held.gate.set()
    texts = [json.loads(read(one))["choices"][0]["text"] for one in connections]
    assert len(set(texts)) == 1
    assert held.post(TEXT, FEW | {"n": 7})[0] == 200


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(held, is_stream):
    """Within one visit: the answer would have taken 180 tokens more."""
    number = len(held.updates)
    connection = held.open(TEXT, LONG | {"stream": is_stream})
    held.wait_until(lambda: held.scheduler.num_running == 1)
    job = held.scheduler._running[0][0]
    connection.close()
    held.wait_until(lambda: job.is_cancelled)
    held.gate.set()
    held.wait_until(lambda: held.scheduler.num_running == 0)
    assert held.scheduler.slots.usage == 0, "its pages are free as well"
    result = held.updates[-1].chunk.result
    assert result.finish_reason == "cancelled"
    assert len(held.updates) - number <= 3
    assert held.post(TEXT, {"prompt": "abc", "max_tokens": 3})[0] == 200


def test_a_deadline_ends_an_answer_with_what_it_has(held):
    connection = held.open(TEXT, LONG | {"max_seconds": 0.05})
    held.wait_until(lambda: held.scheduler.num_running == 1)
    job = held.scheduler._running[0][0]
    held.wait_until(lambda: held.scheduler.clock() > job.deadline)
    held.gate.set()
    reply = json.loads(read(connection))
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["jspec"]["finish_reasons"] == ["deadline"]
    assert reply["usage"]["completion_tokens"] < 180


def test_a_stopping_server_lets_answers_end_and_takes_no_more(generator):
    with Served(generator) as served:
        served.gate.clear()
        connection = served.open(TEXT, LONG | {"stream": True})
        served.wait_until(lambda: served.scheduler.num_running == 1)
        served.scheduler.drain(30.0)
        assert served.post(TEXT, LONG)[0] == 503
        served.gate.set()
        chunks = events(read(connection))
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_what_has_not_begun_when_the_time_is_over_is_refused(generator):
    """Three answers that run end as they are; the two that wait are told to go elsewhere."""
    with Served(generator) as served:
        served.gate.clear()
        connections = [served.open(TEXT, LONG) for _ in range(3)]
        while served.scheduler.num_running < 3:
            served.gate.set()
            time.sleep(0.001)
            served.gate.clear()
        connections += [served.open(TEXT, LONG | {"stream": n}) for n in (False, True)]
        served.wait_until(lambda: served.scheduler.num_waiting == 2)
        served.scheduler.drain(0.0)
        served.gate.set()
        *begun, whole, stream = connections
        with contextlib.closing(whole):
            reply = whole.getresponse()
            assert (reply.status, b"the server is stopping" in reply.read()) == (503, True)
        assert b'"message": "the server is stopping' in read(stream)
        for one in begun:
            reply = json.loads(read(one))
            assert reply["choices"][0]["finish_reason"] == "length"
            assert reply["usage"]["completion_tokens"] > 0
        assert 'finished_reason="error",model_name="tiny"} 2.0' in served.metrics.text().decode()


def test_who_is_sent_away_at_the_end_gets_an_error_and_no_traceback():
    """As uvicorn does with tasks for which it does not wait; an answer that has begun is cut."""

    async def ask(has_begun):
        async def app(scope, receive, send):
            if has_begun:
                await send({"type": "http.response.start", "status": 200, "headers": []})
            await asyncio.sleep(60)

        async def send(message):
            sent.append(message)

        sent = []
        scope = {"type": "http", "headers": [], "path": "/"}
        task = asyncio.create_task(Guard(app, None, 100)(scope, None, send))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await task
        return sent

    begin, body = asyncio.run(ask(has_begun=False))
    assert begin["status"] == 503
    assert json.loads(body["body"])["error"]["message"].startswith("the server is stopping")
    assert [one["status"] for one in asyncio.run(ask(has_begun=True))] == [200]


def test_a_failed_device_is_said_to_all(generator, monkeypatch):
    with Served(generator) as served:
        served.gate.clear()
        connections = [served.open(TEXT, LONG | {"stream": one}) for one in (True, False)]
        served.wait_until(lambda: served.scheduler.num_running + served.scheduler.num_waiting == 2)

        def fail(*_):
            raise MemoryError("none is left")

        monkeypatch.setattr(served.scheduler.slots, "run", fail)
        served.gate.set()
        for connection in connections:
            assert b'"message": "MemoryError: none is left"' in read(connection).replace(
                b'":"', b'": "'
            )
        assert served.request("GET", "/health")[0] == 503
        assert served.post(TEXT, LONG)[0] == 503


def test_a_key_lets_in(generator, monkeypatch):
    """It is compared by a function whose time does not tell how much of a wrong one is right."""
    seen, compare = [], hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda *pair: seen.append(pair) or compare(*pair))
    with Served(generator, api_key="secret") as served:
        for shown in ({}, {"Authorization": "Bearer no"}, {"Authorization": "secret"}):
            for method, path in (("GET", "/v1/models"), ("POST", TEXT), ("GET", "/metrics")):
                status, about, reply = served.request(method, path, **shown)
                assert about["www-authenticate"] == "Bearer"
                assert status == 401
                assert json.loads(reply)["error"]["code"] == "invalid_api_key"
        known = {"Authorization": "Bearer secret"}
        assert served.request("GET", "/v1/models", **known)[0] == 200
        assert served.post(TEXT, {"prompt": "a", "max_tokens": 2}, **known)[0] == 200
        assert served.request("GET", "/health")[0] == 200
    assert (b"Bearer no", b"Bearer secret") in seen


def test_other_sites_pages_cannot_read_or_ask(served):
    """No header lets a browser show an answer; what it sends without asking first is no JSON."""
    foreign = {"Origin": "http://elsewhere.example"}
    ask = foreign | {"Access-Control-Request-Method": "POST"}
    plain = foreign | {"Content-Type": "text/plain"}
    asked = {"prompt": "a", "max_tokens": 2}
    replies = [served.request("GET", "/v1/models", **foreign),
               served.request("OPTIONS", TEXT, **ask),
               served.request("POST", TEXT, asked, **plain)]  # fmt: skip
    assert [status for status, _, _ in replies] == [200, 405, 400]
    names = {name.lower() for _, headers, _ in replies for name in headers}
    assert not any(name.startswith("access-control") for name in names)
