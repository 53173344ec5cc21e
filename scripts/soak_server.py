"""Puts a server under clients that misbehave, kills it, and checks that nothing grows or breaks.

    python scripts/soak_server.py --target=FOLDER --seconds=3600 --kills=50
    python scripts/soak_server.py --target=smollm2-135m-instruct --kills=0 --patience=600

Five kinds of clients come at once: some ask and check the answer against the first, some go on
with what they were answered, some leave in the middle of it, some send what is no request, some ask
for too much. Further flags, such as --draft, are the server's. In between the process is
killed (SIGKILL) and must answer again. Meanwhile another server is told to take the same port. At
the end: every answer was the same as before, no reply had status 500, and after half of the time no
program was compiled and memory hardly grew any more. One line of JSON has the figures.
"""

import argparse
import collections
import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import psutil

_PROMPTS = ["Once upon a time", "abc" * 20, "one two three one two three", "é" * 9, "x" * 120]
_GROWTH = 1.15  # of memory, over that after half of the time
_SLOWER = 2.0  # times as long a start may take as the first, beside clients that ask at once
_GARBAGE = (b"{", b"[" * 5000, b"\xff\xfe", b"", b'{"prompt": 7}', b'{"prompt": "\\ud800"}',
            b'{"prompt": "a", "max_tokens": 1e9}', b'{"prompt": "a", "nothing": null}')  # fmt: skip


