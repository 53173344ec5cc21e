"""What a Generator returns: chunks of an answer, the whole result, its counts, times and rates."""

import collections
import dataclasses
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from jspec.common.errors import InputError
from jspec.generation.request import SamplingParams

_CALLS_THE_TARGET = "lookahead"  # the drafter whose proposal is a call of the target


class RoundCounts(NamedTuple):
    """What one round did in one row. Drafts past the answer's end count neither way.

    Attributes:
      num_proposed: number of drafts proposed.
      num_accepted: number of drafts accepted.
      drafter: name of the drafter that proposed; "" if none did.
    """

    num_proposed: int
    num_accepted: int
    drafter: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class Stats:
    """Counts and times of one request.

    Rates are None where there is nothing to divide by: without a round, or without a draft.

    Example:
      >>> stats = generator.generate("Count to ten.").stats
      >>> print(f"{stats.acceptance_rate:.0%} accepted, {stats.tokens_per_target_call:.2f} a call")

    Attributes:
      rounds: the rounds (verify calls) of the request, in order.
      num_round_tokens: number of tokens emitted by rounds: all but the first, which comes from the
        prefill; of a beam search the steps, each of which adds a token to every beam.
      prefill_seconds: seconds to read the prompt, without compilation.
      decode_seconds: seconds from then to the last token, without compilation. It includes a draft
        model's reading of the prompt; in a batch, the prefills of other rows; and in a stream, what
        the caller does between two chunks.
      device_seconds: the part of `decode_seconds` in which rounds ran on the device.
      compile_seconds: seconds spent on compilation during the request.
      num_draft_tokens: maximum number of drafts a round; 0 for plain decoding.
      tree_depth: the depth of the deepest of its trees of drafts; 0 for chains.
    """

    rounds: tuple[RoundCounts, ...]
    num_round_tokens: int
    prefill_seconds: float
    decode_seconds: float
    device_seconds: float
    compile_seconds: float
    num_draft_tokens: int
    tree_depth: int = 0

    @property
    def num_rounds(self) -> int:
        """Number of rounds, which is the number of verify calls."""
        return len(self.rounds)

    @property
    def num_proposed(self) -> int:
        """Number of drafts proposed."""
        return sum(a_round.num_proposed for a_round in self.rounds)

    @property
    def num_accepted(self) -> int:
        """Number of drafts accepted."""
        return sum(self.accepted_per_round)

    @property
    def accepted_per_round(self) -> tuple[int, ...]:
        """Number of drafts accepted in each round."""
        return tuple(a_round.num_accepted for a_round in self.rounds)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted drafts divided by proposed drafts."""
        return acceptance_rate(self.rounds)

    @property
    def num_target_calls(self) -> int:
        """Verify calls, plus the calls of the target that proposed drafts."""
        return self.num_rounds + sum(r.drafter == _CALLS_THE_TARGET for r in self.rounds)

    @property
    def tokens_per_target_call(self) -> float | None:
        """Tokens emitted by rounds per call of the target, the prefill not among them."""
        return self.num_round_tokens / self.num_target_calls if self.num_rounds else None

    @property
    def target_calls_per_token(self) -> float | None:
        """Calls of the target per token that rounds emitted."""
        return self.num_target_calls / self.num_round_tokens if self.num_round_tokens else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens emitted by rounds per second of decoding."""
        is_timed = self.num_rounds and self.decode_seconds
        return self.num_round_tokens / self.decode_seconds if is_timed else None

    @property
    def accepted_histogram(self) -> list[int]:
        """How many rounds accepted 0, 1, ... `num_draft_tokens` drafts."""
        return [self.accepted_per_round.count(n) for n in range(self.num_draft_tokens + 1)]

    def __repr__(self) -> str:
        """Gives the counts; the whole is in the attributes."""
        unit = "draft" if self.num_proposed == 1 else "drafts"
        drafts = f"{self.num_accepted} of {self.num_proposed} {unit} accepted"
        rounds = "1 round" if self.num_rounds == 1 else f"{self.num_rounds} rounds"
        return f"<Stats: {self.num_round_tokens} tokens in {rounds}, {drafts}>"

    def to_json(self) -> dict[str, object]:
        """Returns counts, rates and times as plain values, ready for `json.dumps`.

        Beside attributes: `num_wasted`, proposed drafts that were not accepted; `host_seconds`, the
        part of `decode_seconds` that is not `device_seconds`; `acceptance_by_position`, of drafts
        at each place of a round the share that was accepted (`conditional_`: where those before it
        were), of trees at each depth the share of rounds that kept a draft there; `by_drafter`, the
        counts of each member of a cascade.
        """
        by_position, conditional = (
            acceptance_by_position(self.rounds, is_conditional=flag)[: self.tree_depth or None]
            for flag in (False, True)
        )
        names = (
            "num_rounds", "num_target_calls", "num_proposed", "num_accepted", "acceptance_rate",
            "tokens_per_target_call", "target_calls_per_token", "accepted_histogram",
            "prefill_seconds", "decode_seconds", "device_seconds", "compile_seconds",
            "tokens_per_second",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names} | {
            "num_wasted": self.num_proposed - self.num_accepted,
            "accepted_per_round": list(self.accepted_per_round),
            "proposed_per_round": [a_round.num_proposed for a_round in self.rounds],
            "acceptance_by_position": by_position,
            "conditional_acceptance_by_position": conditional,
            "by_drafter": by_drafter(self.rounds),
            "host_seconds": max(self.decode_seconds - self.device_seconds, 0.0),
        }


