"""What an experiment is: the fields of a config, what they may hold, and reading them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.common.dataclass_fields import cast, read_fields
from jspec.common.errors import (
    InputError,
    check_among,
    check_range,
    prefixed_errors,
    whole_number,
)
from jspec.drafters import (
    DEFAULT_NUM_DRAFT_TOKENS,
    DrafterOptions,
    choose_drafter,
    entries_of,
    needs_draft_model,
    options_read,
)
from jspec.generation.auto import AUTO
from jspec.generation.batch import needed_switches
from jspec.generation.options import (
    check_draft_sampling,
    check_num_draft_tokens,
    check_rule_option,
    check_temperature,
    is_rule_option_read,
)
from jspec.generation.request import SamplingParams
from jspec.speculation.acceptance import RuleOptions, get_rule
from jspec.speculation.functions import RULES
from jspec.weights.published import SMOLLM2
from jspec.weights.quantize import QUANTIZATIONS

_NUM_PIXELS = 64  # of an image of "digits"

GUESSES = {
    "digits": ("small", "table"),
    "metropolis": ("quadratic", "coin"),
    "langevin": ("quadratic", "nothing"),
}

KINDS = ("generate", "estimate", "theory", "predict", "functions")
THEORY_TABLES = ("table1", "figure2", "figure3", "figure4")  # of arXiv 2211.17192
_DTYPES = ("bfloat16", "float32")
_RATES = "target_bytes_per_weight", "draft_bytes_per_weight", "bandwidth", "flop_rate"
_CHATS = {"auto": None, "yes": True, "no": False}
_MOST = 10**9


@dataclasses.dataclass(frozen=True)
class FunctionsSpec:
    """A chain, who guesses, and how much is measured.

    Attributes:
      chain: "digits", "metropolis" or "langevin".
      guess: f of the chain, a name of `GUESSES`.
      acceptance: the rule.
      num_drafts: numbers of guesses a round.
      num_steps: of a chain; an image has 64.
      num_chains: independent ones, one after another.
      num_updates: of training the networks of "digits".
    """

    chain: str = "digits"
    guess: str = "small"
    acceptance: str = "rejection"
    num_drafts: tuple[int, ...] = (1, 2, 4, 8)
    num_steps: int = 64
    num_chains: int = 32
    num_updates: int = 1500

    def __post_init__(self) -> None:
        check_among("chain", self.chain, GUESSES)
        check_among("guess", self.guess, GUESSES[self.chain])
        check_among("acceptance", self.acceptance, RULES)
        if not self.num_drafts:
            raise InputError("expected num_drafts to have some, got none")
        most = _NUM_PIXELS if self.chain == "digits" else 10**6
        _check_values(self, num_drafts=(1, 4096), num_steps=(1, most), num_chains=(1, 10**5),
                      num_updates=(1, 10**6))  # fmt: skip


def _check_values(spec: object, **bounds: tuple[float, float]) -> None:
    for name, (low, high) in bounds.items():
        value = getattr(spec, name)
        for number in value if isinstance(value, tuple) else (value,):
            check_range(name, number, low, high)


def _check_different(name: str, values: Sequence[int | str]) -> None:
    if not values or len(set(values)) < len(values):
        raise InputError(f"expected {name} that differ, at least one; got {list(values)}")


@dataclasses.dataclass(frozen=True)
class MethodSpec:
    """One method of generating.

    Attributes:
      drafter: its name; see `jspec.drafters.DRAFTERS`.
      num_draft_tokens: drafts a round, or "auto"; the default for the drafter "none".
      draft: the draft model, for drafters that need it.
      draft_quantization: see `load_model`.
      acceptance: the acceptance rule.
      lenience: of the rules `lenient` and `lenient_argmax`; 1, which is none, for the others.
    """

    drafter: str = "none"
    num_draft_tokens: int | str = DEFAULT_NUM_DRAFT_TOKENS
    draft: str | None = None
    draft_quantization: str = "none"
    acceptance: str = "rejection"
    lenience: float = 1.0
    options: DrafterOptions = dataclasses.field(default_factory=DrafterOptions)

    def __post_init__(self) -> None:
        choose_drafter(self.drafter, has_draft=self.draft is not None, options=self.options)
        check_num_draft_tokens(self.num_draft_tokens, self.drafter)
        if self.num_draft_tokens != AUTO:
            number = whole_number("num_draft_tokens", self.num_draft_tokens, f" or {AUTO!r}")
            check_range("num_draft_tokens", number, 1, 4096)
        check_among("draft_quantization", self.draft_quantization, QUANTIZATIONS)
        if self.draft_quantization != "none" and not needs_draft_model(self.drafter):
            raise InputError("expected a draft model with draft_quantization")
        get_rule(self.acceptance, RuleOptions(lenience=self.lenience))
        if self.lenience != MethodSpec.lenience:
            check_rule_option("lenience", self.acceptance, self.drafter)

    @property
    def rule_options(self) -> RuleOptions:
        """The numbers that the rule reads; the others are at their defaults."""
        is_read = is_rule_option_read("lenience", self.acceptance, self.drafter)
        return RuleOptions(lenience=self.lenience) if is_read else RuleOptions()

    @property
    def needs_table(self) -> bool:
        """Whether it drafts from a table and names none, so that one has to be counted."""
        is_read = "draft_table" in options_read(self.drafter, self.options)
        return is_read and self.options.draft_table is None


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """How the table of `unigram` and `bigram` is counted, for methods that name none.

    The target answers the prompts, over and over, until the answers have `num_tokens`.
    """

    prompts_file: str = "configs/table_prompts.jsonl"
    num_tokens: int = 10_000
    temperature: float = 1.0
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        _check_values(self, num_tokens=(1, _MOST))
        SamplingParams(max_new_tokens=self.max_new_tokens, temperature=self.temperature)


@dataclasses.dataclass(frozen=True)
class EstimateSpec:
    """For which leniences the kind "estimate" computes acceptance, and the bins of entropy."""

    leniences: tuple[float, ...] = (1.0, 0.5, 0.3, 0.1)
    num_bins: int = 8

    def __post_init__(self) -> None:
        _check_values(self, leniences=(0, 1), num_bins=(1, 1000))


@dataclasses.dataclass(frozen=True)
class PairSpec:
    """A pair of models for the kind "predict": the arguments of `call_cost.predict_table`."""

    target: str = "llama3.2-3b"
    draft: str = "llama3.2-1b"
    target_quantization: str = "none"
    draft_quantization: str = "none"
    target_bytes_per_weight: float | None = None
    draft_bytes_per_weight: float | None = None
    draft_vocab_size: int = 0
    dtype: str = "bfloat16"
    bandwidth: float | None = None
    flop_rate: float | None = None
    context: int = 1024
    batch_size: int = 1
    alphas: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9)
    numbers: tuple[int, ...] = (1, 2, 3, 4, 5, 7)

    def __post_init__(self) -> None:
        for model in ("target", "draft"):
            kind = getattr(self, f"{model}_quantization")
            check_among(f"{model}_quantization", kind, QUANTIZATIONS)
            if kind != "none" and getattr(self, f"{model}_bytes_per_weight") is not None:
                raise InputError(
                    f"expected {model}_bytes_per_weight or {model}_quantization, got both"
                )
        check_among("dtype", self.dtype, _DTYPES)
        for field in _RATES:
            value = getattr(self, field)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"expected {field} above 0, and finite, got {value}")
        for field in ("alphas", "numbers"):
            if not getattr(self, field):
                raise InputError(f"expected {field} to have some, got none")
        _check_values(self, context=(0, _MOST), batch_size=(1, 10**6), alphas=(0, 1),
                      numbers=(0, 4096), draft_vocab_size=(0, _MOST))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything that decides what an experiment measures.

    Attributes:
      kind: one of `KINDS`.
      dtype: "bfloat16" or "float32", of weights and caches.
      mesh: devices over which the models are split, such as "data:2,model:4"; empty for one device.
      prompts_file: JSONL, see `read_prompts`.
      num_prompts: how many of them, evenly spaced over the file; 0 takes all.
      per_category: before that, the first ones of each category; 0 takes all.
      turns: of a conversation; 0 takes all of them.
      chat: whether prompts go through the chat template: "auto", "yes" or "no".
      methods: of generating, by their labels; the first one is the baseline of all ratios.
      settings: of requests, by their labels.
      seeds: prompt k with seed s is drawn with seed 1000 s + k.
      repeats: how often each answer is timed.
      batch_sizes: prompts answered together.
      max_new_tokens: tokens of an answer, for settings that do not say it themselves.
      max_seq_len: most tokens of prompt and answer together.
      functions: chains for the kind "functions", by label.
      measure_costs: whether the cost of a round is measured for each method, apart from its
        answers, so that the report can compute the expected speed-up; about a minute a method.
    """

    kind: str = "generate"
    title: str = ""
    target: str = SMOLLM2
    dtype: str = "bfloat16"
    target_quantization: str = "none"
    mesh: str = ""
    prompts_file: str = "configs/prompts.jsonl"
    num_prompts: int = 0
    per_category: int = 0
    turns: int = 1
    chat: str = "auto"
    methods: Mapping[str, MethodSpec] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, SamplingParams] = dataclasses.field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    repeats: int = 1
    batch_sizes: tuple[int, ...] = (1,)
    max_new_tokens: int = 64
    max_seq_len: int = 2048
    measure_costs: bool = False
    table: TableSpec = TableSpec()
    estimate: EstimateSpec = EstimateSpec()
    predict: Mapping[str, PairSpec] = dataclasses.field(default_factory=dict)
    functions: Mapping[str, FunctionsSpec] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_among("kind", self.kind, KINDS)
        check_among("dtype", self.dtype, _DTYPES)
        check_among("target_quantization", self.target_quantization, QUANTIZATIONS)
        check_among("chat", self.chat, tuple(_CHATS))
        _check_different("seeds", self.seeds)
        _check_different("batch_sizes", self.batch_sizes)
        _check_values(self, num_prompts=(0, _MOST), per_category=(0, _MOST), turns=(0, _MOST),
                      repeats=(1, 10**6), max_seq_len=(2, _MOST), seeds=(0, 4_000_000),
                      batch_sizes=(1, 4096))  # fmt: skip
        if self.needs_prompts:
            self._check_methods()

    def _check_methods(self) -> None:
        for name in ("methods", "settings"):
            for label in getattr(self, name):
                if not label or "/" in label:  # which separates the parts of a cell's name
                    raise InputError(f"expected labels of {name} without '/', got {label!r}")
        for label, method in self.methods.items():
            temperatures = get_rule(method.acceptance, method.rule_options).temperatures
            with prefixed_errors(f"methods.{label}"):
                for settings in self.settings.values():
                    check_temperature(method.acceptance, temperatures, settings.temperature)
        drafters = [(method.drafter, method.options) for method in self.methods.values()]
        for label, settings in self.settings.items():
            with prefixed_errors(f"settings.{label}"):
                check_draft_sampling(settings, drafters)

    @property
    def needs_prompts(self) -> bool:
        """Whether a model answers prompts."""
        return self.kind in ("generate", "estimate")

    @property
    def wants_chat(self) -> bool | None:
        """The argument `chat` of `encode_prompt`."""
        return _CHATS[self.chat]


