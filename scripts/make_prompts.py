"""Lets a chat model make up prompts itself, to train drafters on where none are at hand.

`python scripts/make_prompts.py --num_prompts=2000 --output_json=prompts.jsonl`

The model is given what its chat template writes before a user's words, and goes on as the user
(Magpie, arXiv 2406.08464): what comes out is of the kinds that it was itself trained on. Prompt k
has seed + k; what does not end within --max_new_tokens, is empty or was there before is left out.
Prompts are added to the file --chunk at a time, and a run that was killed goes on behind the last.
"""

import pathlib
import sys
import time
from collections.abc import Iterable
from typing import Any

from absl import flags

from jspec.common import cli
from jspec.common.errors import InputError, check_range
from jspec.common.journal import Journal, Record
from jspec.common.json_lines import check_output
from jspec.common.progress import format_seconds
from jspec.generation.generator import DEFAULT_TARGET, Generator
from jspec.generation.request import Request, Settings
from jspec.weights.resolver import LoadedModel, load_model

_TARGET = flags.DEFINE_string("target", DEFAULT_TARGET, "The model.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of the weights.")
_OUTPUT_JSON = flags.DEFINE_string("output_json", None, "Prompts are added to it.", required=True)
_NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 1000, "To try; fewer come out.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 96, "Tokens of a prompt.")
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "That prompts are drawn at.")
_TOP_P = flags.DEFINE_float("top_p", 0.95, "Tokens beyond this share are never drawn.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the first prompt.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Prompts made at a time.")
_CHUNK = flags.DEFINE_integer("chunk", 128, "Prompts between two lines of progress.")
_MARK = "\x00"


def main() -> None:
    """Makes what is missing."""
    check_range("num_prompts", _NUM_PROMPTS.value, 1, 10**7)
    check_range("batch_size", _BATCH_SIZE.value, 1, 4096)
    check_range("chunk", _CHUNK.value, 1, 10**6)
    path = check_output(_OUTPUT_JSON.value)
    journal = Journal(path)
    seen, first = read_done(path, journal.read() if path.exists() else ())
    target = load_model(_TARGET.value, dtype=_DTYPE.value)
    opening = opening_of(target)
    generator = Generator(
        target,
        drafter="none",
        batch_size=_BATCH_SIZE.value,
        max_seq_len=min(len(opening) + _MAX_NEW_TOKENS.value, target.config.max_seq_len),
    )
    seeds = range(max(first, _SEED.value), _SEED.value + _NUM_PROMPTS.value)
    begin = time.monotonic()
    for start in range(0, len(seeds), _CHUNK.value):
        chunk = seeds[start : start + _CHUNK.value]
        # In the order of their seeds: a run that goes on knows where.
        results = generator.generate([make_request(opening, seed) for seed in chunk])
        for seed, result in zip(chunk, results, strict=True):
            text = result.text.strip()
            if result.finish_reason == "eos" and text and text not in seen:
                seen.add(text)
                journal.append({"prompt": text, "seed": seed} | how_made())
        done = start + len(chunk)
        left = (time.monotonic() - begin) / done * (len(seeds) - done)
        print(f"{done} of {len(seeds)} tried, {len(seen)} prompts, "
              f"about {format_seconds(left)} left", file=sys.stderr, flush=True)  # fmt: skip


def opening_of(target: LoadedModel) -> list[int]:
    """Returns the ids of what stands before a user's words.

    Raises:
      InputError: the model has no chat template, or one that does not repeat a user's words.
    """
    if not target.tokenizer.has_chat_template:
        raise InputError(f"expected a model with a chat template, {target.name} has none")
    text = target.tokenizer.chat_prompt([{"role": "user", "content": _MARK}])
    before, mark, _ = text.partition(_MARK)
    if not mark or not before:
        raise InputError(f"expected a chat template with a user's words inside, got {text!r}")
    return target.tokenizer.encode(before, add_bos=False)


def make_request(opening: list[int], seed: int) -> Request:
    """Returns the request for one prompt."""
    settings = Settings(
        max_new_tokens=_MAX_NEW_TOKENS.value,
        temperature=_TEMPERATURE.value,
        top_p=_TOP_P.value,
        seed=seed,
    )
    return Request(opening, settings)


def how_made() -> dict[str, Any]:
    """Returns what besides the seed decides a prompt."""
    flags_ = _TARGET, _DTYPE, _TEMPERATURE, _TOP_P, _MAX_NEW_TOKENS
    return {flag.name: flag.value for flag in flags_}


def read_done(path: pathlib.Path, records: Iterable[Record]) -> tuple[set[str], int]:
    """Returns the prompts that are there, and the seed behind the last one.

    Raises:
      InputError: a line that is no prompt of this script, or one that was made otherwise.
    """
    seen, behind = set(), 0
    for number, record in enumerate(records, 1):
        try:
            seen.add(str(record["prompt"]))
            behind = max(behind, int(record["seed"]) + 1)
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{path}:{number}: expected a prompt of this script") from None
        for name, value in how_made().items():
            if record.get(name) != value:
                raise InputError(f"{path}:{number}: made with {name} {record.get(name)!r}, not "
                                 f"{value!r}; take another --output_json")  # fmt: skip
    return seen, behind


if __name__ == "__main__":
    cli.run_main(main)
