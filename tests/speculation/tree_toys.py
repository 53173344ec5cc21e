"""Toy models and drafters for trees, and the exact sum over a round's drafts and verdicts."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jspec.drafters.memory import History
from jspec.sampling.distribution import sampling_probs
from jspec.speculation.acceptance.tree import end_of, tree_of
from jspec.speculation.types import Drafter, Kind, Proposal

# Parents of the drafts; -1 is the last committed token.
SHAPES = {
    "one": [-1],
    "chain": [-1, 0, 1],
    "siblings": [-1, -1, -1],
    "bush": [-1, -1, 0, 0, 1],
    "comb": [-1, 0, -1, 1],
}

CERTAIN = ("least", "twice")  # kinds of drawing of which a proposal says no distributions


def depth_of(parents):
    """Returns the greatest depth of a tree."""
    return max(len(path_to(parents, node)) for node in range(len(parents)))


def path_to(parents, node):
    """Returns the drafts from the root's child down to a draft, which may be -1, the root."""
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


def siblings_before(parents, node):
    """Returns the earlier drafts with the same parent."""
    return [other for other in range(node) if parents[other] == parents[node]]


def tree_apply(
    table, tokens, cache, *, positions=None, block_mask=None, hidden_layers=(), logits_at=None,
    first_layer=0,
):  # fmt: skip
    """An ApplyFn: logits are table[the token before, the token], the one before by the mask alone.

    It is the visible token of the position before. So a sibling that is seen, a wrong position or a
    slot that was moved wrongly changes the distribution.
    """
    del hidden_layers, first_layer
    b, t = tokens.shape
    block_mask = jnp.tril(jnp.ones([1, t, t], bool)) if block_mask is None else block_mask
    offset = block_mask.shape[-1] - t
    if positions is None:
        positions = jnp.broadcast_to(cache.length[:, None] + offset + jnp.arange(t), (b, t))
    keys = (tokens + 1).astype(jnp.float32)[:, :, None, None]
    where = (positions + 1).astype(jnp.float32)[:, :, None, None]
    cache = cache.write(keys, where, offset)
    held, position = (
        leaf[0][:, 0, :, 0].astype(jnp.int32) - 1 for leaf in (cache.keys, cache.values)
    )
    # Equal positions add up: to see two tokens of one position shifts the sum out of the table.
    is_before = cache.visible(block_mask) & (position[:, None, :] == positions[..., None] - 1)
    previous = jnp.sum(jnp.where(is_before, held[:, None, :], 0), axis=-1)
    if logits_at is not None:
        tokens, previous = (
            jnp.take_along_axis(x, logits_at[:, None], axis=1) for x in (tokens, previous)
        )
    return table[previous, tokens], jnp.zeros((b, t, 1)), cache


class ToyTreeDrafter(struct.PyTreeNode, Drafter):
    """Drafts a tree of fixed shapes from a table [previous, last, next].

    Row r, in round n, takes the shape number (r + length) modulo their number.

    Attributes:
      shapes: parents, padded to one width with the number of real drafts first.
      kind_of_draw: "best" takes the table's most likely tokens, "with" and "without" draw siblings
        with and without replacement.
    """

    shapes: tuple = struct.field(pytree_node=False)
    kind_of_draw: str = struct.field(pytree_node=False, default="best")

    may_be_silent = False
    kinds = (Kind("toy", 0.5, 0.5, is_certain=True),)

    @property
    def num_draft_tokens(self):
        return max(map(len, self.shapes))

    def init(self, batch_size, capacity):
        return History.init(batch_size, capacity)

    def observe(self, params, state, tokens, hidden, valid):
        return state.append(tokens, valid)

    def propose(self, params, state, inputs):
        width = self.num_draft_tokens
        padded = np.array([[*shape, *[-1] * (width - len(shape))] for shape in self.shapes])
        which = (jnp.arange(state.length.shape[0]) + state.length) % len(self.shapes)
        parents = jnp.asarray(padded)[which]
        count = jnp.asarray([len(shape) for shape in self.shapes])[which]
        last = inputs.last_token
        previous = [state.newest(), last]
        tokens, probs, rows = [], [], jnp.arange(last.shape[0])
        for i in range(width):
            stacked = jnp.stack([last, *tokens])  # by block slot
            above = jnp.stack([jnp.full_like(last, -1), *[parents[:, j] for j in range(i)]])
            parent = parents[:, i] + 1
            of_node = stacked[parent, rows]
            grand = jnp.where(parent > 0, stacked[above[parent, rows] + 1, rows], previous[0])
            q = sampling_probs(params[grand, of_node][:, None], inputs.settings)[:, 0]
            q = jnp.where(self.kind_of_draw == "best", jax.nn.softmax(params[grand, of_node]), q)
            if self.kind_of_draw != "with":
                for j in range(i):
                    is_taken = (parents[:, j] == parents[:, i])[:, None]
                    q = jnp.where(is_taken & (jnp.arange(q.shape[1]) == tokens[j][:, None]), 0, q)
                total = q.sum(axis=1, keepdims=True)
                q = q / jnp.where(total > 0, total, 1)
            if self.kind_of_draw == "best":
                token = jnp.argmax(q, axis=1)
            else:
                keys = inputs.rng_keys[:, i]
                gumbel = jax.vmap(lambda key, q=q: jax.random.gumbel(key, q.shape[1:]))(keys)
                token = jnp.argmax(jnp.log(q) + gumbel, axis=1)
            tokens.append(token.astype(jnp.int32))
            probs.append(q)
        proposal = Proposal(
            jnp.stack(tokens, axis=1),
            jnp.minimum(count, inputs.wanted()).astype(jnp.int32),
            None if self.kind_of_draw == "best" else jnp.stack(probs, axis=1),
            parents=parents.astype(jnp.int32),
            max_depth=max(map(depth_of, self.shapes)),
        )
        return proposal, state


