"""Acceptance without drafting, from two distributions at every token of the target's own text.

    alpha = E[sum over x of min(target(x), draft(x))]

(Leviathan et al., arXiv 2211.17192, Cor. 3.6; the paper's Table 3 is measured so.) The mean is over
the tokens of answers that the target gave, all but the first of each, which the prefill draws.
Positions at which a drafter proposes nothing are counted apart.

Rounds look at fewer positions: an accepted draft is followed by a token that was not drafted. If
accepted drafts come in runs, as those of prompt lookup do, rounds of one draft therefore accept a
smaller share than alpha; otherwise the two agree.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.common.errors import InputError, check_count, check_range
from jspec.drafters import DrafterOptions, choose_drafter
from jspec.evaluation.experiments.draft_distributions import (
    DraftDistribution,
    ForwardPass,
)
from jspec.evaluation.experiments.position_figures import PositionFigures, position_figures
from jspec.generation.batch import needed_switches
from jspec.generation.capacity import capacity_for
from jspec.generation.programs import make_spec
from jspec.generation.request import Settings
from jspec.sampling.settings import SamplingSettings
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import used_vocab_size

_CHUNK = 64
_DRAFTER_DEFAULTS = DrafterOptions()


class Estimator:
    """Estimates for one target; drafters and settings may change from text to text.

    The target's logits of the last text are kept: several drafters on one text cost one pass.
    """

    def __init__(
        self, target: LoadedModel, *, leniences: Sequence[float] = (), num_bins: int = 8
    ) -> None:
        """Prepares; nothing is compiled yet.

        Args:
          target: the model whose answers the texts are.
          leniences: from 0 to 1, of the rule `lenient`; of `lenient_argmax` at temperature 0.
          num_bins: of the entropy, from 0 to the logarithm of the vocabulary, equally wide.

        Raises:
          InputError: a value out of range.
        """
        for lenience in leniences:
            check_range("lenience", lenience, 0, 1)
        check_count("num_bins", num_bins, 1, 1000)
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
        """Returns a drafter's distributions for `estimate`, for any number of texts.

        Args:
          drafter: its name, or several joined by "+".
          options: of the drafters.
          draft: the draft model, for a drafter that has one.

        Raises:
          InputError: no such drafter, or one that lacks something.
        """
        choose_drafter(drafter, has_draft=draft is not None)
        spec = make_spec(self._target, draft, drafter, options, num_draft_tokens=1)
        return DraftDistribution(drafter, spec, self._target.params)

    def estimate(
        self,
        distribution: DraftDistribution,
        settings: Settings,
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
    ) -> dict[str, Any]:
        """Returns the sums over one answer, as plain values.

        Args:
          distribution: of `make_distribution`.
          settings: how target and drafter are sampled from: temperatures and filters.
          prompt_ids: at least one.
          answer_ids: the target's answer.

        Returns:
          `num_tokens`, the answer's but the first; `num_places`, how many of them the drafter
          proposes something for, over which all the following sums go; `sum_overlap`; `entropy`:
          the `edges` of its bins in nats, and by bin `counts` of positions and `sums` of overlaps;
          `lenience`: for each its `sum_acceptance` and `sum_total_variation`; `distribution`:
          "sampled" or "deterministic".

        Raises:
          InputError: an empty prompt, or settings with processors, whose distributions depend on
            more than is looked at here.
        """
        figures = self.figures(distribution, settings, prompt_ids, answer_ids)
        num_tokens, here = len(figures.is_proposed), figures.is_proposed
        figures = PositionFigures(*(column[here] for column in figures))
        sums = figures.lenient_acceptance.sum(axis=0), figures.total_variation.sum(axis=0)
        return {
            "num_tokens": num_tokens,
            "num_places": int(here.sum()),
            "sum_overlap": float(figures.overlap.sum()),
            "entropy": self._bin(figures.entropy, figures.overlap),
            "lenience": [
                {"lenience": lenience, "sum_acceptance": float(a), "sum_total_variation": float(b)}
                for lenience, a, b in zip(self._leniences, *sums, strict=True)
            ],
            "distribution": "sampled" if distribution.is_sampled else "deterministic",
        }

    def _bin(self, entropy: np.ndarray, overlap: np.ndarray) -> dict[str, list[float]]:
        # The entropy of a uniform distribution is the last edge, but for rounding.
        entropy = np.clip(entropy, 0, self._edges[-1])
        counts, edges = np.histogram(entropy, self._edges)
        sums, _ = np.histogram(entropy, self._edges, weights=overlap)
        return {"edges": edges.tolist(), "counts": counts.tolist(), "sums": sums.tolist()}

    def figures(
        self,
        distribution: DraftDistribution,
        settings: Settings,
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
    ) -> PositionFigures:
        """Returns the figures before each token of an answer but the first, as numpy arrays.

        Arguments and errors are those of `estimate`.
        """
        if not prompt_ids:
            raise InputError("expected a prompt of at least one token, got none")
        own_settings, draft_settings = _sampling_settings(settings)
        text, first = (*prompt_ids, *answer_ids[:-1]), len(prompt_ids)  # nothing follows the last
        options = {"leniences": self._leniences, "is_random": bool(own_settings.is_random)}
        state, parts = distribution.start(capacity_for(len(text), 0)), []
        all_logits = iter(self._logits(text, first))
        for begin, tokens in _chunks(text):
            drafts, state = distribution.read(state, tokens, draft_settings)
            if begin + _CHUNK >= first:
                logits = next(all_logits)
                parts.append(position_figures(logits, drafts, own_settings, **options))
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
    """Yields the tokens in equal chunks, the last one padded, each with its begin."""
    for begin in range(0, len(text), _CHUNK):
        part = text[begin : begin + _CHUNK]
        yield begin, jnp.array([*part, *[0] * (_CHUNK - len(part))], jnp.int32)


def _sampling_settings(settings: Settings) -> tuple[SamplingSettings, SamplingSettings]:
    """Returns the target's and the drafter's settings, of one row.

    Raises:
      InputError: there are processors.
    """
    switches = needed_switches([settings])._replace(logprobs=False)
    if switches.processors:
        names = ", ".join(processor.name for processor in switches.processors)
        raise InputError(f"expected settings of temperature and filters only, got {names}")
    temperature, top_p, min_p = (
        jnp.array([value], jnp.float32)
        for value in (settings.temperature, settings.top_p, settings.min_p)
    )
    top_k = jnp.array([settings.top_k], jnp.int32)
    own = SamplingSettings(temperature, top_k, top_p, min_p, switches=switches)
    if settings.draft_temperature is not None:
        temperature = jnp.array([settings.draft_temperature], jnp.float32)
    return own, own.replace(temperature=temperature)
