"""What a drafter's file tells the registry: its options, its entry, and how it is built.

`REGISTRY` has the entries by name; `drafters.registry` fills it.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

from jspec.common.errors import InputError, check_among, check_numbers, check_range, check_type
from jspec.common.typing import Params
from jspec.drafters.head_folder import find_head
from jspec.models import DecoderConfig
from jspec.speculation.control import Kind
from jspec.speculation.types import Drafter
from jspec.weights import TokenizerLike

DEFAULT_NUM_DRAFT_TOKENS = "auto"  # see `generation.auto`


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
        "For eagle, dflash, medusa, blockwise and lookahead: folder with the trained head, made "
        "by jspec.train or published. Default: the head that comes with jspec for the target, if "
        "any.",
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
      draft_tokenizer: the draft model's, where it is another one than the target's; `vocab_size`
        then counts the target's ids.
      shares_encoder: whether target and draft have the same encoder; the draft's runs once less.
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
    draft_tokenizer: TokenizerLike | None = None
    shares_encoder: bool = False

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
      read: given the options, the names of those that it reads, where that depends on their values.
      takes_any_tokenizer: whether its draft model may have another tokenizer than the target.

    Raises:
      InputError: a name that is no text, is empty, or has a "+", which joins names.
    """

    name: str
    build: Callable[[DrafterSpec], BuiltDrafter]
    proposes: str
    source: str = ""
    options: type[Options] = Options
    needs: Literal["", "draft", "draft_head", "draft_table", "layers", "logits"] = ""
    read: Callable[[Any], set[str]] | None = None
    takes_any_tokenizer: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name) or "+" in self.name:
            raise InputError(f"expected a drafter's name without '+', got {self.name!r}")

    def options_read(self, options: Any) -> set[str]:
        """Returns the names of the options that it reads, given their values."""
        if self.read is not None:
            return self.read(options)
        return {field.name for field in dataclasses.fields(self.options)}


LIKELIEST, WITH, WITHOUT = "likeliest", "with", "without"


