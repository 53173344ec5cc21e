"""Several independent drafts for one position by one threshold: K-SEQ (SpecTr, arXiv 2310.15141).

For a tree whose siblings are drawn independently from one distribution q. Each of K siblings is
accepted with probability min(1, p(x) / (rho · q(x))), where p is the target's distribution, the
same for all of them: nothing is updated after a refusal. With

  beta = sum of min(q, p / rho),  the probability that a sibling is accepted,
  gain = (1 - (1 - beta)^K) / beta,

x comes out of the siblings with probability min(q(x), p(x) / rho) · gain. If all are refused, the
next token is drawn from norm(p - min(q, p / rho) · gain), which is nowhere negative as long as
gain <= rho. The smallest such rho, from 1 to K, accepts most; it is found by bisection. So at least
1 - 1/e of what the best possible rule accepts is accepted (theorem 3).

On a chain K is 1 and rho is 1: that is `rejection`. Siblings of different distributions, drawn
without replacement or deterministic, are tried as `rejection` tries them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.typing import TargetProbs
from jspec.speculation.acceptance import rejection, siblings
from jspec.speculation.acceptance.chain import draft_probs_of_drafts
from jspec.speculation.acceptance.siblings import Trial, is_candidate
from jspec.speculation.acceptance.tree import Tree, along
from jspec.speculation.types import Proposal

_BISECTIONS = 24  # as many as float32 has binary digits


def _gain(beta: Float32[Array, "b t"], number: Int32[Array, "b t"]) -> Float32[Array, "b t"]:
    # By logarithms, as rounding would lose 1 - (1 - beta)^K of a small beta.
    number = number.astype(jnp.float32)
    some = -jnp.expm1(number * jnp.log1p(-jnp.minimum(beta, 1.0)))
    return jnp.where(beta > 0, some / jnp.where(beta > 0, beta, 1.0), number)


def threshold(
    target: Float32[Array, "b t v"], draft: Float32[Array, "b t v"], number: Int32[Array, "b t"]
) -> tuple[Float32[Array, "b t"], Float32[Array, "b t"]]:
    """Returns rho and the gain at each slot, of `number` siblings drawn from `draft`."""

    def gain(rho: Float32[Array, "b t"]) -> Float32[Array, "b t"]:
        return _gain(jnp.sum(jnp.minimum(draft, target / rho[..., None]), axis=-1), number)

    def halve(_: Int32[Array, ""], bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        is_enough = gain(middle) <= middle
        return jnp.where(is_enough, low, middle), jnp.where(is_enough, middle, high)

    high = jnp.maximum(number, 1).astype(jnp.float32)  # gain <= K always
    # The upper bound, so that the residual is not negative.
    _, rho = jax.lax.fori_loop(0, _BISECTIONS, halve, (jnp.ones_like(high), high))
    return rho, gain(rho)


def try_all(target_probs: TargetProbs, proposal: Proposal, tree: Tree) -> Trial:
    """Tries all drafts of all nodes; see `siblings.try_all`."""
    in_turn = siblings.try_all(target_probs, proposal, tree)
    if proposal.probs is None:
        return in_turn
    is_possible = is_candidate(proposal, tree)
    rows, slots = jnp.arange(proposal.tokens.shape[0])[:, None], jnp.arange(tree.depths.shape[1])
    is_child = (tree.parents[:, None, :] == slots[:, None]) & is_possible[:, None, :]
    first = jnp.argmax(is_child, axis=-1)
    number = jnp.sum(is_child, axis=-1, dtype=jnp.int32)
    draft = along(first, proposal.probs)  # of each slot's first child
    is_equal = (proposal.probs == along(tree.parents, draft)).all(axis=-1)
    is_even: Bool[Array, "b t"] = ~(is_child & ~is_equal[:, None, :]).any(axis=-1)
    rho, gain = threshold(target_probs, draft, number)
    drawn = jnp.minimum(draft, target_probs / rho[..., None]) * gain[..., None]
    drawn = jnp.where((number > 0)[..., None], drawn, 0.0)
    lacking = jnp.maximum(target_probs - drawn, 0.0)
    probs = draft_probs_of_drafts(proposal)
    target = jnp.where(
        is_possible & (probs > 0), target_probs[rows, tree.parents, proposal.tokens], 0.0
    )
    is_even_at = along(tree.parents, is_even)
    return Trial(
        jnp.where(is_even_at, target, in_turn.target),
        jnp.where(is_even_at, probs * along(tree.parents, rho), in_turn.draft),
        jnp.where(is_even[..., None], lacking, in_turn.lacking),
    )


RULE = rejection.RULE._replace(tree=siblings.make_rule(try_all))
