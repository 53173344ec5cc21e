"""A real server of a tiny chat model on a free port, in this process."""

import functools
import http.client
import json
import pathlib
import socket
import tempfile
import threading
import time

import uvicorn

from jspec.generation.generator import Generator
from jspec.serving.http import make_app
from jspec.serving.http_answers import Server
from jspec.serving.metrics import Metrics
from jspec.serving.traces import Traces
from jspec.serving.worker import Worker, make_scheduler
from tests.tiny_models import save_folder

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@functools.cache
def load_tiny(**options):
    """Returns the Generator of a tiny chat model in float32, whose drafts are looked up."""
    options = {"drafter": "prompt_lookup", "num_draft_tokens": 3, "batch_size": 3} | options
    with tempfile.TemporaryDirectory() as folder:
        path = save_folder(pathlib.Path(folder, "tiny"), template=TEMPLATE, num_layers=1)
        return Generator.load(path, dtype="float32", **options)


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
        """Returns status and JSON of a reply."""
        status, _, reply = self.request("POST", path, body, **headers)
        return status, json.loads(reply)

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