@dataclasses.dataclass(frozen=True)
class TreeSizeOptions(Options):
    """Of the drafters that can draft a tree."""

    tree_depth: int = option(
        0,
        "For model, eagle, mtp, dflash, medusa, prompt_lookup, suffix and recycle: draft a tree at "
        "most this deep, of num_draft_tokens drafts in all; 0 drafts a chain.",
        between=(0, 16),
    )
    tree_branches: int = option(
        3,
        "With tree_depth: successors of a draft that are considered, and, of model, eagle and mtp, "
        "drafts of a level that are fed.",
        between=(1, 16),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree_depth == 0 and self.tree_branches != type(self).tree_branches:
            raise InputError(f"expected tree_branches with tree_depth, got {self.tree_branches}")


@dataclasses.dataclass(frozen=True)
class TreeOptions(TreeSizeOptions):
    """Of those whose drafts have a distribution from which a tree can be drawn."""

    tree_draws: str = option(
        LIKELIEST,
        "With tree_depth: the likeliest drafts; or tree_branches whole drafts, whose first tokens "
        "are drawn with or without replacement. Under coupled, whose noise they share, without.",
        among=(LIKELIEST, WITH, WITHOUT),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree_depth == 0 and self.tree_draws != LIKELIEST:
            raise InputError(f"expected tree_draws with tree_depth, got {self.tree_draws!r}")


class Shape(NamedTuple):
    """The static size of a tree; `draws` is how its drafts are chosen, see `TreeOptions`."""

    num_draft_tokens: int
    depth: int
    branches: int
    draws: str = LIKELIEST

    @property
    def num_fed(self) -> int:
        """Drafts that are fed: those of every level but the last."""
        if self.draws == LIKELIEST:
            return (self.depth - 1) * self.branches
        return self.num_draft_tokens - self.branches

    @property
    def levels(self) -> tuple[int, ...]:
        """How many branches reach each level, where they are drawn: all of them the first."""
        sizes = [self.branches]
        for num_left in range(self.depth - 1, 0, -1):
            # As even as can be, and never more than in the level before.
            sizes.append(-(-(self.num_draft_tokens - sum(sizes)) // num_left))
        return tuple(sizes)


class DraftingTrees:
    """A drafter that has a field `shape`, that of its trees."""

    shape: Shape

    @property
    def tree_depth(self) -> int:
        """The greatest depth of its trees."""
        return self.shape.depth

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Those of its chains, as trees; drawn trees have no scores."""
        kinds: tuple[Kind, ...] = super().kinds  # type: ignore[misc]
        is_tree, depth = self.shape.draws == LIKELIEST, self.shape.depth
        return tuple(kind._replace(most=min(kind.most, depth), is_tree=is_tree) for kind in kinds)


def certain_tree_shape(spec: DrafterSpec) -> Shape | None:
    """Returns the shape for a drafter that draws nothing.

    It drafts a chain beside members of a cascade that draw their trees.
    """
    return tree_shape(spec) if spec.options.tree_draws == LIKELIEST else None


def for_chains(options: Any) -> Any:
    """Returns a drafter's options without a tree."""
    none = {field.name: field.default for field in dataclasses.fields(TreeOptions)}
    return dataclasses.replace(options, **none)


def with_at_most_a_tree(spec: DrafterSpec) -> DrafterSpec:
    """Returns it with no more drafts than a tree has that grows level by level."""
    branches, depth = spec.options.tree_branches, spec.options.tree_depth
    if depth == 0 or spec.options.tree_draws != LIKELIEST:
        return spec
    return spec.with_at_most(branches + (depth - 1) * branches**2)


def tree_shape(spec: DrafterSpec) -> Shape | None:
    """Returns the shape of the tree that the options ask for; None for a chain.

    Raises:
      InputError: fewer drafts than levels; or branches that do not come to as many drafts.
    """
    options = spec.options
    if options.tree_depth == 0:
        return None
    if spec.num_draft_tokens < options.tree_depth:
        raise InputError(
            f"expected num_draft_tokens, a tree's drafts in all, of at least tree_depth, "
            f"{options.tree_depth}; got {spec.num_draft_tokens}"
        )
    shape = Shape(
        spec.num_draft_tokens, options.tree_depth, options.tree_branches, options.tree_draws
    )
    if shape.draws != LIKELIEST:
        _check_drawn(shape, options.draft_confidence)
    return shape


def _check_drawn(shape: Shape, draft_confidence: float) -> None:
    least, most = shape.branches + shape.depth - 1, shape.branches * shape.depth
    if not least <= shape.num_draft_tokens <= most:
        raise InputError(
            f"expected num_draft_tokens from {least} to {most}, with tree_draws={shape.draws} all "
            f"drafts of {shape.branches} branches of at most {shape.depth}; got "
            f"{shape.num_draft_tokens}"
        )
    if draft_confidence > 0:
        # To drop a drawn draft because it looks unlikely would bias what is emitted.
        raise InputError(
            f"expected draft_confidence 0 with tree_draws={shape.draws}, got {draft_confidence}"
        )


REGISTRY: dict[str, DrafterEntry] = {}  # by name; `drafters.registry` fills it
DRAFTERS = REGISTRY.keys()  # grows with the registry


def register_drafter(entry: DrafterEntry) -> None:
    """Makes a drafter of your own known by its entry's name, to every program and to `Generator`.

    Example:
      >>> jspec.register_drafter(jspec.DrafterEntry("mine", build, "what I think comes next"))

    Raises:
      InputError: there is another drafter of that name.
    """
    check_type("a drafter's entry", entry, DrafterEntry)
    if REGISTRY.get(entry.name, entry) is not entry:
        raise InputError(
            f"the drafter {entry.name!r} is already registered: choose another name, or register "
            "nothing and give the DrafterEntry itself to Generator"
        )
    REGISTRY[entry.name] = entry


def name_of(drafter: str | DrafterEntry) -> str:
    """Returns the name of a drafter that was given by name or as an entry."""
    return drafter.name if isinstance(drafter, DrafterEntry) else drafter


def entries_of(drafter: str | DrafterEntry) -> list[DrafterEntry]:
    """Returns the entries that a name stands for, see `member_names`; or an entry, in a list."""
    if isinstance(drafter, DrafterEntry):
        return [drafter]  # which need not be registered
    return [REGISTRY[name] for name in member_names(drafter)]


def member_names(name: str) -> list[str]:
    """Returns the drafters that a name stands for: one, or those of a cascade in their order.

    Raises:
      InputError: no such drafter, or a cascade with one of them twice, with two that are trained
        heads, with "none", or with an empty name.
    """
    names = name.split("+")
    if len(names) > 1 and "" in names:
        raise InputError(f"expected a drafter's name on both sides of every '+', got {name!r}")
    for member in names:
        if member not in DRAFTERS:
            where = "" if member == name else f" in {name!r}"
            if member == "auto":  # of another flag
                where += "; num_draft_tokens='auto' (--num_draft_tokens=auto) chooses their number"
            raise InputError(
                f"expected a drafter among {', '.join(DRAFTERS)}, or several joined by '+'; "
                f"got {member!r}{where}"
            )
    if len(names) > 1 and "none" in names:
        raise InputError(f"expected 'none' alone, as it drafts nothing; got {name!r}")
    if len(set(names)) < len(names):
        raise InputError(f"expected each drafter of a cascade once, got {name!r}")
    # There is one --draft_head.
    with_head = drafters_needing("draft_head")
    if len(set(names).intersection(with_head)) > 1:
        raise InputError(
            f"expected at most one of {', '.join(with_head)} in a cascade, as draft_head is one "
            f"folder; got {name!r}"
        )
    return names


def needs_draft_model(drafter: str | DrafterEntry) -> bool:
    """Returns whether a drafter drafts with a second model; see `entries_of`."""
    return any(member.needs == "draft" for member in entries_of(drafter))


def drafters_needing(what: str) -> list[str]:
    """Returns the drafters whose entry's `needs` is this."""
    # From the entries themselves, so that a new drafter needs no second list.
    return [entry.name for entry in REGISTRY.values() if entry.needs == what]


def options_read(drafter: str | DrafterEntry, options: Any) -> set[str]:
    """Returns which of the options a drafter reads, members and inner one included.

    Raises:
      InputError: see `member_names`; or an inner drafter that may not be one.
    """
    return set[str]().union(*(member.options_read(options) for member in entries_of(drafter)))
