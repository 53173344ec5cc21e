"""Prompts: read from a JSONL file, and encoded into the token ids that a model is given."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jspec.common.errors import InputError, whole_number
from jspec.common.json_lines import check_unicode, read_json_lines, title_of
from jspec.common.shipped import find_shipped
from jspec.generation.request import Request
from jspec.models.config import EncoderConfig
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
    if not prompts_file:
        raise InputError("expected a file in --prompts_file, got an empty name")
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
      chat: whether to use the template; None does so if there is a template. Without it the
        texts are joined, with an empty line after each answer.
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


def read_prompt(
    target: LoadedModel, request: Request, *, chat: bool | None, system: str | None
) -> tuple[list[int], np.ndarray | None]:
    """Returns the token ids with which the decoder's text begins, and the encoder's source.

    Of a decoder alone the first are the prompt's, and there is no source.

    Raises:
      InputError: see `encode_prompt`; or a source that the model cannot read.
    """
    encoder = target.config.encoder
    if encoder is None:
        if request.source is not None:
            raise InputError(f"expected no source, as {target.name} has no encoder; got one")
        return encode_prompt(target, request.prompt, chat=chat, system=system), None
    if encoder.is_audio:
        if request.source is None:
            raise InputError(f"{target.name} hears: expected sound, as `jspec transcribe` reads it")
        if isinstance(request.prompt, str):
            raise InputError("expected the prompt of a model that hears as token ids, got a text")
        prompt = encode_prompt(target, request.prompt, chat=chat, system=system)
        return prompt, _check_spectrogram(encoder, request.source)
    if request.source is None:
        source = encode_text(target, request.prompt, chat=chat, system=system)
        return [encoder.start_id], _check_text(encoder, source)
    prompt = encode_prompt(target, request.prompt, chat=chat, system=system)
    return prompt, _check_text(encoder, request.source)


def encode_text(
    target: LoadedModel, prompt: str | Sequence[int], *, chat: bool | None, system: str | None
) -> list[int]:
    """Returns the token ids of a prompt, see `encode_prompt`; of a source with its end."""
    ids, encoder = encode_prompt(target, prompt, chat=chat, system=system), target.config.encoder
    is_source = encoder is not None and not encoder.is_audio
    return _with_end(target, ids) if is_source and isinstance(prompt, str) else ids


def _with_end(target: LoadedModel, source: Sequence[int]) -> list[int]:
    """Returns a text's ids with the end that a model's sources have, once."""
    end = target.config.eos_ids[:1]
    return [*source] if tuple(source[-1:]) == end else [*source, *end]


def _check_text(encoder: EncoderConfig, source: Any) -> np.ndarray:
    if isinstance(source, str) or not np.iterable(source):
        raise InputError(f"expected the source as a list of token ids, got {source!r}")
    ids = [whole_number("a source's token id", token_id) for token_id in source]
    if not 1 <= len(ids) <= encoder.max_len:
        most = f"a source of 1 to {encoder.max_len} tokens, which the encoder reads"
        raise InputError(f"expected {most}, got {len(ids)}")
    return np.array(ids, np.int64)


def _check_spectrogram(encoder: EncoderConfig, source: Any) -> np.ndarray:
    wanted = 2 * encoder.max_len, encoder.num_mels
    got = getattr(source, "shape", source)
    if not isinstance(source, np.ndarray) or source.shape != wanted:
        raise InputError(f"expected a spectrogram of {list(wanted)}, frames and mels; got {got}")
    if not np.isfinite(source).all():
        raise InputError("expected a spectrogram of finite numbers, got others")
    return source.astype(np.float32)
