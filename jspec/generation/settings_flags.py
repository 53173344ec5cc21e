"""Flags that say how tokens are sampled and drafts accepted, for the programs that sample."""

from absl import flags

from jspec.common.cli import list_flags
from jspec.common.errors import InputError
from jspec.generation.request import Settings
from jspec.speculation.acceptance import RULES, RuleOptions, get_rule

_DRAFT_TEMPERATURE = flags.DEFINE_float(
    "draft_temperature", None, "The drafter's own temperature. Default: --temperature. The "
    "output's distribution does not depend on it."
)  # fmt: skip
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 takes the most likely token.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Keep this many of the most likely tokens; 0 keeps all.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Keep the most likely tokens that reach this together.")
_MIN_P = flags.DEFINE_float("min_p", 0.0, "Keep tokens at least this likely relative to the best.")
_REPETITION_PENALTY = flags.DEFINE_float(
    "repetition_penalty", 1.0, "Divides positive logits of tokens in prompt or output."
)
_PRESENCE_PENALTY = flags.DEFINE_float(
    "presence_penalty", 0.0, "Taken off the logits of tokens in the output, -2 to 2."
)
_FREQUENCY_PENALTY = flags.DEFINE_float(
    "frequency_penalty", 0.0, "Likewise, times their count in the output, -2 to 2."
)
_LOGIT_BIAS = flags.DEFINE_list(
    "logit_bias", [], "Numbers added to logits: ID:NUMBER, separated by commas."
)
_ALLOWED_TOKEN_IDS = flags.DEFINE_list("allowed_token_ids", None, "No other token may come.")
_FORBIDDEN_TOKEN_IDS = flags.DEFINE_list("forbidden_token_ids", [], "These tokens may not come.")
_MIN_NEW_TOKENS = flags.DEFINE_integer(
    "min_new_tokens", 0, "End-of-text and stop tokens are suppressed until then."
)
_LOGPROBS = flags.DEFINE_bool(
    "logprobs", False, "Report each token's log-probability under the target."
)
_ACCEPTANCE = flags.DEFINE_enum(
    "acceptance", "rejection", list(RULES), "The acceptance rule. lenient, lenient_argmax and "
    "typical are lossy: they change what the model says."
)  # fmt: skip
_LENIENCE = flags.DEFINE_float(
    "lenience", RuleOptions.lenience, "Of lenient and lenient_argmax, from 0 to 1; 1 is none."
)
_TYPICAL_EPSILON = flags.DEFINE_float(
    "typical_epsilon", RuleOptions.typical_epsilon, "Of typical: a probability always enough."
)
_TYPICAL_DELTA = flags.DEFINE_float(
    "typical_delta", RuleOptions.typical_delta, "Of typical: enough, times exp(-entropy)."
)
_SEED = flags.DEFINE_integer("seed", 0, "Seeds everything that is random.")

list_flags(
    "Sampling",
    "temperature top_k top_p seed",
    "min_p draft_temperature repetition_penalty presence_penalty frequency_penalty logit_bias "
    "allowed_token_ids forbidden_token_ids min_new_tokens logprobs",
)
list_flags("Acceptance", "acceptance", "lenience typical_epsilon typical_delta")


def read_settings(*, max_new_tokens: int, stop: tuple[str, ...] = ()) -> Settings:
    """Returns the settings that the flags ask for.

    Args:
      max_new_tokens: the most tokens to emit.
      stop: texts that end the answer.

    Raises:
      InputError: a value out of range or not a number.
    """
    allowed = _ALLOWED_TOKEN_IDS.value
    return Settings(
        max_new_tokens=max_new_tokens,
        temperature=_TEMPERATURE.value,
        top_k=_TOP_K.value,
        top_p=_TOP_P.value,
        min_p=_MIN_P.value,
        draft_temperature=_DRAFT_TEMPERATURE.value,
        repetition_penalty=_REPETITION_PENALTY.value,
        presence_penalty=_PRESENCE_PENALTY.value,
        frequency_penalty=_FREQUENCY_PENALTY.value,
        logit_bias=dict(map(_parse_bias, _LOGIT_BIAS.value)),
        allowed_token_ids=None if allowed is None else _parse_ids("allowed_token_ids", allowed),
        forbidden_token_ids=_parse_ids("forbidden_token_ids", _FORBIDDEN_TOKEN_IDS.value),
        min_new_tokens=_MIN_NEW_TOKENS.value,
        logprobs=_LOGPROBS.value,
        seed=_SEED.value,
        stop=stop,
    )


def read_rule() -> tuple[str, RuleOptions]:
    """Returns the acceptance rule that the flags ask for, and its options.

    Raises:
      InputError: an option out of its range.
    """
    options = RuleOptions(
        lenience=_LENIENCE.value,
        typical_epsilon=_TYPICAL_EPSILON.value,
        typical_delta=_TYPICAL_DELTA.value,
    )
    get_rule(_ACCEPTANCE.value, options)
    return _ACCEPTANCE.value, options


def _parse_bias(text: str) -> tuple[int, float]:
    token_id, _, number = text.partition(":")
    try:
        return int(token_id), float(number)
    except ValueError:
        raise InputError(f"expected logit_bias as ID:NUMBER, got {text!r}") from None


def _parse_ids(name: str, texts: list[str]) -> tuple[int, ...]:
    try:
        return tuple(map(int, texts))
    except ValueError:
        raise InputError(f"expected {name} to be whole numbers, got {','.join(texts)!r}") from None
