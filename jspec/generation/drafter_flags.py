"""Flags that say what drafts are proposed, for the programs that speculate."""

import re

from absl import flags

from jspec.common.errors import InputError
from jspec.drafters import DRAFTERS, DrafterOptions
from jspec.drafters.spec import NGRAM_PROBS

_DRAFTER = flags.DEFINE_string(
    "drafter",
    None,
    f"What proposes tokens: {', '.join(DRAFTERS)}, or several joined by +, of which the first that "
    "has something to say proposes. Default: model with --draft, else prompt_lookup, and "
    "prompt_lookup+eagle where a head for the target comes with jspec (smollm2-135m-instruct).",
)
_DRAFT_CONFIDENCE = flags.DEFINE_float(
    "draft_confidence", DrafterOptions.draft_confidence, "A drafter that is drawn from stops "
    "where its most likely token is less likely than this; 0 never stops it."
)  # fmt: skip
_LOOKUP_MIN_MATCH = flags.DEFINE_integer(
    "lookup_min_match", DrafterOptions.lookup_min_match, "Tokens that must match for "
    "prompt_lookup; 0 takes 1, and 2 in a cascade."
)  # fmt: skip
_DRAFT_LAYERS = flags.DEFINE_string(
    "draft_layers", None, "The target's layers with which layer_skip drafts: a number takes the "
    "first so many, a list such as 0-5,28,29 takes those."
)  # fmt: skip
_INNER_DRAFTER = flags.DEFINE_string(
    "inner_drafter", DrafterOptions.inner_drafter, "What guesses the draft model's tokens for "
    "hierarchical."
)  # fmt: skip
_INNER_NUM_DRAFT_TOKENS = flags.DEFINE_integer(
    "inner_num_draft_tokens", DrafterOptions.inner_num_draft_tokens, "How many of them at a time."
)
_DRAFT_PATTERN = flags.DEFINE_string(
    "draft_pattern", None, "A regular expression whose forced tokens pattern proposes."
)
_DRAFT_JSON = flags.DEFINE_string(
    "draft_json", None, 'Or a JSON text, such as {"name": "<string>", "age": "<integer>"}; '
    "placeholders: <string>, <number>, <integer>, <boolean>. Spaces and line breaks count: drafts "
    "come only where the answer is laid out as this text is."
)  # fmt: skip
_LOOKUP_GROWTH = flags.DEFINE_float(
    "lookup_growth", DrafterOptions.lookup_growth, "prompt_lookup proposes at most this times the "
    "length of the match; 0 sets no such limit."
)  # fmt: skip
_NGRAM_MIN_ORDER = flags.DEFINE_integer(
    "ngram_min_order", DrafterOptions.ngram_min_order, "n of the shortest n-grams of ngram."
)
_NGRAM_MAX_ORDER = flags.DEFINE_integer(
    "ngram_max_order", DrafterOptions.ngram_max_order, "n of the longest."
)
_NGRAM_WINDOW = flags.DEFINE_integer(
    "ngram_window", DrafterOptions.ngram_window, "Tokens at the text's end in which it counts."
)
_NGRAM_MAX_TOKENS = flags.DEFINE_integer(
    "ngram_max_tokens", DrafterOptions.ngram_max_tokens, "Its drafts a round, at most."
)
_NGRAM_PROBS = flags.DEFINE_enum(
    "ngram_probs", DrafterOptions.ngram_probs, NGRAM_PROBS, "It proposes the most frequent token, "
    "or draws in proportion to the counts."
)  # fmt: skip
_DRAFT_TABLE = flags.DEFINE_string(
    "draft_table", None, "Counts for unigram and bigram, made by scripts/make_answers.py."
)
_DRAFT_HEAD = flags.DEFINE_string(
    "draft_head",
    None,
    "Folder with what jspec.train has trained for eagle, medusa, blockwise or lookahead."
    " Published heads of EAGLE-3 and Medusa have the same layouts. Default for eagle: the head that"
    " comes with jspec for the target, if there is one, which shipped:NAME names.",
)


def read_drafter() -> tuple[str | None, DrafterOptions]:
    """Returns the drafter that the flags ask for, None for the default, and its options.

    Raises:
      InputError: an option out of its range.
    """
    options = DrafterOptions(
        draft_confidence=_DRAFT_CONFIDENCE.value,
        lookup_min_match=_LOOKUP_MIN_MATCH.value,
        draft_layers=_parse_layers(_DRAFT_LAYERS.value),
        inner_drafter=_INNER_DRAFTER.value,
        inner_num_draft_tokens=_INNER_NUM_DRAFT_TOKENS.value,
        pattern=_DRAFT_PATTERN.value,
        json_skeleton=_DRAFT_JSON.value,
        lookup_growth=_LOOKUP_GROWTH.value,
        ngram_min_order=_NGRAM_MIN_ORDER.value,
        ngram_max_order=_NGRAM_MAX_ORDER.value,
        ngram_window=_NGRAM_WINDOW.value,
        ngram_max_tokens=_NGRAM_MAX_TOKENS.value,
        ngram_probs=_NGRAM_PROBS.value,
        draft_table=_DRAFT_TABLE.value,
        draft_head=_DRAFT_HEAD.value,
    )
    return _DRAFTER.value, options


def read_options() -> DrafterOptions:
    """Returns the options, for a program that compares drafters.

    Raises:
      InputError: an option out of its range, or --drafter.
    """
    drafter, options = read_drafter()
    if drafter is not None:
        raise InputError(f"expected --drafters, a list; got --drafter={drafter}")
    return options


def _parse_layers(text: str | None) -> tuple[int, ...] | None:
    """Returns the layers of a list of numbers and ranges; those of one number are the first.

    Raises:
      InputError: something else, a range that falls, or no layer at all.
    """
    if text is None:
        return None
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
    if text.isdigit():
        if int(text) == 0:
            raise InputError(f"expected draft_layers to be at least one layer, got {text!r}")
        return tuple(range(int(text)))
    return tuple(layer for first, last in ranges for layer in range(first, last + 1))
