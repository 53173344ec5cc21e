"""Whether a request can be answered by a model: what only the two together decide."""

from collections.abc import Collection

from jspec.errors import InputError
from jspec.request import Settings
from jspec.speculation.types import AcceptanceRule, Temperatures


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
    check_ids("logit_bias for token ids", [pair[0] for pair in settings.logit_bias], vocab_size)
    check_ids("allowed_token_ids", allowed or (), vocab_size)
    check_ids("forbidden_token_ids", settings.forbidden_token_ids, vocab_size)
    left = set(range(vocab_size) if allowed is None else allowed) - {*settings.forbidden_token_ids}
    if not left:
        raise InputError("expected at least one token that is allowed, got every one forbidden")
    if settings.min_new_tokens and left <= set(stop_ids):
        raise InputError(
            "expected a token besides those that end the answer, for min_new_tokens "
            f"{settings.min_new_tokens}; got none allowed"
        )


def check_temperature(name: str, rule: AcceptanceRule, temperature: float) -> None:
    """Checks that a rule is meant for a temperature.

    Raises:
      InputError: it is not.
    """
    expected = rule.temperatures
    is_right = {
        Temperatures.ANY: True,
        Temperatures.ZERO: temperature == 0,
        Temperatures.POSITIVE: temperature > 0,
    }[expected]
    if not is_right:
        raise InputError(
            f"the acceptance rule {name!r} expects a temperature {expected.value}, "
            f"got {temperature}"
        )
