"""The distribution of the first draft after every token of a text, for every drafter, without
drafting.

Tables say it from the last token alone, models (draft models, some of the target's layers) in one
forward pass over the text, and drafters that look back (prompt lookup, n-grams, patterns) as they
are shown one token after another. The distributions are those that drafts would really be drawn
from: after temperature and filters, in float32.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jspec.common.errors import InputError
from jspec.common.typing import Params
from jspec.drafters import (
    DrafterSpec,
    HierarchicalDrafter,
    LayerSubsetDrafter,
    ModelDrafter,
    TableDrafter,
    make_drafter,
    member_names,
)
from jspec.evaluation.experiments.draft_distribution import DraftDistribution, FirstDrafts
from jspec.evaluation.experiments.forward_pass import ForwardPass, widen
from jspec.models import KVCache
from jspec.sampling.distribution import SamplingSettings, confidence, likeliest, sampling_probs
from jspec.speculation.types import Drafter, TargetView, observed_layers


@dataclasses.dataclass(frozen=True)
class ModelDistribution:
    """The distributions of a draft model, or of some of the target's layers.

    Attributes:
      model: it, with as many logits as the target has.
      min_confidence: nothing is proposed where no token is this likely.
    """

    model: ForwardPass
    min_confidence: float

    is_sampled = True

    def start(self, capacity: int) -> KVCache:
        """Returns the empty cache."""
        return self.model.start(capacity)

    def read(
        self, state: KVCache, tokens: Int32[Array, "t"], settings: SamplingSettings
    ) -> tuple[FirstDrafts, KVCache]:
        """Runs the model; see `DraftDistribution`."""
        logits, state = self.model.logits(state, tokens)
        return _draw_distributions(logits, settings, min_confidence=self.min_confidence), state


@dataclasses.dataclass(frozen=True)
class TableDistribution:
    """The distributions of a table, which has no state.

    Attributes:
      drafter: with the table's logits.
      params: the table.
    """

    drafter: TableDrafter
    params: Params

    is_sampled = True

    def start(self, capacity: int) -> tuple[()]:
        """Returns no state."""
        del capacity
        return ()

    def read(
        self, state: tuple[()], tokens: Int32[Array, "t"], settings: SamplingSettings
    ) -> tuple[FirstDrafts, tuple[()]]:
        """Looks the tokens up; see `DraftDistribution`."""
        logits = _table_logits(self.params, tokens, drafter=self.drafter)
        return _draw_distributions(
            logits, settings, min_confidence=self.drafter.min_confidence
        ), state


@dataclasses.dataclass(frozen=True)
class LookBackDistribution:
    """The distributions of a drafter that is shown the text token by token, and asked for a draft
    each time.

    Attributes:
      drafter: with one draft a round.
      params: its parameters.
      width: v of the target's distributions.
    """

    drafter: Drafter
    params: Params
    width: int

    @property
    def is_sampled(self) -> bool:
        """As the drafter."""
        return getattr(self.drafter, "is_sampled", False)

    def start(self, capacity: int) -> Any:
        """Returns the drafter's state."""
        return self.drafter.init(1, capacity)

    def read(
        self, state: Any, tokens: Int32[Array, "t"], settings: SamplingSettings
    ) -> tuple[FirstDrafts, Any]:
        """Asks and shows; see `DraftDistribution`."""
        options = {"drafter": self.drafter, "width": self.width}
        return _look_back(self.params, state, tokens, settings, **options)


@dataclasses.dataclass(frozen=True)
class CascadeDistribution:
    """The distributions of the first of several drafters that has something to say.

    Attributes:
      members: in their order.
    """

    members: tuple[DraftDistribution, ...]

    @property
    def is_sampled(self) -> bool:
        """Whether any of them draws at random."""
        return any(member.is_sampled for member in self.members)

    def start(self, capacity: int) -> tuple[Any, ...]:
        """Returns the members' states."""
        return tuple(member.start(capacity) for member in self.members)

    def read(
        self, state: tuple[Any, ...], tokens: Int32[Array, "t"], settings: SamplingSettings
    ) -> tuple[FirstDrafts, tuple[Any, ...]]:
        """Asks all of them; see `DraftDistribution`."""
        pairs = [m.read(s, tokens, settings) for m, s in zip(self.members, state, strict=True)]
        drafts, states = zip(*pairs, strict=True)
        return functools.reduce(_first_of, drafts), states