Rounds = Sequence[RoundCounts]


def acceptance_rate(rounds: Rounds) -> float | None:
    """Returns accepted drafts divided by proposed drafts; None if none were proposed."""
    num_proposed = sum(a_round.num_proposed for a_round in rounds)
    return sum(a_round.num_accepted for a_round in rounds) / num_proposed if num_proposed else None


def acceptance_by_position(rounds: Rounds, *, is_conditional: bool = False) -> list[float]:
    """Returns, for each position in a proposal, the share of its drafts that were accepted.

    In trees this is the share of rounds that kept a path as long, and 0 beyond their depth.

    Conditional rates count only rounds in which all earlier drafts were accepted.
    """
    rates = []
    for position in range(max((a_round.num_proposed for a_round in rounds), default=0)):
        reached = position if is_conditional else 0
        had = [r for r in rounds if r.num_proposed > position and r.num_accepted >= reached]
        if not had:
            break
        rates.append(sum(r.num_accepted > position for r in had) / len(had))
    return rates


def by_drafter(rounds: Rounds) -> dict[str, dict[str, float | int | None]]:
    """Returns counts and acceptance rate of each drafter that proposed anything, by its name."""
    report = {}
    for name in sorted({a_round.drafter for a_round in rounds if a_round.num_proposed}):
        drafted = [r for r in rounds if r.num_proposed and r.drafter == name]
        report[name] = {
            "num_rounds": len(drafted),
            "num_proposed": sum(r.num_proposed for r in drafted),
            "num_accepted": sum(r.num_accepted for r in drafted),
            "acceptance_rate": acceptance_rate(drafted),
        }
    return report


class Beam(NamedTuple):
    """One beam of an answer that was searched for with `num_beams`.

    Attributes:
      token_ids: its tokens, the one that ended it included.
      text: as text, without special tokens.
      score: sum of its log-probabilities / its number of tokens ^ `length_penalty`.
      finish_reason: "eos", "stop" or "length", as in `Result`.
    """

    token_ids: list[int]
    text: str
    score: float
    finish_reason: str


class TokenLogprob(NamedTuple):
    """Natural log-probabilities of one token, and of others in its place.

    Attributes:
      raw: under the model's own distribution.
      processed: under the distribution that it was sampled from.
      top: (token id, raw log-probability) of the likeliest tokens; empty if not wanted.
    """

    raw: float
    processed: float
    top: Sequence[tuple[int, float]] = ()


