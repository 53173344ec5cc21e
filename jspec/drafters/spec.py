"""What a drafter is built from, and what the registry knows of it.

Some trained heads come with jspec, each for one target, in `shipped_heads/`.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple, Self

from jspec.common.errors import InputError
from jspec.common.typing import Params
from jspec.drafters.options import LIKELIEST, DrafterOptions
from jspec.models import DecoderConfig
from jspec.speculation.control import Kind
from jspec.speculation.types import Drafter
from jspec.weights import TokenizerLike
from jspec.weights.published import SMOLLM2

DEFAULT_NUM_DRAFT_TOKENS = "auto"  # see `generation.auto`


_PREFIX = "shipped:"
_FOLDER = pathlib.Path(__file__).parent / "shipped_heads"
_HEADS = {("eagle", SMOLLM2): SMOLLM2}  # of a drafter and what its target is asked for by


def shipped_head(drafter: str, target: str) -> str | None:
    """Returns the `draft_head` that comes with jspec for a drafter and a target's name, or None."""
    name = _HEADS.get((drafter, target))
    return None if name is None else _PREFIX + name


def find_head(head: str) -> pathlib.Path:
    """Returns the folder that `draft_head` means: a path, or the name of a head that is shipped.

    Raises:
      InputError: no such folder, or no head of that name comes with jspec.
    """
    if not head.startswith(_PREFIX):
        folder = pathlib.Path(head).expanduser()
        if not folder.is_dir():
            raise InputError(f"{head}: no such folder; expected one with a trained head")
        return folder
    if head.removeprefix(_PREFIX) not in _HEADS.values():
        known = ", ".join(_PREFIX + name for name in _HEADS.values())
        raise InputError(f"expected a head that comes with jspec, {known}; got {head!r}")
    return _FOLDER / head.removeprefix(_PREFIX)


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
    """What the registry knows of a drafter.

    Attributes:
      name: as `--drafter` takes it.
      build: makes it.
      proposes: one line for the README's table, in Markdown.
      source: arXiv ids, separated by commas.
      options: the names of those `DrafterOptions` that it reads.
      needs: what it drafts with besides the text; the target's layers and logits need no option.
      read: given the options, further names, where what it reads depends on their values.
      takes_any_tokenizer: whether its draft model may have another tokenizer than the target.

    Raises:
      InputError: a name that is no text, is empty, or has a "+", which joins names; or an option
        that there is none of.
    """

    name: str
    build: Callable[[DrafterSpec], BuiltDrafter]
    proposes: str
    source: str = ""
    options: Collection[str] = frozenset()
    needs: Literal["", "draft", "draft_head", "draft_table", "layers", "logits"] = ""
    read: Callable[[DrafterOptions], Collection[str]] | None = None
    takes_any_tokenizer: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name) or "+" in self.name:
            raise InputError(f"expected a drafter's name without '+', got {self.name!r}")
        given = self.options if isinstance(self.options, Collection) else [self.options]
        strangers = set(given) - {field.name for field in dataclasses.fields(DrafterOptions)}
        if strangers:
            raise InputError(
                f"expected the names of options of {self.name!r} among those of DrafterOptions, "
                f"got {', '.join(map(str, strangers))}"
            )
        object.__setattr__(self, "options", frozenset(given))  # an entry can be hashed

    def options_read(self, options: DrafterOptions) -> set[str]:
        """Returns the names of the options that it reads, given their values."""
        return {*self.options, *(() if self.read is None else self.read(options))}


class Shape(NamedTuple):
    """The static size of a tree; `draws` is how its drafts are chosen, see `DrafterOptions`."""

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


@dataclasses.dataclass(frozen=True)
class DraftingTrees(Drafter):
    """A drafter of chains, or where it has a shape of trees.

    Attributes:
      shape: of its trees; None for chains.
    """

    shape: Shape | None = dataclasses.field(default=None, kw_only=True)

    @property
    def chain_kinds(self) -> tuple[Kind, ...]:
        """The kinds of its chains."""
        raise NotImplementedError

    @property
    def tree_depth(self) -> int:
        """The greatest depth of its trees."""
        return 0 if self.shape is None else self.shape.depth

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Those of its chains, or the same as trees; drawn trees have no scores."""
        kinds, shape = self.chain_kinds, self.shape
        if shape is None:
            return kinds
        is_tree = shape.draws == LIKELIEST
        return tuple(k._replace(most=min(k.most, shape.depth), is_tree=is_tree) for k in kinds)


def certain_tree_shape(spec: DrafterSpec) -> Shape | None:
    """Returns the shape for a drafter that draws nothing.

    It drafts a chain beside members of a cascade that draw their trees.
    """
    return tree_shape(spec) if spec.options.tree_draws == LIKELIEST else None


def growing_fields(spec: DrafterSpec, most_drafts: int = 0) -> dict[str, Any]:
    """Returns the fields of a `ChainDrafter` of chains, or of trees that grow level by level.

    `most_drafts` is the length of a chain, or of a path, at most; 0 sets no limit.

    Raises:
      InputError: a tree that is deeper, or see `tree_shape`.
    """
    branches, depth = spec.options.tree_branches, spec.options.tree_depth
    if depth > 0 and spec.options.tree_draws == LIKELIEST:
        # A level has no more drafts than that.
        spec = spec.with_at_most(branches + (depth - 1) * branches**2)
    shape = tree_shape(spec)
    if shape is None and most_drafts:
        spec = spec.with_at_most(most_drafts)
    if shape is not None and 0 < most_drafts < shape.depth:
        raise InputError(
            f"expected tree_depth of at most {most_drafts}, the drafts of the head's blocks; got "
            f"{shape.depth}"
        )
    return spec.chain_fields | {"shape": shape}


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
