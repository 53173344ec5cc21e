"""Logits to the distribution that is really sampled from.

Draft and target go through the same function, in float32: the distribution a draft token was drawn
from must be the distribution that the acceptance rule is told. Processors come first
(`jspec.sampling.processors`), then temperature and the filters in the order in which transformers
applies them: top-k, top-p, min-p. None of them sorts the vocabulary: each keeps the tokens at or
above a threshold, and thresholds are found in the bits of a float, exactly: by bisection, or in
C++. Tokens that tie with the last one kept are kept.
"""

import functools
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32

from jspec import kernels
from jspec.common.typing import DraftTokens, Logits, Probs, RowTokens, Tokens
from jspec.sampling.processor import Processor, ProcessorState

_INT_BITS = 32

NO_TOKEN = -1
_COLDEST = float(jnp.finfo(jnp.float32).tiny)  # below it numbers are flushed to 0


class Switches(NamedTuple):
    """What a compiled program contains; a row's neutral value switches one off in it.

    Attributes:
      top_k: that filter.
      top_p: that filter.
      min_p: that filter.
      processors: in their order.
      logprobs: log-probabilities of the emitted tokens.
    """

    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    processors: tuple[Processor, ...] = ()
    logprobs: bool = False


class SamplingSettings(struct.PyTreeNode):
    """How tokens are drawn, for each row.

    Attributes:
      temperature: [b]; 0, and what float32 flushes to it, takes the most likely token.
      top_k: [b]; how many of the most likely tokens to keep; 0 keeps all.
      top_p: [b]; keep the fewest most likely tokens whose probability reaches this; 1 keeps all.
      min_p: [b]; keep tokens at least this likely relative to the most likely one; 0 keeps all.
      states: of the processors: what each row has committed so far.
      switches: what is compiled in.
    """

    temperature: Float32[Array, "b"]
    top_k: Int32[Array, "b"]
    top_p: Float32[Array, "b"]
    min_p: Float32[Array, "b"]
    states: tuple[ProcessorState, ...] = ()
    switches: Switches = struct.field(pytree_node=False, default=Switches())

    @property
    def is_random(self) -> Bool[Array, ""]:
        """Whether any row draws at random at all."""
        return (self.temperature >= _COLDEST).any()

    def after(self, token: RowTokens) -> Self:
        """Returns the settings of the position behind one more token of each row, [b]."""
        pairs = zip(self.switches.processors, self.states, strict=True)
        return self.replace(states=tuple(p.update(state, token) for p, state in pairs))

    def after_all(self, tokens: Tokens, valid: Bool[Array, "b t"]) -> Self:
        """Returns the settings behind those tokens [b t] that are valid, the first few of a row."""
        settings = self
        for i in range(tokens.shape[1] if self.switches.processors else 0):
            new = settings.after(tokens[:, i])
            settings = jax.tree.map(functools.partial(_choose_rows, valid[:, i]), new, settings)
        return settings

    def process(self, logits: Float32[Array, "b v"]) -> Float32[Array, "b v"]:
        """Applies the processors at one position of each row."""
        for processor, state in zip(self.switches.processors, self.states, strict=True):
            logits = processor.apply(state, logits)
        return logits

    def without_processors(self) -> Self:
        """Returns the settings for logits that have been processed."""
        return self.replace(states=(), switches=self.switches._replace(processors=()))


