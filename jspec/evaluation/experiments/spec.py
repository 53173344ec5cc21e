"""What an experiment is."""

import dataclasses
from collections.abc import Mapping, Sequence

from jspec.common.cli import QUANTIZATIONS
from jspec.common.errors import InputError, check_among, check_range
from jspec.evaluation.experiments.method_spec import MethodSpec
from jspec.evaluation.experiments.pair_spec import DTYPES, PairSpec
from jspec.generation.generator import DEFAULT_TARGET
from jspec.generation.request import Settings
from jspec.generation.row_checks import check_temperature
from jspec.generation.validate_options import check_draft_temperature
from jspec.speculation.acceptance import get_rule

KINDS = ("generate", "estimate", "theory", "predict")
THEORY_TABLES = ("table1", "figure2", "figure3", "figure4")
_WITH_PROMPTS = ("generate", "estimate")
_CHATS = {"auto": None, "yes": True, "no": False}
_MOST_SEEDS = 4_000_000
_SEPARATOR = "/"


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """How the table of `unigram` and `bigram` is counted, where a way brings none of its own.

    Attributes:
      prompts_file: the target answers these prompts, over and over.
      num_tokens: until the answers have so many tokens.
      temperature: at which it answers.
      max_new_tokens: of one answer.
    """

    prompts_file: str = "configs/table_prompts.jsonl"
    num_tokens: int = 10_000
    temperature: float = 1.0
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        check_range("table.num_tokens", self.num_tokens, 1, 10**9)
        try:
            Settings(max_new_tokens=self.max_new_tokens, temperature=self.temperature)
        except InputError as error:
            raise InputError(f"table: {error}") from None


@dataclasses.dataclass(frozen=True)
class EstimateSpec:
    """What the kind "estimate" computes at every token.

    Attributes:
      leniences: of the acceptance under lenience.
      num_bins: of entropy.
    """

    leniences: tuple[float, ...] = (1.0, 0.5, 0.3, 0.1)
    num_bins: int = 8

    def __post_init__(self) -> None:
        for lenience in self.leniences:
            check_range("estimate.leniences", lenience, 0, 1)
        check_range("estimate.num_bins", self.num_bins, 1, 1000)


@dataclasses.dataclass(frozen=True)
class TheorySpec:
    """What the kind "theory" computes.

    Attributes:
      tables: names among `THEORY_TABLES`.
    """

    tables: tuple[str, ...] = THEORY_TABLES

    def __post_init__(self) -> None:
        for name in self.tables:
            check_among("theory.tables", name, THEORY_TABLES)
        if not self.tables or len(set(self.tables)) < len(self.tables):
            raise InputError(
                f"expected theory.tables that differ, at least one; got {list(self.tables)}"
            )


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything that decides what an experiment measures.

    Attributes:
      kind: one of `KINDS`.
      title: a line for the report.
      target: the target model.
      dtype: "bfloat16" or "float32", of weights and caches.
      target_quantization: "none", "int8" or "int4".
      prompts_file: JSONL, see `read_prompts`.
      num_prompts: so many of them, evenly spaced over the file; 0 takes all.
      per_category: before that, the first so many of each category; 0 takes all.
      turns: of a conversation; 0 takes all of them.
      chat: whether prompts go through the chat template: "auto", "yes" or "no".
      methods: of generating, by their labels; the first one is the base of all ratios.
      settings: of requests, by their labels.
      seeds: prompt k with seed s is drawn with seed 1000 s + k.
      repeats: how often each answer is timed.
      batch_sizes: prompts answered together.
      max_new_tokens: tokens of an answer, where a setting says nothing else.
      max_seq_len: tokens that prompt and answer may come to.
      measure_costs: whether the cost of a round is measured for each way, apart from its answers,
        so that the report can say what was to be expected; a minute or so a way, mostly compiling.
      table: see `TableSpec`.
      estimate: see `EstimateSpec`.
      theory: see `TheorySpec`.
      predict: pairs of models by their labels; see `PairSpec`.
    """

    kind: str = "generate"
    title: str = ""
    target: str = DEFAULT_TARGET
    dtype: str = "bfloat16"
    target_quantization: str = "none"
    prompts_file: str = "configs/prompts.jsonl"
    num_prompts: int = 0
    per_category: int = 0
    turns: int = 1
    chat: str = "auto"
    methods: Mapping[str, MethodSpec] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Settings] = dataclasses.field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    repeats: int = 1
    batch_sizes: tuple[int, ...] = (1,)
    max_new_tokens: int = 64
    max_seq_len: int = 2048
    measure_costs: bool = False
    table: TableSpec = TableSpec()
    estimate: EstimateSpec = EstimateSpec()
    theory: TheorySpec = TheorySpec()
    predict: Mapping[str, PairSpec] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_among("kind", self.kind, KINDS)
        check_among("dtype", self.dtype, DTYPES)
        check_among("target_quantization", self.target_quantization, QUANTIZATIONS)
        check_among("chat", self.chat, tuple(_CHATS))
        for name in ("num_prompts", "per_category", "turns"):
            check_range(name, getattr(self, name), 0, 10**9)
        check_range("repeats", self.repeats, 1, 10**6)
        check_range("max_seq_len", self.max_seq_len, 2, 10**9)
        _check_different("seeds", self.seeds, 0, _MOST_SEEDS)
        _check_different("batch_sizes", self.batch_sizes, 1, 4096)
        for label, pair in self.predict.items():
            pair.check(f"predict.{label}")
        if self.needs_prompts:
            self._check_methods()

    def _check_methods(self) -> None:
        for name in ("methods", "settings"):
            for label in getattr(self, name):
                if not label or _SEPARATOR in label:
                    raise InputError(f"expected labels of {name} without {_SEPARATOR!r}, "
                                     f"got {label!r}")  # fmt: skip
        for label, method in self.methods.items():
            rule = get_rule(method.acceptance, method.rule_options)
            for settings in self.settings.values():
                try:
                    check_temperature(method.acceptance, rule.temperatures, settings.temperature)
                except InputError as error:
                    raise InputError(f"methods.{label}: {error}") from None
        drafters = [(method.drafter, method.options) for method in self.methods.values()]
        for label, settings in self.settings.items():
            try:
                check_draft_temperature(settings, drafters)
            except InputError as error:
                raise InputError(f"settings.{label}: {error}") from None

    @property
    def needs_prompts(self) -> bool:
        """Whether a model answers prompts."""
        return self.kind in _WITH_PROMPTS

    @property
    def wants_chat(self) -> bool | None:
        """What `encode_prompt` takes for `chat`."""
        return _CHATS[self.chat]


def _check_different(name: str, values: Sequence[int], low: int, high: int) -> None:
    if not values or len(set(values)) < len(values):
        raise InputError(f"expected {name} that differ, at least one; got {list(values)}")
    for value in values:
        check_range(name, value, low, high)
