"""Lets a target answer prompts, to train drafters on: what was answered before is not done again.

`python scripts/make_answers.py --prompts_file=PROMPTS.jsonl --output_json=answers.jsonl`

Prompt k has seed + k. Every answer is added to the file as soon as it is finished, in any order; a
run that was killed goes on where it was, and a line that it tore is cut off.
"""

import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

from absl import flags

from jspec.common import cli
from jspec.common.errors import InputError, check_range
from jspec.common.journal import Journal
from jspec.common.json_lines import check_output
from jspec.common.progress import format_seconds
from jspec.generation.generator import DEFAULT_TARGET, Generator
from jspec.generation.prompts import read_prompts
from jspec.generation.request import Request, Settings
from jspec.weights.resolver import load_model

_TARGET = flags.DEFINE_string("target", DEFAULT_TARGET, "The target.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of the weights.")
_PROMPTS_FILE = flags.DEFINE_string("prompts_file", None, "JSONL.", required=True)
_OUTPUT_JSON = flags.DEFINE_string("output_json", None, "Answers are added to it.", required=True)
_NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 0, "The first so many; 0 takes all.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 192, "Tokens of an answer.")
_MAX_PROMPT_TOKENS = flags.DEFINE_integer("max_prompt_tokens", 256, "Longer ones are left out.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 takes the most likely token.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the first prompt.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Prompts answered at a time.")
_CHUNK = flags.DEFINE_integer("chunk", 128, "Prompts handed over at a time.")


def main() -> None:
    """Answers what is missing."""
    check_range("batch_size", _BATCH_SIZE.value, 1, 4096)
    check_range("chunk", _CHUNK.value, 1, 10**6)
    path = check_output(_OUTPUT_JSON.value, _PROMPTS_FILE.value)
    journal = Journal(path)
    done = read_done(path, journal)
    prompts = [one.text for one in read_prompts(_PROMPTS_FILE.value)]
    prompts = prompts[: _NUM_PROMPTS.value or None]
    target = load_model(_TARGET.value, dtype=_DTYPE.value)
    context = target.config.max_seq_len
    if _MAX_PROMPT_TOKENS.value + _MAX_NEW_TOKENS.value > context:
        raise InputError(
            f"expected max_prompt_tokens + max_new_tokens within the target's context, {context}; "
            f"got {_MAX_PROMPT_TOKENS.value} + {_MAX_NEW_TOKENS.value}"
        )
    generator = Generator(
        target,
        drafter="none",
        batch_size=_BATCH_SIZE.value,
        max_seq_len=_MAX_PROMPT_TOKENS.value + _MAX_NEW_TOKENS.value,
    )
    waiting = []
    for index, text in enumerate(prompts):
        ids = generator.encode_prompt(text)
        if index in done:
            check_same(path, index, done[index], how_answered() | {"prompt_token_ids": ids})
        elif len(ids) <= _MAX_PROMPT_TOKENS.value:
            waiting.append((index, ids))
    if not waiting:
        print(f"{path} has all answers: nothing to do", file=sys.stderr, flush=True)
    begin, num_tokens = time.monotonic(), 0
    for first in range(0, len(waiting), _CHUNK.value):
        chunk = waiting[first : first + _CHUNK.value]
        for piece in generator.run([make_request(index, ids) for index, ids in chunk]):
            if piece.result is None:
                continue
            num_tokens += len(piece.result.token_ids)
            record = how_answered() | {
                "index": chunk[piece.index][0],
                "prompt_token_ids": piece.result.prompt_token_ids,
                "token_ids": piece.result.token_ids,
            }
            journal.append(record)
        seconds = time.monotonic() - begin
        left = seconds / (first + len(chunk)) * (len(waiting) - first - len(chunk))
        print(f"{first + len(chunk)} of {len(waiting)} prompts, {num_tokens} tokens, "
              f"{num_tokens / seconds:.0f} a second, about {format_seconds(left)} left",
              file=sys.stderr, flush=True)  # fmt: skip


def how_answered() -> dict[str, Any]:
    """Returns what besides the prompt decides an answer."""
    flags_ = _TARGET, _DTYPE, _TEMPERATURE, _SEED, _MAX_NEW_TOKENS
    return {flag.name: flag.value for flag in flags_}


def check_same(
    path: pathlib.Path, index: int, theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> None:
    """Checks that an answer in the file is one to our prompt, drawn as we would.

    Raises:
      InputError: it is not; the message names what differs.
    """
    for name, value in ours.items():
        if theirs.get(name) != value:
            what = f"{theirs.get(name)!r} there and {value!r} here"
            if name == "prompt_token_ids":
                what = "another there"
            raise InputError(f"{path} has other answers: {name} of prompt {index} is {what}")


def make_request(index: int, prompt: list[int]) -> Request:
    """Returns the request for a prompt of the file."""
    settings = Settings(
        max_new_tokens=_MAX_NEW_TOKENS.value,
        temperature=_TEMPERATURE.value,
        seed=_SEED.value + index,
    )
    return Request(prompt, settings)


def read_done(path: pathlib.Path, journal: Journal) -> dict[int, dict[str, Any]]:
    """Returns the answers in a file by prompt; a line that was torn at its end is cut off.

    Raises:
      InputError: a line that is no answer.
    """
    done = {}
    for number, record in enumerate(journal.read() if path.exists() else (), 1):
        try:
            done[int(record["index"])] = record
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{path}:{number}: expected an answer of this script") from None
    return done


if __name__ == "__main__":
    cli.run_main(main)
