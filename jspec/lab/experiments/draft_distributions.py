"""The distribution of the first draft after every token of a text, for every drafter.

Models (draft models, some of the target's layers) give them in one forward pass over the text. All
other drafters are shown the text token by token, and are asked for a draft after each token. They
are those that drafts would really be drawn from: after temperature and filters, in float32.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.errors import InputError
from jspec.common.typing import Params
from jspec.drafters import (
    DrafterSpec,
    draws_from_distribution,
    make_drafter,
    member_names,
    needs_draft_model,
)
from jspec.drafters.chain import spread
from jspec.drafters.layer_skip import choose_layers
from jspec.drafters.model import HEAD_IDS, with_draft_vocabulary
from jspec.models import DecoderConfig, KVCache, init_cache, make_apply
from jspec.sampling.distribution import confidence, likeliest, sampling_probs
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.types import Drafter, RoundInputs, TargetView


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
