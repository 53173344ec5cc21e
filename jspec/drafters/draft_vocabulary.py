"""A draft model's head over the most frequent tokens only.

    head of the model   | 0  1  2  3  4  5 ...                              151,935 |
    rows that are kept  | 0  1  2  3  4  5 ...  31,999 |   151,643  151,645           |

The head of a small model is a large share of what it reads for a token. A head of fewer rows is
read faster, and its logits are those of the whole head, bit for bit. The drafts are drawn from
their softmax, in which every other token has probability 0. As the proposal says so, every
acceptance rule stays exact: a token that is never drafted comes from the residual.

The ids of a byte-level BPE come in the order in which its merges were learned, the most frequent
pair first. So the first ids are the frequent tokens, and no text has to be counted.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jspec.common.errors import InputError
from jspec.drafters.spec import ConfidenceOptions, DrafterSpec, option
from jspec.kernels import take_rows
from jspec.models.layers import head_kernel

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


def with_draft_vocabulary(spec: DrafterSpec) -> DrafterSpec:
    """Returns what the drafter is built from, with a draft model whose head has fewer rows.

    Without the option `draft_vocab_size`, or a draft model, the same.

    Raises:
      InputError: more tokens than draft and target share.
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
    ids = draft_ids(size, spec.vocab_size, ends)
    head = take_rows(head_kernel(config, params), ids)
    return spec._replace(
        draft_config=dataclasses.replace(config, tie_embeddings=False, head_size=len(ids)),
        draft_params={**params, "head": head, HEAD_IDS: jnp.asarray(ids, jnp.int32)},
    )


def draft_ids(size: int, vocab_size: int, ends: set[int]) -> Int[np.ndarray, "u"]:
    """Returns the first `size` ids, and those of `ends` that a vocabulary has, in rising order."""
    # Without the tokens that end a text no draft would ever end one.
    late = sorted(token_id for token_id in ends if size <= token_id < vocab_size)
    return np.array([*range(size), *late], np.int64)
