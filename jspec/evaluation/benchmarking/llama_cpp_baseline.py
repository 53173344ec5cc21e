"""The baseline of llama.cpp: programs that load SmolLM2, answer one prompt, and print times.

Each answer is a process of its own, so what counts is the time that the program prints: of the
prompt and of the answer, without loading. Texts are not compared: the programs print no ids. The
model is SmolLM2-135M-Instruct in bfloat16, made by `llama-quantize` out of the file that jspec
reads. Speculation with a model drafts with the same model in Q4_1, for want of a smaller one with
this tokenizer.
"""

import functools
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Mapping

from jspec.common.errors import InputError
from jspec.evaluation.benchmarking.answers import Generated, GenerateFn
from jspec.weights.fetch import fetch
from jspec.weights.published import SMOLLM2

LLAMA_PLAIN = "llama.cpp plain"
PROGRAM = "llama-completion"
_NUM_MODEL_DRAFTS = 3  # llama.cpp's own default


def check_programs(folder: pathlib.Path) -> None:
    """Raises an `InputError` unless a folder holds llama.cpp's programs."""
    if not (folder / PROGRAM).is_file():
        raise InputError(f"expected the folder of llama.cpp's programs, got {folder}: no {PROGRAM}")


def llama_methods(
    programs: pathlib.Path,
    texts: Mapping[tuple[int, ...], str],
    max_new_tokens: int,
    *,
    num_drafts: int,
) -> dict[str, GenerateFn]:
    """Returns llama.cpp's methods of generating, each a program of its own.

    Args:
      programs: their folder; the model in bfloat16 is put there, too.
      texts: of each prompt by its ids, as the chat template writes it.
      max_new_tokens: of an answer.
      num_drafts: of its prompt lookup.
    """
    source, model = fetch(SMOLLM2), programs / "SmolLM2-135M-Instruct.BF16.gguf"
    if not model.exists():
        new = model.with_suffix(".new")
        _run([programs / "llama-quantize", "--allow-requantize", source, new, "BF16"])
        new.rename(model)
    drafting = ["-md", source, "--spec-type", "draft-simple"]
    commands = {
        LLAMA_PLAIN: [PROGRAM, "-no-cnv"],
        f"llama.cpp lookup:{num_drafts}": ["llama-lookup", "--spec-draft-n-max", num_drafts],
        f"llama.cpp model (Q4_1):{_NUM_MODEL_DRAFTS}": [
            "llama-speculative-simple", *drafting, "--spec-draft-n-max", _NUM_MODEL_DRAFTS
        ],
    }  # fmt: skip
    usual = ["-m", model, "-t", len(os.sched_getaffinity(0)), "--temp", 0]

    def answer(own: list, prompt: list[int], seed: int) -> Generated:
        del seed
        command = [programs / own[0], *usual, *own[1:]]
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
            file.write(texts[tuple(prompt)])
            file.flush()
            printed = _run([*command, "-f", file.name, "-n", max_new_tokens])
        seconds, num_tokens = _read_times(printed, command[0])
        return Generated([], 0, 0, seconds=seconds, num_tokens=num_tokens)

    return {name: functools.partial(answer, one) for name, one in commands.items()}


# Where a program tells the time of the prompt and the time and the tokens of decoding: those that
# speculate tell seconds, plain decoding milliseconds, and runs, which come after the first token.
_TIMES = {
    "s": (
        re.compile(r"encoded +\d+ tokens in +([\d.]+) seconds"),
        re.compile(r"decoded +(?P<tokens>\d+) tokens in +(?P<time>[\d.]+) seconds"),
    ),
    "ms": (
        re.compile(r"prompt eval time = +([\d.]+) ms"),
        re.compile(r" I .*?(?<!prompt )eval time = +(?P<time>[\d.]+) ms / +(?P<tokens>\d+) runs"),
    ),
}


def _read_times(printed: str, program: pathlib.Path) -> tuple[float, int]:
    """Returns the seconds and the tokens of an answer."""
    for unit, patterns in _TIMES.items():
        prompt, decode = (pattern.search(printed) for pattern in patterns)
        if prompt is not None and decode is not None:
            time, num_tokens = float(prompt[1]) + float(decode["time"]), int(decode["tokens"])
            return (time / 1000, num_tokens + 1) if unit == "ms" else (time, num_tokens)
    raise InputError(f"expected times in what {program} prints, got {printed[-200:]!r}")


def _run(command: list) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL)
    printed = (done.stderr + done.stdout).decode(errors="replace")
    if done.returncode:
        raise InputError(f"expected {command[0]} to succeed, got status {done.returncode}: "
                         f"{printed.strip().splitlines()[-1:]}")  # fmt: skip
    return printed
