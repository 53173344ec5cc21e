"""A prompt to the ids that the model is given."""

from collections.abc import Sequence

from jspec.errors import InputError
from jspec.weights.resolver import LoadedModel


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
        return [int(token_id) for token_id in prompt]
    if not prompt:
        raise InputError("expected a prompt, got an empty text")
    tokenizer = model.tokenizer
    if chat is None:
        chat = tokenizer.has_chat_template
    if not chat:
        if system is not None:
            raise InputError("a system message needs the chat template, which is off")
        return tokenizer.encode(prompt)
    if not tokenizer.has_chat_template:
        raise InputError(f"{model.name} has no chat template; ask without chat")
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": prompt})
    # The template writes BOS itself.
    return tokenizer.encode(tokenizer.chat_prompt(messages), add_bos=False)
