"""Counts of n-grams over prompt and output as they grow, as a drafter that needs no training.

The n-grams in the last tokens of the text that begin with the n - 1 tokens at its end predict what
follows. The largest n with any such n-gram decides. There are two distributions:

* deterministic: the most frequent continuation, of equals the most recent; one-hot, as it follows
  from the text alone;
* sampled: a continuation is drawn in proportion to its count, as from any other distribution.

The next draft is predicted likewise from a context that ends with this one; counts come from the
committed text alone. No n-gram, no draft. It is a trivial approximation model in the sense of
Leviathan et al. (arXiv 2211.17192, §4.1).

    place       0  1  2  3  4  5  6  7  8
    window      a  b  c  x  b  c  y  b  c   the text's last tokens; it goes on with ...?
    lengths     0  1  2  0  1  2  0  1      tokens that agree with the end, up to each place
    followed    b  c  x  b  c  y  b  c      after [b c] x came once, and y once, more recently

Everything is linear in the window: another token lengthens each match or ends it, and equal
continuations are counted in a table of the window's size.
"""

import dataclasses

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32, Key

from jspec.common.typing import Params, RowCounts, RowTokens
from jspec.drafters.chain import ChainDrafter, DrawFn
from jspec.drafters.memory import History, Remembering
from jspec.drafters.spec import BuiltDrafter, DrafterSpec
from jspec.sampling.distribution import NO_TOKEN, sample, sampling_probs
from jspec.sampling.noise import gumbel_noise
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.types import Kind, Proposal, RoundInputs

_NO_TEXT = -1


class Window(struct.PyTreeNode):
    """The last u tokens of each text, and what follows each of the p = u - 1 places before."""

    tokens: Int32[Array, "b u"]  # ending with the newest; negative before the text's beginning
    followed: Int32[Array, "b p"]  # the token after each place
    label: Int32[Array, "b p"]  # of that token, a number below u that equal tokens share


def last_window(history: History, last_token: RowTokens, width: int, vocab_size: int) -> Window:
    """Returns the last `width` tokens, at least 2, of each text: the history and the last token.

    No more than the history has room for are looked at. Ids are below `vocab_size`.
    """
    # More would only be padding.
    width = min(width, history.tokens.shape[1])
    # The newest token is not in the history yet and takes the last place.
    start = history.length - (width - 1)
    places = jnp.arange(width - 1)
    # The window may begin before the text.
    is_text = start[:, None] + places >= 0
    tokens = jnp.where(is_text, history.window(start, width - 1), _NO_TEXT)
    tokens = jnp.concatenate([tokens, last_token[:, None]], axis=1)
    followed = tokens[:, 1:]
    rows = jnp.arange(followed.shape[0])[:, None]
    # The last place of each token; what is no text comes under an arbitrary label.
    last_place = jnp.zeros([followed.shape[0], vocab_size], jnp.int32)
    last_place = last_place.at[rows, followed].max(jnp.broadcast_to(places, followed.shape))
    # Labels below u keep the tables of counts as small as the window, not the vocabulary.
    label = jnp.take_along_axis(last_place, followed, axis=1, mode="clip")
    return Window(tokens, followed, label)


def first_matches(window: Window, longest: int) -> Int32[Array, "b p"]:
    """Returns the lengths of the matches, `longest` at most, with the text but its newest token."""
    lengths = jnp.zeros(window.followed.shape, jnp.int32)
    width = window.tokens.shape[1]
    # Only the last tokens can lengthen a match that is capped at `longest`.
    for place in range(max(width - longest, 0), width - 1):
        lengths = lengthen(window, lengths, window.tokens[:, place], longest)
    return lengths


def lengthen(
    window: Window, lengths: Int32[Array, "b p"], token: RowTokens, longest: int
) -> Int32[Array, "b p"]:
    """Returns the lengths of the matches, `longest` at most, once a token follows their end."""
    # A match that ended one place earlier goes on here.
    before = jnp.pad(lengths[:, :-1], ((0, 0), (1, 0)))
    # Negative ids are what lies before the text: they agree with nothing.
    agrees = (window.tokens[:, :-1] == token[:, None]) & (token >= 0)[:, None]
    return jnp.where(agrees, jnp.minimum(before + 1, longest), 0)


