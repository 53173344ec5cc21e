"""How many drafts a row asks for: a function of its own history and of recorded costs.

A round of n drafts emits 1 + a + a·l + a·l² + ... tokens on average, where a is the probability
that the first draft is accepted, and l that a later one is once those before it are. Of the few
numbers of drafts for which a verify call is compiled, each row takes the one that gives the most
tokens per second: Theorem 3.8 of Leviathan et al. (arXiv 2211.17192) with measured costs instead of
the ratio c. A round of 0 drafts is a plain step. No clock is read: the same history and costs, the
same choice.

Each row estimates a and l from its own rounds, for each kind of proposal. Where no later drafts are
tried, l follows a. What is assumed at first is what was measured for the models, if it was. With
every round the past fades towards it, so a drafter that was switched off is tried again.

What a drafter must read first, in the beginning the whole prompt, is spread over the tokens still
to come: as many as other answers of the models lead to expect, at least 16 and as many as the
answer has so far, at most the room that is left. Of these a later drafter of a cascade counts the
share of rounds for which the earlier ones found nothing so far.

Trying is limited: each row counts the seconds by which its rounds have taken longer than plain
decoding would have. A round that could bring that above one plain step and 1 % of the answer is
chosen only if the row's own rounds speak for it, without what was assumed.

A tree is drafted whole or not at all; the drafter's own estimates say how many nodes to verify. In
a cascade a drafter that has found a draft leaves the round to a later one that always has a draft,
where that promises more tokens per second.

In a batch the rows' blocks lie side by side, and `budget` grants drafts out of what rows want.
Where that cannot be, all rows wait for the widest: the most drafts that any row may have is the c
that maximises sum_r E_r(min(c, c_r)) / seconds(c), where E_r(c) are the tokens that row r is
expected to emit in a round with c drafts, and c_r is what the row wants itself.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.typing import RowCounts, RowFlags


class Kind(NamedTuple):
    """A kind of proposal, whose drafts are accepted about equally often.

    Attributes:
      drafter: the name of the drafter; kinds of one drafter cost the same.
      first: assumed probability, before any round, that the first draft is accepted.
      later: likewise for a later draft once those before it are accepted.
      most: the most drafts that such a proposal can have.
      is_certain: whether the drafter makes such a proposal in every round in which it is asked.
      costs_when_silent: whether the drafter runs a model before it proposes nothing.
      is_tree: whether the proposal is a tree with scores; `most` is then its greatest depth.
    """

    drafter: str
    first: float
    later: float
    most: int = 2**31 - 1
    is_certain: bool = False
    costs_when_silent: bool = False
    is_tree: bool = False


def drafters_of(kinds: Sequence[Kind]) -> list[str]:
    """Returns the names of the drafters that make these kinds of proposals, each once, in order."""
    return list(dict.fromkeys(kind.drafter for kind in kinds))


_MEMORY = 0.97  # what is left of an observation a round later
_PRIOR_WEIGHT = 5.0  # the assumption counts like this many observed drafts
_DOUBT = 1.5  # where nothing is assumed, this many refused drafts are added instead
_PATIENCE = 8  # tokens that count as drafted by the first drafter, before there are others
_MORE_TO_COME = 16  # tokens that an answer is taken to have left, beside as many as it has
FREE_STEPS, _FREE_SHARE = 1.0, 0.01  # what may be lost by trying: plain steps, and of the answer

LagFn = Callable[[RowCounts], RowCounts]
Costs = Float32[Array, "b m c"]


class Control(struct.PyTreeNode):
    """The choice of a number of drafts, for each row.

    Attributes:
      costs: seconds of a round of each drafter with each number of drafts, [b m c].
      alone: seconds of the same rounds where the row is alone, [b m c].
      reading: seconds that each drafter takes for a token that it has missed, [b m].
      assumed: probabilities, before any round, that a first and a later draft of each kind is
        accepted, [b k 2].
      answer_tokens: tokens that an answer is expected to have; 0 where that is unknown, [b].
      num_emitted: tokens of the answer so far, [b].
      num_undrafted: those of rounds for which no drafter had a draft, [b].
      owed: seconds of the rounds so far beyond plain decoding's, less first readings, [b].
      kept: accepted drafts of each kind, first and later ones, with fading weights, [b k 2].
      tried: drafts of each kind whose acceptance was decided, likewise.
      forced: for each kind, the number of drafts where it is not to be chosen; -1 elsewhere, [b k].
      kinds: the drafter's.
      numbers: the numbers of drafts to choose from, rising from 0.
      num_rows: rows of the rounds whose seconds `costs` are.
    """

    costs: Float32[Array, "b m c"]
    alone: Float32[Array, "b m c"]
    reading: Float32[Array, "b m"]
    assumed: Float32[Array, "b k 2"]
    answer_tokens: RowCounts
    num_emitted: RowCounts
    num_undrafted: RowCounts
    owed: Float32[Array, "b"]
    kept: Float32[Array, "b k 2"]
    tried: Float32[Array, "b k 2"]
    forced: Int32[Array, "b k"]
    kinds: tuple[Kind, ...] = struct.field(pytree_node=False)
    numbers: tuple[int, ...] = struct.field(pytree_node=False)
    num_rows: int = struct.field(pytree_node=False, default=1)

    @classmethod
    def init(cls, batch_size: int, *, kinds: Sequence[Kind], numbers: Sequence[int]) -> Self:
        """Returns rows without a history, all of whose rounds cost the same."""
        counts = jnp.zeros([batch_size, len(kinds), 2], jnp.float32)
        seconds = jnp.ones([batch_size, len(drafters_of(kinds)), len(numbers)], jnp.float32)
        return cls(
            costs=seconds,
            alone=seconds,
            reading=jnp.zeros_like(seconds[..., 0]),
            assumed=counts + jnp.array([(kind.first, kind.later) for kind in kinds], jnp.float32),
            answer_tokens=jnp.zeros([batch_size], jnp.int32),
            num_emitted=jnp.ones([batch_size], jnp.int32),  # the token that the prefill drew
            num_undrafted=jnp.ones([batch_size], jnp.int32),
            owed=jnp.zeros([batch_size], jnp.float32),
            kept=counts,
            tried=counts,
            forced=jnp.full([batch_size, len(kinds)], -1, jnp.int32),
            kinds=tuple(kinds),
            numbers=tuple(numbers),
        )

    def with_measured(
        self,
        accepted: Float32[np.ndarray, "k 2"],
        decided: Float32[np.ndarray, "k 2"],
        answer_tokens: int,
    ) -> Self:
        """Returns the control whose rows assume what other answers of these models have shown.

        `accepted` are the first and later drafts of each kind that were accepted, `decided` those
        that were accepted or refused, and `answer_tokens` is the mean length of the answers.
        """
        assumed = (accepted + _PRIOR_WEIGHT * self.assumed) / (decided + _PRIOR_WEIGHT)
        length = np.full(self.answer_tokens.shape, answer_tokens, self.answer_tokens.dtype)
        return self.replace(assumed=assumed, answer_tokens=length)

    def round_costs(self, is_free: RowFlags) -> Costs:
        """Returns what rounds of as many rows as there are cost, [b m c].

        The seconds lie between those of one row and those of `num_rows`. Only for free rows: the
        drafts of other rows, and so their tokens, must not depend on the batch.
        """
        if len(is_free) >= self.num_rows:
            return self.costs
        share = (len(is_free) - 1) / (self.num_rows - 1)
        fewer = self.alone + (self.costs - self.alone) * share
        return jnp.where(is_free[:, None, None], fewer, self.costs)

    def choose(self, costs: Costs, kind: RowCounts, lag: LagFn, room: RowCounts) -> RowCounts:
        """Returns how many drafts each row wants, one of `numbers`, [b].

        By `costs`, see `round_costs`, for proposals of that kind. `lag` is from kinds [b] to the
        tokens that their drafters have to read first; `room`, the tokens that may still be emitted.
        """
        per_token = self.seconds_per_token(costs, kind, lag(kind), room)
        best = jnp.asarray(self.numbers, jnp.int32)[jnp.argmin(per_token, axis=-1)]
        for index, rival_kind in enumerate(self.kinds):
            # A drafter that may find nothing is no reason to give up a draft that it has.
            if rival_kind.is_certain and rival_kind.drafter != self.kinds[0].drafter:
                rival = jnp.full_like(kind, index)
                promised = self.seconds_per_token(costs, rival, lag(rival), room).min(axis=-1)
                gives_way = (kind < index) & (self.drafter_of(kind) != self.drafter_of(rival))
                best = jnp.where(gives_way & (promised < per_token.min(axis=-1)), 0, best)
        best = jnp.where(self._is_tree(kind) & (best > 0), self.numbers[-1], best)
        forced = self.forced[jnp.arange(kind.shape[0]), kind]
        return jnp.where(forced >= 0, forced, best)

    def choose_nodes(
        self, costs: Costs, kind: RowCounts, scores: Float32[Array, "b w"]
    ) -> RowCounts:
        """Returns how many of the best nodes of a tree are worth verifying, [b].

        `scores` are logarithms of the estimated probabilities of the nodes' paths, in any order.
        """
        rows = jnp.arange(kind.shape[0])
        gains = jnp.cumsum(-jnp.sort(-jnp.exp(scores), axis=-1), axis=-1)
        numbers = jnp.asarray(self.numbers[1:], jnp.int32)
        costs = costs[rows, self.drafter_of(kind), 1:]
        best = numbers[jnp.argmin(costs / (1 + gains[:, numbers - 1]), axis=-1)]
        forced = self.forced[rows, kind]
        return jnp.where(forced >= 0, forced, best)

    def charge(self, kind: RowCounts, lag: RowCounts) -> Self:
        """Returns the control after the drafters of the kinds have read `lag` tokens, [b]."""
        return self.replace(owed=self.owed + self._charged(kind, lag))

    def after_silence(
        self,
        costs: Costs,
        kind: RowCounts,
        num_proposed: RowCounts,
        wanted: LagFn,
        lag: LagFn,
        silent: Bool[Array, "b k"] | None = None,
    ) -> Self:
        """Returns the control after models that were asked, and were too unsure to propose.

        Each is charged a round of the fewest drafts, and one refused draft counts against it. From
        kinds [b], `wanted` is to drafts asked for, `lag` as for `choose`; `silent` is a Proposal's.
        """
        control = self
        for index, member in enumerate(self.kinds):
            if not member.costs_when_silent or len(self.numbers) == 1:
                continue
            kinds = jnp.full_like(kind, index)
            # A drafter of a later kind has a proposal alone only if the earlier ones were silent.
            had_none = (num_proposed == 0) | (kind > index) if silent is None else silent[:, index]
            is_silent = (wanted(kinds) > 0) & had_none
            seconds = costs[:, drafters_of(self.kinds).index(member.drafter)]
            spent = seconds[:, 1] - seconds[:, 0] + self._charged(kinds, lag(kinds))
            owed = control.owed + jnp.where(is_silent, spent, 0.0)
            tried = control.tried.at[:, index, 0].add(is_silent.astype(jnp.float32))
            control = control.replace(owed=owed, tried=tried)
        return control

    def update(
        self,
        costs: Costs,
        kind: RowCounts,
        num_proposed: RowCounts,
        num_accepted: RowCounts,
        is_running: RowFlags,
        is_refused: RowFlags | None = None,
    ) -> Self:
        """Returns the control after a round in which the running rows took part.

        `is_refused` tells for trees whether a draft was refused where the kept path ends, [b].
        """
        # Drafts after the first rejected one were never decided, and say nothing of the rate.
        if is_refused is None:
            is_refused = num_accepted < jnp.minimum(num_proposed, self._most(kind))
        num_tried = num_accepted + is_refused.astype(jnp.int32)
        is_kind = jnp.arange(self.kept.shape[1]) == kind[:, None]

        # The weights of all kinds fade in every round of the row, those that are not tried, too.
        def fade(old: Float32[Array, "b k 2"], count: RowCounts) -> Float32[Array, "b k 2"]:
            first = jnp.minimum(count, 1)
            pair = jnp.stack([first, count - first], axis=-1).astype(jnp.float32)
            new = _MEMORY * old + jnp.where(is_kind[..., None], pair[:, None], 0.0)
            return jnp.where(is_running[:, None, None], new, old)

        costs = costs[jnp.arange(kind.shape[0]), self.drafter_of(kind)]
        # Fewer drafts than were wanted cost as the next number that was measured.
        number = jnp.sum(jnp.asarray(self.numbers) < num_proposed[:, None], axis=-1)
        spent = jnp.take_along_axis(costs, number[:, None], axis=1)[:, 0]
        loss = spent - costs[:, 0] * (num_accepted + 1).astype(jnp.float32)
        is_undrafted = is_running & (num_proposed == 0)
        return self.replace(
            num_emitted=self.num_emitted + jnp.where(is_running, num_accepted + 1, 0),
            num_undrafted=self.num_undrafted + is_undrafted.astype(jnp.int32),
            owed=self.owed + jnp.where(is_running, loss, 0.0),
            kept=fade(self.kept, num_accepted),
            tried=fade(self.tried, num_tried),
        )

    def is_forced(self, kind: RowCounts) -> RowFlags:
        """Returns which rows are told how many drafts of a kind they get."""
        return self.forced[jnp.arange(kind.shape[0]), kind] >= 0

    def drafter_of(self, kind: RowCounts) -> RowCounts:
        """Returns the places of the kinds' drafters in `costs`, [b]."""
        drafters = drafters_of(self.kinds)
        return jnp.array([drafters.index(known.drafter) for known in self.kinds])[kind]

    def runs_model(self, kind: RowCounts) -> RowFlags:
        """Returns whether the kinds' drafters run a model for a proposal, [b]."""
        runs = [known.is_certain or known.costs_when_silent for known in self.kinds]
        return jnp.array(runs)[kind]

    def _most(self, kind: RowCounts) -> RowCounts:
        return jnp.array([known.most for known in self.kinds], jnp.int32)[kind]

    def _is_tree(self, kind: RowCounts) -> RowFlags:
        return jnp.array([known.is_tree for known in self.kinds])[kind]

    def _charged(self, kind: RowCounts, lag: RowCounts) -> Float32[Array, "b"]:
        rows = jnp.arange(kind.shape[0])
        # The first reading has been weighed against the tokens to come. Charged in full it would
        # forbid the very drafts for which it was done.
        seconds = self.reading[rows, self.drafter_of(kind)] * lag.astype(jnp.float32)
        return jnp.where(self._is_new(kind), 0.0, seconds)

    def _is_new(self, kind: RowCounts) -> RowFlags:
        return self.tried[jnp.arange(kind.shape[0]), kind, 0] == 0

    def _tokens_to_come(self, kind: RowCounts, room: RowCounts) -> Float32[Array, "b"]:
        """Returns the tokens among which what drafters read first is shared, [b]; at least 1."""
        to_come = self.num_emitted + _MORE_TO_COME
        to_come = jnp.maximum(to_come, self.answer_tokens - self.num_emitted)
        horizon = jnp.minimum(to_come, room).astype(jnp.float32)
        undrafted = self.num_undrafted.astype(jnp.float32)
        share = undrafted / (self.num_emitted + _PATIENCE).astype(jnp.float32)
        is_later = (self.drafter_of(kind) > 0) & self._is_new(kind)
        return jnp.maximum(horizon * jnp.where(is_later, share, 1.0), 1.0)

    def seconds_per_token(
        self, costs: Costs, kind: RowCounts, lag: RowCounts, room: RowCounts
    ) -> Float32[Array, "b c"]:
        """Returns the seconds that each token is expected to take, for every number of drafts."""
        rows, drafter = jnp.arange(kind.shape[0]), self.drafter_of(kind)
        costs, plain = costs[rows, drafter], costs[rows, drafter, :1]
        # Catching up is paid once, and shared by the tokens that are expected to follow.
        share = lag.astype(jnp.float32) / self._tokens_to_come(kind, room)
        catching_up = self.reading[rows, drafter] * share  # seconds for each token to come
        # All nodes of a tree may turn out to be worth verifying.
        most = jnp.where(self._is_tree(kind)[:, None], costs[:, -1:], costs)
        # At worst a round emits one token, as a plain step does.
        worst = (self.owed + self._charged(kind, lag))[:, None] + most - plain
        num_emitted = self.num_emitted[:, None].astype(jnp.float32)
        allowed = plain * (FREE_STEPS + _FREE_SHARE * num_emitted)
        hoped, proven = (self.expected_tokens(kind, is_proven) for is_proven in (False, True))
        # A round without drafts needs no catching up.
        return costs / jnp.where(worst <= allowed, hoped, proven) + jnp.where(
            jnp.asarray(self.numbers) > 0, catching_up[:, None], 0.0
        )

    def expected_tokens(self, kind: RowCounts, is_proven: bool) -> Float32[Array, "b c"]:
        """Returns the expected tokens of a round; with `is_proven` nothing is assumed of drafts."""
        kept, expected = self.kept_probs(kind, is_proven), [jnp.ones(kind.shape, jnp.float32)]
        for number in range(self.numbers[-1]):
            expected.append(expected[-1] + kept[:, number])
        return jnp.stack([expected[number] for number in self.numbers], axis=-1)

    def kept_probs(self, kind: RowCounts, is_proven: bool = False) -> Float32[Array, "b w"]:
        """Returns the estimated probability that each draft is kept, [b w]; it never rises."""
        kept, tried = (leaf[jnp.arange(len(kind)), kind] for leaf in (self.kept, self.tried))
        rates = kept / (tried + _DOUBT)
        if not is_proven:
            prior = self.assumed[jnp.arange(len(kind)), kind]
            # Rounds of 1 draft try no later draft. As much more often, or less, as first drafts are
            # accepted than was assumed, later ones are assumed to be.
            more = (kept - tried * prior)[:, 0] / (tried[:, 0] + _PRIOR_WEIGHT)
            prior = prior.at[:, 1].add(more).clip(0.0, 1.0)
            rates = (kept + _PRIOR_WEIGHT * prior) / (tried + _PRIOR_WEIGHT)
        gain, later = rates.T
        most, gains = self._most(kind), []
        for number in range(self.numbers[-1]):
            gains.append(jnp.where(number < most, gain, 0.0))
            gain = gain * later
        return jnp.stack(gains, axis=-1) if gains else jnp.zeros([len(kind), 0], jnp.float32)


