"""Prompts: read from a JSONL file, and encoded into the token ids that a model is given."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jspec.common.errors import InputError, whole_number
from jspec.common.json_lines import check_unicode, read_json_lines, title_of
from jspec.common.shipped import find_shipped
from jspec.weights.resolver import LoadedModel

_MAX_SHOWN = 60  # characters of a bad value in an error message
_BETWEEN_TURNS = "\n\n"


class Prompt(NamedTuple):
    """One line of a prompts file; `later_turns` are the user's messages after each answer."""

    text: str
    category: str | None = None
    later_turns: tuple[str, ...] = ()

    @property
    def turns(self) -> tuple[str, ...]:
        """All messages of the user."""
        return (self.text, *self.later_turns)


def read_prompts(path: str) -> Iterator[Prompt]:
    """Yields the prompts of a JSONL file, line by line.

    Each line is an object with a text `prompt`, or with a list `turns` as in Spec-Bench, the first
    of which is the prompt; it may have a `category`. "-" is standard input; of jspec's own files,
    such as "configs/prompts.jsonl", the name is enough.

    Raises:
      InputError: if the file cannot be read or a line is broken; the message names file and line.
    """
    for where, record in read_json_lines(find_shipped(path), "the prompts file"):
        text, *later = (check_unicode(turn, where) for turn in _turns_of(record, where))
        category = record.get("category")
        yield Prompt(text, None if category is None else str(category), tuple(later))


def prompts_of(prompt: str | None, prompts_file: str | None) -> list[Prompt]:
    """Returns the prompts that a program's flags give.

    Raises:
      InputError: no prompt at all, two sources of them, an empty or broken text, or a broken
        line anywhere in the file.
    """
    if (prompt is None) == (prompts_file is None):
        given = "neither" if prompt is None else "both"
        raise InputError(f"expected either --prompt or --prompts_file, got {given}")
    if prompts_file is None:
        if not prompt:
            raise InputError("expected a text in --prompt, got an empty one")
        return [Prompt(check_unicode(prompt, "--prompt"))]
    texts = list(read_prompts(prompts_file))
    if not texts:
        raise InputError(f"expected at least one prompt in {title_of(prompts_file)}, got none")
    return texts


def _turns_of(record: Any, where: str) -> list[str]:
    if not isinstance(record, dict) or not record.keys() & {"prompt", "turns"}:
        raise InputError(
            f'{where}: expected an object with a text "prompt" or a list "turns", got '
            f"{_shown(record)}"
        )
    name = "prompt" if "prompt" in record else "turns"
    value = record[name]
    turns = [value] if name == "prompt" else value
    if isinstance(turns, list) and turns and all(isinstance(t, str) and t for t in turns):
        return turns
    expected = "a text that is not empty" if name == "prompt" else "a list of texts, none empty"
    raise InputError(f'{where}: expected "{name}" as {expected}; got {_shown(value)}')


def _shown(value: Any) -> str:
    """Returns a value as JSON, cut if it is long."""
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def encode_prompt(
    model: LoadedModel, prompt: str | Sequence[int], *, chat: bool | None, system: str | None
) -> list[int]:
    """Returns the token ids of a prompt.

    Raises:
      InputError: see `encode_conversation`; or token ids, which are taken as they are, are to be
        put into a template.
    """
    if not isinstance(prompt, str):
        if chat or system is not None:
            raise InputError(
                "a prompt of token ids is taken as it is: expected no chat and no system with it"
            )
        if not isinstance(prompt, Iterable):
            expected = "a prompt as a text, a list of token ids or a Request"
            raise InputError(f"expected {expected}, got {prompt!r}")
        return [whole_number("a prompt's token id", token_id) for token_id in prompt]
    return encode_conversation(model, [prompt], [], chat=chat, system=system)


def encode_conversation(
    model: LoadedModel,
    turns: Sequence[str],
    answers: Sequence[str],
    *,
    chat: bool | None,
    system: str | None = None,
) -> list[int]:
    """Returns the token ids of a conversation in which the model speaks next.

    Args:
      model: the model whose tokenizer and chat template are used.
      turns: the user's messages.
      answers: the model's answers to all of them but the last.
      chat: whether to use the template; None does so if there is one. Without it the texts are
        joined, with an empty line after each answer.
      system: a system message for the template.

    Raises:
      InputError: an empty message or one that is not UTF-8, or no template where `chat` wants it.
    """
    if not all(turns):
        raise InputError("expected a prompt, got an empty text")
    tokenizer = model.tokenizer
    if chat is None:
        chat = tokenizer.chat_template is not None
    if not chat:
        if system is not None:
            has_one = tokenizer.chat_template is not None
            off, none = "--nochat (chat=False) turns it off", f"{model.name} has none"
            why = off if has_one else f"{none}: put what it says into the prompt"
            raise InputError(f"a system message needs the chat template; {why}")
        before = zip(turns[:-1], answers, strict=True)
        said = "".join(turn + answer + _BETWEEN_TURNS for turn, answer in before)
        return tokenizer.encode(said + turns[-1])
    if tokenizer.chat_template is None:
        raise InputError(
            f"{model.name} has no chat template: expected --nochat (in Python chat=False)"
        )
    messages = [] if system is None else [{"role": "system", "content": system}]
    for turn, answer in zip(turns[:-1], answers, strict=True):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": turns[-1]})
    # The template writes BOS itself.
    return tokenizer.encode(tokenizer.chat_prompt(messages), add_bos=False)
