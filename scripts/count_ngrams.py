"""Counts unigrams and bigrams into a table for the drafters `unigram` and `bigram`.

python -m jspec.generate --prompts_file=PROMPTS.jsonl --drafter=none --output_json=answers.jsonl
python scripts/count_ngrams.py --input=answers.jsonl --output=table.safetensors
python -m jspec.generate --drafter=bigram --draft_table=table.safetensors --prompt="Hello"

The target's own answers are the best corpus; texts do as well.
"""

import pathlib

from absl import flags

from jspec.common import cli
from jspec.common.errors import InputError, check_range
from jspec.common.json_lines import check_output
from jspec.drafters.count_ngrams import count_ngrams
from jspec.drafters.ngram_table import NgramTable, save_table
from jspec.generation.generator import DEFAULT_TARGET
from jspec.training.texts import read_token_texts
from jspec.weights import load_model
from jspec.weights.vocabulary import used_vocab_size

_TARGET = flags.DEFINE_string("target", DEFAULT_TARGET, "The target, for its tokenizer.")
_INPUT = flags.DEFINE_string(
    "input", None, "JSONL with `token_ids`, as jspec.generate --output_json writes, or `text`, "
    "`prompt` or `turns` a line; - for standard input."
)  # fmt: skip
_OUTPUT = flags.DEFINE_string("output", None, "The table, a safetensors file.")
_ORDER = flags.DEFINE_integer("order", 2, "1 counts unigrams only, 2 bigrams as well.")
_NUM_CONTINUATIONS = flags.DEFINE_integer(
    "num_continuations", 32, "How many of the tokens that followed one are kept."
)
_COUNT_PROMPTS = flags.DEFINE_bool("count_prompts", True, "Count `prompt_token_ids`, too.")


def count(
    *, target: str, source: str, output: pathlib.Path, order: int, num_continuations: int,
    with_prompts: bool,
) -> NgramTable:  # fmt: skip
    """Counts a file's n-grams and writes the table.

    Args:
      target: a name that `load_model` takes.
      source: the JSONL file; see `read_token_texts`.
      output: the table, which appears when it is complete.
      order: 1 or 2.
      num_continuations: see `count_ngrams`.
      with_prompts: see `read_token_texts`.

    Raises:
      InputError: no such model, a broken line, nothing to count, or no place to write.
    """
    model = load_model(target)
    texts = read_token_texts(source, model.tokenizer, with_prompts=with_prompts)
    table = count_ngrams(
        texts, used_vocab_size(model), order=order, num_continuations=num_continuations
    )
    save_table(table, output, model.tokenizer)
    return table


def main() -> None:
    """Reads the flags and counts."""
    if not _INPUT.value or not _OUTPUT.value:
        raise InputError("expected --input and --output")
    check_range("order", _ORDER.value, 1, 2)
    check_range("num_continuations", _NUM_CONTINUATIONS.value, 1, 4096)
    table = count(
        target=_TARGET.value,
        source=_INPUT.value,
        output=check_output(_OUTPUT.value, _INPUT.value),
        order=_ORDER.value,
        num_continuations=_NUM_CONTINUATIONS.value,
        with_prompts=_COUNT_PROMPTS.value,
    )
    print(f"wrote {_OUTPUT.value}: {table.num_tokens} tokens counted")


if __name__ == "__main__":
    cli.run_main(main)
