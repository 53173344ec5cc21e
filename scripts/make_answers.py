"""Makes what drafters learn from: a target's answers, prompts where none are at hand, or counts.

python scripts/make_answers.py --prompts_file=PROMPTS.jsonl --output_json=answers.jsonl
python scripts/make_answers.py --what=prompts --num_prompts=2000 --output_json=prompts.jsonl
python scripts/make_answers.py --what=table --input=answers.jsonl --output=table.safetensors

Answers and prompts are added to their file, and a run that was killed goes on where it was; a line
that it tore is cut off. Prompt k has seed + k.

Prompts: a chat model is given what its chat template writes before a user's words, and goes on as
the user (Magpie, arXiv 2406.08464), so that the prompts are of the kinds that it was trained on.
Those that do not end within --max_new_tokens, are empty or were there before are left out.

A table holds counts of unigrams and bigrams for the drafters of these names; the target's own
answers are the best corpus, but texts serve as well.
"""

import dataclasses
import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from absl import flags

from jspec.cli import program as cli
from jspec.common.errors import InputError, check_range, say
from jspec.common.journal import Journal, Record
from jspec.common.json_lines import check_output
from jspec.common.progress import format_seconds
from jspec.drafters.tables import count_ngrams, save_table
from jspec.drafters.token_texts import read_token_texts
from jspec.generation.generator import Generator
from jspec.generation.prompts import read_prompts
from jspec.generation.request import Request, SamplingParams
from jspec.generation.result import check_answered
from jspec.weights.published import SMOLLM2
from jspec.weights.resolver import LoadedModel, load_model
from jspec.weights.vocabulary import used_vocab_size

_WHAT = flags.DEFINE_enum("what", "answers", ["answers", "prompts", "table"], "What to make.")
_TARGET = flags.DEFINE_string("target", SMOLLM2, "The model that answers.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Type of weights.")
_OUTPUT_JSON = flags.DEFINE_string("output_json", None, "File to add answers or prompts to.")
_PROMPTS_FILE = flags.DEFINE_string("prompts_file", None, "JSON lines with the prompts.")
_NUM_PROMPTS = flags.DEFINE_integer(
    "num_prompts", None, "For answers: how many prompts of the file; default: all. For prompts: "
    "how many to try to make; fewer come out. Default: 1000."
)  # fmt: skip
_MAX_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens", None, "Most tokens of an answer or a prompt. Default: 192 and 96."
)
_MAX_PROMPT_TOKENS = flags.DEFINE_integer("max_prompt_tokens", 256, "Leave longer prompts out.")
_TEMPERATURE = flags.DEFINE_float("temperature", None, "Default: 0 for answers, 1 for prompts.")
_TOP_P = flags.DEFINE_float("top_p", 0.95, "For prompts: top-p of what is sampled.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of prompt 0; prompt k has this plus k.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Number of rows that run together.")
_CHUNK = flags.DEFINE_integer("chunk", 128, "Number of prompts between two writes.")
_INPUT = flags.DEFINE_string(
    "input", None, "For table: JSON lines to count in, each with `token_ids` (as jspec.generate "
    "--output_json writes), `text`, `prompt` or `turns`; - for standard input."
)  # fmt: skip
_OUTPUT = flags.DEFINE_string("output", None, "For table: the safetensors file.")
_ORDER = flags.DEFINE_integer("order", 2, "For table: 1 counts unigrams, 2 bigrams too.")
_NUM_CONTINUATIONS = flags.DEFINE_integer(
    "num_continuations", 32, "For table: how many successors of each token to keep."
)
_COUNT_PROMPTS = flags.DEFINE_bool("count_prompts", True, "For table: count prompts too.")
_MARK = "\x00"


