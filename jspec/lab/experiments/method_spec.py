"""One method of generating, as a config describes it."""

import dataclasses

from jspec.common.errors import InputError, check_among, check_range, whole_number
from jspec.drafters import (
    DEFAULT_NUM_DRAFT_TOKENS,
    DrafterOptions,
    choose_drafter,
    needs_draft_model,
    options_read,
)
from jspec.generation.auto import AUTO
from jspec.generation.validate_options import (
    check_num_draft_tokens,
    check_rule_option,
    is_rule_option_read,
)
from jspec.speculation.acceptance import RuleOptions, get_rule
from jspec.weights.quantize import QUANTIZATIONS


@dataclasses.dataclass(frozen=True)
class MethodSpec:
    """One method of generating.

    Attributes:
      drafter: its name; see `jspec.drafters.DRAFTERS`.
      num_draft_tokens: drafts a round, or "auto"; the default for the drafter "none".
      draft: the draft model, for drafters that have one.
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
