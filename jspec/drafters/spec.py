"""What a drafter's file tells the registry: its options, its entry, and how it is built."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

from jspec.common.errors import InputError, check_among, check_numbers, check_range
from jspec.common.typing import Params
from jspec.drafters.heads.shipped import find_head
from jspec.models import DecoderConfig
from jspec.speculation.types import Drafter
from jspec.weights import TokenizerLike

DEFAULT_NUM_DRAFT_TOKENS = 2


def option(
    default: Any,
    help_text: str,
    *,
    between: tuple[int, int] | None = None,
    among: tuple[str, ...] = (),
    flag: str | None = None,
    parse: Callable[[str], Any] | None = None,
) -> Any:
    """Returns a field of a drafter's options, from which its flag and its checks are made.

    Args:
      default: the value that nobody asks for.
      help_text: one or two lines for `--help`.
      between: the smallest and the largest number allowed.
      among: the texts allowed.
      flag: the flag's name, if it is not the field's.
      parse: makes a value that is no number and no text from the flag's text.
    """
    about = {"help": help_text, "between": between, "among": among, "flag": flag, "parse": parse}
    return dataclasses.field(default=default, metadata=about)


@dataclasses.dataclass(frozen=True)
class Options:
    """Base of a drafter's options; every field is an `option`.

    Raises:
      InputError: a value of another type or out of its range.
    """

    def __post_init__(self) -> None:
        check_numbers(self)
        for field in dataclasses.fields(self):
            value, about = getattr(self, field.name), field.metadata
            if about["between"]:
                check_range(field.name, value, *about["between"])
            if about["among"]:
                check_among(field.name, value, about["among"])
            # By the field's annotation, as the value itself may be of a wrong type.
            if field.type in (str, str | None) and not (value is None and field.default is None):
                if not isinstance(value, str):
                    raise InputError(f"expected {field.name} as a text, got {value!r}")
                if not value:
                    raise InputError(f"expected {option_title(field)} as a text, got an empty one")


def option_title(field: dataclasses.Field[Any]) -> str:
    """Returns an option's name, with its flag's name where that is another."""
    flag = field.metadata["flag"]
    return field.name if flag is None else f"{field.name} (--{flag})"


@dataclasses.dataclass(frozen=True)
class ConfidenceOptions(Options):
    """Options of every drafter that draws its drafts from a distribution."""

    # At temperature 0 the distribution is looked at before it is made one-hot.
    draft_confidence: float = option(
        0.0,
        "Stop drafting where no token is at least this likely, for drafters that draw from a "
        "distribution; 0 never stops.",
        between=(0, 1),
    )


@dataclasses.dataclass(frozen=True)
class HeadOptions(Options):
    """Options of the drafters that were trained for a target."""

    # In jspec's layout or that of published heads of EAGLE-3 and Medusa, or "shipped:" and the name
    # of a head that comes with jspec.
    draft_head: str | None = option(
        None,
        "For eagle, medusa, blockwise and lookahead: folder with the trained head, made by "
        "jspec.train or published. Default: the head that comes with jspec for the target, if any.",
    )


@dataclasses.dataclass(frozen=True)
class DrawnHeadOptions(HeadOptions, ConfidenceOptions):
    """Options of a trained drafter that draws its drafts from a distribution."""


class DrafterSpec(NamedTuple):
    """What a drafter may be built from.

    Attributes:
      num_draft_tokens: drafts a round.
      target_config: the target's shape.
      vocab_size: ids that are really used, shared by target and draft.
      draft_config: the draft model's shape; None without a draft model.
      dtype: of the caches.
      draft_params: the draft model's.
      options: a `DrafterOptions`; None for the defaults, which `make_drafter` fills in.
      is_member: whether the drafter will be one of several.
      is_in_cascade: whether others propose where it does not.
      tokenizer: the target's.
    """

    num_draft_tokens: int
    target_config: DecoderConfig
    vocab_size: int
    draft_config: DecoderConfig | None
    dtype: Any
    draft_params: Params = None
    options: Any = None
    is_member: bool = False
    is_in_cascade: bool = False
    tokenizer: TokenizerLike | None = None

    @property
    def chain_fields(self) -> dict[str, Any]:
        """The fields of every `ChainDrafter`."""
        return {
            "num_draft_tokens": self.num_draft_tokens,
            "vocab_size": self.vocab_size,
            "target_vocab_size": self.target_config.vocab_size,
            "min_confidence": self.options.draft_confidence,
        }

    def head_folder(self, name: str) -> pathlib.Path:
        """Returns the folder of the trained head that the drafter of that name needs.

        Raises:
          InputError: none was given, or there is no such folder.
        """
        head = self.options.draft_head
        if head is None:
            raise InputError(f"the drafter {name!r} expects draft_head (--draft_head), got none")
        return find_head(head)

    def with_at_most(self, num_draft_tokens: int) -> Self:
        """Returns it with no more drafts a round than a drafter can make."""
        return self._replace(num_draft_tokens=min(self.num_draft_tokens, num_draft_tokens))


class BuiltDrafter(NamedTuple):
    """A drafter, None for plain decoding, and its parameters, which compiled programs are given."""

    drafter: Drafter | None
    params: Params = None


@dataclasses.dataclass(frozen=True)
class DrafterEntry:
    """What the registry knows of a drafter. Each drafter's file exports one.

    Attributes:
      name: as `--drafter` takes it.
      build: makes it.
      proposes: one line for the README's table, in Markdown.
      source: arXiv ids, separated by commas.
      options: the dataclass of the options that it reads.
      needs: what it drafts with besides the text; the target's layers and logits need no option.
      prior_cost: a round with one draft (or as a comment says), in plain steps of the target, for
        SmolLM2-135M on two CPU cores, one row, 512 slots: as recorded in benchmarks/paper_walltime
        and, for trained heads, benchmarks/compare_trained. None where it has not been measured.
      read: given the options, the names of those that it reads, where that depends on their values.

    Raises:
      InputError: a name that is no text, is empty, or has a "+", which joins names.
    """

    name: str
    build: Callable[[DrafterSpec], BuiltDrafter]
    proposes: str
    source: str = ""
    options: type[Options] = Options
    needs: Literal["", "draft", "draft_head", "draft_table", "layers", "logits"] = ""
    prior_cost: float | None = None
    read: Callable[[Any], set[str]] | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name) or "+" in self.name:
            raise InputError(f"expected a drafter's name without '+', got {self.name!r}")

    def options_read(self, options: Any) -> set[str]:
        """Returns the names of the options that it reads, given their values."""
        if self.read is not None:
            return self.read(options)
        return {field.name for field in dataclasses.fields(self.options)}
