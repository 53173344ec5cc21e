"""Handing on the target's cache, behind whose committed slots a drafter has written.

Whoever called the target while drafting gives the verify call the cache that came out of it. Were
the one from before used again, XLA would copy it, in every round and whether there was a call or
not. What stands behind the committed slots harms nobody: the verify call writes its block over it,
and nobody sees slots that are in no block.
"""

import jax.numpy as jnp

from jspec.common.typing import DraftTokens, RowTokens
from jspec.models.layers import look_up
from jspec.speculation.acceptance.types import TargetPrefix
from jspec.speculation.types import TargetView


def hand_on(view: TargetView, last_token: RowTokens, drafts: DraftTokens) -> TargetPrefix:
    """Returns a verify call of which no layer has run yet, over the cache of the view.

    Args:
      view: the target, its cache as the drafters have left it.
      last_token: the newest token, [b].
      drafts: what follows it, [b w].
    """
    block = jnp.concatenate([last_token[:, None], drafts], axis=1)
    hidden = look_up(view.params["embedding"], block).astype(jnp.float32)
    return TargetPrefix(hidden, view.cache, 0)