_GROUPS = {"table": TableSpec, "estimate": EstimateSpec}
_LABELLED = {"methods": MethodSpec, "predict": PairSpec, "functions": FunctionsSpec}


def read_experiment(plain: Mapping[str, Any]) -> Experiment:
    """Returns the experiment with fields as JSON has them, settings without a seed.

    Raises:
      InputError: an unknown field, a value of another type or out of range, or nothing to measure;
        the message names the field.
    """
    fields = read_fields(Experiment, plain)
    for name, kind in _LABELLED.items():
        groups = fields.get(name, {}).items()
        fields[name] = {
            label: _read_group(kind, f"{name}.{label}", given) for label, given in groups
        }
    max_new_tokens = fields.get("max_new_tokens", Experiment.max_new_tokens)
    fields["settings"] = {
        label: _read_settings(f"settings.{label}", given, max_new_tokens)
        for label, given in fields.get("settings", {}).items()
    }
    for name in _GROUPS.keys() & fields.keys():
        fields[name] = _read_group(_GROUPS[name], name, fields[name])
    experiment = Experiment(**fields)
    needed = ("methods", "settings") if experiment.needs_prompts else (experiment.kind,)
    for name in () if experiment.kind == "theory" else needed:
        if not fields[name]:
            raise InputError(f"expected the config to have {name}, got none")
    if experiment.kind == "estimate":
        _check_estimate(experiment)
    return experiment