def _choose_rows(condition: Bool[Array, "b"], new: Array, old: Array) -> Array:
    if new is old:
        return old
    return jnp.where(condition.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def process_block(
    logits: Logits,
    settings: SamplingSettings,
    tokens: Tokens,
    parents: tuple[int, ...] | None = None,
) -> Logits:
    """Applies the processors along a block, each position with the state its own prefix leads to.

    Args:
      logits: at every token of the block, [b t v].
      settings: at its first token's position.
      tokens: the block, [b t].
      parents: the parent of each token but the first, counted from -1; None for a chain.
    """
    return process_drafts(logits, settings.after(tokens[:, 0]), tokens[:, 1:], parents)


def process_drafts(
    logits: Logits,
    settings: SamplingSettings,
    drafts: DraftTokens,
    parents: tuple[int, ...] | None = None,
) -> Logits:
    """Does the same for a block whose first token the processors have seen.

    Args:
      logits: at every token of the block, [b w+1 v].
      settings: behind its first token.
      drafts: the rest of the block, [b w].
      parents: see `process_block`.
    """
    if not settings.switches.processors:
        return logits
    if parents is None:
        parents = tuple(range(-1, drafts.shape[1] - 1))
    path = [settings]
    for i, parent in enumerate(parents):
        path.append(path[parent + 1].after(drafts[:, i]))
    return jnp.stack([here.process(logits[:, i]) for i, here in enumerate(path)], axis=1)


def sampling_probs(logits: Logits, settings: SamplingSettings) -> Probs:
    """Returns the distribution that tokens are drawn from.

    Args:
      logits: [b t v].
      settings: one row each; with processors t is 1.

    Returns:
      Probabilities [b t v], float32; exactly 0 for a token that is never drawn.
    """
    if settings.switches.processors:
        (position,) = jnp.unstack(logits, axis=1)
        logits = settings.process(position)[:, None]
        settings = settings.without_processors()
    return jax.lax.cond(settings.is_random, _filtered_probs, _greedy_probs, logits, settings)


def likeliest(logits: Logits) -> Float32[Array, "b t"]:
    """Returns how likely the most likely token is by logits at temperature 1."""
    return jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1)


def confidence(
    likely: Float32[Array, "b t"], probs: Probs, settings: SamplingSettings
) -> Float32[Array, "b t"]:
    """Returns how likely the most likely token of each distribution is.

    At temperature 0, where every distribution is sure of its token, it is what the logits say at
    temperature 1.

    Args:
      likely: the `likeliest` of the logits, before the processors.
      probs: the distributions that `sampling_probs` returns for them.
      settings: one row each.
    """
    is_greedy = settings.temperature[:, None] < _COLDEST
    return jnp.where(is_greedy, likely, jnp.max(probs, axis=-1))


def _greedy_probs(logits: Logits, settings: SamplingSettings) -> Probs:
    """Returns one-hot distributions, for a batch of temperature 0 only: it skips all the rest."""
    del settings
    return jax.nn.one_hot(best_token(logits), logits.shape[-1], dtype=jnp.float32)


def _filtered_probs(logits: Logits, settings: SamplingSettings) -> Probs:
    """Returns every row's distribution, one-hot for those of temperature 0."""
    rows = jax.tree.map(lambda leaf: leaf[:, None, None], settings)
    is_greedy = rows.temperature < _COLDEST
    one_hot = _greedy_probs(logits, settings)
    # Relative to the best, so that a temperature near 0 makes the rest -inf and not all of it inf.
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    logits = logits / jnp.where(is_greedy, 1.0, rows.temperature)
    if settings.switches.top_k:
        logits = _keep(logits, _top_k_mask(logits, rows.top_k))
    if settings.switches.top_p:
        logits = _keep(logits, _top_p_mask(logits, rows.top_p))
    if settings.switches.min_p:
        highest = jnp.max(logits, axis=-1, keepdims=True)
        logits = _keep(logits, logits >= highest + jnp.log(rows.min_p))
    return jnp.where(is_greedy, one_hot, jax.nn.softmax(logits, axis=-1))


def _keep(logits: Logits, mask: Bool[Array, "b t v"]) -> Logits:
    return jnp.where(mask, logits, -jnp.inf)


def _top_k_mask(logits: Logits, top_k: Int32[Array, "b 1 1"]) -> Bool[Array, "b t v"]:
    """Marks the `top_k` largest logits and their ties; every one where `top_k` is 0."""
    rank = _rank(logits)
    counts = jnp.ones_like(logits)  # float32 counts exactly as far as any vocabulary goes
    return (rank <= _smallest_rank(rank, counts, top_k.astype(jnp.float32))) | (top_k <= 0)


def _top_p_mask(logits: Logits, top_p: Float32[Array, "b 1 1"]) -> Bool[Array, "b t v"]:
    """Marks the fewest most likely tokens that reach `top_p` together, and their ties."""
    rank = _rank(logits)
    reached = jnp.maximum(top_p, _COLDEST)  # the empty set is never enough
    return (rank <= _smallest_rank(rank, jax.nn.softmax(logits), reached)) | (top_p >= 1)


