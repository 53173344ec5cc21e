"""A real server of a tiny chat model on a free port, and a scheduler that tests drive by hand."""

import functools
import http.client
import json
import pathlib
import socket
import tempfile
import threading
import time

from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.serving.http import make_app
from jspec.serving.http_answers import Server
from jspec.serving.job import Job
from jspec.serving.metrics import Metrics
from jspec.serving.traces import Traces
from jspec.serving.worker import Worker, make_row, make_scheduler
from tests.tiny_models import save_folder

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@functools.cache
def load_tiny(template=TEMPLATE, **options):
    """Returns the Generator of a tiny chat model in float32, whose drafts are looked up."""
    usual = {"drafter": "prompt_lookup", "num_draft_tokens": 3, "batch_size": 3}
    with tempfile.TemporaryDirectory() as folder:
        path = save_folder(pathlib.Path(folder, "tiny"), template=template, num_layers=1)
        generator = Generator.load(path, dtype="float32", **usual | options)
    if template != TEMPLATE:  # on which programs do not depend, nor do patterns
        shared = load_tiny(**options)
        generator.engine, generator.pattern_processor = shared.engine, shared.pattern_processor
    return generator


def say(text):
    return [{"role": "user", "content": text}]


def submit(generator, scheduler, prompt, settings, *drafting):
    """Submits a request; returns its job, and the list into which its result will come."""
    results, request = [], Request(prompt, settings)

    def keep(update):
        if update.chunk.result is not None:
            results.append(update.chunk.result)

    job = Job(request, make_row(generator, request, *drafting), keep)
    scheduler.submit([job])
    return job, results


def step(scheduler):
    """Lets the device run once, and tells all that are waiting."""
    for update in scheduler.step():
        update.job.on_update(update)


def run(scheduler):
    while scheduler.is_busy:
        step(scheduler)


def answer(generator, scheduler, prompt, settings):
    job, results = submit(generator, scheduler, prompt, settings)
    run(scheduler)
    return job.num_cached, results[0]


# Of every processor and filter something.
_EVERYTHING = SamplingParams(
    2, temperature=1.0, top_k=5, top_p=0.7, min_p=0.1, presence_penalty=0.5, frequency_penalty=0.2,
    repetition_penalty=1.3, logit_bias={97: 2.0}, forbidden_token_ids=(98,), min_new_tokens=1,
    logprobs=True,
)  # fmt: skip


def generate_by_one_program(generator, requests):
    """Returns answers of a Generator, by the program that has every processor and filter."""
    return generator.generate([*requests, Request([1], _EVERYTHING)])[:-1]


def generated(generator, ids, settings):
    """Returns one answer of a Generator, by that program of three rows."""
    return generate_by_one_program(generator, [Request(ids, settings)] * 2)[0]


def answer_all(generator, scheduler, asked, *drafting):
    waiting = [submit(generator, scheduler, *pair, *drafting)[1] for pair in asked]
    run(scheduler)
    return [results[0] for results in waiting]


class Served:
    """The server. `gate` holds the computing thread between two updates while it is cleared."""

    def __init__(self, generator, *, max_queue=4, **options):
        self.generator = generator
        self.scheduler = make_scheduler(generator, max_queue=max_queue, rounds_per_visit=2)
        self.model = "tiny"
        self.metrics = Metrics(self.model, self.scheduler)
        self.traces = Traces()
        self.gate, self.updates = threading.Event(), []
        self.gate.set()
        self.worker = Worker(self.scheduler, self._observe, lambda: None)
        about = self.metrics, self.traces, self.model
        app = make_app(Server(self.worker, generator, *about, **options))
        import uvicorn  # a machine with a GPU may be without

        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none"))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))

    def _observe(self, update):
        self.metrics.observe(update)
        self.traces.observe(update)
        self.updates.append(update)
        self.gate.wait(timeout=30)

    def __enter__(self):
        self.worker.start()
        self._thread.start()
        return self

    def __exit__(self, *error):
        self.gate.set()
        self._server.should_exit = True
        self._thread.join()
        self.worker.stop()
        self._socket.close()

    def request(self, method, path, body=None, **headers):
        """Sends JSON or bytes; returns the reply as status, headers and bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        if body is not None:
            headers = {"Content-Type": "application/json"} | headers
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        answer = reply.status, dict(reply.headers), reply.read()
        connection.close()
        return answer

    def post(self, path, body, **headers):
        status, _, reply = self.request("POST", path, body, **headers)
        return status, json.loads(reply)

    def client(self, api_key="none"):
        """Returns a client of OpenAI's, to be closed by the caller."""
        base_url = f"http://127.0.0.1:{self.port}/v1"
        import openai  # a machine with a GPU may be without

        return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)

    def open(self, path, body):
        """Sends a request and returns its connection, to be read or closed by the caller."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        data = json.dumps(body).encode()
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        return connection

    def wait_until(self, is_so, seconds=20):
        """Waits for a condition; fails where it does not come true."""
        end = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < end, "it never came true"
            time.sleep(0.01)


def events(data):
    """Returns the JSON objects of a stream of server-sent events, which must end as they do."""
    *lines, last, empty = data.decode().split("\n\n")
    assert (last, empty) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]
