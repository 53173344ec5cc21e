"""What drafters are built from, and what building one gives."""

import dataclasses
import pathlib
from typing import Any, NamedTuple

from jspec.common.errors import InputError, check_numbers, check_range, whole_number
from jspec.common.typing import Params
from jspec.drafters.heads.shipped import find_head
from jspec.models import LlamaConfig
from jspec.speculation.types import Drafter
from jspec.weights import TokenizerLike

DEFAULT_NUM_DRAFT_TOKENS = 2
NGRAM_PROBS = ("deterministic", "sampled")
_FLAGS = {"pattern": "--draft_pattern", "json_skeleton": "--draft_json"}


@dataclasses.dataclass(frozen=True)
class DrafterOptions:
    """Options of all drafters; each reads its own.

    Attributes:
      draft_confidence: a drafter that samples proposes no further where its distribution's most
        likely token is less likely than this, at temperature 0 before it is made one-hot; 0 never
        stops it.
      lookup_min_match: tokens that must match for `prompt_lookup` to propose; 0 takes 1, and 2 in a
        cascade, where others have more to say than one token's match.
      draft_layers: the target's layers with which `layer_skip` drafts, rising; it expects some.
      inner_drafter: what guesses the draft model's tokens under `hierarchical`.
      inner_num_draft_tokens: how many of them it guesses at a time, at most.
      pattern: a regular expression for `pattern`; see `pattern_regex`.
      json_skeleton: or a JSON text with placeholders; see `pattern_json`.
      lookup_growth: `prompt_lookup` proposes at most this times the length of the match; 0 sets no
        such limit.
      ngram_min_order: n of the shortest n-grams that `ngram` counts.
      ngram_max_order: n of the longest.
      ngram_window: tokens at the text's end in which it counts.
      ngram_max_tokens: its drafts a round, at most.
      ngram_probs: "deterministic", the most frequent token, or "sampled" in proportion to the
        counts.
      draft_table: the file with the counts of `unigram` and `bigram`.
      draft_head: the folder with what was trained for `eagle`, `medusa`, `blockwise` or
        `lookahead`, or "shipped:" and the name of a head that comes with jspec; None takes that of
        the target, if there is one.
    """

    draft_confidence: float = 0.0
    lookup_min_match: int = 0
    draft_layers: tuple[int, ...] | None = None
    inner_drafter: str = "prompt_lookup"
    inner_num_draft_tokens: int = 4
    pattern: str | None = None
    json_skeleton: str | None = None
    lookup_growth: float = 0.0
    ngram_min_order: int = 2
    ngram_max_order: int = 4
    ngram_window: int = 512
    ngram_max_tokens: int = 4
    ngram_probs: str = "deterministic"
    draft_table: str | None = None
    draft_head: str | None = None

    def __post_init__(self) -> None:
        check_numbers(self)
        self._check_texts()
        check_range("draft_confidence", self.draft_confidence, 0, 1)
        check_range("lookup_min_match", self.lookup_min_match, 0, 8)
        check_range("inner_num_draft_tokens", self.inner_num_draft_tokens, 1, 64)
        check_range("lookup_growth", self.lookup_growth, 0, 100)
        check_range("ngram_max_order", self.ngram_max_order, 2, 16)
        if not 2 <= self.ngram_min_order <= self.ngram_max_order:
            raise InputError(
                f"expected ngram_min_order from 2 to ngram_max_order, {self.ngram_max_order}; got "
                f"{self.ngram_min_order}"
            )
        check_range("ngram_window", self.ngram_window, 2, 32768)
        check_range("ngram_max_tokens", self.ngram_max_tokens, 1, 64)
        if self.ngram_probs not in NGRAM_PROBS:
            raise InputError(
                f"expected an ngram_probs among {', '.join(NGRAM_PROBS)}; got {self.ngram_probs!r}"
            )

    def _check_texts(self) -> None:
        layers = self.draft_layers
        if layers is not None and not isinstance(layers, tuple | list | range):
            raise InputError(f"expected draft_layers as a tuple of numbers, got {layers!r}")
        for layer in layers or ():
            whole_number("draft_layers", layer)
        for name in (
            "inner_drafter",
            "ngram_probs",
            "draft_table",
            "draft_head",
            "pattern",
            "json_skeleton",
        ):
            value = getattr(self, name)
            is_given = value is not None or name in ("inner_drafter", "ngram_probs")
            if is_given and not isinstance(value, str):
                raise InputError(f"expected {name} as a text, got {value!r}")
            if value == "" and name != "inner_drafter":  # which has to be a drafter's name
                raise InputError(f"expected {option_title(name)} as a text, got an empty one")


def option_title(name: str) -> str:
    """Returns an option's name, with its flag's where that is another."""
    return f"{name} ({_FLAGS[name]})" if name in _FLAGS else name


class DrafterSpec(NamedTuple):
    """What a drafter may be built from.

    Attributes:
      num_draft_tokens: drafts a round.
      target_config: the target's shape.
      vocab_size: ids that are really used, shared by target and draft.
      draft_config: the draft model's shape; None without a draft model.
      dtype: of the caches.
      draft_params: the draft model's parameters.
      options: of the drafters.
      is_member: whether the drafter will be one of several.
      is_in_cascade: whether others propose where it does not.
      tokenizer: the target's.
    """

    num_draft_tokens: int
    target_config: LlamaConfig
    vocab_size: int
    draft_config: LlamaConfig | None
    dtype: Any
    draft_params: Params = None
    options: DrafterOptions = DrafterOptions()
    is_member: bool = False
    is_in_cascade: bool = False
    tokenizer: TokenizerLike | None = None


class BuiltDrafter(NamedTuple):
    """A drafter and its parameters, which are arguments of the compiled programs.

    Attributes:
      drafter: None for plain decoding.
      params: a pytree; None without parameters.
    """

    drafter: Drafter | None
    params: Params = None


def required_head(spec: DrafterSpec, name: str) -> pathlib.Path:
    """Returns the folder of the trained head that a drafter of that name needs.

    Raises:
      InputError: none was given.
    """
    head = spec.options.draft_head
    if head is None:
        raise InputError(f"the drafter {name!r} expects draft_head (--draft_head), got none")
    return find_head(head)
