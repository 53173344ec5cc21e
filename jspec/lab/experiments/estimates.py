"""Acceptance without drafting, from two distributions at every token of the target's own text.

    alpha = E[sum over x of min(target(x), draft(x))]

(Leviathan et al., arXiv 2211.17192, Cor. 3.6; the paper's Table 3 is measured so.) The mean is over
the tokens of answers that the target gave, without the first of an answer, which the prefill draws.
Positions at which a drafter proposes nothing are counted apart.

Models (draft models, some of the target's layers) give the distribution of the first draft after
every token in one forward pass over the text. All other drafters are shown the text token by token,
and are asked for a draft after each token. The distributions are those that drafts would be drawn
from: after temperature and filters, in float32, normalised; those of a draft that follows from the
context alone are one-hot. `lenience` is the l of arXiv 2211.17192, A.5, from 0 to 1.

Rounds look at fewer positions: an accepted draft is followed by a token that was not drafted. If
accepted drafts come in runs, as those of prompt lookup do, rounds of one draft therefore accept a
smaller share than alpha; otherwise the two agree.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.errors import InputError
from jspec.common.typing import Params
from jspec.drafters import (
    DrafterOptions,
    DrafterSpec,
    choose_drafter,
    draws_from_distribution,
    make_drafter,
    member_names,
    needs_draft_model,
)
from jspec.drafters.chain import spread
from jspec.drafters.layer_skip import choose_layers
from jspec.drafters.model import HEAD_IDS, with_draft_vocabulary
from jspec.generation.batch import needed_switches
from jspec.generation.options import make_spec
from jspec.generation.request import SamplingParams
from jspec.generation.rows import capacity_for
from jspec.models import DecoderConfig, KVCache, init_cache, make_apply
from jspec.sampling.distribution import confidence, likeliest, sampling_probs
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.acceptance.chain import min_ratio, normalised_or
from jspec.speculation.acceptance.lenient import distribution_at_temperature_one
from jspec.speculation.types import Drafter, RoundInputs, TargetView
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import used_vocab_size

Distributions = Float32[Array, "... v"]
Values = Float32[Array, "..."]

_CHUNK = 64
_DRAFTER_DEFAULTS = DrafterOptions()
_HostOrDeviceArray = Any


def expected_acceptance(target_probs: Distributions, draft_probs: Distributions) -> Values:
    """Returns how likely speculative sampling accepts a draft drawn from a distribution.

        alpha = E[min(1, target(x) / draft(x))] = sum over x of min(target(x), draft(x))

    which is 1 - D(target, draft), D the total variation; its mean over contexts is the expected
    acceptance rate (Leviathan et al., arXiv 2211.17192, Cor. 3.6).
    """
    return jnp.sum(jnp.minimum(target_probs, draft_probs), axis=-1)


def divergence(target: Distributions, draft: Distributions) -> Values:
    """Returns how far two distributions are apart, from 0 (equal) to 1 (disjoint).

    The total variation, half the sum of |one(x) - other(x)|, which is D of arXiv 2211.17192, Def.
    3.2; 1 minus it is the acceptance (Thm 3.5, Lemma 3.3).
    """
    return jnp.sum(jnp.abs(target - (target + draft) / 2), axis=-1)


def lenient_outcome(
    target: Distributions, draft: Distributions, lenience: float, at_one: Distributions | None
) -> tuple[Values, Distributions]:
    """Returns how likely a lenient rule accepts a draft, and the distribution of what comes out.

    Under `lenient`, where `at_one` is None, x is drafted and accepted with probability

        draft(x) · min(1, target(x) / (l · draft(x))) = min(draft(x), target(x) / l)

    and what is missing from the sum goes to norm(max(target - draft, 0)); at l = 0 every token that
    is possible is accepted, at l = 1 the target's distribution comes out. `lenient_argmax` accepts
    x if at_one(x) >= l · max(at_one), with the target's distribution at temperature 1; a rejected
    draft becomes the most likely token, which `target` then has alone.
    """
    if at_one is None:
        kept = draft * min_ratio(target, lenience * draft)
        rest = normalised_or(jnp.maximum(target - draft, 0.0), target)
    else:
        is_kept = at_one >= lenience * jnp.max(at_one, axis=-1, keepdims=True)
        kept, rest = jnp.where(is_kept & (at_one > 0), draft, 0.0), target
    acceptance = jnp.sum(kept, axis=-1)
    return acceptance, kept + (1 - acceptance[..., None]) * rest


class FirstDrafts(NamedTuple):
    """What a drafter proposes first after each token: the distribution that it is drawn from.

    It is one-hot if the draft follows from the text, and 0 everywhere if there is no draft.
    """

    probs: Float32[Array, "t v"]
    is_proposed: Bool[Array, "t"]


_ReadFn = Callable[[Any, Int32[Array, "t"], SamplingSettings], tuple[FirstDrafts, Any]]
_Member = tuple[Callable[[int], Any], _ReadFn]


class DraftDistribution:
    """A drafter's distributions along a text; of a cascade, those of the first one with a draft.

    Attributes:
      is_sampled: whether drafts are drawn at random; else they follow from the text.
    """

    def __init__(self, name: str, spec: DrafterSpec, target_params: Params) -> None:
        names = member_names(name)
        spec = spec._replace(num_draft_tokens=1, is_member=True, is_in_cascade=len(names) > 1)
        self._members = [_make_member(member, spec, target_params) for member in names]
        self.is_sampled = draws_from_distribution(name, spec.options)

    def start(self, capacity: int) -> list[Any]:
        """Returns the state before a text of at most this many tokens."""
        return [start(capacity) for start, _ in self._members]

    def read(
        self, state: list[Any], tokens: Int32[Array, "t"], settings: SamplingSettings
    ) -> tuple[FirstDrafts, list[Any]]:
        """Returns what is proposed after each token of a chunk, and the state, consumed, after."""
        pairs = zip(self._members, state, strict=True)
        results = [read(member_state, tokens, settings) for (_, read), member_state in pairs]
        drafts = functools.reduce(_first_of, (drafts for drafts, _ in results))
        return drafts, [member_state for _, member_state in results]


@jax.jit
def _first_of(first: FirstDrafts, second: FirstDrafts) -> FirstDrafts:
    probs = jnp.where(first.is_proposed[:, None], first.probs, second.probs)
    return FirstDrafts(probs, first.is_proposed | second.is_proposed)


def _make_member(name: str, spec: DrafterSpec, target_params: Params) -> _Member:
    """Returns the functions `start` and `read` of one drafter."""
    built = make_drafter(name, spec)
    drafter, width = built.drafter, spec.target_config.vocab_size
    if drafter is None:
        raise InputError(f"expected a drafter that drafts, got {name!r}")
    if drafter.hidden_layers:
        raise InputError(f"expected a drafter without a trained head, got {name!r}")
    if drafter.num_runners_up:  # which a given text does not tell
        raise InputError(f"expected a drafter that does not learn from logits, got {name!r}")
    cut = with_draft_vocabulary(spec)
    if needs_draft_model(name) and cut.draft_config is not None and spec.draft_tokenizer is None:
        model = ForwardPass(cut.draft_config, spec.vocab_size, width)
        return _of_model(model, cut.draft_params, spec.options.draft_confidence)
    if name == "layer_skip":
        layers = choose_layers(spec.options.draft_layers, spec.target_config.num_layers)
        model = ForwardPass(spec.target_config, spec.vocab_size, width, layers)
        return _of_model(model, target_params, spec.options.draft_confidence)
    read = functools.partial(_ask_after_each, drafter, width, built.params)
    return functools.partial(drafter.init, 1), read


@dataclasses.dataclass(frozen=True)
class ForwardPass:
    """A model run over a given text, a chunk at a time, so that its logits [t v] stay small.

    Attributes:
      config: the model's.
      num_ids: ids that are used; the logits of later ones are -inf.
      width: v, how many logits are wanted.
      layers: the layers that are run, in rising order; None runs all.
    """

    config: DecoderConfig
    num_ids: int
    width: int
    layers: tuple[int, ...] | None = None

    def start(self, params: Params, capacity: int) -> KVCache:
        """Returns the cache before a text of at most this many tokens."""
        config = self.config
        if self.layers is not None:
            config = dataclasses.replace(config, num_layers=len(self.layers))
        dtype = params["embedding"].dtype
        return init_cache(config, batch_size=1, capacity=capacity, dtype=dtype)

    # Equal passes share their programs: texts, drafters and settings compile nothing anew.
    @functools.partial(jax.jit, static_argnums=0, donate_argnames="cache")
    def logits(
        self, params: Params, cache: KVCache, tokens: Int32[Array, "t"]
    ) -> tuple[Float32[Array, "t v"], KVCache]:
        """Returns the logits after each token of a chunk, and the cache, consumed, with all."""
        logits, _, cache = make_apply(self.config, self.layers)(params, tokens[None], cache)
        logits = spread(logits[0, :, : self.num_ids], params.get(HEAD_IDS), self.width)
        return logits, cache.commit(jnp.array([tokens.shape[0]], jnp.int32))


def _of_model(model: ForwardPass, params: Params, min_confidence: float) -> _Member:
    def read(
        cache: KVCache, tokens: Int32[Array, "t"], settings: SamplingSettings
    ) -> tuple[FirstDrafts, KVCache]:
        logits, cache = model.logits(params, cache, tokens)
        return _as_drawn(logits, settings, min_confidence), cache

    return functools.partial(model.start, params), read


@functools.partial(jax.jit, static_argnames="min_confidence")
def _as_drawn(
    logits: Float32[Array, "t v"], settings: SamplingSettings, min_confidence: float
) -> FirstDrafts:
    """Returns the distributions as `drafters.chain` draws from them, and where it would stop."""
    probs = sampling_probs(logits[None], settings)[0]
    sureness = confidence(likeliest(logits[None]), probs[None], settings)[0]
    is_proposed = sureness >= min_confidence
    return FirstDrafts(jnp.where(is_proposed[:, None], probs, 0.0), is_proposed)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames="state")
def _ask_after_each(
    drafter: Drafter,
    width: int,
    params: Params,
    state: Any,
    tokens: Int32[Array, "t"],
    settings: SamplingSettings,
) -> tuple[FirstDrafts, Any]:
    """Shows a drafter the tokens in turn, and asks for a draft after each token."""
    keys = jax.random.split(jax.random.key(0), (1, 1))  # for a draw that nobody looks at
    hidden, valid = jnp.zeros([1, 1, 1], jnp.float32), jnp.ones([1, 1], bool)

    def step(state: Any, token: Int32[Array, ""]) -> tuple[Any, FirstDrafts]:
        last_token = token[None]
        view = TargetView(None, _no_target, None)
        inputs = RoundInputs(last_token, jnp.ones_like, keys, settings, view)
        proposal, state = drafter.propose(params, state, inputs)
        draft, probs = proposal.tokens[0, 0], proposal.probs
        probs = jax.nn.one_hot(draft, width) if probs is None else probs[0, 0]
        is_proposed = (proposal.num_tokens[0] > 0) & (draft >= 0)
        state = drafter.observe(params, state, last_token[None], hidden, valid)
        return state, FirstDrafts(jnp.where(is_proposed, probs, 0.0), is_proposed)

    state, drafts = jax.lax.scan(step, state, tokens)
    return drafts, state


def _no_target(*args: Any, **options: Any) -> Any:
    raise NotImplementedError("this drafter does not run the target")


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
    outcomes = [lenient_outcome(target, drafts.probs, one, at_one) for one in leniences]
    none = jnp.zeros([logits.shape[0], 0], jnp.float32)
    columns = [acceptance[:, None] for acceptance, _ in outcomes]
    accepted = jnp.concatenate([none, *columns], axis=1)
    columns = [divergence(target, emitted)[:, None] for _, emitted in outcomes]
    variation = jnp.concatenate([none, *columns], axis=1)
    overlap = expected_acceptance(target, drafts.probs)
    entropy = jnp.sum(unfiltered * surprise, axis=1)
    return PositionFigures(drafts.is_proposed, overlap, entropy, accepted, variation)
