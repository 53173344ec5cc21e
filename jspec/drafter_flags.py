"""Flags that say what drafts are proposed, for the programs that speculate."""

from absl import flags

from jspec.drafters import DRAFTERS, DrafterOptions
from jspec.drafters.spec import NGRAM_LAWS

_DRAFTER = flags.DEFINE_string(
    "drafter",
    None,
    f"What proposes tokens: {', '.join(DRAFTERS)}, or several joined by +, of which the first that "
    "has something to say proposes. Default: model with --draft, else prompt_lookup.",
)
_DRAFT_CONFIDENCE = flags.DEFINE_float(
    "draft_confidence", DrafterOptions.draft_confidence, "A draft model stops where its most "
    "likely token is less likely than this; 0 never stops it."
)  # fmt: skip
_LOOKUP_MIN_MATCH = flags.DEFINE_integer(
    "lookup_min_match", DrafterOptions.lookup_min_match, "Tokens that must match for prompt_lookup."
)
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
_NGRAM_LAW = flags.DEFINE_enum(
    "ngram_law", DrafterOptions.ngram_law, NGRAM_LAWS, "It proposes the most frequent token, or "
    "draws in proportion to the counts."
)  # fmt: skip
_DRAFT_TABLE = flags.DEFINE_string(
    "draft_table", None, "Counts for unigram and bigram, made by scripts/count_ngrams.py."
)


def read_drafter() -> tuple[str | None, DrafterOptions]:
    """Returns the drafter that the flags ask for, None for the default, and its options.

    Raises:
      InputError: an option out of its range.
    """
    options = DrafterOptions(
        draft_confidence=_DRAFT_CONFIDENCE.value,
        lookup_min_match=_LOOKUP_MIN_MATCH.value,
        lookup_growth=_LOOKUP_GROWTH.value,
        ngram_min_order=_NGRAM_MIN_ORDER.value,
        ngram_max_order=_NGRAM_MAX_ORDER.value,
        ngram_window=_NGRAM_WINDOW.value,
        ngram_max_tokens=_NGRAM_MAX_TOKENS.value,
        ngram_law=_NGRAM_LAW.value,
        draft_table=_DRAFT_TABLE.value,
    )
    return _DRAFTER.value, options
