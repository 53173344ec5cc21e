"""Answers over HTTP: the same as without it, streamed or not, to the client of OpenAI."""

import json
import re

import jsonschema
import openai
import pytest

from jspec.generation.request import Request, SamplingParams
from tests.serving.served import (
    CHAT,
    TEXT,
    Served,
    events,
    generate_by_one_program,
    generated,
    load_tiny,
    say,
)
from tests.test_house import ROOT

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "max_tokens": 30}
SETTINGS = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_new_tokens=30)


@pytest.fixture(scope="module")
def served():
    with Served(load_tiny()) as server:
        yield server


@pytest.fixture
def client(served):
    with served.client() as client:
        yield client


def test_a_chat_is_what_the_generator_says_streamed_or_not(served, client):
    expected = generated(served.generator, served.generator.encode_prompt("Hello?"), SETTINGS)
    asked = {"model": served.model, "messages": say("Hello?"), **SAMPLED}
    whole = client.chat.completions.create(**asked)
    (choice,) = whole.choices
    assert choice.message.content == expected.text
    assert choice.message.role == "assistant"
    assert whole.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert whole.usage.completion_tokens == len(expected.token_ids)
    assert choice.finish_reason == ("length" if expected.finish_reason == "length" else "stop")
    stats = whole.usage.model_extra["jspec"]
    assert stats["num_accepted"] == expected.stats.num_accepted > 0
    assert stats["accepted_per_round"] == list(expected.stats.accepted_per_round)
    chunks = list(client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ))  # fmt: skip
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == expected.text
    assert len(texts) > 3, "a stream comes in pieces"
    assert chunks[-1].usage.completion_tokens == len(expected.token_ids)
    # As OpenAI has it: a field of every chunk, null in all but the last.
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks[:-1])
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons == [None] * (len(reasons) - 1) + [whole.choices[0].finish_reason]


def test_a_completion_is_what_the_generator_says_streamed_or_not(served, client):
    ids = served.generator.encode_prompt("Once upon", chat=False)
    expected = generated(served.generator, ids, SETTINGS)
    asked = {"model": served.model, "prompt": "Once upon", **SAMPLED}
    assert client.completions.create(**asked).choices[0].text == expected.text
    chunks = client.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    echoed = client.completions.create(**(asked | {"prompt": ids}), echo=True)
    assert echoed.choices[0].text == "Once upon" + expected.text