@dataclasses.dataclass(frozen=True, repr=False)
class Result:
    """One answer.

    Attributes:
      prompt: the prompt of the request.
      prompt_token_ids: the token ids that the model was given.
      token_ids: the token ids of the answer, including the one that ended it.
      text: the answer as text, without special tokens and cut before a stop string.
      finish_reason: "eos" (the model ended its answer), "stop" (a stop string or stop token came)
        or "length" (`max_new_tokens` or the context was reached); or "failed", see `error`.
      settings: the settings of the request.
      stats: counts and times.
      logprobs: natural log-probability of each token under the distribution that it was sampled
        from, after processors, temperature and filters; None unless `SamplingParams.logprobs` is
        set.
      raw_logprobs: the same under the model's own distribution.
      token_logprobs: both, and those of the likeliest tokens at each place, of which at least
        `SamplingParams.top_logprobs` are there.
      prompt_logprobs: of the prompt's tokens but the first; None unless they are asked for.
      category: the category of the request.
      beams: with `num_beams` all beams, best first; `text` and `token_ids` are those of
        the first. Else None.
      error: what was wrong with an answer that failed, such as logits that are NaN; else None. The
        tokens before are there.
    """

    prompt: str | Sequence[int]
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    settings: SamplingParams
    stats: Stats
    logprobs: list[float] | None = None
    raw_logprobs: list[float] | None = None
    token_logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    category: str | None = None
    error: str | None = None
    beams: list[Beam] | None = None

    @property
    def is_cut_by_context(self) -> bool:
        """Whether the answer ended because the context was full, before `max_new_tokens`."""
        return self.finish_reason == "length" and len(self.token_ids) < self.settings.max_new_tokens

    def __repr__(self) -> str:
        """Begins with the text; the whole is in the attributes."""
        text = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        return f"<Result {text!r}: {len(self.token_ids)} tokens, {self.finish_reason}>"

    def to_json(self) -> dict[str, object]:
        """Returns the result as plain values, ready for `json.dumps`."""
        return vars(self) | {
            "prompt": self.prompt if isinstance(self.prompt, str) else list(self.prompt),
            "seed": self.settings.seed,
            "settings": dataclasses.asdict(self.settings),
            "stats": self.stats.to_json(),
            "beams": self.beams and [beam._asdict() for beam in self.beams],
        }


def check_answered(results: Sequence[Result]) -> None:
    """Raises an `InputError` that names the first answer that failed, if any did."""
    for index, result in enumerate(results):
        if result.error is not None:
            where = f"prompt {index}: " if len(results) > 1 else ""
            raise InputError(f"{where}{result.error}")


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A part of an answer, as it comes.

    Attributes:
      index: number of the request, counted from 0 in the order in which they were given.
      text: the text to print. It may trail the tokens by an unfinished character or by the
        beginning of a stop string.
      token_ids: the new tokens.
      num_accepted: how many of them are accepted drafts.
      result: the whole answer, with its last chunk; None before that.
    """

    index: int
    text: str
    token_ids: list[int]
    num_accepted: int
    result: Result | None = None


def format_stats(result: Result, number: int | str, steps: float | None = None) -> str:
    """Returns an answer's statistics, for people.

    Args:
      result: the answer.
      number: of drafts a round, or "auto".
      steps: what a round cost, in plain steps, where that is known.
    """
    stats = result.stats
    rate = "-" if stats.tokens_per_second is None else f"{stats.tokens_per_second:.1f}"
    line = (
        f"{len(result.token_ids)} tokens ({result.finish_reason}), {rate} tokens/s; "
        f"prefill {stats.prefill_seconds:.2f} s, decode {stats.decode_seconds:.2f} s, "
        f"compile {stats.compile_seconds:.2f} s"
    )
    accepted = "no drafts"
    if stats.acceptance_rate is not None:
        members = by_drafter(stats.rounds).items()
        shares = [
            f"{name} {counts['num_accepted']} of {counts['num_proposed']}"
            for name, counts in members
        ]
        of_number = "" if isinstance(number, str) else f", {number} a round"
        proposed = "draft" if stats.num_proposed == 1 else "drafts"
        shown = f"{', '.join(shares)} {proposed}{of_number}"
        accepted = f"acceptance {stats.acceptance_rate:.1%} ({shown})"
    per_call = stats.tokens_per_target_call
    calls = "-" if per_call is None else f"{per_call:.2f}"
    text = f"{line}\n{accepted}, {calls} tokens per target call"
    if isinstance(number, str):  # auto
        chosen = collections.Counter(a_round.num_proposed for a_round in stats.rounds)
        counts = ", ".join(f"{drafts} in {times}" for drafts, times in sorted(chosen.items()))
        text += f"\nauto: drafts in rounds: {counts or 'no rounds'}"
    if steps is not None:
        text += f"; a round cost {steps:.2f} plain steps, as measured on this machine"
    if result.beams:
        scores = ", ".join(f"{beam.score:.4f}" for beam in result.beams)
        per_token = stats.target_calls_per_token
        text += (
            f"\n{len(result.beams)} beams, {per_token:.2f} target calls per token; scores {scores}"
        )
    if result.logprobs is not None and result.raw_logprobs is not None:
        mean, raw = (statistics.fmean(values) for values in (result.logprobs, result.raw_logprobs))
        text += f"\nmean log-probability {mean:.4f} as sampled, {raw:.4f} raw"
    return text
