"""Acceptance without drafting: the target's own text, and at every token the overlap of two
distributions.

    alpha = E[sum over x of min(target(x), draft(x))]

(Leviathan et al., arXiv 2211.17192, Cor. 3.6; the paper's Table 3 is measured so.) The mean is over
the tokens of answers that the target gave, all but the first of each, which the prefill draws.
Places where a drafter has nothing to say are counted apart.

Rounds look at fewer places: behind a kept draft comes a token that was not drafted. Where kept
drafts come in runs, as those of prompt lookup do, rounds of one draft therefore keep a smaller
share than alpha; where they do not, the two agree.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.common.errors import InputError, check_range, whole_number
from jspec.drafters import DrafterOptions, DrafterSpec, choose_drafter
from jspec.evaluation.experiments.draft_distribution import DraftDistribution, FirstDrafts
from jspec.evaluation.experiments.draft_distributions import make_draft_distribution
from jspec.evaluation.experiments.forward_pass import ForwardPass
from jspec.evaluation.experiments.places import Places, look_at_places
from jspec.generation.batch import needed_switches
from jspec.generation.capacity import capacity_for
from jspec.generation.request import Settings
from jspec.sampling.distribution import SamplingSettings
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import shared_vocab_size, used_vocab_size

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
        check_range("num_bins", whole_number("num_bins", num_bins), 1, 1000)
        self._target, num_ids = target, used_vocab_size(target)
        self._pass = ForwardPass(target.config, target.params, num_ids, target.config.vocab_size)
        self._leniences = tuple(map(float, leniences))
        self._edges = np.linspace(0, math.log(num_ids), num_bins + 1)
        self._last_text: tuple[list[int], int] | None = None
        self._last_logits: list[jax.Array] = []

    def make_distribution(
        self,
        drafter: str,
        options: DrafterOptions = _DRAFTER_DEFAULTS,
        draft: LoadedModel | None = None,
    ) -> DraftDistribution:
        """Returns a drafter's distributions, for `estimate`; made once, they are good for every
        text.

        Args:
          drafter: its name, or several joined by "+".
          options: of the drafters.
          draft: the draft model, for a drafter that has one.

        Raises:
          InputError: no such drafter, or one that lacks something.
        """
        spec = DrafterSpec(
            num_draft_tokens=1,
            target_config=self._target.config,
            vocab_size=shared_vocab_size(self._target, draft),
            draft_config=None if draft is None else draft.config,
            dtype=self._target.params["embedding"].dtype,
            draft_params=None if draft is None else draft.params,
            options=options,
            tokenizer=self._target.tokenizer,
        )
        name = choose_drafter(drafter, has_draft=draft is not None)
        return make_draft_distribution(name, spec, self._target.params)

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
          answer_ids: what the target answered.

        Returns:
          `num_tokens`, the answer's but the first; `num_places`, how many of them the drafter had
          something to say before, over which all the following sums go; `sum_overlap`; `entropy`:
          the `edges` of its bins in nats, and by bin `counts` of places and `sums` of overlaps;
          `lenience`: for each its `sum_acceptance` and `sum_total_variation`; `distribution`:
          "sampled" or "deterministic".

        Raises:
          InputError: an empty prompt, or settings with processors, whose distributions depend on
            more than is looked at here.
        """
        places = self.places(distribution, settings, prompt_ids, answer_ids)
        here = places.is_proposed
        kept, far = places.lenient_acceptance[here], places.total_variation[here]
        sums = zip(self._leniences, kept.sum(axis=0), far.sum(axis=0), strict=True)
        return {
            "num_tokens": len(here),
            "num_places": int(here.sum()),
            "sum_overlap": float(places.overlap[here].sum()),
            "entropy": self._bin(places.entropy[here], places.overlap[here]),
            "lenience": [
                {"lenience": lenience, "sum_acceptance": float(a), "sum_total_variation": float(b)}
                for lenience, a, b in sums
            ],
            "distribution": "sampled" if distribution.is_sampled else "deterministic",
        }

    def _bin(self, entropy: np.ndarray, overlap: np.ndarray) -> dict[str, list[float]]:
        num_bins = len(self._edges) - 1
        index = np.searchsorted(self._edges, entropy, side="right") - 1
        index = np.clip(index, 0, num_bins - 1)  # a uniform distribution stands on the last edge
        counts = np.bincount(index, minlength=num_bins)
        sums = np.bincount(index, weights=overlap, minlength=num_bins)
        return {"edges": self._edges.tolist(), "counts": counts.tolist(), "sums": sums.tolist()}

    def places(
        self,
        distribution: DraftDistribution,
        settings: Settings,
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
    ) -> Places:
        """Returns the figures before each token of an answer but the first, as numpy arrays.

        Args:
          distribution: see `estimate`.
          settings: likewise.
          prompt_ids: likewise.
          answer_ids: likewise.

        Raises:
          InputError: see `estimate`.
        """
        prompt, answer = list(prompt_ids), list(answer_ids)
        if not prompt:
            raise InputError("expected a prompt of at least one token, got none")
        own_settings, draft_settings = _sampling_settings(settings)
        text, first = [*prompt, *answer[:-1]], len(prompt)  # the last token is followed by none
        parts = [_no_places(len(self._leniences))]
        if len(text) > first:
            drafts = self._drafts(distribution, draft_settings, text, first)
            options = {"leniences": self._leniences, "is_random": bool(own_settings.is_random)}
            for logits, proposed in zip(self._logits(text, first), drafts, strict=True):
                parts.append(look_at_places(logits, proposed, own_settings, **options))
        places = jax.tree.map(lambda *leaves: np.concatenate(jax.device_get(leaves)), *parts)
        skipped = first % _CHUNK  # tokens of the prompt in the first chunk that was looked at
        places = jax.tree.map(lambda leaf: leaf[skipped : skipped + len(text) - first], places)
        return Places(places[0], *(leaf.astype(np.float64) for leaf in places[1:]))

    def _drafts(
        self,
        distribution: DraftDistribution,
        settings: SamplingSettings,
        text: list[int],
        first: int,
    ) -> Iterator[FirstDrafts]:
        """Yields what is proposed in each chunk from that of token `first` on."""
        state = distribution.start(capacity_for(len(text), 0))
        for begin, tokens in _chunks(text):
            drafts, state = distribution.read(state, tokens, settings)
            if begin + _CHUNK > first:
                yield drafts

    def _logits(self, text: list[int], first: int) -> list[jax.Array]:
        """Returns the target's logits in those chunks."""
        if self._last_text != (text, first):
            self._last_logits, self._last_text = [], None
            cache = self._pass.start(capacity_for(len(text), 0))
            for begin, tokens in _chunks(text):
                logits, cache = self._pass.logits(cache, tokens)
                if begin + _CHUNK > first:
                    self._last_logits.append(logits)
            self._last_text = text, first
        return self._last_logits


