"""Loads a server that speaks OpenAI's interface: tokens a second, and how long clients wait.

The server is running already, jspec's or another; each number of clients asks the prompts in turn,
so that servers are compared by a run for each server.
"""

import http.client
import itertools
import json
import os
import queue
import statistics
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jspec.common.errors import InputError
from jspec.common.text_table import NOTHING, format_table, number_cell
from jspec.lab.benchmarking.measurement import Measurement, Outcome, choose_prompts

_TIMEOUT = 600.0  # seconds without an event
_PERCENTILES = 50, 99
_COLUMNS = (
    "at once", "tokens/s", "answers", "to the first, ms: p50", "p99", "between, ms: p50", "p99",
)  # fmt: skip

_PARTS = {
    "reading": "reading, ms", "device": "a round: device, ms", "host": "host, ms",
    "outside": "outside an answer, ms",
}  # fmt: skip


class Reply(NamedTuple):
    """One streamed answer, times in seconds of one clock.

    Attributes:
      begin: when it was asked for.
      events: when each part of its text came.
      num_tokens: as the server counts them, or else the parts.
      end: when all of it had come.
      stats: what jspec's server says of its rounds; empty from others.
    """

    begin: float
    events: list[float]
    num_tokens: int
    end: float = 0.0
    stats: dict[str, Any] = {}  # noqa: RUF012


