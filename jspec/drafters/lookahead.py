"""The target drafts for itself with trained look-ahead embeddings (PaSS, arXiv 2311.13581).

    propose   | committed | last  [LA]  [LA]  [LA] |   one call: logits of d1, d2, d3, d4
    verify    | committed | last   d1    d2    d3   d4 |

A round is two calls of the target, and gives at least two tokens: d1 comes from the target's own
distribution. The first call works in the target's cache, after the committed tokens; the second
writes its block over that, and nothing of the first is ever committed. The embeddings take the
positions of tokens that are not known yet; nothing else is trained.

A folder holds

```
  config.json           lookahead_num_tokens (L), and the target's sizes
  model.safetensors
    embeddings.weight   [L, D], float32
```
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Float32, Int32

from jspec.common.typing import Params, RowTokens
from jspec.drafters.chain import ChainDrafter
from jspec.drafters.head_folder import HeadFormat, HeadSizes, load_head, save_head
from jspec.drafters.memory import hand_on
from jspec.drafters.spec import BuiltDrafter, DrafterSpec
from jspec.models.cache import KVCache
from jspec.models.layers import Kernel, look_up
from jspec.speculation.types import Kind, Proposal, RoundInputs
from jspec.weights.parameter import Parameter, one_tensor

_KEYS = {"num_tokens": "lookahead_num_tokens"}


@dataclasses.dataclass(frozen=True)
class LookaheadConfig(HeadSizes):
    """How many embeddings there are, and how wide they are.

    With the target's own next token, drafts are one more than `num_tokens`.
    """

    embed_dim: int
    num_tokens: int


def embed_block(
    table: Kernel, params: Any, last_token: Array, num_ahead: int
) -> Float[Array, "b t d"]:
    """Returns the inputs of a call that looks ahead, [b 1+num_ahead d], float32.

    These are the newest token of each row [b] in the target's embedding `table`, and the first of
    `params["embeddings"]`, [l d].
    """
    last = look_up(table, last_token[:, None]).astype(jnp.float32)
    later = params["embeddings"][:num_ahead].astype(jnp.float32)
    # The same embeddings for every row: they stand for positions, not for texts.
    later = jnp.broadcast_to(later, (last.shape[0], *later.shape))
    return jnp.concatenate([last, later], axis=1)


def init_lookahead_params(
    config: LookaheadConfig, table: Float[Array, "v d"], rng_key: Array
) -> dict[str, Any]:
    """Returns embeddings as large as those of `table`, without a meaning; the key is consumed."""
    # Inputs of another size than the model's own would start training far off.
    scale = jnp.sqrt(jnp.mean(jnp.square(table.astype(jnp.float32))))
    shape = config.num_tokens, config.embed_dim
    return {"embeddings": scale * jax.random.normal(rng_key, shape)}


def _rules(config: LookaheadConfig) -> list[Parameter]:
    shape = config.num_tokens, config.embed_dim
    return [one_tensor(("embeddings",), "embeddings.weight", shape)]


_FORMAT = HeadFormat(
    what="look-ahead embeddings",
    architecture="LookaheadEmbeddings",
    keys=_KEYS,
    read_config=lambda raw, target, _: LookaheadConfig(target.embed_dim, raw[_KEYS["num_tokens"]]),
    rules=_rules,
)
load_lookahead = functools.partial(load_head, _FORMAT)  # float32 whatever the target's type
save_lookahead = functools.partial(save_head, _FORMAT)


class _Looked(struct.PyTreeNode):
    cache: KVCache  # the target's, the block written and not committed
    logits: Float32[Array, "b w v"]  # of every draft
    index: Int32[Array, ""]  # of the draft that is drawn next


@dataclasses.dataclass(frozen=True)
class LookaheadDrafter(ChainDrafter):
    """Proposes a chain whose distributions come from one call of the target. It has no state.

    There is one draft, and one more for each embedding that is used.
    """

    kind = Kind("lookahead", 0.98, 0.5, is_certain=True)  # the first draft is the target's own
    can_roll_back = True

    def propose(
        self, params: Params, state: tuple[()], inputs: RoundInputs
    ) -> tuple[Proposal, tuple[()]]:
        """Looks ahead once, if any row wants drafts, and draws them one after another."""
        view, (b, width) = inputs.view, inputs.rng_keys.shape

        def first(looked: _Looked, token: RowTokens) -> tuple[Array, _Looked]:
            # One call gives the logits of every draft; later ones only read them.
            block = embed_block(view.params["embedding"], params, token, width - 1)
            logits, _, cache = view.apply(view.params, block, looked.cache)
            return later(looked.replace(cache=cache, logits=logits), token)

        def later(looked: _Looked, token: RowTokens) -> tuple[Array, _Looked]:
            logits = looked.logits[:, looked.index, : self.vocab_size]
            return logits, looked.replace(index=looked.index + 1)

        # A loop's state must have its final shape before the call is made.
        nothing = jnp.zeros([b, width, self.target_vocab_size], jnp.float32)
        looked = _Looked(view.cache, nothing, jnp.int32(0))
        proposal, looked, _ = self.draw_chain(first, later, looked, inputs)
        # The look-ahead block lies after the committed slots; the verify call overwrites it.
        prefix = hand_on(view._replace(cache=looked.cache), inputs.last_token, proposal.tokens)
        return proposal.replace(prefix=prefix), state


def build(spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter over trained embeddings."""
    folder = spec.head_folder("lookahead")
    embeddings = load_lookahead(folder, spec.target_config)
    # + 1: the target's own next token needs no embedding.
    spec = spec.with_at_most(embeddings.config.num_tokens + 1)
    return BuiltDrafter(LookaheadDrafter(**spec.chain_fields), embeddings.params)
