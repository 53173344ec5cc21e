"""The load of a server: what is asked, counted and refused, of a server of two lines."""

import http.server
import json
import threading
import time
import types

import pytest

from jspec.common.errors import InputError
from jspec.lab.benchmarking.server import Client, Reply, figures, format_load, measure_server

_WORDS = ["a", "b", "", "c"]  # an event without text, as that of a finish reason, is none


class Handler(http.server.BaseHTTPRequestHandler):
    """Streams three tokens; the prompt "refuse" has status 400, and "break" ends in the middle."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.keys.append(self.headers["Authorization"])
        self.send_response(400 if body["prompt"] == "refuse" else 200)
        self.end_headers()
        with self.server.lock:
            self.server.together += 1
            self.server.most = max(self.server.most, self.server.together)
        for text in _WORDS:
            time.sleep(0.01)
            end = "" if body["prompt"] == "break" else "\n\n"
            event = json.dumps({"choices": [{"text": text}]})[: None if end else 9]
            self.wfile.write(f"data: {event}{end}".encode())
        with self.server.lock:
            self.server.together -= 1
        usage = {"choices": [], "usage": {"completion_tokens": 3}}
        self.wfile.write(f": a comment\n\ndata: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())


@pytest.fixture
def server():
    """Returns a running server; its `url`, and what it was `asked`."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.keys, server.together, server.most = [], [], 0, 0
    server.lock, server.url = threading.Lock(), f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def measurement(server, tmp_path, prompts, **changes):
    """Returns what a command line asks for."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    asked = {
        "url": server.url, "streams": [1, 3], "prompts_file": str(path), "num_prompts": 9,
        "per_category": None, "max_new_tokens": 3, "temperature": 0.0, "repeats": 2,
    }  # fmt: skip
    return types.SimpleNamespace(**asked | changes)


def test_each_number_of_clients_asks_every_prompt(server, tmp_path, monkeypatch):
    """Guards against clients one after another, and a first answer that counts."""
    monkeypatch.setenv("JSPEC_API_KEY", "secret")
    first, last = measure_server(measurement(server, tmp_path, ["x", "y"]))
    assert len(first.record["lines"]) == 1
    single, three = last.record["lines"]
    assert (single["streams"], single["answers"], single["tokens"]) == (1, 4, 12)
    assert (three["streams"], three["answers"], three["tokens"]) == (3, 6, 18)
    assert server.most == 3
    prompts = [body["prompt"] for body in server.asked]
    assert prompts[:5] == ["x", "x", "y", "x", "y"]
    assert sorted(body["seed"] for body in server.asked[5:]) == list(range(6))
    assert {body["model"] for body in server.asked} == {"tiny"}
    assert set(server.keys) == {"Bearer secret"}
    assert three["tokens_per_second"] > 0
    assert last.text.splitlines()[2].split()[0] == "3"


def test_figures_by_hand():
    """6 tokens in 4 s; the first ones after 1 and 2 s, then one each second and each half."""
    replies = [Reply(0.0, [1.0, 2.0, 3.0], 3), Reply(1.0, [3.0, 4.0], 3)]
    line = figures(replies)
    assert line["tokens_per_second"] == pytest.approx(6 / 4)
    assert line["to_first_ms"] == pytest.approx({"p50": 1500, "p99": 1990})
    assert line["between_ms"] == pytest.approx({"p50": 750, "p99": 995})
    empty = figures([Reply(0.0, [], 0)])
    assert empty["tokens_per_second"] is None
    assert format_load([{"streams": 1} | empty]).splitlines()[1].split() == ["1", "-", "1", *"----"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("refuse", "expected an answer, got status 400"), ("break", "expected a whole answer of")],
)
def test_a_server_that_refuses_ends_the_run(server, tmp_path, prompt, message):
    """Guards against figures of half of the answers."""
    with pytest.raises(InputError, match=message):
        list(measure_server(measurement(server, tmp_path, ["x", prompt])))


def test_what_is_no_server_is_told():
    with pytest.raises(InputError, match="expected --url of a server"):
        Client("127.0.0.1:8000")
    with pytest.raises(InputError, match=r"OpenAI's interface at 127\.0\.0\.1:1, got"):
        Client("http://127.0.0.1:1").model()


def test_the_parts_of_a_served_answer():
    """Of an answer whose end came 10 s after it was asked for; other servers tell nothing."""
    told = {"prefill_seconds": 2.0, "decode_seconds": 5.0, "device_seconds": 4.0}
    reply = Reply(1.0, [4.0, 9.0], 5, 11.0, told | {"host_seconds": 1.0, "num_rounds": 4})
    line = figures([reply, Reply(0.0, [1.0], 1)])
    expected = {"reading": 2000.0, "device": 1000.0, "host": 250.0, "outside": 3000.0}
    assert line["parts_ms"] == expected
    assert figures([Reply(0.0, [1.0], 1)])["parts_ms"] is None
    assert "3000.00" in format_load([{"streams": 1} | line])