def _read_group(kind: type, name: str, plain: Any) -> Any:
    fields = read_fields(kind, plain, f"{name}.")
    if kind is MethodSpec:
        options = fields.get("options", {})
        fields["options"] = _read_group(DrafterOptions, f"{name}.options", options)
    with prefixed_errors(name):
        return kind(**fields)


def _read_settings(name: str, plain: Any, max_new_tokens: int) -> SamplingParams:
    plain = dict(cast(name, plain, Mapping))
    bias = _read_bias(f"{name}.logit_bias", plain.pop("logit_bias", {}))
    fields = read_fields(SamplingParams, plain, f"{name}.", without=["seed"])
    with prefixed_errors(name):
        return SamplingParams(**{"max_new_tokens": max_new_tokens, "logit_bias": bias} | fields)


def _read_bias(name: str, plain: Any) -> tuple[tuple[int, float], ...]:
    """Returns (token id, number) pairs from a list of them, or a group whose ids are texts."""
    try:
        items = plain.items() if isinstance(plain, Mapping) else plain
        pairs = [(token_id, number) for token_id, number in items]
        if any(isinstance(token_id, bool | float) for token_id, _ in pairs):
            raise TypeError
        return tuple((int(token_id), cast(name, number, float)) for token_id, number in pairs)
    except (TypeError, ValueError):
        raise InputError(f"expected {name} to be numbers by token ids, got {plain!r}") from None