def _rank(logits: Logits) -> Int32[Array, "b t v"]:
    """Returns integers that fall as the logits grow.

    They come from the bits, not from a difference or a softmax: XLA computes those anew where they
    are used, may fuse a multiplication into them there and not here, and a token on the threshold
    would be cut off.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.int32)
    return ~jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _smallest_rank(
    rank: Int32[Array, "b t v"], weights: Float32[Array, "b t v"], target: Float32[Array, "b #t 1"]
) -> Int32[Array, "b t 1"]:
    """Returns the smallest threshold at or below which the ranks' weights reach the target.

    Where none is, the largest integer.
    """
    shape = (*rank.shape[:-1], 1)
    operands = rank, weights, jnp.broadcast_to(target, shape)
    if not kernels.is_available():
        return _bisect(*operands)
    return kernels.call("smallest_rank", _bisect, jax.ShapeDtypeStruct(shape, jnp.int32), *operands)


def _bisect(
    rank: Int32[Array, "b t v"], weights: Float32[Array, "b t v"], target: Float32[Array, "b t 1"]
) -> Int32[Array, "b t 1"]:
    """Does the same in JAX."""

    def halve(
        _: Int32[Array, ""], bounds: tuple[Int32[Array, "b t 1"], Int32[Array, "b t 1"]]
    ) -> tuple[Int32[Array, "b t 1"], Int32[Array, "b t 1"]]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, rounded down, without overflow
        kept = jnp.where(rank <= middle, weights, 0.0)
        enough = jnp.sum(kept, axis=-1, keepdims=True) >= target
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    limits = jnp.iinfo(jnp.int32)
    start = tuple(jnp.full(target.shape, limit, jnp.int32) for limit in (limits.min, limits.max))
    return jax.lax.fori_loop(0, _INT_BITS, halve, start)[0]


def sample(probs: Float32[Array, "... v"], gumbel: Float32[Array, "... v"]) -> Int32[Array, "..."]:
    """Draws from each distribution by the Gumbel-max trick; a token of probability 0 is never
    drawn.

    Args:
      probs: distributions; they need not be normalised.
      gumbel: standard Gumbel noise of the same shape.

    Returns:
      The tokens; `NO_TOKEN` where the distribution is none: NaN somewhere, or 0 everywhere.
    """
    best, score = first_argmax(jnp.log(probs) + gumbel)
    return jnp.where(score > -jnp.inf, best, NO_TOKEN)


def best_token(logits: Float32[Array, "... v"]) -> Int32[Array, "..."]:
    """Returns the most likely token, what `sample` draws at temperature 0: of equals the first.

    `NO_TOKEN` where there is none: NaN somewhere, or -inf everywhere, which is a distribution of
    zeros.
    """
    best, highest = first_argmax(logits)
    return jnp.where(jnp.isfinite(highest), best, NO_TOKEN)


def first_argmax(
    values: Float32[Array, "... v"],
) -> tuple[Int32[Array, "..."], Float32[Array, "..."]]:
    """Returns the index of the largest value, the first of equals, and that value.

    Where a value is NaN, so is the largest, and the index is v.
    """
    rows = values.reshape(-1, values.shape[-1])
    if kernels.is_available():
        count = rows.shape[0]
        results = tuple(jax.ShapeDtypeStruct((count,), dtype) for dtype in (jnp.int32, jnp.float32))
        index, largest = kernels.call("first_argmax", _first_argmax, results, rows)
    else:
        index, largest = _first_argmax(rows)
    return index.reshape(values.shape[:-1]), largest.reshape(values.shape[:-1])


def _first_argmax(values: Float32[Array, "r v"]) -> tuple[Int32[Array, "r"], Float32[Array, "r"]]:
    """Does the same in JAX: XLA's argmax on CPU takes four times as long as these reductions.

    NaN is looked for: the largest of thousands of numbers is, to XLA on CPU, one of the others.
    """
    size = values.shape[-1]
    has_nan = jnp.any(jnp.isnan(values), axis=-1, keepdims=True)
    largest = jnp.where(has_nan, jnp.nan, jnp.max(values, axis=-1, keepdims=True))
    index = jnp.where(values == largest, jnp.arange(size, dtype=jnp.int32), size)
    return jnp.min(index, axis=-1), largest[:, 0]
