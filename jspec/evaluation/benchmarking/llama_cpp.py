"""llama.cpp's programs that are timed: each loads the model, answers, and prints times."""

import os
import pathlib
import re
import subprocess
from collections.abc import Callable

from jspec.common.errors import InputError
from jspec.weights.smollm2 import fetch

_NUM_MODEL_DRAFTS = 3  # llama.cpp's own default

LlamaFn = Callable[[pathlib.Path, int], tuple[float, int]]
"""(file with a prompt, max_new_tokens) -> seconds and tokens of the answer."""


def llama_methods(programs: pathlib.Path, *, num_drafts: int) -> dict[str, LlamaFn]:
    """Returns llama.cpp's methods of generating with SmolLM2, each a program of its own.

    Args:
      programs: folder of them; the model in bfloat16 is put there, too.
      num_drafts: of its prompt lookup.
    """
    source, model = fetch(), programs / "SmolLM2-135M-Instruct.BF16.gguf"
    if not model.exists():
        new = model.with_suffix(".new")
        _run([programs / "llama-quantize", "--allow-requantize", source, new, "BF16"])
        new.rename(model)
    usual = ["-m", model, "-t", len(os.sched_getaffinity(0)), "--temp", 0]
    lookup = [programs / "llama-lookup", *usual, "--spec-draft-n-max", num_drafts]
    drafting = ["-md", source, "--spec-type", "draft-simple", "--spec-draft-n-max"]
    model_drafts = [programs / "llama-speculative-simple", *usual, *drafting, _NUM_MODEL_DRAFTS]
    plain = [programs / "llama-completion", *usual, "-no-cnv"]
    return {
        "llama.cpp plain": _program(plain, _PLAIN_TIMES, first_tokens=1),
        f"llama.cpp lookup:{num_drafts}": _program(lookup, _SPECULATIVE_TIMES),
        f"llama.cpp model (Q4_1):{_NUM_MODEL_DRAFTS}": _program(model_drafts, _SPECULATIVE_TIMES),
    }


# Both halves of an answer: reading the prompt, in some unit of time, and decoding, with its tokens.
_PLAIN_TIMES = (
    0.001,
    re.compile(r"prompt eval time = +([\d.]+) ms"),
    re.compile(r" I .*?(?<!prompt )eval time = +(?P<time>[\d.]+) ms / +(?P<tokens>\d+) runs"),
)
_SPECULATIVE_TIMES = (
    1.0,
    re.compile(r"encoded +\d+ tokens in +([\d.]+) seconds"),
    re.compile(r"decoded +(?P<tokens>\d+) tokens in +(?P<time>[\d.]+) seconds"),
)


def _program(
    command: list, times: tuple[float, re.Pattern, re.Pattern], first_tokens: int = 0
) -> LlamaFn:
    unit, prompt_pattern, decode_pattern = times

    def answer(file: pathlib.Path, max_new_tokens: int) -> tuple[float, int]:
        printed = _run([*command, "-f", file, "-n", max_new_tokens])
        prompt, decode = prompt_pattern.search(printed), decode_pattern.search(printed)
        if prompt is None or decode is None:
            raise InputError(f"expected times in what {command[0]} prints, got {printed[-200:]!r}")
        seconds = unit * (float(prompt[1]) + float(decode["time"]))
        return seconds, int(decode["tokens"]) + first_tokens

    return answer


def _run(command: list) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, stdin=subprocess.DEVNULL
    )
    printed = (done.stderr + done.stdout).decode(errors="replace")
    if done.returncode:
        raise InputError(f"expected {command[0]} to succeed, got status {done.returncode}: "
                         f"{printed.strip().splitlines()[-1:]}")  # fmt: skip
    return printed