def main() -> None:
    """Makes what is wanted."""
    if _WHAT.value == "table":
        return make_table()
    check_range("batch_size", _BATCH_SIZE.value, 1, 4096)
    check_range("chunk", _CHUNK.value, 1, 10**6)
    check_range("num_prompts", 1 if _NUM_PROMPTS.value is None else _NUM_PROMPTS.value, 1, 10**7)
    if _WHAT.value == "prompts":
        (output,) = _required(_OUTPUT_JSON)
        return make_prompts(check_output(output))
    source, output = _required(_PROMPTS_FILE, _OUTPUT_JSON)
    make_answers(check_output(output, source), source)


def _required(*holders: flags.FlagHolder[str | None]) -> list[str]:
    if missing := [f"--{holder.name}" for holder in holders if not holder.value]:
        raise InputError(f"expected {' and '.join(missing)}")
    return [holder.value for holder in holders if holder.value]


def make_answers(path: pathlib.Path, prompts_file: str) -> None:
    """Answers the prompts that have no answer yet; the answers are added to `path`."""
    settings = settings_by_default(max_new_tokens=192, temperature=0.0)
    journal = Journal(path, lambda record: isinstance(record.get("index"), int))
    done = {record["index"]: record for record in _read(path, journal, "an answer", index=int)}
    texts = [prompt.text for prompt in read_prompts(prompts_file)][: _NUM_PROMPTS.value]
    if not texts:
        raise InputError(f"expected a prompt in {prompts_file}, got none")
    target = load_model(_TARGET.value, dtype=_DTYPE.value)
    length, context = _MAX_PROMPT_TOKENS.value + settings.max_new_tokens, target.config.max_seq_len
    if length > context:
        raise InputError(
            f"expected max_prompt_tokens + max_new_tokens within the target's context, {context}; "
            f"got {_MAX_PROMPT_TOKENS.value} + {settings.max_new_tokens}"
        )
    generator = _plain(target, length)
    fixed = _decisive(settings) | {"seed": _SEED.value}
    waiting = {}
    for index, text in enumerate(texts):
        ids = generator.encode_prompt(text)
        if index in done:
            _check_same(f"{path}: prompt {index}", done[index], fixed | {"prompt_token_ids": ids})
        elif len(ids) <= _MAX_PROMPT_TOKENS.value:
            waiting[index] = ids
    if not waiting:
        say(f"{path} has all answers: nothing to do")
    for chunk in _chunks(list(waiting)):
        seeded = {index: dataclasses.replace(settings, seed=_SEED.value + index) for index in chunk}
        requests = [Request(waiting[index], seeded[index]) for index in chunk]
        for piece in generator.run(requests):
            if (result := piece.result) is not None:
                check_answered([result])
                ids = {"prompt_token_ids": result.prompt_token_ids, "token_ids": result.token_ids}
                journal.append(fixed | {"index": chunk[piece.index]} | ids)


def make_prompts(path: pathlib.Path) -> None:
    """Lets a chat model make up prompts itself; they are added to `path`."""
    settings = settings_by_default(max_new_tokens=96, temperature=1.0, top_p=_TOP_P.value)
    journal = Journal(path, lambda record: isinstance(record.get("seed"), int))
    fixed = _decisive(settings) | {"top_p": settings.top_p}
    seen, first = set(), _SEED.value
    for line, record in enumerate(_read(path, journal, "a prompt", seed=int, prompt=str), 1):
        _check_same(f"{path}:{line}", record, fixed)
        seen.add(record["prompt"])
        first = max(first, record["seed"] + 1)
    target = load_model(_TARGET.value, dtype=_DTYPE.value)
    opening = opening_of(target)
    length = min(len(opening) + settings.max_new_tokens, target.config.max_seq_len)
    generator = _plain(target, length)
    for chunk in _chunks(range(first, _SEED.value + (_NUM_PROMPTS.value or 1000))):
        # In the order of their seeds: a run that goes on knows where.
        seeded = [dataclasses.replace(settings, seed=seed) for seed in chunk]
        results = generator.generate([Request(opening, settings_) for settings_ in seeded])
        for seed, result in zip(chunk, results, strict=True):
            text = result.text.strip()
            if result.finish_reason == "eos" and text and text not in seen:
                seen.add(text)
                journal.append({"prompt": text, "seed": seed} | fixed)
    print(f"{path}: {len(seen)} prompts; texts that were cut, empty or made before are left out")


