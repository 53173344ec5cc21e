"""Flags of the programs that answer prompts: which models, what proposes tokens, how they
are sampled and accepted.
"""

import dataclasses
import functools
from typing import Any, cast

from absl import flags
from jax.sharding import Mesh

from jspec.cli.program import list_flags
from jspec.common.errors import InputError
from jspec.drafters import DEFAULT_NUM_DRAFT_TOKENS, DRAFTERS, DrafterOptions
from jspec.generation.auto import parse_num_draft_tokens
from jspec.generation.layout import place_model
from jspec.generation.options import Method, check_draft_sampling, choose_method
from jspec.generation.request import SamplingParams
from jspec.speculation.acceptance import RULES, RuleOptions, get_rule
from jspec.weights.published import MODELS, SMOLLM2
from jspec.weights.quantize import QUANTIZATION_FLAG
from jspec.weights.resolver import LoadedModel, load_model

TARGET = flags.DEFINE_string(
    "target", SMOLLM2, "The model whose answers are wanted: a Hugging Face folder or hub "
    f"name, a .gguf file, an Orbax folder, random:<preset> for random weights,"
    f" or one of {', '.join(MODELS)}."
)  # fmt: skip
DRAFT = flags.DEFINE_string(
    "draft",
    None,
    "A cheaper model, which proposes tokens; named like --target.",
)
_DRAFTER = flags.DEFINE_string(
    "drafter", None, f"What proposes tokens: {', '.join(DRAFTERS)}, or several joined by +. "
    "Default: prompt_lookup, with +model if there is a --draft, else with +eagle if jspec has a "
    "head for the target."
)  # fmt: skip
NUM_DRAFT_TOKENS = flags.DEFINE_string(
    "num_draft_tokens", DEFAULT_NUM_DRAFT_TOKENS, "Most drafts per round; auto chooses their "
    "number for each round, by the acceptance so far and by what rounds cost on this machine."
)  # fmt: skip
_DTYPE = flags.DEFINE_enum(
    "dtype", "bfloat16", ["bfloat16", "float32"], "The number type of weights and caches."
)
_TARGET_QUANTIZATION = flags.DEFINE_enum(
    "target_quantization",
    "auto",
    QUANTIZATION_FLAG,
    "int8, int4 and q4_0 round the target's weights, which makes it another model; packed "
    "leaves those of a .gguf file as they are; packed_a8 does, and rounds what they are multiplied "
    "with to 8 bits, which is faster, and another model, too; none makes them floats. auto: packed "
    "for a .gguf file where the processor multiplies it fast (AVX2 or AVX-512), else none.",
)
_DRAFT_QUANTIZATION = flags.DEFINE_enum(
    "draft_quantization",
    "auto",
    QUANTIZATION_FLAG,
    "int8, int4 and q4_0 round the draft model's weights, packed leaves "
    "those of a .gguf file as they are, none makes them floats; no answer's distribution changes. "
    "auto: q4_0 for a .gguf file where the processor multiplies packed weights fast (AVX2 or "
    "AVX-512); on a GPU int8 where the draft's blocks are faster so; else none.",
)
_LOGIT_BIAS = flags.DEFINE_list(
    "logit_bias", [], "Numbers to add to the logits of tokens, as ID:NUMBER,ID:NUMBER."
)
_ALLOWED_TOKEN_IDS = flags.DEFINE_list(
    "allowed_token_ids",
    None,
    "Ids of the only tokens that the answer may contain, separated by commas.",
)
_FORBIDDEN_TOKEN_IDS = flags.DEFINE_list(
    "forbidden_token_ids", [], "Ids of tokens that the answer may not contain, separated by commas."
)
_ACCEPTANCE = flags.DEFINE_string(
    "acceptance", "rejection", f"The rule that accepts or rejects drafts: {', '.join(RULES)}. "
    "lenient, lenient_argmax and typical are lossy: they change the answers' distribution."
)  # fmt: skip


