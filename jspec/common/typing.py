"""The legend of the axes, and the array types used in signatures.

Axes:
  b: rows of a batch, one request each
  t: tokens of one block, the query tokens of one model call
  u: slots of one block that a query may see, u >= t
  s: slots of a KV cache
  n: query heads; k: key/value heads; g = n / k: query heads of a group
  h: dimensions of one head; d: width of the residual stream; f: width of the feed-forward layer
  v: vocabulary
  w: draft tokens of one round (the paper's gamma)
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Array, Bool, Float, Float32, Int, Int32, UInt32

Params: TypeAlias = Any  # a nested dict of arrays

Tokens: TypeAlias = Int32[Array, "b t"]
RowTokens: TypeAlias = Int32[Array, "b"]
RowCounts: TypeAlias = Int32[Array, "b"]
RowFlags: TypeAlias = Bool[Array, "b"]
RowSeeds: TypeAlias = UInt32[Array, "b"]
BlockFlags: TypeAlias = Bool[Array, "b t"]
BlockMask: TypeAlias = Bool[Array, "b t u"]

Logits: TypeAlias = Float32[Array, "b t v"]
Probs: TypeAlias = Float32[Array, "b t v"]
DraftTokens: TypeAlias = Int32[Array, "b w"]
DraftProbs: TypeAlias = Float32[Array, "b w v"]
# Logits, or values computed of them: an array [b t v], or a device's part, `kernels.SplitLogits`.
AnyLogits: TypeAlias = Any
TargetProbs: TypeAlias = Float32[Array, "b t v"]  # t = w + 1: the last committed token, drafts


@runtime_checkable
class ApplyFn(Protocol):
    """A model, as the algorithm sees it: a function."""

    def __call__(
        self,
        params: Params,
        tokens: Int[Array, "b t"] | Float[Array, "b t d"],
        cache: Any,
        *,
        positions: Int[Array, "b t"] | None = None,
        block_mask: Bool[Array, "#b t u"] | None = None,
        hidden_layers: Sequence[int] = (),
        logits_at: Int[Array, "b"] | None = None,
        first_layer: int = 0,
    ) -> tuple[Float32[Array, "b l v"], Array, Any]:
        """Runs one block of tokens, ids or embeddings, through the model.

        Args:
          params: the model's parameters.
          tokens: the block. Embeddings are as the table has them, before any scale of the config.
          cache: a KVCache with the tokens before. The block is written after its committed slots.
          positions: position of each token; None for a chain, which follows `cache.length`.
          block_mask: which slots of the block each token sees; None for a chain. With u > t the
            first u - t slots of the block were written by earlier calls and are not committed.
          hidden_layers: layers whose outputs to return: 0 is the embedding, i the output of the
            i-th block.
          logits_at: the one index of each row's block at which to compute logits; None for all.
          first_layer: the layer to begin with. If it is not 0, `tokens` are the outputs of the
            layer before it, and the keys and values of the earlier layers are in the cache.

        Returns:
          logits: [b t v], or [b 1 v] with `logits_at`; float32.
          hidden: the output after the final norm, [b t d]; with `hidden_layers` their outputs,
            [b t l d].
          cache: the cache with the block written and nothing committed.
        """
        ...
