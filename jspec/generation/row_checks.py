"""Whether a request can be answered by a model: what only the two together decide."""

from collections.abc import Collection

from jspec.common.errors import InputError
from jspec.generation.engine import MAX_STOP_IDS, Row
from jspec.generation.request import Settings
from jspec.models import LlamaConfig
from jspec.speculation.acceptance.types import Temperatures


def make_row(
    prompt: list[int],
    settings: Settings,
    *,
    config: LlamaConfig,
    vocab_size: int,
    max_seq_len: int,
    acceptance: str,
    temperatures: Temperatures,
) -> Row:
    """Returns a request in the form that the engine wants.

    Args:
      prompt: its token ids.
      settings: how to answer.
      config: the target's.
      vocab_size: ids that the target really uses.
      max_seq_len: tokens that prompt and answer may come to.
      acceptance: the rule's name.
      temperatures: those that the rule is meant for.

    Raises:
      InputError: the model, or the rule, cannot answer that.
    """
    if not prompt:
        raise InputError("expected a prompt of at least one token, got none")
    if len(prompt) >= max_seq_len:
        raise InputError(
            f"expected a prompt of fewer tokens than the context's {max_seq_len}, got {len(prompt)}"
        )
    check_ids("prompt token ids", prompt, config.vocab_size)
    stop_ids = {*config.eos_ids, *settings.stop_token_ids}
    if len(stop_ids) > MAX_STOP_IDS:
        raise InputError(
            f"expected at most {MAX_STOP_IDS} stop token ids, the model's own among them, got "
            f"{len(stop_ids)}"
        )
    check_token_settings(settings, stop_ids, vocab_size)
    check_temperature(acceptance, temperatures, settings.temperature)
    return Row(
        settings=settings,
        prompt=prompt,
        stop_ids=tuple(stop_ids),
        max_length=min(len(prompt) + settings.max_new_tokens, max_seq_len),
    )


def check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    """Checks token ids.

    Args:
      name: what they are.
      ids: the ids.
      vocab_size: of the model.

    Raises:
      InputError: an id outside the vocabulary.
    """
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise InputError(
            f"expected {name} from 0 to {vocab_size - 1}, got some from {min(ids)} to {max(ids)}"
        )


def check_token_settings(settings: Settings, stop_ids: Collection[int], vocab_size: int) -> None:
    """Checks the settings that name tokens.

    Args:
      settings: of the request.
      stop_ids: every token that ends it.
      vocab_size: ids that the model really uses.

    Raises:
      InputError: an id outside the vocabulary, or no token left to emit.
    """
    allowed = settings.allowed_token_ids
    check_ids("logit_bias for token ids", dict(settings.logit_bias), vocab_size)
    check_ids("allowed_token_ids", allowed or (), vocab_size)
    check_ids("forbidden_token_ids", settings.forbidden_token_ids, vocab_size)
    forbidden = set(settings.forbidden_token_ids)
    num_left = vocab_size - len(forbidden) if allowed is None else len(set(allowed) - forbidden)
    if not num_left:
        raise InputError(
            "expected allowed_token_ids and forbidden_token_ids to leave at least one token, got "
            "every one forbidden"
        )
    if settings.min_new_tokens:
        early = {token_id for token_id in stop_ids if token_id < vocab_size} - forbidden
        early = early if allowed is None else early & set(allowed)
        if num_left == len(early):
            raise InputError(
                "expected a token besides those that end the answer, for min_new_tokens "
                f"{settings.min_new_tokens}; got none allowed"
            )


def check_temperature(acceptance: str, expected: Temperatures, temperature: float) -> None:
    """Checks that a rule is meant for a temperature.

    Raises:
      InputError: it is not.
    """
    is_right = {
        Temperatures.ANY: True,
        Temperatures.ZERO: temperature == 0,
        Temperatures.POSITIVE: temperature > 0,
    }[expected]
    if not is_right:
        raise InputError(
            f"the acceptance rule {acceptance!r} expects temperature {expected.value}, "
            f"got {temperature}"
        )
