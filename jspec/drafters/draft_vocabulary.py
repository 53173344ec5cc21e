"""A draft model's head over the most frequent tokens only.

    head of the model   | 0  1  2  3  4  5 ...                              151,935 |
    rows that are kept  | 0  1  2  3  4  5 ...  31,999 |   151,643  151,645           |

The head of a small model is a large share of what it reads for a token. A head of fewer rows is
read faster, and its logits are those of the whole head, bit for bit. The drafts are drawn from
their softmax, in which every other token has probability 0. As the proposal says so, every
acceptance rule stays exact: a token that is never drafted comes from the residual.

Which tokens are frequent is counted in a text, if there is one. The other rows are for the first
ids: those of a byte-level BPE come in the order in which its merges were learned, the most frequent
pair first.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jspec.common.errors import InputError
from jspec.drafters.spec import ConfidenceOptions, DrafterSpec, option
from jspec.models.layers import head_of_ids

HEAD_IDS = "head_ids"  # beside the draft model's parameters


@dataclasses.dataclass(frozen=True)
class DraftVocabularyOptions(ConfidenceOptions):
    """Of the drafters that draft with a second model."""

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_vocab_text is not None and self.draft_vocab_size == 0:
            raise InputError("expected draft_vocab_size with draft_vocab_text, got it alone")


def with_draft_vocabulary(spec: DrafterSpec) -> DrafterSpec:
    """Returns what the drafter is built from, with a draft model whose head has fewer rows.

    Without the option `draft_vocab_size`, or a draft model, the same.

    Raises:
      InputError: more tokens than draft and target share, or a text that cannot be read.
    """
    size, config, params = spec.options.draft_vocab_size, spec.draft_config, spec.draft_params
    if size == 0 or config is None:
        return spec
    if size > spec.vocab_size:
        raise InputError(
            f"expected draft_vocab_size of at most {spec.vocab_size}, the ids that draft and "
            f"target share; got {size}"
        )
    ends = {*config.eos_ids, *spec.target_config.eos_ids}
    ids = draft_ids(size, spec.vocab_size, ends, _frequent_ids(spec))
    head = head_of_ids(config, params, ids)
    return spec._replace(
        draft_config=dataclasses.replace(config, tie_embeddings=False, head_size=len(ids)),
        draft_params={**params, "head": head, HEAD_IDS: jnp.asarray(ids, jnp.int32)},
    )


def draft_ids(
    size: int, vocab_size: int, ends: set[int], frequent: Sequence[int] = ()
) -> Int[np.ndarray, "u"]:
    """Returns `size` ids and those of `ends`, in rising order, all of them below `vocab_size`.

    The most `frequent` come first, then the lowest ids.
    """
    counted = (token_id for token_id in frequent if token_id < vocab_size)
    kept = list(dict.fromkeys([*counted, *range(vocab_size)]))[:size]
    # Without the tokens that end a text no draft would ever end one.
    return np.array(sorted({*kept, *(one for one in ends if one < vocab_size)}), np.int64)


def _frequent_ids(spec: DrafterSpec) -> list[int]:
    """Returns the ids of the text's tokens, the most frequent first; none without a text."""
    name = spec.options.draft_vocab_text
    if name is None:
        return []
    assert spec.tokenizer is not None
    try:
        text = pathlib.Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: expected a text in UTF-8, got {error.reason}") from None
    counts = collections.Counter(spec.tokenizer.encode(text, add_bos=False))
    # Of equal counts the lower id first, so that the order does not depend on the text's.
    return sorted(counts, key=lambda token_id: (-counts[token_id], token_id))