def _check_estimate(experiment: Experiment) -> None:
    """Checks that the kind "estimate" is not asked for anything that it would ignore.

    It computes how likely the first draft after every token of an answer is accepted under
    `rejection`: a rule, a number of drafts, a clock and a batch have no part in it.
    """
    _check_defaults(experiment, "", ("turns", "repeats", "batch_sizes", "mesh"))
    for label, method in experiment.methods.items():
        _check_defaults(method, f"methods.{label}.", ("num_draft_tokens", "acceptance"))
        name = f"methods.{label}.drafter"
        if method.drafter == "none":
            raise InputError(f"expected {name} to draft with kind 'estimate', got 'none'")
        needs = {entry.needs for entry in entries_of(method.drafter)}
        if "logits" in needs:
            raise InputError(f"expected {name} to learn from the text alone with kind 'estimate', "
                             f"got {method.drafter!r}")  # fmt: skip
        if "draft_head" in needs:
            raise InputError(f"expected {name} without a trained head with kind 'estimate', "
                             f"got {method.drafter!r}")  # fmt: skip
    for label, settings in experiment.settings.items():
        if processors := needed_switches([settings]).processors:
            names = ", ".join(processor.name for processor in processors)
            raise InputError(f"expected settings.{label} to have temperature and filters only with "
                             f"kind 'estimate', got {names}")  # fmt: skip


def _check_defaults(spec: Experiment | MethodSpec, prefix: str, names: tuple[str, ...]) -> None:
    for name in names:
        default, value = getattr(type(spec), name), getattr(spec, name)
        if value != default:
            shown, got = (list(v) if isinstance(v, tuple) else v for v in (default, value))
            raise InputError(f"expected {prefix}{name} to be {shown!r} with kind 'estimate', which "
                             f"does not read it; got {got!r}")  # fmt: skip
