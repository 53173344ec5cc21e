"""Measures what a server saves where a prompt begins as an earlier one: time to the first token.

    python scripts/prefix_hits.py --output_json=hits.jsonl --target=smollm2-135m-instruct

A server is started and asked over HTTP for one token after prompts by chance, of which none begins
as another does: each once, again, and with 20 tokens more. One line of JSON has the milliseconds
from the request to the reply's first event. Unknown flags are those of jspec.serve.
"""

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import time
from typing import Any

from jspec.common.errors import InputError
from jspec.generation.provenance import Recorder, git_state

_MORE = 20  # tokens of the third prompt beyond the first one
_FEWEST_ID, _MOST_ID = 100, 40_000  # of tokens, none of which is special in the usual vocabularies


def start(flags: list[str]) -> tuple[subprocess.Popen[str], int]:
    """Starts a server; returns its process and its port once it answers.

    Raises:
      InputError: it ended.
    """
    command = [sys.executable, "-m", "jspec.serve", "--port=0", "--max_slots=4", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "http://" in line:
            return process, int(line.rpartition(":")[2])
    raise InputError(f"expected a server that starts, got {lines[-1].strip() if lines else ''!r}")


def ask(port: int, prompt: list[int]) -> tuple[float, int]:
    """Returns the milliseconds to the first event of a reply, and the tokens not read again.

    Raises:
      InputError: the server refuses.
    """
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    headers = {"Content-Type": "application/json"}
    begin = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    reply = connection.getresponse()
    reply.readline()
    seconds = time.perf_counter() - begin
    rest = reply.read().decode()
    connection.close()
    if reply.status != 200:
        raise InputError(f"expected an answer, got status {reply.status}")
    usage = json.loads(rest.split("data: ")[-2])["usage"]
    return 1000 * seconds, usage["prompt_tokens_details"]["cached_tokens"]


def measure(port: int, num_prompts: int, num_tokens: int) -> list[dict[str, Any]]:
    """Returns each request's kind, milliseconds and cached tokens; the first ones warm up."""
    rng, lines = random.Random(0), []
    for number in range(num_prompts + 1):
        prompt = [rng.randint(_FEWEST_ID, _MOST_ID) for _ in range(num_tokens)]
        longer = prompt + [rng.randint(_FEWEST_ID, _MOST_ID) for _ in range(_MORE)]
        for kind, asked in (("new", prompt), ("again", prompt), ("longer", longer)):
            milliseconds, num_cached = ask(port, asked)
            if number:
                lines.append({"kind": kind, "milliseconds": milliseconds, "cached": num_cached})
    return lines


def main() -> None:
    """Measures; prints the medians, and what share of a new prompt's time the others take."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output_json")
    parser.add_argument("--num_prompts", type=int, default=8)
    parser.add_argument("--num_tokens", type=int, default=1000)
    options, rest = parser.parse_known_args()
    recorder = Recorder(options.output_json, vars(options) | {"serve": rest})
    process, port = start(rest)
    try:
        lines = measure(port, options.num_prompts, options.num_tokens)
    finally:
        process.terminate()
        process.wait()
    medians = {kind: statistics.median(one["milliseconds"] for one in lines if one["kind"] == kind)
               for kind in ("new", "again", "longer")}  # fmt: skip
    recorder.save({"git": git_state(), "lines": lines, "medians": medians})
    for kind, median in medians.items():
        print(f"{kind:8} {median:8.1f} ms {median / medians['new']:7.1%}")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(str(error))
