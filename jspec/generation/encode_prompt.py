"""A prompt to the ids that the model is given."""

from collections.abc import Sequence
from typing import Any

from jspec.common.errors import InputError, whole_number
from jspec.weights.resolver import LoadedModel

_BETWEEN_TURNS = "\n\n"


def encode_prompt(
    model: LoadedModel, prompt: str | Sequence[int], *, chat: bool | None, system: str | None
) -> list[int]:
    """Returns the ids of a prompt.

    Args:
      model: whose tokenizer and chat template to use.
      prompt: a text, or ids, which are taken as they are.
      chat: whether to put a text into the chat template; None does if there is one.
      system: a system message for the template.

    Raises:
      InputError: an empty prompt, no chat template where one is asked for, or ids with a template.
    """
    if not isinstance(prompt, str):
        if chat or system is not None:
            raise InputError(
                "a prompt of token ids is taken as it is: expected no chat and no system with it"
            )
        return _token_ids(prompt)
    return encode_conversation(model, [prompt], [], chat=chat, system=system)


def _token_ids(prompt: Any) -> list[int]:
    try:
        ids = list(prompt)
    except TypeError:
        raise InputError(
            f"expected a prompt as a text, a list of token ids or a Request, got {prompt!r}"
        ) from None
    return [whole_number("a prompt's token id", token_id) for token_id in ids]


def encode_conversation(
    model: LoadedModel,
    turns: Sequence[str],
    answers: Sequence[str],
    *,
    chat: bool | None,
    system: str | None = None,
) -> list[int]:
    """Returns the ids of a conversation that waits for the model's next words.

    Args:
      model: whose tokenizer and chat template to use.
      turns: what the user has said.
      answers: what the model has said to all of them but the last.
      chat: whether to use the chat template; None does if there is one. Without it the texts stand
        one behind the other, and an empty line after each answer.
      system: a system message for the template.

    Raises:
      InputError: an empty turn, or no chat template where one is asked for.
    """
    if not all(turns):
        raise InputError("expected a prompt, got an empty text")
    tokenizer = model.tokenizer
    if chat is None:
        chat = tokenizer.has_chat_template
    if not chat:
        if system is not None:
            raise InputError("a system message needs the chat template, which is off")
        before = zip(turns[:-1], answers, strict=True)
        said = "".join(turn + answer + _BETWEEN_TURNS for turn, answer in before)
        return tokenizer.encode(said + turns[-1])
    if not tokenizer.has_chat_template:
        raise InputError(
            f"{model.name} has no chat template: expected --nochat (in Python chat=False)"
        )
    messages = [] if system is None else [{"role": "system", "content": system}]
    for turn, answer in zip(turns[:-1], answers, strict=True):
        messages.append({"role": "user", "content": turn})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": turns[-1]})
    # The template writes BOS itself.
    return tokenizer.encode(tokenizer.chat_prompt(messages), add_bos=False)
