"""The target drafts for itself with trained look-ahead embeddings (PaSS, arXiv 2311.13581).

    propose   | committed | last  [LA]  [LA]  [LA] |   one call: logits of d1, d2, d3, d4
    verify    | committed | last   d1    d2    d3   d4 |

A round is two calls of the target, and gives at least two tokens: d1 comes from the target's own
distribution. The first call works in the target's cache, after the committed tokens; the second
writes its block over that, and nothing of the first is ever committed.
"""

import dataclasses

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float32, Int32, Key

from jspec.common.typing import Params, RowTokens
from jspec.drafters.chain import draw_chain
from jspec.drafters.heads.lookahead_checkpoint import load_lookahead
from jspec.drafters.heads.lookahead_module import embed_block
from jspec.drafters.memory import Stateless, StopsUnsure, hand_on
from jspec.drafters.spec import (
    BuiltDrafter,
    DrafterEntry,
    DrafterSpec,
    DrawnHeadOptions,
    required_head,
)
from jspec.models.cache import KVCache
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.types import Kind, LimitFn, TargetView

_ASSUMED = 0.98, 0.5  # acceptance, before it is known; the first draft is the target's own


class _Looked(struct.PyTreeNode):
    """What the look ahead has given.

    Attributes:
      cache: the target's, the block written and not committed.
      logits: of every draft, [b w v].
      index: the draft that is drawn next.
    """

    cache: KVCache
    logits: Float32[Array, "b w v"]
    index: Int32[Array, ""]


@dataclasses.dataclass(frozen=True)
class LookaheadDrafter(StopsUnsure, Stateless):
    """Proposes a chain whose distributions come from one call of the target. It has no state.

    Attributes:
      num_draft_tokens: drafts a round: one, and one more for each embedding that is used.
      vocab_size: ids that are really used; the padding beyond them is cut.
      target_vocab_size: width of the target's distributions.
      min_confidence: it proposes no further where no token is this likely; 0 never stops it.
    """

    num_draft_tokens: int
    vocab_size: int
    target_vocab_size: int
    min_confidence: float = 0.0

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """One: a chain of one draft and one more for each embedding."""
        return (Kind("lookahead", *_ASSUMED, most=self.num_draft_tokens),)

    def propose(
        self,
        params: Params,
        state: tuple[()],
        last_token: RowTokens,
        *,
        limit: LimitFn,
        rng_keys: Key[Array, "b w"],
        settings: SamplingSettings,
        view: TargetView,
    ) -> tuple[Proposal, tuple[()]]:
        """Looks ahead once, if any row wants drafts, and draws them one after another."""
        table, (b, width) = view.params["embedding"], rng_keys.shape

        def first(looked: _Looked, token: RowTokens) -> tuple[Array, _Looked]:
            # One call gives the logits of every draft; later ones only read them.
            block = embed_block(table, params, token, width - 1)
            logits, _, cache = view.apply(view.params, block, looked.cache)
            return later(looked.replace(cache=cache, logits=logits), token)

        def later(looked: _Looked, token: RowTokens) -> tuple[Array, _Looked]:
            del token
            logits = looked.logits[:, looked.index, : self.vocab_size]
            return logits, looked.replace(index=looked.index + 1)

        # A loop's state must have its final shape before the call is made.
        nothing = jnp.zeros([b, width, self.target_vocab_size], jnp.float32)
        proposal, looked, _ = draw_chain(
            first,
            later,
            _Looked(view.cache, nothing, jnp.int32(0)),
            last_token,
            limit=limit(jnp.zeros_like(last_token)),
            rng_keys=rng_keys,
            settings=settings,
            vocab_size=self.target_vocab_size,
            min_confidence=self.min_confidence,
        )
        # The look-ahead block lies after the committed slots; the verify call overwrites it.
        prefix = hand_on(view._replace(cache=looked.cache), last_token, proposal.tokens)
        return proposal.replace(prefix=prefix), state


def build_lookahead(spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter over the embeddings in `spec.options.draft_head`.

    Raises:
      InputError: there are none, or they are another target's.
    """
    folder = required_head(spec, "lookahead")
    embeddings = load_lookahead(folder, spec.target_config)
    drafter = LookaheadDrafter(
        # + 1: the target's own next token needs no embedding.
        num_draft_tokens=min(spec.num_draft_tokens, embeddings.config.num_tokens + 1),
        vocab_size=spec.vocab_size,
        target_vocab_size=spec.target_config.vocab_size,
        min_confidence=spec.options.draft_confidence,
    )
    return BuiltDrafter(drafter, embeddings.params)


ENTRY = DrafterEntry(
    name="lookahead",
    build=build_lookahead,
    proposes="what the target itself draws at trained embeddings of unknown tokens",
    source="2311.13581",
    options=DrawnHeadOptions,
    needs="draft_head",
    prior_cost=2.02,
)