def _no_places(num_leniences: int) -> Places:
    empty, pairs = np.zeros(0, np.float32), np.zeros([0, num_leniences], np.float32)
    return Places(np.zeros(0, bool), empty, empty, pairs, pairs)


def _chunks(text: Sequence[int]) -> Iterator[tuple[int, jax.Array]]:
    """Yields the tokens in equal chunks, the last one padded, each with its begin."""
    for begin in range(0, len(text), _CHUNK):
        part = text[begin : begin + _CHUNK]
        tokens = np.zeros(_CHUNK, np.int32)
        tokens[: len(part)] = part
        yield begin, jnp.asarray(tokens)


def _sampling_settings(settings: Settings) -> tuple[SamplingSettings, SamplingSettings]:
    """Returns the target's and the drafter's, of one row.

    Raises:
      InputError: there are processors.
    """
    switches = needed_switches([settings])._replace(logprobs=False)
    if switches.processors:
        names = ", ".join(processor.name for processor in switches.processors)
        raise InputError(f"expected settings of temperature and filters only, got {names}")
    own = SamplingSettings(
        temperature=jnp.array([settings.temperature], jnp.float32),
        top_k=jnp.array([settings.top_k], jnp.int32),
        top_p=jnp.array([settings.top_p], jnp.float32),
        min_p=jnp.array([settings.min_p], jnp.float32),
        switches=switches,
    )
    if settings.draft_temperature is None:
        return own, own
    temperature = jnp.array([settings.draft_temperature], jnp.float32)
    return own, own.replace(temperature=temperature)