@functools.partial(jax.jit, static_argnames="rule")
def end_probs(rule, target_probs, proposal):
    """Returns a rule's `end_probs` by one program: operation by operation takes far longer."""
    return rule.end_probs(target_probs, proposal, tree_of(proposal))


@functools.partial(jax.jit, static_argnames="rule")
def next_token_probs(rule, target_probs, proposal, slots):
    """Returns a rule's `next_token_probs` by one program for all slots."""
    return rule.next_token_probs(target_probs, proposal, tree_of(proposal), slots)


@functools.partial(jax.jit, static_argnames="rule")
def accept(rule, target_probs, proposal, noise):
    """Returns a rule's verdict, likewise."""
    return rule.accept(target_probs, proposal, tree_of(proposal), noise)


def ends_and_probs(rule, noise_of, target_probs, proposal):
    """Returns where verdicts with that noise end, by block slot, and a rule's `end_probs`."""
    n, _, vocab = target_probs.shape
    seeds, position, is_random = jnp.arange(n, dtype=jnp.uint32), jnp.full(n, 7), jnp.array(True)

    @jax.jit
    def draw(proposal):
        return noise_of(seeds, position, tree_of(proposal), vocab, is_random)

    verdict = accept(rule, target_probs, proposal, draw(proposal))
    ends = np.asarray(end_of(verdict.path, verdict.num_accepted))
    return ends, np.asarray(end_probs(rule, target_probs, proposal))


def enumerate_tree(rule, target, draft, parents, draw, report=lambda proposal: proposal):
    """Returns, for m = 1 .. depth + 1, the probability [context, m emitted tokens] of a round.

    Args:
      rule: a `TreeRule`.
      target: distributions [previous, last, next].
      draft: likewise.
      parents: the tree's shape.
      draw: "with" or "without" replacement; "least", the tokens that `draft` likes least for
        certain, which is "without" of a certain distribution; "twice", the same with the first of
        them twice, as a user's own drafter may propose it: equal tokens under one parent.
      report: what the rule is told of a proposal.
    """
    vocab, width = target.shape[-1], len(parents)
    contexts = list(itertools.product(range(vocab), repeat=2))
    drafts = list(itertools.product(range(vocab), repeat=width))
    index = np.repeat(np.arange(len(contexts)), len(drafts))
    chains = np.array([[*context, *path] for context in contexts for path in drafts])
    weights, dists, targets = _weigh(target, draft, parents, chains, draw)
    proposal = Proposal(
        jnp.asarray(chains[:, 2:], jnp.int32),
        jnp.full(len(chains), width, jnp.int32),
        None if draw in CERTAIN else jnp.asarray(dists, jnp.float32),
        parents=jnp.broadcast_to(jnp.asarray(parents, jnp.int32), (len(chains), width)),
        max_depth=depth_of(parents),
    )
    proposal = report(proposal)
    target_probs = jnp.asarray(targets, jnp.float32)
    ends = np.asarray(end_probs(rule, target_probs, proposal), np.float64)
    emitted = {}
    for slot in range(width + 1):
        slots = jnp.full(len(chains), slot, jnp.int32)
        last = np.asarray(next_token_probs(rule, target_probs, proposal, slots), np.float64)
        path = [2 + node for node in path_to(parents, slot - 1)]
        out = emitted.setdefault(
            len(path) + 1, np.zeros((len(contexts), *[vocab] * (len(path) + 1)))
        )
        np.add.at(out, (index, *chains[:, path].T), (weights * ends[:, slot])[:, None] * last)
    return emitted


def _weigh(target, draft, parents, chains, draw):
    """Returns the probability of drafting each row, its distributions, and the target's."""
    n, width = len(chains), len(parents)
    before = chains[:, :2]
    weights, dists = np.ones(n), np.zeros((n, width, target.shape[-1]))
    targets = [target[before[:, 0], before[:, 1]]]
    for node in range(width):
        path = [0, 1, *[2 + other for other in path_to(parents, node)]]
        context = chains[:, path[-3]], chains[:, path[-2]]
        q = np.array(draft[context])
        if draw in CERTAIN:
            q = np.where(q == 0, math.inf, q)
        siblings = siblings_before(parents, node)
        if draw != "with" and (draw != "twice" or len(siblings) > 1):
            for other in siblings:
                q[np.arange(n), chains[:, 2 + other]] = math.inf if draw in CERTAIN else 0
        if draw in CERTAIN:
            q = np.eye(q.shape[1])[q.argmin(axis=1)]
        q = q / np.maximum(q.sum(axis=1, keepdims=True), 1e-300)
        weights *= q[np.arange(n), chains[:, 2 + node]]
        dists[:, node] = q
        targets.append(target[chains[:, path[-2]], chains[:, path[-1]]])
    return weights, dists, np.stack(targets, axis=1)