def _define(options: type, **helps: str) -> list[flags.FlagHolder[Any]]:
    makers = {int: flags.DEFINE_integer, int | None: flags.DEFINE_integer, bool: flags.DEFINE_bool}
    types = {field.name: field.type for field in dataclasses.fields(options)}
    return [
        makers.get(types[name], flags.DEFINE_float)(name, getattr(options, name), text)
        for name, text in helps.items()
    ]


def _define_option(field: dataclasses.Field[Any]) -> flags.FlagHolder[Any]:
    about, default = field.metadata, cast(Any, field.default)
    name = about["flag"] or field.name
    if about["among"]:
        return flags.DEFINE_enum(name, default, about["among"], about["help"])
    define = {int: flags.DEFINE_integer, float: flags.DEFINE_float}
    return define.get(field.type, flags.DEFINE_string)(name, default, about["help"])


_SETTINGS = _define(
    SamplingParams,
    max_new_tokens="Most tokens of an answer.",
    draft_temperature="The drafter's own temperature, on which the answer's distribution does not "
    "depend. Default: --temperature.",
    draft_top_k="Draw drafts from this many of the tokens that the drafter finds likeliest; 0 for "
    "all. Default: --top_k.",
    draft_top_p="Draw drafts from the tokens that the drafter finds likeliest and whose "
    "probabilities add up to this; 1 for all. Default: --top_p.",
    temperature="0 takes the most likely token; 1 samples from the model's own distribution.",
    top_k="Sample from this many of the most likely tokens; 0 for all.",
    top_p="Sample from the most likely tokens whose probabilities add up to this; 1 for all.",
    min_p="Sample from tokens at least this many times as likely as the likeliest; 0 for all.",
    repetition_penalty="Makes tokens of the prompt and the answer less likely: positive logits are "
    "divided by this, negative ones multiplied; 1 changes nothing.",
    presence_penalty="Number from -2 to 2 to subtract from the logits of tokens in the answer.",
    frequency_penalty="Number from -2 to 2 to subtract from a token's logit, once for each time "
    "that it stands in the answer.",
    min_new_tokens="Suppress tokens that end the answer until it has this many tokens.",
    logprobs="Write each token's log-probability under the target to --output_json.",
    num_beams="Search with this many beams, as transformers does, at temperature 0; 1 is none.",
    length_penalty="For --num_beams: exponent of the length by which a beam's score is divided.",
    seed="Seed of everything that is random.",
)
_EARLY_STOPPING = flags.DEFINE_enum(
    "early_stopping", "false", ["false", "true", "never"], "For --num_beams: end when --num_beams "
    "texts have ended (true), when the best running one would not be among them (false), or when "
    "no longer one could be (never)."
)  # fmt: skip
_RULE_OPTIONS = _define(
    RuleOptions,
    lenience="For the rules lenient and lenient_argmax: from 0 to 1; the smaller, the more drafts "
    "are accepted; 1 is lossless.",
    typical_epsilon="For the rule typical: accept a draft more likely than this.",
    typical_delta="For the rule typical: accept a draft more likely than this times exp(-entropy).",
)

_DRAFTER_OPTIONS = {field: _define_option(field) for field in dataclasses.fields(DrafterOptions)}
OF_DRAFTERS = [holder.name for holder in _DRAFTER_OPTIONS.values()]  # besides --drafter

list_flags(
    "Drafting",
    "drafter num_draft_tokens draft_head draft_confidence draft_vocab_size",
    "costs_file " + " ".join(OF_DRAFTERS),
)
list_flags("Models", "target draft dtype draft_quantization", "target_quantization max_seq_len")
list_flags(
    "Sampling",
    "temperature top_k top_p seed",
    "min_p draft_temperature draft_top_k draft_top_p repetition_penalty presence_penalty "
    "frequency_penalty logit_bias allowed_token_ids forbidden_token_ids min_new_tokens logprobs "
    "num_beams length_penalty early_stopping",
)
list_flags("Acceptance", "acceptance", "lenience typical_epsilon typical_delta")