FORBIDDEN = 1e6  # seconds of a number of drafts that a row may not have
MARGIN = 1.1  # times the speed of no drafts that drafts must promise: rates lag, costs are guessed


class Demand(NamedTuple):
    """The drafts that the rows of a batch want in one round, and what decides how many they get.

    Attributes:
      control: of the rows.
      costs: see `Control.round_costs`.
      kind: of each row's proposal.
      wanted: drafts that each row wants, or has.
      is_running: whether the row takes part.
      is_free: whether the row's tokens are the same with any number of drafts; others keep their
        drafts, as their tokens must not depend on the other rows.
    """

    control: Control
    costs: Costs
    kind: RowCounts
    wanted: RowCounts
    is_running: RowFlags
    is_free: RowFlags


def agree(demand: Demand) -> RowCounts:
    """Returns how many drafts each row gets, [b], where all rows have blocks of one width.

    That is at most what a row wants; all of it where the batch, or the control, has one row, and
    where its number is forced.
    """
    control, costs, kind, wanted, is_running, is_free = demand
    if control.num_rows == 1 or kind.shape[0] == 1:
        return wanted
    numbers = jnp.asarray(control.numbers, jnp.int32)
    place = jnp.sum(numbers < wanted[:, None], axis=-1)  # the place of each row's number
    places = jnp.minimum(jnp.arange(len(control.numbers)), place[:, None])
    expected = control.expected_tokens(kind, is_proven=False)
    tokens = jnp.take_along_axis(expected, places, axis=1)
    seconds = costs[jnp.arange(kind.shape[0]), control.drafter_of(kind)]
    # A row that may not draft is no reason for the others not to.
    seconds = jnp.where((seconds < FORBIDDEN).all(axis=1, keepdims=True), seconds, 0.0)
    seconds = seconds * jnp.where(numbers > 0, MARGIN, 1.0)

    def total(of_rows: jnp.ndarray) -> jnp.ndarray:
        return jnp.sum(jnp.where(is_running[:, None], of_rows, 0.0), axis=0)

    # Rows differ in seconds by their contexts alone; where none runs, nothing is chosen.
    most = numbers[jnp.argmax(total(tokens) / jnp.maximum(total(seconds), 1e-9))]
    return jnp.where(is_free & ~control.is_forced(kind), jnp.minimum(wanted, most), wanted)
