"""A draft model that is itself decoded speculatively (arXiv 2211.17192, section 6).

    text     | ... previous  token |
    guesses  |                     | g1  g2  g3         the inner drafter's
    one call | previous  token  g1  g2  g3              of the draft model
    draws    |            x0   x1  x2  x3               from its probs, with the round's own noise
    kept     | ... previous  token  x0  x1  x2          if g1 = x0, g2 = x1, g3 is not x2

The draft model's token at each offset of a round is the one that the distribution there and the
offset's own noise give: a guess is kept exactly if it is that token (the coupled rule, arXiv
2408.07978). So the drafts and their distributions are those of the drafter `model` with the same
keys, as far as a pass over several tokens rounds like one over a single token, and no randomness is
added. Only the number of calls changes: one gives as many drafts as guesses were right, and one
more.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from jspec.common.errors import InputError
from jspec.common.typing import BlockFlags, Params, RowCounts, Tokens
from jspec.drafters.draft_vocabulary import DraftVocabularyOptions
from jspec.drafters.hierarchical_chain import Drafting, HierarchicalParams, Round, grow
from jspec.drafters.model import ModelDrafter, ModelState, make_model_drafter
from jspec.drafters.spec import BuiltDrafter, DrafterEntry, DrafterSpec, option
from jspec.drafters.tree_options import TreeOptions, for_chains
from jspec.kernels import while_any
from jspec.sampling.noise import gumbel_noise
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.types import Drafter, Kind, RoundInputs


@dataclasses.dataclass(frozen=True)
class HierarchicalOptions(DraftVocabularyOptions):
    """Of `hierarchical`."""

    inner_drafter: str = option(
        "prompt_lookup", "For hierarchical: the drafter that proposes tokens to the draft model."
    )
    inner_num_draft_tokens: int = option(
        4, "For hierarchical: most tokens that --inner_drafter proposes at a time.", between=(1, 64)
    )


class PairState(NamedTuple):
    """Memory of the draft model and of the inner drafter: both have seen what is committed."""

    model: ModelState
    inner: Any


@dataclasses.dataclass(frozen=True)
class HierarchicalDrafter:
    """Proposes the drafts of a draft model, in fewer calls of it.

    Attributes:
      model: the drafter whose drafts these are.
      inner: guesses them; how well changes the number of calls, never a draft.
    """

    model: ModelDrafter
    inner: Drafter

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """One: the drafts are the draft model's."""
        (kind,) = self.model.kinds
        return (kind._replace(drafter="hierarchical"),)

    @property
    def num_draft_tokens(self) -> int:
        """The draft model's."""
        return self.model.num_draft_tokens

    @property
    def may_be_silent(self) -> bool:
        """As the draft model: whether there was a guess makes no difference."""
        return self.model.may_be_silent

    def lag(self, state: PairState, kind: RowCounts) -> RowCounts:
        """Returns the tokens in the calls by which the draft model catches up, [b]."""
        return self.model.lag(state.model, kind)

    def init(self, batch_size: int, capacity: int) -> PairState:
        """Returns the state of rows that have seen nothing."""
        return PairState(
            self.model.init(batch_size, capacity), self.inner.init(batch_size, capacity)
        )

    def observe(
        self, params: Params, state: PairState, tokens: Tokens, hidden: Array, valid: BlockFlags
    ) -> PairState:
        """Shows both the committed tokens."""
        return PairState(
            self.model.observe(params.draft, state.model, tokens, hidden, valid),
            self.inner.observe(params.inner, state.inner, tokens, hidden, valid),
        )

    def propose(
        self, params: HierarchicalParams, state: PairState, inputs: RoundInputs
    ) -> tuple[Proposal, PairState]:
        """Drafts as many tokens as guesses allow in each call of the draft model."""
        wanted, vocab_size = inputs.wanted(), self.model.target_vocab_size
        shape = inputs.rng_keys.shape
        is_wanted = wanted > 0
        # No row that drafts means no draw, so the costly noise can be left out.
        is_random = inputs.settings.is_random & is_wanted.any()
        # All noise of the round at once: each offset has its own, whichever call draws there.
        noise = gumbel_noise(inputs.rng_keys.reshape(-1), vocab_size, is_random)
        noise = noise.reshape(*shape, vocab_size)
        drafting = Drafting(
            cache=self.model.ready_cache(params.draft, state.model, is_wanted),
            inner=state.inner,
            settings=inputs.settings,
            # Two tokens: the slot of the older one may never have been written.
            newest=jnp.stack([state.model.history.newest(), inputs.last_token], axis=1),
            tokens=jnp.zeros(shape, jnp.int32),
            # As wide as the target's distributions, which may have more ids than the draft model.
            probs=inputs.empty_probs(vocab_size),
            num_tokens=jnp.zeros_like(wanted),
            # No token is -1: a slot never fed can not pass for a committed one.
            fed=jnp.full(shape, -1, jnp.int32),
            is_going=is_wanted,
        )
        a_round = Round(self.model, self.inner, params, wanted, inputs, noise)
        drafting = while_any(
            lambda drafting: drafting.is_going, functools.partial(grow, a_round), drafting
        )
        proposal = Proposal(drafting.tokens, drafting.num_tokens, drafting.probs)
        model = self.model.remember(
            state.model, drafting.cache, drafting.fed, drafting.num_tokens, is_wanted
        )
        # The inner drafter forgets the drafts that it has seen: they may be rejected.
        return proposal, state._replace(model=model)


def _build(spec: DrafterSpec) -> BuiltDrafter:
    from jspec.drafters.registry import make_drafter  # which imports this file

    model, draft_params = make_model_drafter(spec, "hierarchical")
    # The last draft of a round comes with the guesses before it.
    num_guesses = min(spec.options.inner_num_draft_tokens, max(spec.num_draft_tokens - 1, 1))
    # Guesses are read as a chain.
    inner_spec = spec._replace(
        num_draft_tokens=num_guesses, is_member=True, options=for_chains(spec.options)
    )
    inner = make_drafter(_inner_name(spec.options), inner_spec)
    assert inner.drafter is not None
    params = HierarchicalParams(draft_params, inner.params)
    return BuiltDrafter(HierarchicalDrafter(model, inner.drafter), params)


def _inner_name(options: HierarchicalOptions) -> str:
    from jspec.drafters.registry import REGISTRY

    name = options.inner_drafter
    known = [one.name for one in REGISTRY.values() if one.needs in ("", "draft_table")]
    # Without guesses every call would give one draft: that is the drafter `model`.
    known.remove("none")
    if not set(known).issuperset(name.split("+")):
        listed = ", ".join(known)
        raise InputError(f"expected an inner drafter without a model, among {listed}; got {name!r}")
    return name


def _options_read(options: HierarchicalOptions) -> set[str]:
    from jspec.drafters.options import options_read  # which imports this file

    own = {field.name for field in dataclasses.fields(HierarchicalOptions)}
    inner = options_read(_inner_name(options), options)  # type: ignore[arg-type]
    return own | inner - {field.name for field in dataclasses.fields(TreeOptions)}


ENTRY = DrafterEntry(
    name="hierarchical",
    build=_build,
    proposes="the drafts of `model`, itself decoded speculatively by `--inner_drafter`",
    source="2211.17192",
    options=HierarchicalOptions,
    needs="draft",
    prior_cost=3.48,  # three drafts
    read=_options_read,
)
