"""A request as one row of a batch, and the checks that need both the request and the model."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from jspec.common.errors import InputError
from jspec.generation.request import Settings
from jspec.models import LlamaConfig
from jspec.speculation.acceptance.types import Temperatures

MAX_STOP_IDS = 8


class CostsAt(NamedTuple):
    """What the rounds of one row cost at its length; see `Control`.

    Attributes:
      rounds: seconds of a round, by drafter and number of drafts, [m c].
      reading: seconds per token that a drafter has not read yet, [m].
    """

    rounds: np.ndarray
    reading: np.ndarray


class Row(NamedTuple):
    """A request in the form that the engine takes.

    Attributes:
      settings: the user's settings.
      prompt: token ids of the prompt.
      stop_ids: every token that ends the answer, at most `MAX_STOP_IDS`.
      max_length: maximum number of tokens, prompt included.
      costs: costs of this row's rounds; None where the number of drafts is fixed.
    """

    settings: Settings
    prompt: Sequence[int]
    stop_ids: Sequence[int]
    max_length: int
    costs: CostsAt | None = None


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
    """Returns the row of a request, after checking that the model can answer it.

    Args:
      prompt: token ids of the prompt.
      settings: how to answer.
      config: the target's configuration.
      vocab_size: number of token ids that the target really uses.
      max_seq_len: maximum number of tokens of prompt and answer together.
      acceptance: name of the acceptance rule.
      temperatures: the temperatures that this rule accepts.

    Raises:
      InputError: if the model or the acceptance rule cannot answer the request.
    """
    if not prompt:
        raise InputError("expected a prompt of at least one token, got none")
    if len(prompt) >= max_seq_len:
        raise InputError(
            f"expected a prompt of fewer tokens than the context's {max_seq_len}, got {len(prompt)}"
        )
    _check_ids("prompt token ids", prompt, config.vocab_size)
    stop_ids = {*config.eos_ids, *settings.stop_token_ids}
    if len(stop_ids) > MAX_STOP_IDS:
        raise InputError(
            f"expected at most {MAX_STOP_IDS} stop token ids, the model's own among them, got "
            f"{len(stop_ids)}"
        )
    _check_token_settings(settings, stop_ids, vocab_size)
    check_temperature(acceptance, temperatures, settings.temperature)
    max_length = min(len(prompt) + settings.max_new_tokens, max_seq_len)
    return Row(settings, prompt, tuple(stop_ids), max_length)


def _check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    """Checks that all token ids lie in the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise InputError(
            f"expected {name} from 0 to {vocab_size - 1}, got some from {min(ids)} to {max(ids)}"
        )


def _check_token_settings(settings: Settings, stop_ids: Collection[int], vocab_size: int) -> None:
    """Checks that settings name tokens of the vocabulary and leave at least one to emit."""
    _check_ids("logit_bias for token ids", dict(settings.logit_bias), vocab_size)
    _check_ids("allowed_token_ids", settings.allowed_token_ids or (), vocab_size)
    _check_ids("forbidden_token_ids", settings.forbidden_token_ids, vocab_size)
    forbidden = set(settings.forbidden_token_ids)
    ends = {token_id for token_id in stop_ids if token_id < vocab_size} - forbidden
    num_left = vocab_size - len(forbidden)
    if settings.allowed_token_ids is not None:
        left = set(settings.allowed_token_ids) - forbidden
        ends, num_left = ends & left, len(left)
    if not num_left:
        raise InputError(
            "expected allowed_token_ids and forbidden_token_ids to leave at least one token, got "
            "every one forbidden"
        )
    if settings.min_new_tokens and num_left == len(ends):
        raise InputError(
            "expected a token besides those that end the answer, for min_new_tokens "
            f"{settings.min_new_tokens}; got none allowed"
        )


def check_temperature(acceptance: str, expected: Temperatures, temperature: float) -> None:
    """Checks that an acceptance rule can be used at a temperature.

    Args:
      acceptance: name of the rule.
      expected: the temperatures that it accepts.
      temperature: the temperature of the request.

    Raises:
      InputError: if it cannot.
    """
    is_accepted = {
        Temperatures.ANY: True,
        Temperatures.ZERO: temperature == 0,
        Temperatures.POSITIVE: temperature > 0,
    }[expected]
    if not is_accepted:
        raise InputError(
            f"the acceptance rule {acceptance!r} expects temperature {expected.value}, "
            f"got {temperature}"
        )