def make_draft_distribution(
    name: str, spec: DrafterSpec, target_params: Params
) -> DraftDistribution:
    """Returns the distributions of a drafter.

    Args:
      name: a drafter's, or several joined by "+"; see `make_drafter`.
      spec: what it is built from; whatever it says, one draft a round is asked for.
      target_params: the target's parameters, for a drafter of its layers.

    Raises:
      InputError: no such drafter, one that lacks something, or "none".
    """
    names = member_names(name)
    spec = spec._replace(num_draft_tokens=1, is_member=True, is_in_cascade=len(names) > 1)
    distributions = [_make_distribution(member, spec, target_params) for member in names]
    return (
        distributions[0] if len(distributions) == 1 else CascadeDistribution(tuple(distributions))
    )


def _make_distribution(name: str, spec: DrafterSpec, target_params: Params) -> DraftDistribution:
    built = make_drafter(name, spec)
    drafter, options = built.drafter, spec.options
    ids = spec.vocab_size, spec.target_config.vocab_size
    if drafter is None:
        raise InputError(f"expected a drafter that drafts, got {name!r}")
    if isinstance(drafter, ModelDrafter | HierarchicalDrafter):  # of the same distribution
        assert spec.draft_config is not None
        model = ForwardPass(spec.draft_config, spec.draft_params, *ids)
        return ModelDistribution(model, options.draft_confidence)
    if isinstance(drafter, LayerSubsetDrafter):
        layers = tuple(options.draft_layers or ())
        model = ForwardPass(spec.target_config, target_params, *ids, layers)
        return ModelDistribution(model, options.draft_confidence)
    if isinstance(drafter, TableDrafter):
        return TableDistribution(drafter, built.params)
    if observed_layers(drafter):
        raise InputError(f"expected a drafter without a trained head, got {name!r}")
    return LookBackDistribution(drafter, built.params, spec.target_config.vocab_size)


@functools.partial(jax.jit, static_argnames="min_confidence")
def _draw_distributions(
    logits: Float32[Array, "t v"], settings: SamplingSettings, *, min_confidence: float
) -> FirstDrafts:
    """Returns the distributions as `drafters.chain` draws from them, and where it would stop."""
    probs = sampling_probs(logits[None], settings)[0]
    sureness = confidence(likeliest(logits[None]), probs[None], settings)[0]
    is_proposed = (jnp.max(logits, axis=1) > -jnp.inf) & (sureness >= min_confidence)
    return FirstDrafts(jnp.where(is_proposed[:, None], probs, 0.0), is_proposed)


@functools.partial(jax.jit, static_argnames="drafter")
def _table_logits(
    params: Params, tokens: Int32[Array, "t"], *, drafter: TableDrafter
) -> Float32[Array, "t v"]:
    # Behind the barrier a distribution that no token changes is not folded, slowly, at compile
    # time.
    logits = jax.lax.optimization_barrier(drafter.logits(params, tokens))
    return widen(logits, drafter.vocab_size)


@functools.partial(jax.jit, static_argnames=("drafter", "width"), donate_argnames="state")
def _look_back(
    params: Params,
    state: Any,
    tokens: Int32[Array, "t"],
    settings: SamplingSettings,
    *,
    drafter: Drafter,
    width: int,
) -> tuple[FirstDrafts, Any]:
    keys = jax.random.split(jax.random.key(0), (1, 1))  # of a draw that nobody looks at
    hidden, valid = jnp.zeros([1, 1, 1], jnp.float32), jnp.ones([1, 1], bool)

    def step(state: Any, token: Int32[Array, ""]) -> tuple[Any, FirstDrafts]:
        last_token = token[None]
        proposal, state = drafter.propose(
            params,
            state,
            last_token,
            limit=jnp.ones_like,
            rng_keys=keys,
            settings=settings,
            view=TargetView(None, _no_target, None),
        )
        draft = proposal.tokens[0, 0]
        distribution = jax.nn.one_hot(draft, width, dtype=jnp.float32)
        if proposal.probs is not None:
            distribution = proposal.probs[0, 0]
        is_proposed = (proposal.num_tokens[0] > 0) & (draft >= 0)
        state = drafter.observe(params, state, last_token[None], hidden, valid)
        return state, FirstDrafts(jnp.where(is_proposed, distribution, 0.0), is_proposed)

    state, drafts = jax.lax.scan(step, state, tokens)
    return drafts, state


def _no_target(*args: Any, **options: Any) -> Any:
    raise NotImplementedError("a drafter that looks back does not run the target")


@jax.jit
def _first_of(one: FirstDrafts, other: FirstDrafts) -> FirstDrafts:
    probs = jnp.where(one.is_proposed[:, None], one.probs, other.probs)
    return FirstDrafts(probs, one.is_proposed | other.is_proposed)
