"""Flags of the programs that answer prompts: which models, how tokens are sampled and accepted."""

import functools
from typing import Any

from absl import flags

from jspec.common.cli import list_flags
from jspec.common.errors import InputError
from jspec.drafters import DEFAULT_NUM_DRAFT_TOKENS, choose_drafter
from jspec.generation.drafter_flags import read_drafter
from jspec.generation.flag_values import (
    QUANTIZATION_FLAG,
    parse_num_draft_tokens,
    parse_quantization,
)
from jspec.generation.generator import DEFAULT_TARGET
from jspec.generation.request import Settings
from jspec.generation.validate_options import (
    check_draft_temperature,
    check_num_draft_tokens,
    check_rule_options,
)
from jspec.speculation.acceptance import RULES, RuleOptions, get_rule
from jspec.weights.resolver import LoadedModel, load_model

TARGET = flags.DEFINE_string(
    "target", DEFAULT_TARGET, "The model whose answers are wanted: a Hugging Face folder or hub "
    "name, a .gguf file, an Orbax folder, smollm2-135m-instruct, or random:<preset>."
)  # fmt: skip
DRAFT = flags.DEFINE_string(
    "draft", None, "A cheaper model with the same vocabulary, named as --target is."
)
_NUM_DRAFT_TOKENS = flags.DEFINE_string(
    "num_draft_tokens", str(DEFAULT_NUM_DRAFT_TOKENS), "Drafts a round; auto chooses "
    "them, round by round, from what has been accepted and what rounds cost on this machine."
)  # fmt: skip
_DTYPE = flags.DEFINE_enum(
    "dtype", "bfloat16", ["bfloat16", "float32"], "The type of weights and caches."
)
_TARGET_QUANTIZATION = flags.DEFINE_enum(
    "target_quantization",
    "auto",
    QUANTIZATION_FLAG,
    "int8 and int4 round the target's weights to integers, which makes it another model; packed "
    "leaves those of a .gguf file as they are, none makes them floats. auto: packed for a .gguf "
    "file where the processor multiplies it fast (AVX-512), else none.",
)
_DRAFT_QUANTIZATION = flags.DEFINE_enum(
    "draft_quantization",
    "auto",
    QUANTIZATION_FLAG,
    "The same for the draft model's weights, which changes no answer's distribution.",
)
_LOGIT_BIAS = flags.DEFINE_list(
    "logit_bias", [], "Numbers added to logits: ID:NUMBER, separated by commas."
)
_ALLOWED_TOKEN_IDS = flags.DEFINE_list("allowed_token_ids", None, "No other token may come.")
_FORBIDDEN_TOKEN_IDS = flags.DEFINE_list("forbidden_token_ids", [], "These tokens may not come.")
_ACCEPTANCE = flags.DEFINE_string(
    "acceptance", "rejection", f"The acceptance rule: {', '.join(RULES)}. The last three are "
    "lossy: they change what the model says."
)  # fmt: skip


def _define(options: type, **helps: str) -> list[flags.FlagHolder[Any]]:
    """Defines the flags of some fields of `Settings` or `RuleOptions`, by their defaults' types."""
    makers = {int: flags.DEFINE_integer, bool: flags.DEFINE_bool}
    defaults = {name: getattr(options, name) for name in helps}
    return [
        makers.get(type(default), flags.DEFINE_float)(name, default, helps[name])
        for name, default in defaults.items()
    ]


_SETTINGS = _define(
    Settings,
    max_new_tokens="Tokens an answer may have.",
    draft_temperature="The drafter's own temperature. Default: --temperature. The output's "
    "distribution does not depend on it.",
    temperature="0 takes the most likely token.",
    top_k="Keep this many of the most likely tokens; 0 keeps all.",
    top_p="Keep the most likely tokens that reach this together.",
    min_p="Keep tokens at least this likely relative to the best.",
    repetition_penalty="Divides positive logits of tokens in prompt or output.",
    presence_penalty="Subtracted from the logits of tokens in the output, -2 to 2.",
    frequency_penalty="Subtracted from a token's logit for each time it is in the output, -2 to 2.",
    min_new_tokens="End-of-text and stop tokens are suppressed until then.",
    logprobs="Report each token's log-probability under the target.",
    seed="Seeds everything that is random.",
)
_RULE_OPTIONS = _define(
    RuleOptions,
    lenience="Of the rules lenient and lenient_argmax, from 0 to 1; 1 is no lenience.",
    typical_epsilon="Of the rule typical: a probability that is always enough.",
    typical_delta="Of the rule typical: this times exp(-entropy) is enough, too.",
)

list_flags("Models", "target draft dtype draft_quantization", "target_quantization max_seq_len")
list_flags(
    "Sampling",
    "temperature top_k top_p seed",
    "min_p draft_temperature repetition_penalty presence_penalty frequency_penalty logit_bias "
    "allowed_token_ids forbidden_token_ids min_new_tokens logprobs",
)
list_flags("Acceptance", "acceptance", "lenience typical_epsilon typical_delta")


def read_settings(stop: tuple[str, ...] = ()) -> Settings:
    """Returns the settings that the flags ask for, with these stop strings.

    Raises:
      InputError: a value out of range or not a number.
    """
    allowed = _ALLOWED_TOKEN_IDS.value
    return Settings(
        logit_bias=dict(map(_parse_bias, _LOGIT_BIAS.value)),
        allowed_token_ids=None if allowed is None else _parse_ids("allowed_token_ids", allowed),
        forbidden_token_ids=_parse_ids("forbidden_token_ids", _FORBIDDEN_TOKEN_IDS.value),
        stop=stop,
        **{holder.name: holder.value for holder in _SETTINGS},
    )


def read_method(settings: Settings) -> dict[str, Any]:
    """Returns the options of a `Generator` that the flags ask for: its drafter and its rule.

    Raises:
      InputError: an option out of its range, or one that is not read; no model is loaded before.
    """
    name, drafter_options = read_drafter()
    has_draft = DRAFT.value is not None
    if not has_draft and _DRAFT_QUANTIZATION.value != "auto":
        raise InputError("draft_quantization expects a draft model (--draft), got none")
    drafter = choose_drafter(
        name, has_draft=has_draft, target=TARGET.value, options=drafter_options
    )
    number, acceptance = parse_num_draft_tokens(_NUM_DRAFT_TOKENS.value), _ACCEPTANCE.value
    rule_options = RuleOptions(**{holder.name: holder.value for holder in _RULE_OPTIONS})
    get_rule(acceptance, rule_options)  # checks the options of all rules
    check_num_draft_tokens(number, drafter)
    check_rule_options(rule_options, acceptance, drafter)
    check_draft_temperature(settings, [(drafter, drafter_options)])
    return {
        "drafter": drafter,
        "drafter_options": drafter_options,
        "num_draft_tokens": number,
        "acceptance": acceptance,
        "rule_options": rule_options,
    }


def load_models() -> tuple[LoadedModel, LoadedModel | None]:
    """Returns the target and the draft model, None without one, that the flags name."""
    load = functools.partial(load_model, dtype=_DTYPE.value)
    target = load(TARGET.value, quantization=parse_quantization(_TARGET_QUANTIZATION.value))
    if DRAFT.value is None:
        return target, None
    return target, load(DRAFT.value, quantization=parse_quantization(_DRAFT_QUANTIZATION.value))


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