def read_settings(stop: tuple[str, ...] = ()) -> SamplingParams:
    """Returns the settings that the flags ask for, with these stop strings.

    Raises:
      InputError: a value out of range or not a number.
    """
    allowed = _ALLOWED_TOKEN_IDS.value
    early_stopping = {"false": False, "true": True}.get(_EARLY_STOPPING.value, "never")
    return SamplingParams(
        logit_bias=dict(map(_parse_bias, _LOGIT_BIAS.value)),
        allowed_token_ids=None if allowed is None else _parse_ids("allowed_token_ids", allowed),
        forbidden_token_ids=_parse_ids("forbidden_token_ids", _FORBIDDEN_TOKEN_IDS.value),
        stop=stop,
        early_stopping=early_stopping,
        **{holder.name: holder.value for holder in _SETTINGS},
    )


def read_drafter() -> tuple[str | None, DrafterOptions]:
    """Returns the drafter that the flags ask for, None for the default, and its options.

    Raises:
      InputError: an option out of its range.
    """
    values = {}
    for field, holder in _DRAFTER_OPTIONS.items():
        parse, value = field.metadata["parse"], holder.value
        values[field.name] = value if parse is None or value is None else parse(value)
    return _DRAFTER.value, DrafterOptions(**values)


def read_options(instead: str = "--drafters") -> DrafterOptions:
    """Returns the options, for a program that compares drafters, which the flag `instead` names.

    Raises:
      InputError: an option out of its range, or --drafter.
    """
    drafter, options = read_drafter()
    if drafter is not None:
        raise InputError(f"expected {instead} alone, which lists drafters; got --drafter={drafter}")
    return options


def read_method(settings: SamplingParams) -> Method:
    """Returns the drafter and the acceptance rule that the flags ask for.

    Raises:
      InputError: an option out of its range, or one that is not read; no model is loaded before.
    """
    name, drafter_options = read_drafter()
    acceptance, rule_options = read_rule()
    options = {
        "drafter": name,
        "drafter_options": drafter_options,
        "num_draft_tokens": parse_num_draft_tokens(NUM_DRAFT_TOKENS.value),
        "acceptance": acceptance,
        "rule_options": rule_options,
    }
    method = choose_method(options, TARGET.value, has_draft=has_draft())
    check_draft_sampling(settings, [(method.drafter, drafter_options)])
    return method


def read_rule() -> tuple[str, RuleOptions]:
    """Returns the name of the rule that the flags ask for, and the options of the rules.

    Raises:
      InputError: no such rule, or an option out of its range.
    """
    options = RuleOptions(**{holder.name: holder.value for holder in _RULE_OPTIONS})
    get_rule(_ACCEPTANCE.value, options)  # checks the options of all rules
    return _ACCEPTANCE.value, options


def has_draft() -> bool:
    """Returns whether the flags name a draft model; an `InputError` if they only round it."""
    if DRAFT.value is None and _DRAFT_QUANTIZATION.value != "auto":
        kind = _DRAFT_QUANTIZATION.value
        raise InputError(f"expected --draft=MODEL with --draft_quantization={kind}, got no --draft")
    return DRAFT.value is not None


def load_models(mesh: Mesh | None = None) -> tuple[LoadedModel, LoadedModel | None]:
    """Returns the target and the draft model, or None for no draft, that the flags name.

    On a mesh the layers of both are split; a draft model that cannot be is on every device.
    """
    load = functools.partial(load_model, dtype=_DTYPE.value)
    target = load(TARGET.value, quantization=_TARGET_QUANTIZATION.value, mesh=mesh)
    if DRAFT.value is None:
        return target, None
    kind = _DRAFT_QUANTIZATION.value
    load_draft = functools.partial(load, DRAFT.value)
    draft = load_draft(quantization=kind)
    if kind == "auto" and mesh is None:
        from jspec.generation.draft_weights import with_fast_weights

        draft = with_fast_weights(draft, _ACCEPTANCE.value, load_draft)
    return target, place_model(draft, mesh)


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
