"""Acceptance without drafting, from two distributions at every token of the target's own text.

    alpha = E[sum over x of min(target(x), draft(x))]

(Leviathan et al., arXiv 2211.17192, Cor. 3.6; the paper's Table 3 is measured so.) The mean is over
the tokens of answers that the target gave, without the first of an answer, which the prefill draws.
Positions at which a drafter proposes nothing are counted apart.

Rounds look at fewer positions: an accepted draft is followed by a token that was not drafted. If
accepted drafts come in runs, as those of prompt lookup do, rounds of one draft therefore accept a
smaller share than alpha; otherwise the two agree.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jspec.drafters import DrafterOptions, choose_drafter
from jspec.generation.batch import needed_switches
from jspec.generation.options import make_spec
from jspec.generation.request import SamplingParams
from jspec.generation.rows import capacity_for
from jspec.lab.analysis.acceptance import (
    divergence,
    expected_acceptance,
    lenient_acceptance,
    lenient_argmax_accepted,
    lenient_next_token_probs,
)
from jspec.lab.experiments.draft_distributions import (
    DraftDistribution,
    FirstDrafts,
    ForwardPass,
)
from jspec.sampling.distribution import sampling_probs
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.acceptance.lenient import distribution_at_temperature_one
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import used_vocab_size

_CHUNK = 64
_DRAFTER_DEFAULTS = DrafterOptions()
_HostOrDeviceArray = Any


class PositionFigures(NamedTuple):
    """Figures of every position.

    Attributes:
      is_proposed: whether the drafter proposes a token, [t].
      overlap: the probability that its draft is accepted, [t].
      entropy: of the target's own distribution, at temperature 1 and without filters, in nats, [t].
      lenient_acceptance: as `overlap`, for each lenience, [t l].
      total_variation: between the target's distribution and the one that is then emitted, [t l].
    """

    is_proposed: _HostOrDeviceArray
    overlap: _HostOrDeviceArray
    entropy: _HostOrDeviceArray
    lenient_acceptance: _HostOrDeviceArray
    total_variation: _HostOrDeviceArray


class Estimator:
    """Estimates for one target; drafters and settings may change from text to text.

    The target's logits of the last text are kept: several drafters on one text cost one pass.
    """

    def __init__(
        self, target: LoadedModel, *, leniences: Sequence[float] = (), num_bins: int = 8
    ) -> None:
        """Prepares; nothing is compiled yet.

        The leniences are of the rule `lenient`; of `lenient_argmax` at temperature 0. The bins of
        the entropy go from 0 to the logarithm of the vocabulary and are equally wide.
        """
        self._target, num_ids = target, used_vocab_size(target)
        self._pass = ForwardPass(target.config, num_ids, target.config.vocab_size)
        self._leniences = tuple(map(float, leniences))
        self._edges = np.linspace(0, math.log(num_ids), num_bins + 1)
        self._logits = functools.lru_cache(maxsize=1)(self._run_target)

    def make_distribution(
        self,
        drafter: str,
        options: DrafterOptions = _DRAFTER_DEFAULTS,
        draft: LoadedModel | None = None,
    ) -> DraftDistribution:
        """Returns a drafter's distributions for `estimate`; a cascade's names are joined by "+".

        Raises:
          InputError: no such drafter, or one that lacks something.
        """
        choose_drafter(drafter, has_draft=draft is not None)
        spec = make_spec(self._target, draft, drafter, options, num_draft_tokens=1)
        return DraftDistribution(drafter, spec, self._target.params)

    def estimate(
        self,
        distribution: DraftDistribution,
        settings: SamplingParams,
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
    ) -> dict[str, Any]:
        """Returns the sums over one answer, as plain values.

        The settings are temperatures and filters, without processors; there is a prompt.

        Returns:
          `num_tokens`, the answer's but the first; `num_places`, how many of them the drafter
          proposes something for, over which all the following sums go; `sum_overlap`; `entropy`:
          the `edges` of its bins in nats, and by bin `counts` of positions and `sums` of overlaps;
          `lenience`: for each its `sum_acceptance` and `sum_total_variation`; `distribution`:
          "sampled" or "deterministic".
        """
        figures = self.figures(distribution, settings, prompt_ids, answer_ids)
        num_tokens, here = len(figures.is_proposed), figures.is_proposed
        figures = PositionFigures(*(column[here] for column in figures))
        sums = figures.lenient_acceptance.sum(axis=0), figures.total_variation.sum(axis=0)
        # The entropy of a uniform distribution is the last edge, but for rounding.
        entropy = np.clip(figures.entropy, 0, self._edges[-1])
        counts, edges = np.histogram(entropy, self._edges)
        overlaps, _ = np.histogram(entropy, self._edges, weights=figures.overlap)
        return {
            "num_tokens": num_tokens,
            "num_places": int(here.sum()),
            "sum_overlap": float(figures.overlap.sum()),
            "entropy": {"edges": edges.tolist(), "counts": counts.tolist(),
                        "sums": overlaps.tolist()},
            "lenience": [
                {"lenience": lenience, "sum_acceptance": float(a), "sum_total_variation": float(b)}
                for lenience, a, b in zip(self._leniences, *sums, strict=True)
            ],
            "distribution": "sampled" if distribution.is_sampled else "deterministic",
        }  # fmt: skip

    def figures(
        self,
        distribution: DraftDistribution,
        settings: SamplingParams,
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
    ) -> PositionFigures:
        """Returns the figures before each token of an answer but the first; see `estimate`."""
        own_settings, draft_settings = _sampling_settings(settings)
        text, first = (*prompt_ids, *answer_ids[:-1]), len(prompt_ids)  # nothing follows the last
        state, parts = distribution.start(capacity_for(len(text), 0)), []
        all_logits = iter(self._logits(text, first))
        for begin, tokens in _chunks(text):
            drafts, state = distribution.read(state, tokens, draft_settings)
            if begin + _CHUNK >= first:
                parts.append(
                    _position_figures(next(all_logits), drafts, own_settings, self._leniences,
                                      bool(own_settings.is_random))
                )  # fmt: skip
        figures = jax.tree.map(lambda *leaves: np.concatenate(jax.device_get(leaves)), *parts)
        skipped = (first - 1) % _CHUNK + 1  # tokens of the prompt in the first of these chunks
        here = slice(skipped, skipped + len(text) - first)
        return PositionFigures(
            figures[0][here], *(leaf[here].astype(np.float64) for leaf in figures[1:])
        )

    def _run_target(self, text: tuple[int, ...], first: int) -> list[jax.Array]:
        """Returns the target's logits in each chunk, from that of the prompt's last token on."""
        params, all_logits = self._target.params, []
        cache = self._pass.start(params, capacity_for(len(text), 0))
        for begin, tokens in _chunks(text):
            logits, cache = self._pass.logits(params, cache, tokens)
            if begin + _CHUNK >= first:
                all_logits.append(logits)
        return all_logits


def _chunks(text: Sequence[int]) -> Iterator[tuple[int, jax.Array]]:
    for begin in range(0, len(text), _CHUNK):
        part = text[begin : begin + _CHUNK]
        yield begin, jnp.array([*part, *[0] * (_CHUNK - len(part))], jnp.int32)


def _sampling_settings(settings: SamplingParams) -> tuple[SamplingSettings, SamplingSettings]:
    row = functools.partial(jnp.full, 1, dtype=jnp.float32)
    target_settings = SamplingSettings(
        row(settings.temperature), jnp.array([settings.top_k], jnp.int32), row(settings.top_p),
        row(settings.min_p), switches=needed_switches([settings])._replace(logprobs=False),
    )  # fmt: skip
    temperature, top_k, top_p = settings.draft_sampling
    return target_settings, target_settings.replace(
        temperature=row(temperature), top_k=jnp.array([top_k], jnp.int32), top_p=row(top_p),
        switches=target_settings.switches._replace(top_k=top_k > 0, top_p=top_p < 1),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("leniences", "is_random"))
def _position_figures(
    logits: Float32[Array, "t v"],
    drafts: FirstDrafts,
    settings: SamplingSettings,
    leniences: tuple[float, ...],
    is_random: bool,
) -> PositionFigures:
    target, unfiltered = sampling_probs(logits[None], settings)[0], jax.nn.softmax(logits, axis=1)
    surprise = jnp.where(unfiltered > 0, -jnp.log(jnp.where(unfiltered > 0, unfiltered, 1.0)), 0.0)
    # At temperature 0 the target is one-hot, and lenience is measured at temperature 1.
    at_one = None if is_random else distribution_at_temperature_one(logits[None], settings)[0]
    columns = [_lenient(target, at_one, drafts.probs, lenience) for lenience in leniences]
    none = jnp.zeros([logits.shape[0], 0], jnp.float32)
    accepted, variation = (
        jnp.concatenate([none, *(pair[i][:, None] for pair in columns)], axis=1) for i in range(2)
    )
    overlap, entropy = (
        expected_acceptance(target, drafts.probs),
        jnp.sum(unfiltered * surprise, axis=1),
    )
    return PositionFigures(drafts.is_proposed, overlap, entropy, accepted, variation)


def _lenient(
    target: Float32[Array, "t v"],
    at_one: Float32[Array, "t v"] | None,
    draft: Float32[Array, "t v"],
    lenience: float,
) -> tuple[Float32[Array, "t"], Float32[Array, "t"]]:
    if at_one is None:
        emitted = lenient_next_token_probs(target, draft, lenience)
        return lenient_acceptance(target, draft, lenience), divergence(target, emitted)
    kept = lenient_argmax_accepted(at_one, draft, lenience)
    acceptance = jnp.sum(kept, axis=1)
    return acceptance, divergence(target, kept + (1 - acceptance[:, None]) * target)