class Client:
    """Asks one server."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Takes the server's address, such as http://127.0.0.1:8000.

        Raises:
          InputError: the address is none.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"expected --url of a server, as http://127.0.0.1:8000, got {url!r}")
        secure = parts.scheme == "https"
        self._kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._place, self._path = parts.netloc, parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def model(self) -> str:
        """Returns the name of the server's model.

        Raises:
          InputError: no such server answers.
        """
        try:
            with self._open("GET", "/v1/models") as reply:
                return json.loads(reply.read())["data"][0]["id"]
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise InputError(
                f"expected a server with OpenAI's interface at {self._place}, got {error!r}"
            ) from None

    def ask(self, body: dict[str, Any]) -> Reply:
        """Returns a completion, read as it comes.

        Raises:
          InputError: the server refuses, or breaks off.
        """
        begin, events, num_tokens, stats = time.perf_counter(), [], 0, {}
        try:
            with self._open("POST", "/v1/completions", json.dumps(body)) as reply:
                if reply.status != 200:
                    said = reply.read().decode(errors="replace")[:200]
                    raise InputError(f"expected an answer, got status {reply.status}: {said}")
                for line in reply:
                    data = line.removeprefix(b"data: ").strip()
                    if data == line.strip() or data == b"[DONE]":
                        continue
                    event = json.loads(data)
                    if any(choice.get("text") for choice in event.get("choices", ())):
                        events.append(time.perf_counter())
                    usage = event.get("usage") or {}
                    num_tokens = usage.get("completion_tokens") or num_tokens
                    stats = usage.get("jspec") or stats
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise InputError(f"expected a whole answer of {self._place}, got {error!r}") from None
        return Reply(begin, events, num_tokens or len(events), time.perf_counter(), stats)

    def _open(self, method: str, path: str, body: str | None = None) -> http.client.HTTPResponse:
        connection = self._kind(self._place, timeout=_TIMEOUT)
        connection.request(method, self._path + path, body, self._headers)
        return connection.getresponse()


def measure_server(asked: Measurement) -> Iterator[Outcome]:
    """Asks with each number of clients in turn; yields after every number.

    Raises:
      InputError: no server, or one that refuses.
    """
    texts = [prompt.text for prompt in choose_prompts(asked)[0]]
    client = Client(asked.url, os.environ.get("JSPEC_API_KEY"))
    usual = {
        "model": client.model(),
        "max_tokens": asked.max_new_tokens,
        "temperature": asked.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    client.ask(usual | {"prompt": texts[0]})  # what is compiled or loaded at first does not count
    lines = []
    for number in asked.streams:
        count = max(len(texts), number) * asked.repeats
        bodies = [
            usual | {"prompt": text, "seed": seed}
            for seed, text in zip(range(count), itertools.cycle(texts), strict=False)
        ]
        lines.append({"streams": number} | figures(ask_together(client, bodies, number)))
        yield Outcome({"model": usual["model"], "lines": list(lines)}, format_load(lines))


def ask_together(client: Client, bodies: Sequence[dict[str, Any]], number: int) -> list[Reply]:
    """Returns the replies to all bodies, asked by this many clients at once.

    Raises:
      InputError: one was refused.
    """
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for body in bodies:
        waiting.put(body)
    replies, errors = list[Reply](), list[InputError]()

    def work() -> None:
        try:
            while not errors:
                replies.append(client.ask(waiting.get_nowait()))
        except queue.Empty:
            pass
        except InputError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return replies


def figures(replies: Sequence[Reply]) -> dict[str, Any]:
    """Returns what replies show: tokens a second, and percentiles of what clients waited, in ms."""
    begun = [reply for reply in replies if reply.events]
    num_tokens = sum(reply.num_tokens for reply in replies)
    ends = [reply.events[-1] for reply in begun]
    seconds = max(ends) - min(reply.begin for reply in replies) if ends else 0.0
    first = [reply.events[0] - reply.begin for reply in begun]
    between = [
        (reply.events[-1] - reply.events[0]) / (reply.num_tokens - 1)
        for reply in begun
        if reply.num_tokens > 1
    ]
    return {
        "answers": len(replies),
        "tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_second": num_tokens / seconds if seconds else None,
        "to_first_ms": _percentiles(first),
        "between_ms": _percentiles(between),
        "parts_ms": _parts(replies),
    }


def _parts(replies: Sequence[Reply]) -> dict[str, float] | None:
    """Returns the medians of what a server's time goes into, in ms; None of other servers.

    `reading` is of a prompt; `device` and `host` of a round, where the host's time includes reading
    the prompts of others; `outside` of an answer: waiting for a slot, HTTP and the client itself.
    """
    parts: dict[str, list[float]] = {name: [] for name in _PARTS}
    for reply in replies:
        if num_rounds := (stats := reply.stats).get("num_rounds"):
            answering = stats["prefill_seconds"] + stats["decode_seconds"]
            parts["reading"].append(stats["prefill_seconds"])
            parts["device"].append(stats["device_seconds"] / num_rounds)
            parts["host"].append(stats["host_seconds"] / num_rounds)
            parts["outside"].append(reply.end - reply.begin - answering)
    if not parts["reading"]:
        return None
    return {name: 1e3 * statistics.median(seconds) for name, seconds in parts.items()}


def _percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    values = np.percentile(seconds, _PERCENTILES).tolist() if seconds else [None, None]
    return {
        f"p{share}": None if value is None else 1e3 * value
        for share, value in zip(_PERCENTILES, values, strict=True)
    }


def format_load(lines: Sequence[dict[str, Any]]) -> str:
    """Returns a table, a line for each number of clients."""
    rows = [
        [
            str(line["streams"]),
            number_cell(line["tokens_per_second"], ".1f"),
            str(line["answers"]) if line["answers"] else NOTHING,
            *(
                number_cell(value, ".0f")
                for key in ("to_first_ms", "between_ms")
                for value in line[key].values()
            ),
        ]
        for line in lines
    ]
    known = [line for line in lines if line.get("parts_ms")]
    if not known:
        return format_table(_COLUMNS, rows)
    parts = [
        [str(line["streams"]), *(number_cell(line["parts_ms"][key], ".2f") for key in _PARTS)]
        for line in known
    ]
    titles = "at once", *_PARTS.values()
    return format_table(_COLUMNS, rows) + "\n\n" + format_table(titles, parts)
