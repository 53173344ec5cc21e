"""Measures servers under load: jspec's, llama.cpp's and transformers', one after the other.

    python scripts/load_servers.py --prompts=SPEC_BENCH.jsonl --guidellm=PROGRAM \
        --tokenizer=FOLDER --gguf=FILE --llama_cpp=FOLDER --transformers=PROGRAM \
        --output_json=load.jsonl

The load is guidellm's: it asks for 64 tokens at temperature 0, with 1 to 32 requests at once and at
random moments (Poisson), of prompts in a fixed order. All servers have room for --slots requests of
2,048 tokens, and none keeps what it has read of a prompt. One line of JSON has, by server and load,
tokens a second, and milliseconds to the first token and between tokens. Only the tokens of answers
that ended count, over the time from the first request to the end of the last such answer.
"""

import json
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from typing import Any

from absl import flags

from jspec.cli import program as cli
from jspec.common.errors import InputError
from jspec.common.json_lines import read_json_lines
from jspec.common.text_table import format_table
from jspec.generation.provenance import Recorder, git_state

_LENGTH = 2048  # tokens of prompt and answer
_TOKENS = 64  # of an answer
_PORT, _START_SECONDS = 8123, 600
_FIGURES = {"to_first_ms": "time_to_first_token_ms", "between_ms": "inter_token_latency_ms"}
_SHARES = ("p50", "p99")


# Folders and files of this machine, which the record does not name.
_PLACES = {
    "guidellm": "guidellm's program", "tokenizer": "folder of the model in Hugging Face's layout",
    "gguf": "llama.cpp's file of the same weights", "draft_gguf": "its file of the draft model",
    "llama_cpp": "folder of llama-server", "transformers": "transformers' program",
    "prompts": "JSON Lines of objects with `turns` or `prompt`", "output_json": "the record",
    "log": "what the servers say; default: servers.log",
}  # fmt: skip
_TEXTS = {
    "target": ("smollm2-135m-instruct", "jspec's model"), "draft": (None, "its draft model"),
    "servers": (None, "names, separated by commas; default: all"),
    "streams": ("1,2,4,8,16,32", "requests at once"),
    "rates": ("1,2", "requests a second, at random moments"),
    "jspec_flags": ("", "flags of jspec.serve"),
    "transformers_flags": ("", "flags of transformers serve"),
}  # fmt: skip
_NUMBERS = {
    "slots": (32, "requests that have room at once"), "seconds": (40, "of a load, at most"),
    "per_stream": (3, "requests for each at once"), "fewest": (12, "requests of a load, at least"),
    "threads": (2, "threads of llama.cpp"), "repeats": (1, "turns of all servers"),
}  # fmt: skip
for _name, _about in _PLACES.items():
    flags.DEFINE_string(_name, None, _about)
for _name, (_default, _about) in _TEXTS.items():
    flags.DEFINE_string(_name, _default, _about)
for _name, (_number, _about) in _NUMBERS.items():
    flags.DEFINE_integer(_name, _number, _about)


def commands(options: flags.FlagValues) -> dict[str, list[str]]:
    """Returns what starts each server that is wanted, by its name."""
    jspec = [sys.executable, "-m", "jspec.serve", f"--max_slots={options.slots}",
             f"--port={_PORT}", f"--max_seq_len={_LENGTH}", "--prefix_cache_bytes=0",
             f"--target={options.target}", *options.jspec_flags.split()]  # fmt: skip
    drafting = ["--num_draft_tokens=auto", *([f"--draft={options.draft}"] if options.draft else [])]
    found = {"jspec none": [*jspec, "--drafter=none"], "jspec auto": [*jspec, *drafting]}
    if options.llama_cpp:
        own = "-np {0} -c {1} -t {2} --port {3} --no-cache-prompt --cache-ram 0 --no-ui --temp 0"
        own = own.format(options.slots, options.slots * _LENGTH, options.threads, _PORT).split()
        own = [f"{options.llama_cpp}/llama-server", "-m", options.gguf, *own]
        found["llama.cpp none"] = own
        if options.draft_gguf:
            drafting = ["-md", options.draft_gguf, "--spec-type", "draft-simple"]
            found["llama.cpp draft"] = [*own, *drafting, "--spec-draft-n-max", "3"]
        else:
            found["llama.cpp lookup"] = [*own, "--spec-type", "ngram-simple"]
    if options.transformers:
        own = ["serve", options.tokenizer, "--device=cpu", "--dtype=bfloat16", f"--port={_PORT}"]
        found["transformers"] = [options.transformers, *own, *options.transformers_flags.split()]
    names = options.servers.split(",") if options.servers else list(found)
    if unknown := sorted(set(names) - set(found)):
        raise InputError(f"expected servers among {', '.join(found)}, got {', '.join(unknown)}")
    return {name: found[name] for name in names}