def test_the_guides_example_runs_as_it_stands(served, monkeypatch, capsys):
    """But for the port and the name of the model; OpenAI's own sets them by its environment."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/serve.md").read_text(), re.DOTALL)
    code = code.replace(":8000", f":{served.port}").replace("smollm2-135m-instruct", served.model)
    exec(code, {})
    assert capsys.readouterr().out.strip()
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{served.port}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    talk = [
        {"role": "developer", "content": "Talk like a pirate."},
        *say("Are semicolons optional?"),
    ]
    with openai.OpenAI() as guide_client:
        reply = guide_client.chat.completions.create(model=served.model, messages=talk)
    assert reply.choices[0].message.content


@pytest.mark.parametrize("has_limit", [False, True])
def test_a_chat_without_a_limit_may_fill_the_context(served, has_limit):
    """As at OpenAI and in vLLM, unless the server was given a limit; a completion may not."""
    defaults, context = SamplingParams(max_new_tokens=5), served.generator.max_seq_len
    most = {"seed": 1, "temperature": 1, "ignore_eos": True}
    chat = {"messages": say("Hello?")} | most
    with Served(served.generator, defaults=defaults, has_limit=has_limit) as server:
        usage = server.post(CHAT, chat)[1]["usage"]
        assert server.post(TEXT, {"prompt": "a"} | most)[1]["usage"]["completion_tokens"] == 5
        limited = server.post(CHAT, chat | {"max_completion_tokens": 3})[1]["usage"]
    assert limited["completion_tokens"] == 3
    name, number = ("completion_tokens", 5) if has_limit else ("total_tokens", context)
    assert usage[name] == number


def test_refusals_are_the_clients_own_exceptions(served, client):
    asked = {"model": served.model, "messages": say("Hello?")}
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(**asked, temperature=3)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**(asked | {"model": "gpt-5"}))
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="fields that this server knows"):
        client.chat.completions.create(**asked, stream=True, extra_body={"nothing": 1})


def test_several_prompts_and_answers_come_in_order(served, client):
    asked = {"model": served.model, **SAMPLED, "n": 2, "prompt": ["one", "two"]}
    choices = client.completions.create(**asked).choices
    assert [choice.index for choice in choices] == [0, 1, 2, 3]
    seeds = [
        SamplingParams(temperature=0.9, top_p=0.95, seed=5 + k, max_new_tokens=30) for k in range(4)
    ]
    ids = [served.generator.encode_prompt(text, chat=False) for text in ("one", "two")]
    requests = [Request(ids[k // 2], own) for k, own in enumerate(seeds)]
    expected = generate_by_one_program(served.generator, requests)
    assert [choice.text for choice in choices] == [result.text for result in expected]
    assert len({choice.text for choice in choices}) == 4
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == [choice.text for choice in choices]


def test_every_setting_reaches_the_engine(served):
    """Each of them changes this answer, to what Generator says."""
    ids = served.generator.encode_prompt("abcabc", chat=False)
    base = {"temperature": 1.0, "max_new_tokens": 25, "seed": 3}
    plain = generated(served.generator, ids, SamplingParams(**base))
    stop = plain.token_ids[12]
    cases = [
        ({"top_k": 3}, {"top_k": 3}),
        ({"min_p": 0.3}, {"min_p": 0.3}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({"presence_penalty": 2}, {"presence_penalty": 2.0}),
        ({"frequency_penalty": -1.5}, {"frequency_penalty": -1.5}),
        ({"repetition_penalty": 1.8}, {"repetition_penalty": 1.8}),
        ({"logit_bias": {"97": 100}}, {"logit_bias": {97: 100.0}}),
        ({"allowed_token_ids": [99, 98]}, {"allowed_token_ids": (99, 98)}),
        ({"stop_token_ids": [stop]}, {"stop_token_ids": (stop,)}),
        ({"stop": plain.text[5:8]}, {"stop": (plain.text[5:8],)}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"seed": 4}, {"seed": 4}),
        ({"max_tokens": 7}, {"max_new_tokens": 7}),
    ]
    requests = [Request(ids, SamplingParams(**(base | settings))) for _, settings in cases]
    expected_of = generate_by_one_program(served.generator, requests)
    for (asked, _), expected in zip(cases, expected_of, strict=True):
        body = {"prompt": ids, "temperature": 1, "max_tokens": 25, "seed": 3} | asked
        (choice,) = served.post(TEXT, body)[1]["choices"]
        assert choice["text"] == expected.text != plain.text, asked
        assert choice["finish_reason"] == (
            "length" if expected.finish_reason == "length" else "stop"
        )


def test_what_load_generators_ask_for(served):
    """As guidellm does: no end before the limit, and counts in every chunk."""
    asked = {"prompt": "abc", "max_tokens": 60, "ignore_eos": True, "stop": None, "stream": True,
             "stream_options": {"include_usage": True, "continuous_usage_stats": True}}  # fmt: skip
    counts = [one["usage"]["completion_tokens"] for one in events(
        served.request("POST", TEXT, asked)[2])]  # fmt: skip
    assert counts == sorted(counts)
    assert counts[-2:] == [60, 60]
    assert counts[0] < 10


def test_counts_of_speculation_by_vllms_names(served):
    """As aiperf reads them, of a stream's last chunk too; several answers have no sum of theirs."""
    asked = {"prompt": "abc", "max_tokens": 40, "temperature": 0}
    reply = served.post(TEXT, asked)[1]
    stats, counts = reply["usage"]["jspec"], reply["metrics"]["speculative_decoding"]
    histogram = counts["acceptance_histogram"]
    assert len(histogram) == counts["num_spec_tokens"] + 1
    assert sum(histogram) == counts["num_spec_steps"] == stats["num_rounds"]
    accepted = sum(number * steps for number, steps in enumerate(histogram))
    assert accepted == counts["num_accepted_draft_tokens"] == stats["num_accepted"] > 0
    assert counts["num_draft_tokens"] == stats["num_proposed"]
    assert counts["mean_acceptance_length"] == 1 + accepted / stats["num_rounds"]
    streamed = asked | {"stream": True, "stream_options": {"include_usage": True}}
    last = list(events(served.request("POST", TEXT, streamed)[2]))[-1]
    assert last["metrics"] == reply["metrics"]
    assert "metrics" not in served.post(TEXT, asked | {"n": 2})[1]
    plain = asked | {"speculation": {"num_draft_tokens": 0}}
    assert "metrics" not in served.post(TEXT, plain)[1]


