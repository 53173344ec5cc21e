"""Texts of token ids from a JSONL file: answers of jspec.generate, or texts to be tokenised."""

from collections.abc import Iterator
from typing import Any

from jspec.common.errors import InputError
from jspec.common.json_lines import check_unicode, read_json_lines
from jspec.weights import TokenizerLike


def read_token_texts(
    path: str, tokenizer: TokenizerLike, *, with_prompts: bool
) -> Iterator[list[int]]:
    """Yields token ids, text by text.

    Args:
      path: of the file, or "-" for standard input. Each line is an object with `token_ids` and
        perhaps `prompt_token_ids`, as `python -m jspec.generate --output_json` writes, or with
        `text`, `prompt` or a list `turns`, of which the first that is there counts.
      tokenizer: for texts; no BOS is added.
      with_prompts: whether `prompt_token_ids` come before `token_ids`.

    Raises:
      InputError: an unreadable file, or a line with none of these.
    """
    for where, record in read_json_lines(path, "the input"):
        if not isinstance(record, dict):
            raise InputError(f"{where}: expected an object")
        if "token_ids" in record:
            names = ("prompt_token_ids", "token_ids") if with_prompts else ("token_ids",)
            yield [i for name in names for i in _check_ids(record.get(name, []), name, where)]
        else:
            for text in _texts_of(record, where):
                yield tokenizer.encode(check_unicode(text, where), add_bos=False)


def _check_ids(ids: Any, name: str, where: str) -> list[int]:
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise InputError(f"{where}: expected {name} to be a list of whole numbers")
    return ids


def _texts_of(record: dict[str, Any], where: str) -> list[str]:
    names = ("text", "prompt", "turns")
    found: Any = next((record[name] for name in names if name in record), None)
    texts = found if isinstance(found, list) else [found]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(
            f'{where}: expected "token_ids", or a text "text" or "prompt", or a list "turns"'
        )
    return texts