def longest_matches(
    lengths: Int32[Array, "b p"], shortest: int
) -> tuple[RowCounts, Bool[Array, "b p"]]:
    """Returns the length of each row's longest match, [b], and where there is one of it, [b p].

    Without one of at least `shortest` the length is 0.
    """
    length = jnp.max(lengths, axis=1)
    # 0 tells the caller that the row has no draft.
    length = jnp.where(length >= shortest, length, 0)
    return length, (lengths == length[:, None]) & (length > 0)[:, None]


def most_frequent(window: Window, is_match: Bool[Array, "b p"]) -> RowTokens:
    """Returns what followed most often where there is a match, [b]; of equals the most recent."""
    num_places = is_match.shape[1]
    counts = _count_equals(window, is_match)
    # One maximum over both criteria: the count, then the more recent place.
    score = jnp.where(is_match, counts * num_places + jnp.arange(num_places), 0)
    place = jnp.max(score, axis=1, keepdims=True) % num_places
    return jnp.take_along_axis(window.followed, place, axis=1)[:, 0]


def log_counts(
    window: Window, is_match: Bool[Array, "b p"], vocab_size: int
) -> Float32[Array, "b v"]:
    """Returns the logarithm of how often each token followed where there is a match."""
    rows = jnp.arange(is_match.shape[0])[:, None]
    here = jnp.log(_count_equals(window, is_match).astype(jnp.float32))
    nothing = jnp.full([is_match.shape[0], vocab_size], -jnp.inf, jnp.float32)
    # `max` and not `set`: places without a match must not erase the count of one with it.
    return nothing.at[rows, window.followed].max(jnp.where(is_match, here, -jnp.inf))


def _count_equals(window: Window, is_match: Bool[Array, "b p"]) -> Int32[Array, "b p"]:
    """Returns how often what followed each place followed where there is a match."""
    rows = jnp.arange(is_match.shape[0])[:, None]
    # Added up by label, then read back at each place: [b p] both times.
    counts = jnp.zeros_like(window.label).at[rows, window.label].add(is_match.astype(jnp.int32))
    return jnp.take_along_axis(counts, window.label, axis=1)


@dataclasses.dataclass(frozen=True)
class NgramDrafter(Remembering, ChainDrafter):
    """Proposes what followed the last few tokens most often, or in proportion.

    Attributes:
      min_order: n of the shortest n-grams.
      max_order: n of the longest.
      window: tokens of the text's end that are counted in.
      is_sampled: which of the two distributions; the deterministic one is never unsure.
    """

    _: dataclasses.KW_ONLY
    min_order: int = 2
    max_order: int = 4
    window: int = 512
    is_sampled: bool = False
    kind = Kind("ngram", 0.4, 0.6)

    @property
    def chain_kinds(self) -> tuple[Kind, ...]:
        """One for each n of the first draft's n-gram: a longer one may be followed more often."""
        return super().chain_kinds * (self.max_order + 1 - self.min_order)

    def propose(
        self, params: Params, state: History, inputs: RoundInputs
    ) -> tuple[Proposal, History]:
        """Predicts token after token from the counts."""
        last_token = inputs.last_token
        window = last_window(state, last_token, self.window, self.target_vocab_size)
        # The newest token is followed below, as every draft is.
        lengths = first_matches(window, self.max_order - 1)
        # Looked at once in advance: the limit depends on the first draft's n.
        _, length, _ = self._follow(window, lengths, last_token)
        kind = jnp.maximum(length - (self.min_order - 1), 0)
        wanted = jnp.where(length > 0, inputs.limit(kind), 0)
        if not self.is_sampled:
            # One-hot drafts need no noise and no distribution of a whole vocabulary.
            proposal = self._predict(window, lengths, last_token, wanted)
            return proposal.replace(kind=kind), state

        def count(
            lengths: Int32[Array, "b p"], token: RowTokens
        ) -> tuple[Float32[Array, "b v"], Int32[Array, "b p"]]:
            lengths, _, is_match = self._follow(window, lengths, token)
            return log_counts(window, is_match, self.target_vocab_size), lengths

        draw = make_draw(window, self.window - 1)
        proposal, _, _ = self.draw_chain(count, count, lengths, inputs, wanted=wanted, draw=draw)
        return proposal.replace(kind=kind), state

    def _follow(
        self, window: Window, lengths: Int32[Array, "b p"], token: RowTokens
    ) -> tuple[Int32[Array, "b p"], RowCounts, Bool[Array, "b p"]]:
        """Returns the matches once a token follows; the longest's length; where it stands."""
        lengths = lengthen(window, lengths, token, self.max_order - 1)
        return lengths, *longest_matches(lengths, self.min_order - 1)

    def _predict(
        self, window: Window, lengths: Int32[Array, "b p"], token: RowTokens, wanted: RowCounts
    ) -> Proposal:
        """Returns the most frequent continuations, as many as are wanted or as there are."""
        tokens, is_going, num_tokens = [], wanted > 0, jnp.zeros_like(wanted)
        for _ in range(self.num_draft_tokens):
            lengths, length, is_match = self._follow(window, lengths, token)
            is_going &= (length > 0) & (num_tokens < wanted)
            token = jnp.where(is_going, most_frequent(window, is_match), 0)
            num_tokens += is_going.astype(jnp.int32)
            tokens.append(token)
        return Proposal(jnp.stack(tokens, axis=1), num_tokens)