def test_a_trace_says_where_each_token_came_from(served):
    """What the page colours: the texts add up, and origins are those of the reply's rounds."""
    asked = {"prompt": "abcabcabc", "max_tokens": 40, "temperature": 0, "stream": True,
             "trace": True, "stream_options": {"include_usage": True}}  # fmt: skip
    status, headers, data = served.request("POST", TEXT, asked)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    *chunks, last = events(data)
    tokens = [token for chunk in chunks for token in chunk["jspec"]["tokens"]]
    rounds = [traced for chunk in chunks for traced in chunk["jspec"]["rounds"]]
    stats = last["usage"]["jspec"]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert "".join(text for text, _ in tokens) == text
    expected = ["plain"]  # the token that the prefill drew
    for traced in served.traces.find(last["id"])["answers"][0]["rounds"]:
        source = traced["next"] if traced["draft_ids"] else "plain"
        expected += ["drafted"] * traced["num_accepted"] + [source] * (traced["next"] is not None)
    assert [origin for _, origin in tokens] == expected
    assert expected.count("drafted") == stats["num_accepted"] > 0
    assert {"plain", "residual", "bonus"} < set(expected)
    assert [accepted for _, accepted in rounds] == stats["accepted_per_round"]
    assert [proposed for proposed, _ in rounds] == stats["proposed_per_round"]


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_streamed_chunks_are_as_the_schema_says(served, path):
    """Guards against a field of an event that /openapi.json does not name."""
    document = json.loads(served.request("GET", "/openapi.json")[2])
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    schema = content["text/event-stream"]["schema"] | {"components": document["components"]}
    asked = {"max_tokens": 9, "temperature": 0, "stream": True, "trace": True, "logprobs": True}
    asked["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if path == TEXT:
        asked |= {"prompt": "abcabc", "logprobs": 2}
    else:
        asked |= {"messages": [{"role": "user", "content": "abcabc"}]}
    chunks = events(served.request("POST", path, asked)[2])
    assert len(chunks) > 2
    for chunk in chunks:
        jsonschema.validate(chunk, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(chunks[0] | {"unknown": 1}, schema)


def test_a_prompt_that_was_read_before_is_not_read_again(served, client):
    """By usage and metrics, streamed or not; of two answers to one prompt the first one counts."""
    asked = {"model": served.model, "prompt": "another beginning " * 8, **SAMPLED}
    for n in (1, 1, 2):  # a process that has grown large has forgotten its programs
        client.completions.create(**asked, n=n)
    before = read_metrics(served)
    asked["prompt"] = "the same beginning " * 8
    first, again, two = (client.completions.create(**asked, n=n) for n in (1, 1, 2))
    cached = [reply.usage.prompt_tokens_details.cached_tokens for reply in (first, again, two)]
    assert cached == [0, 128, 128]
    assert first.choices[0].text == again.choices[0].text == two.choices[0].text
    *_, last = client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    assert last.usage.prompt_tokens_details.cached_tokens == 128
    after = read_metrics(served)
    hits, queries = (f"vllm:prefix_cache_{name}_total" for name in ("hits", "queries"))
    assert after[hits] - before[hits] == 4 * 128
    assert after[queries] - before[queries] == 5 * first.usage.prompt_tokens
    assert after["jspec:prefix_cache_bytes"] > before["jspec:prefix_cache_bytes"]
    assert after["jspec:num_compiled_programs"] == before["jspec:num_compiled_programs"]


def test_a_message_is_taken_back_with_all_that_the_client_adds_to_it(client, served):
    """The openai client dumps fields that this server does not know, with nothing in them."""
    asked = {"model": served.model, "max_tokens": 2}
    answer = client.chat.completions.create(messages=say("a"), **asked).choices[0].message
    dumped = answer.model_dump()
    assert {"annotations", "audio", "function_call"} < dumped.keys()
    client.chat.completions.create(messages=[*say("a"), dumped, *say("b")], **asked)


def test_tokens_are_counted_before_they_are_sent(served):
    status, reply = served.post("/tokenize", {"prompt": "abc"})
    assert status == 200
    assert reply["tokens"] == served.generator.encode_prompt("abc", chat=False)
    _, reply = served.post("/tokenize", {"messages": say("abc")})
    assert reply["tokens"] == served.generator.encode_prompt("abc", chat=True)
    assert reply["count"] == len(reply["tokens"])


def test_the_model_says_what_it_is(served, client):
    (model,) = client.models.list().data
    assert client.models.retrieve(served.model) == model
    assert model.id == served.model
    assert model.model_extra["max_model_len"] == 200
    assert model.model_extra["jspec"]["drafter"] == "prompt_lookup"
    assert model.model_extra["jspec"]["draft_memory"] == 0
    assert json.loads(served.request("GET", "/health")[2]) == {"status": "ok"}


def test_metrics_add_up_to_what_was_answered(served):
    """By the names that dashboards of vLLM look for."""
    before = read_metrics(served)
    asked = {"prompt": "abcabcabc", "max_tokens": 40, "temperature": 0}
    stats = served.post(TEXT, asked)[1]["usage"]
    after = read_metrics(served)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    counts = stats["jspec"]
    assert grown["vllm:spec_decode_num_draft_tokens_total"] == counts["num_proposed"] > 0
    assert grown["vllm:spec_decode_num_accepted_tokens_total"] == counts["num_accepted"] > 0
    positions = sum(v for name, v in grown.items() if name.endswith("per_pos_total"))
    assert positions == counts["num_accepted"]
    assert grown["vllm:generation_tokens_total"] == stats["completion_tokens"]
    assert grown["vllm:prompt_tokens_total"] == stats["prompt_tokens"]
    assert grown["vllm:time_to_first_token_seconds_count"] == 1
    assert grown["vllm:inter_token_latency_seconds_count"] == stats["completion_tokens"] - 1
    assert (after["vllm:num_requests_running"], after["jspec:num_slots"]) == (0, 3)
    served.scheduler.num_paused += 3
    name = "vllm:num_preemptions_total"
    assert read_metrics(served)[name] - after[name] == 3
    assert read_metrics(served)[name] - after[name] == 3, "each is counted once"
    text = served.request("GET", "/metrics")[2].decode()
    reasons = set(re.findall(r'request_success_total\{finished_reason="(\w+)"', text))
    assert "length" in reasons <= {"stop", "length", "abort"}


def read_metrics(served):
    metrics = {}
    for line in served.request("GET", "/metrics")[2].decode().splitlines():
        if not line.startswith("#"):
            name, value = line.split("{")[0], float(line.rpartition(" ")[2])
            metrics[name] = metrics.get(name, 0.0) + value
    return metrics