class Soak:
    """A server process, and what its clients have seen."""

    def __init__(self, flags: list[str], seed: int, patience: float) -> None:
        self.flags, self.rng, self.patience = flags, random.Random(seed), patience
        self.num_cached = 0  # tokens that were not read again
        self.statuses, self.problems = collections.Counter[str](), list[str]()
        self.expected: dict[str, str] = {}
        self.starts, self.memory, self.programs = list[float](), list[int](), list[int]()
        self.is_over = threading.Event()
        self.is_down = False  # replies may be broken off
        self.port = 0

    def start(self) -> None:
        """Starts the server, on the port that it had before; waits until it answers."""
        begin, self.process = time.monotonic(), self._launch()
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if "http://" in line:
                self.port = int(line.rpartition(":")[2])
                break
            if "rror" in line or "arning" in line:  # a damaged cache, for one
                self.problems.append(f"at start: {line.strip()}")
        else:
            raise SystemExit(f"the server did not start: status {self.process.wait()}")
        threading.Thread(target=self._watch, args=[self.process.stderr], daemon=True).start()
        self.starts.append(time.monotonic() - begin)

    def _launch(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "jspec.serve", *self.flags, f"--port={self.port}"]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def _watch(self, lines: Any) -> None:
        for line in lines:
            if "Traceback" in line or "Error" in line:
                self.problems.append(line.strip())

    def _open(
        self, method: str, path: str, body: bytes | None = None
    ) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.patience)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        return connection

    def send(self, body: dict[str, Any] | bytes) -> tuple[int, Any]:
        """Returns status and JSON of a completion."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(self._open("POST", "/v1/completions", content)) as connection:
            reply = connection.getresponse()
            answer = json.loads(reply.read() or b"null")
        self.statuses[str(reply.status)] += 1
        return reply.status, answer

    def ask(self, rng: random.Random) -> None:
        """Asks as a good client does; the answer must be the one that was given before."""
        prompt, seed = rng.choice(_PROMPTS), rng.randrange(4)
        body = {"prompt": prompt, "seed": seed, "temperature": 0.8, "max_tokens": 12}
        status, reply = self.send(body)
        if status == 200:
            text = reply["choices"][0]["text"]
            if self.expected.setdefault(f"{prompt} {seed}", text) != text:
                self.problems.append(f"another answer to {prompt!r} with seed {seed}")

    def converse(self, rng: random.Random) -> None:
        """Goes on with what was answered, so that pages of answers are shared and dropped."""
        text = rng.choice(_PROMPTS) + f" {rng.randrange(3)}. "
        for _ in range(3):
            body = {"prompt": text, "temperature": 0, "max_tokens": 40}
            status, reply = self.send(body)
            if status != 200:
                return
            self.num_cached += reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            text += reply["choices"][0]["text"] + " And then? "

    def leave(self, rng: random.Random) -> None:
        """Asks for a long answer and leaves while it comes, or before."""
        body = {"prompt": rng.choice(_PROMPTS), "max_tokens": 60, "stream": rng.random() < 0.5}
        with contextlib.closing(self._open("POST", "/v1/completions", json.dumps(body).encode())):
            time.sleep(rng.random() * 0.05)
        self.statuses["left"] += 1

    def disturb(self, rng: random.Random) -> None:
        """Sends what is no request, or one that is too large."""
        body = rng.choice(_GARBAGE)
        if rng.random() < 0.2:
            prompt = "long " * rng.randrange(10**4, 10**5)
            body = json.dumps({"prompt": prompt, "max_tokens": 2}).encode()
        status, _ = self.send(body)
        if status not in (400, 413, 429):
            self.problems.append(f"status {status} for {body[:40]!r}")

    def client(self, seed: int) -> None:
        """Acts as one client after another until the end."""
        rng = random.Random(seed)
        while not self.is_over.is_set():
            try:
                kinds = self.ask, self.ask, self.converse, self.leave, self.disturb
                rng.choice(kinds)(rng)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.statuses["broken off"] += 1
                if not self.is_down:
                    self.problems.append(f"{type(error).__name__}: {error}")
                time.sleep(0.1)

    def measure(self) -> None:
        """Notes the memory of the process and the programs that it has compiled."""
        with contextlib.closing(self._open("GET", "/metrics")) as connection:
            lines = connection.getresponse().read().decode().splitlines()
        (count,) = (line for line in lines if line.startswith("jspec:num_compiled_programs{"))
        self.programs.append(int(float(count.rpartition(" ")[2])))
        self.memory.append(psutil.Process(self.process.pid).memory_info().rss)

    def kill(self) -> None:
        """Kills the server at a random moment of its work, and every other time of its start, too.

        Then it must answer, and not much later than the first time.
        """
        time.sleep(self.rng.random())
        self.is_down = True
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        if len(self.starts) % 2:
            process = self._launch()
            time.sleep(self.rng.random() * self.starts[0])
            process.kill()
            process.wait()
        self.start()
        if self.starts[-1] > _SLOWER * self.starts[0]:
            self.problems.append(f"a start took {self.starts[-1]:.1f} s")
        self.ask(self.rng)
        time.sleep(1.0)  # clients of the server that was killed notice it
        self.is_down = False

    def second_server(self) -> None:
        """Starts a server on the port that is taken; it must end with one line."""
        command = [sys.executable, "-m", "jspec.serve", f"--port={self.port}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 2 or len(done.stderr.strip().splitlines()) != 1:
            self.problems.append(f"a second server: status {done.returncode}, {done.stderr[:200]}")

    def figures(self) -> dict[str, Any]:
        """Returns what was seen, and what is wrong with it."""
        first = len(self.memory) // 2
        if self.programs[-1] != self.programs[first]:
            self.problems.append(f"programs compiled: {self.programs[first:]}")
        if max(self.memory[first:]) > _GROWTH * self.memory[first]:
            self.problems.append(f"memory grew: {self.memory[first]} to {max(self.memory)}")
        return {
            "cached_tokens": self.num_cached,
            "requests": sum(self.statuses.values()), "by_status": dict(self.statuses),
            "starts_seconds": [round(value, 1) for value in self.starts],
            "memory_mb": [round(value / 2**20) for value in self.memory],
            "programs": [self.programs[first], self.programs[-1]], "problems": self.problems[:10],
        }  # fmt: skip


def main() -> int:
    """Runs the soak; the status is 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True, help="a model")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that clients wait")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--clients", type=int, default=8)
    options, rest = parser.parse_known_args()
    flags = [f"--target={options.target}", "--max_queue=4", "--max_slots=3", *rest]
    soak = Soak(flags, seed=0, patience=options.patience)
    soak.start()
    try:
        clients = [
            threading.Thread(target=soak.client, args=[seed]) for seed in range(options.clients)
        ]
        for client in clients:
            client.start()
        for _ in range(options.kills):
            soak.kill()
        soak.second_server()
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            time.sleep(min(options.seconds / 20, 30))
            soak.measure()
        soak.is_over.set()
        for client in clients:
            client.join()
        figures = soak.figures()
    finally:
        soak.is_over.set()
        soak.process.kill()
    print(json.dumps(figures))
    return int(bool(soak.problems))


if __name__ == "__main__":
    os.environ.pop("JSPEC_API_KEY", None)  # its clients show none
    sys.exit(main())
