"""What a user may set of the drafters: one dataclass, from which flags and checks are made."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Self

from jspec.common.errors import InputError, check_among, check_numbers, check_range, whole_number

LIKELIEST, WITH, WITHOUT = "likeliest", "with", "without"  # how a tree's drafts are chosen
SHARED, SPELLING, AUTO = "shared", "spelling", "auto"  # drafts of another vocabulary


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


def option_title(field: dataclasses.Field[Any]) -> str:
    """Returns an option's name, with its flag's name where that is another."""
    flag = field.metadata["flag"]
    return field.name if flag is None else f"{field.name} (--{flag})"


def parse_layers(text: str) -> tuple[int, ...]:
    """Returns the layers of a list of numbers and ranges; those of one number are the first.

    Raises:
      InputError: something else, a range that falls, or no layer at all.
    """
    parts = [re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", part) for part in text.split(",")]
    ranges = [(int(part[1]), int(part[2] or part[1])) for part in parts if part is not None]
    if len(ranges) < len(parts):
        raise InputError(
            "expected draft_layers as a number or a list like 0-5,28,29, with no number above "
            f"9999; got {text!r}"
        )
    falling = [f"{first}-{last}" for first, last in ranges if first > last]
    if falling:
        raise InputError(
            f"expected ranges of draft_layers from the lower to the higher, got {falling[0]!r}"
        )
    # A lone number is a count; in a list the same number is a layer.
    if text.isdigit():
        if int(text) == 0:
            raise InputError(f"expected draft_layers to be at least one layer, got {text!r}")
        return tuple(range(int(text)))
    return tuple(layer for first, last in ranges for layer in range(first, last + 1))


@dataclasses.dataclass(frozen=True)
class DrafterOptions:
    """Options of all drafters; each reads its own: see `DrafterEntry.options`.

    Raises:
      InputError: a value of another type or out of its range, or one that needs another option.
    """

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
    # A cascade's other members have better drafts than those of one token's match. A tree has room
    # for theirs as well.
    lookup_min_match: int = option(
        0,
        "For prompt_lookup: number of tokens that must match; 0 means 1, or 2 in a cascade of "
        "chains.",
        between=(0, 8),
    )
    lookup_growth: float = option(
        0.0,
        "For prompt_lookup: propose at most this times the length of the match; 0 for no limit.",
        between=(0, 100),
    )
    draft_corpus: str | None = option(
        None,
        "For suffix: a file of earlier answers (.jsonl, as --output_json writes) or of one plain "
        "text, in which the text's end is looked up, too.",
    )
    suffix_growth: float = option(
        4.0, "For suffix: propose at most this times the length of the match.", between=(1, 100)
    )
    suffix_min_share: float = option(
        0.1,
        "For suffix: stop where a smaller share of the places that match go on like this.",
        between=(0, 1),
    )
    suffix_min_match: int = option(
        0,
        "For suffix: number of tokens that must match; 0 means 1, or 2 in a cascade of chains. "
        "Tokens that match in --draft_corpus count one less.",
        between=(0, 16),
    )
    draft_memory: int = option(
        0,
        "For suffix: look the text's end up in this many earlier answers of this run or server, "
        "too, where the answer does not depend on drafts: at temperature 0, or with --acceptance="
        "coupled.",
        between=(0, 4096),
    )
    tree_draws: str = option(
        LIKELIEST,
        "With tree_depth: the likeliest drafts; or tree_branches whole drafts, whose first tokens "
        "are drawn with or without replacement. Under coupled, whose noise they share, without.",
        among=(LIKELIEST, WITH, WITHOUT),
    )
    # At temperature 0 the distribution is looked at before it is made one-hot.
    draft_confidence: float = option(
        0.0,
        "Stop drafting where no token is at least this likely, for drafters that draw from a "
        "distribution; 0 never stops.",
        between=(0, 1),
    )
    draft_layers: tuple[int, ...] | None = option(
        None,
        "For layer_skip: the target's layers that draft. A number takes that many of the first, a "
        "list such as 0-5,28,29 takes those. Default: the first nine tenths.",
        parse=parse_layers,
    )
    draft_translation: str = option(
        AUTO,
        "For a draft model with another tokenizer: draw drafts from the tokens that both have "
        "(shared), spell what the draft would say in the target's tokens (spelling), or spell at "
        "temperature 0 and draw above (auto).",
        among=(SHARED, SPELLING, AUTO),
    )
    draft_context: int = option(
        0,
        "The draft model reads at most this many of a text's last tokens before its first drafts; "
        "0 reads all. Its drafts are checked as ever.",
        between=(0, 10_000_000),
    )
    draft_vocab_size: int = option(
        0,
        "The draft model chooses among this many tokens, the most frequent ones, and those that "
        "end a text; 0 takes all.",
        between=(0, 10_000_000),
    )
    draft_vocab_text: str | None = option(
        None,
        "Text file whose most frequent tokens they are, such as answers of the target. The first "
        "ids fill what is left, and are all of it by default.",
    )
    inner_drafter: str = option(
        "prompt_lookup", "For hierarchical: the drafter that proposes tokens to the draft model."
    )
    inner_num_draft_tokens: int = option(
        4, "For hierarchical: most tokens that --inner_drafter proposes at a time.", between=(1, 64)
    )
    pattern: str | None = option(
        None,
        "For pattern: a regular expression; the tokens it forces are proposed.",
        flag="draft_pattern",
    )
    json_skeleton: str | None = option(
        None,
        'For pattern: a JSON text, such as {"name": "<string>", "age": "<integer>"}, in place of '
        "--draft_pattern. Placeholders: <string>, <number>, <integer>, <boolean>. Spaces and line "
        "breaks count: drafts are proposed only where the answer is laid out like this text.",
        flag="draft_json",
    )
    ngram_min_order: int = option(2, "For ngram: n of the shortest n-grams that are counted.")
    ngram_max_order: int = option(4, "For ngram: n of the longest n-grams.", between=(2, 16))
    ngram_window: int = option(
        512, "For ngram: number of tokens at the end of the text to count in.", between=(2, 32768)
    )
    ngram_max_tokens: int = option(4, "For ngram: most drafts per round.", between=(1, 64))
    ngram_probs: str = option(
        "deterministic",
        "For ngram: propose the most frequent token, or draw in proportion to the counts.",
        among=("deterministic", "sampled"),
    )
    draft_table: str | None = option(
        None, "For unigram and bigram: file of token counts, made by scripts/make_answers.py."
    )
    # In jspec's layout or that of published heads of EAGLE-3 and Medusa, or "shipped:" and the name
    # of a head that comes with jspec.
    draft_head: str | None = option(
        None,
        "For eagle, dflash, medusa, blockwise and lookahead: folder with the trained head, made "
        "by jspec.train or published. Default: the head that comes with jspec for the target, if "
        "any.",
    )

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
        self._check_together()

    def _check_together(self) -> None:
        if self.tree_depth == 0 and self.tree_branches != type(self).tree_branches:
            raise InputError(f"expected tree_branches with tree_depth, got {self.tree_branches}")
        if self.tree_depth == 0 and self.tree_draws != LIKELIEST:
            raise InputError(f"expected tree_draws with tree_depth, got {self.tree_draws!r}")
        if not 2 <= self.ngram_min_order <= self.ngram_max_order:
            raise InputError(
                f"expected ngram_min_order from 2 to ngram_max_order, {self.ngram_max_order}; got "
                f"{self.ngram_min_order}"
            )
        if self.draft_vocab_text is not None and self.draft_vocab_size == 0:
            raise InputError("expected draft_vocab_size with draft_vocab_text, got it alone")
        layers = () if self.draft_layers is None else self.draft_layers
        if not isinstance(layers, tuple | list | range):
            raise InputError(f"expected draft_layers as a tuple of numbers, got {layers!r}")
        for layer in layers:
            whole_number("draft_layers", layer)

    def without_tree(self) -> Self:
        """Returns them for a drafter of chains."""
        defaults = {name: getattr(DrafterOptions, name) for name in TREE}
        return dataclasses.replace(self, **defaults)


def named(prefix: str) -> frozenset[str]:
    """Returns the names of the options that begin so."""
    names = (field.name for field in dataclasses.fields(DrafterOptions))
    return frozenset(name for name in names if name.startswith(prefix))


# What several drafters read: those that draw from a distribution, that draft trees, that draw
# trees, and that draft with a second model.
CONFIDENCE = frozenset({"draft_confidence"})
TREE_SIZE = frozenset({"tree_depth", "tree_branches"})
TREE = named("tree_")
DRAFT_MODEL = CONFIDENCE | named("draft_vocab_") | {"draft_context"}