class Server:
    """A server process that answers once the block is entered."""

    def __init__(self, command: list[str], log: Any) -> None:
        self._command, self._log = command, log

    def __enter__(self) -> float:
        """Starts it; returns the seconds that this took.

        Raises:
          InputError: it ended, or did not answer in time.
        """
        begin = time.monotonic()
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        while time.monotonic() - begin < _START_SECONDS and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{_PORT}/health", timeout=60).read()
                return time.monotonic() - begin
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        self._process.kill()
        raise InputError(f"expected a server that starts: {self._command[0]}; see its messages")

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def write_prompts(path: str, folder: pathlib.Path) -> pathlib.Path:
    """Writes the prompts as guidellm reads them, in an order by chance that is always the same."""
    prompts = []
    for where, one in read_json_lines(path, "prompts"):
        try:
            prompts.append(one["turns"][0] if "turns" in one else one["prompt"])
        except (KeyError, IndexError, TypeError):
            raise InputError(f"{where}: expected an object with turns or prompt") from None
    random.Random(0).shuffle(prompts)
    lines = [json.dumps({"prompt": one, "output_tokens_count": _TOKENS}) for one in prompts]
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(lines))
    return file


def load(
    options: flags.FlagValues, name: str, profile: dict[str, Any], counts: list[int], data: Any
) -> list[dict[str, Any]]:
    """Lets guidellm ask; returns the figures of each of the profile's loads.

    Raises:
      InputError: guidellm failed.
    """
    output = data.with_name("output.json")
    body: dict[str, Any] = {"temperature": 0}
    if name == "transformers":  # which refuses a field that it does not know
        body["ignore_eos"] = None
    model = options.tokenizer if name == "transformers" else ""
    limits = [{"kind": "max_duration", "seconds": options.seconds}]
    spec = {
        "backend": {"kind": "openai_http", "target": f"http://127.0.0.1:{_PORT}", "model": model,
                    "http2": False, "extras": {"body": body}},
        "profile": profile,
        "constraints": [{"kind": "max_requests", "count": counts}, *limits],
        "tokenizer": {"kind": "huggingface_auto", "model": options.tokenizer},
        "data": [{"kind": "json_file", "path": str(data)}],
        "outputs": [{"kind": "json", "path": str(output)}],
    }  # fmt: skip
    scenario = data.with_name("scenario.json")
    scenario.write_text(json.dumps({"spec": spec}))
    command = [options.guidellm, "run", "--config", str(scenario), "--disable-console"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"expected guidellm to succeed, got {done.stderr.strip()[-500:]}")
    return [figures(one) for one in json.loads(output.read_text())["benchmarks"]]


def figures(benchmark: dict[str, Any]) -> dict[str, Any]:
    """Returns what one load has shown, of guidellm's report of it."""
    metrics, totals = benchmark["metrics"], benchmark["metrics"]["request_totals"]
    strategy, ended = benchmark["config"]["strategy"], benchmark["requests"]["successful"]
    tokens = sum(one["output_tokens"] or 0 for one in ended)
    begin = min((one["request_start_time"] for one in ended), default=0.0)
    end = max((one["request_end_time"] for one in ended), default=0.0)
    kind = strategy["type_"]
    found = {
        "load": f"{strategy['streams']}" if kind == "concurrent" else f"{strategy['rate']:g}/s",
        "answers": len(ended), "tokens": tokens, "seconds": end - begin,
        "prompt_tokens": sum(one["prompt_tokens"] or 0 for one in ended),
        "cut_off": totals["incomplete"], "errors": totals["errored"],
        "tokens_per_second": tokens / max(end - begin, 1e-9),
    }  # fmt: skip
    for key, name in _FIGURES.items():
        shares = metrics[name]["successful"]["percentiles"]
        found[key] = {share: shares[share] for share in _SHARES}
    return found


def measure(options: flags.FlagValues) -> None:
    """Starts one server after the other, loads it, and writes the record after each."""
    servers, streams = commands(options), [int(one) for one in options.streams.split(",")]
    rates = [float(one) for one in options.rates.split(",") if one]
    shown = {name: getattr(options, name) for name in (*_TEXTS, *_NUMBERS)}
    recorder, lines = Recorder(options.output_json, shown, options.prompts), []
    with tempfile.TemporaryDirectory() as folder, open(options.log or "servers.log", "ab") as log:
        data = write_prompts(options.prompts, pathlib.Path(folder))
        for repeat in range(options.repeats):
            for name, command in servers.items():
                print(f"{name}, repeat {repeat}", file=sys.stderr, flush=True)
                with Server(command, log) as seconds:
                    counts = [max(options.fewest, options.per_stream * one) for one in streams]
                    profile = {"kind": "concurrent", "streams": streams}
                    found = load(options, name, profile, counts, data)
                    for rate in rates:
                        count = [round(rate * options.seconds)]
                        profile = {"kind": "poisson", "rate": [rate]}
                        found += load(options, name, profile, count, data)
                about = {"server": name, "repeat": repeat, "start_seconds": seconds}
                lines += [about | one for one in found]
                recorder.save({"git": git_state(), "lines": lines}, is_complete=False)
    recorder.save({"git": git_state(), "lines": lines})
    rows = [
        [one["server"], one["load"], f"{one['tokens_per_second']:.1f}", one["answers"],
         *(f"{one[key][share] or 0:.0f}" for key in _FIGURES for share in _SHARES)]
        for one in lines
    ]  # fmt: skip
    columns = ["", "load", "tokens/s", "answers", "ms to first, p50", "p99", "ms between, p50"]
    print(format_table((*columns, "p99"), [[str(cell) for cell in row] for row in rows]))


def main() -> None:
    """Reads the flags and measures."""
    for name in ("guidellm", "tokenizer", "prompts"):
        if getattr(flags.FLAGS, name) is None:
            raise InputError(f"expected --{name}")
    measure(flags.FLAGS)


if __name__ == "__main__":
    cli.run_main(main)