def make_draw(window: Window, num_places: int) -> DrawFn:
    """Returns how to draw from distributions of tokens that followed in the window.

    Gumbel noise for 49,152 tokens takes a millisecond on two cores, twenty times as long as the
    distribution. So a position of the window is drawn, each with an equal share of its token's
    probability. Under the rule `coupled` these drafts and the target's own choice are not coupled.

    Noise is drawn for `num_places` positions, at least as many as the window has: that number may
    depend on a row's neighbours, and the noise must not.
    """
    rows = jnp.arange(window.label.shape[0])[:, None]
    # A place before the text's beginning has no context and may not be drawn.
    is_text = window.tokens[:, :-1] >= 0
    occurrences = jnp.zeros(window.label.shape, jnp.float32)
    occurrences = occurrences.at[rows, window.label].add(is_text.astype(jnp.float32))
    occurrences = jnp.take_along_axis(occurrences, window.label, axis=1)

    def draw(
        logits: Float32[Array, "b v"], settings: SamplingSettings, rng_keys: Key[Array, "b"]
    ) -> tuple[RowTokens, Float32[Array, "b v"]]:
        probs = sampling_probs(logits[:, None], settings)[:, 0]
        probs = jnp.where(logits > -jnp.inf, probs, 0.0)  # should a processor add a token
        # Probability that was cut off is shared out again, so that what is reported is drawn.
        probs = probs / jnp.sum(probs, axis=1, keepdims=True)
        weights = jnp.take_along_axis(probs, window.followed, axis=1, mode="clip")
        # A token that came twice has two positions, which share its probability.
        weights = jnp.where(is_text, weights / occurrences, 0.0)
        noise = gumbel_noise(rng_keys, num_places, settings.is_random)
        # The newest places keep their noise: a narrower window leaves out the oldest.
        place = sample(weights, noise[:, num_places - weights.shape[1] :])
        token = jnp.take_along_axis(window.followed, place[:, None], axis=1, mode="clip")[:, 0]
        return jnp.where(place >= 0, token, NO_TOKEN), probs

    return draw


def build(spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter."""
    options = spec.options
    drafter = NgramDrafter(
        **spec.with_at_most(options.ngram_max_tokens).chain_fields,
        min_order=options.ngram_min_order,
        max_order=options.ngram_max_order,
        window=options.ngram_window,
        is_sampled=options.ngram_probs == "sampled",
    )
    return BuiltDrafter(drafter)