def make_table() -> None:
    """Counts n-grams and writes the table, which appears when it is complete."""
    source, goal = _required(_INPUT, _OUTPUT)
    check_range("order", _ORDER.value, 1, 2)
    check_range("num_continuations", _NUM_CONTINUATIONS.value, 1, 4096)
    output = check_output(goal, source)
    model = load_model(_TARGET.value)
    texts = read_token_texts(source, model.tokenizer, with_prompts=_COUNT_PROMPTS.value)
    most = _NUM_CONTINUATIONS.value
    table = count_ngrams(texts, used_vocab_size(model), order=_ORDER.value, num_continuations=most)
    save_table(table, output, model.tokenizer)
    print(f"wrote {goal}: {table.num_tokens} tokens counted")


def settings_by_default(**default: Any) -> SamplingParams:
    """Returns how texts are drawn: as the flags say, or else by default."""
    for flag in (_MAX_NEW_TOKENS, _TEMPERATURE):
        default[flag.name] = default[flag.name] if flag.value is None else flag.value
    return SamplingParams(**default)


def opening_of(target: LoadedModel) -> list[int]:
    """Returns the ids of what stands before a user's words.

    Raises:
      InputError: the model has no chat template, or one that does not repeat a user's words.
    """
    if target.tokenizer.chat_template is None:
        raise InputError(f"expected a model with a chat template, {target.name} has none")
    text = target.tokenizer.chat_prompt([{"role": "user", "content": _MARK}])
    before, mark, _ = text.partition(_MARK)
    if not mark or not before:
        raise InputError(f"expected a chat template with a user's words inside, got {text!r}")
    return target.tokenizer.encode(before, add_bos=False)


def _check_same(where: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Checks that a line of the file was made as we would make it.

    Raises:
      InputError: it was not; the message names what differs.
    """
    for name, value in ours.items():
        if theirs.get(name) != value:
            how = f"with {name} {theirs.get(name)!r}, not {value!r}"
            if name == "prompt_token_ids":
                how = "for another prompt"
            raise InputError(f"{where}: made {how}; take another --output_json")


def _plain(target: LoadedModel, max_len: int) -> Generator:
    return Generator(target, drafter="none", batch_size=_BATCH_SIZE.value, max_seq_len=max_len)


def _decisive(settings: SamplingParams) -> dict[str, Any]:
    return {
        "target": _TARGET.value,
        "dtype": _DTYPE.value,
        "temperature": settings.temperature,
        "max_new_tokens": settings.max_new_tokens,
    }


def _chunks(items: Iterable[int]) -> Iterator[list[int]]:
    """Yields a few items at a time, and says after each time how many are done."""
    items, begin = list(items), time.monotonic()
    for first in range(0, len(items), _CHUNK.value):
        chunk = items[first : first + _CHUNK.value]
        yield chunk
        done = first + len(chunk)
        left = (time.monotonic() - begin) / done * (len(items) - done)
        say(f"{done} of {len(items)} prompts, about {format_seconds(left)} left")


def _read(path: pathlib.Path, journal: Journal, what: str, **kinds: type) -> list[Record]:
    """Returns the records of a file; a line that was torn at its end is cut off.

    Raises:
      InputError: a line that is not one of this script's, with values of these kinds.
    """
    records = journal.read() if path.exists() else []
    for number, record in enumerate(records, 1):
        if not all(isinstance(record.get(key), kind) for key, kind in kinds.items()):
            raise InputError(f"{path}:{number}: expected {what} of this script")
    return records


if __name__ == "__main__":
    cli.run_main(main)
