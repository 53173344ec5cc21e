"""How much a text repeats itself."""

from collections.abc import Sequence

ORDER = 4


def repetition(token_ids: Sequence[int], order: int = ORDER) -> float:
    """Returns the share of a text's n-grams that had occurred in it before; 0 where there are none.

    Args:
      token_ids: of the text.
      order: n.
    """
    grams = [tuple(token_ids[i : i + order]) for i in range(len(token_ids) - order + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
