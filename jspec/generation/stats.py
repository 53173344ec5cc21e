"""Counts and times of one answer, and the rates that follow from them."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

_CALLS_THE_TARGET = "lookahead"  # the drafter whose proposal is a call of the target


class RoundCounts(NamedTuple):
    """What one round did for one row. Drafts past the row's end count neither way.

    Attributes:
      num_proposed: drafts put forward.
      num_accepted: drafts kept.
      drafter: who proposed; "" where nobody had anything to say.
    """

    num_proposed: int
    num_accepted: int
    drafter: str = ""


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts and times of one request.

    Attributes:
      rounds: verify calls it took part in, one by one.
      num_round_tokens: tokens emitted by rounds: all but the first, which the prefill gives.
      prefill_seconds: time to consume the prompt, compilation excluded.
      decode_seconds: time from then to the last token, compilation excluded. A draft model catches
        up on the prompt in it; in a batch, other rows' prefills fall into it, and in a stream what
        the caller does between two pieces.
      device_seconds: the part of it in which rounds ran on the device; the rest is the host's.
      compile_seconds: time spent on compiling meanwhile.
      num_draft_tokens: drafts a round at most; 0 for plain decoding.
    """

    rounds: tuple[RoundCounts, ...]
    num_round_tokens: int
    prefill_seconds: float
    decode_seconds: float
    device_seconds: float
    compile_seconds: float
    num_draft_tokens: int

    @property
    def num_rounds(self) -> int:
        """Verify calls it took part in."""
        return len(self.rounds)

    @property
    def num_proposed(self) -> int:
        """Drafts proposed."""
        return sum(a_round.num_proposed for a_round in self.rounds)

    @property
    def num_accepted(self) -> int:
        """Drafts kept."""
        return sum(self.accepted_per_round)

    @property
    def accepted_per_round(self) -> tuple[int, ...]:
        """Drafts kept, round by round."""
        return tuple(a_round.num_accepted for a_round in self.rounds)

    @property
    def acceptance_rate(self) -> float | None:
        """Drafts kept of those proposed; None where none were."""
        return acceptance_rate(self.rounds)

    @property
    def num_target_calls(self) -> int:
        """Verify calls, and those calls of the target that proposed drafts."""
        return self.num_rounds + sum(r.drafter == _CALLS_THE_TARGET for r in self.rounds)

    @property
    def tokens_per_target_call(self) -> float | None:
        """Tokens emitted by rounds per call of the target, prefill excluded; None without one."""
        return self.num_round_tokens / self.num_target_calls if self.num_rounds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens emitted by rounds per second of decoding; None without a round."""
        if not self.num_rounds or not self.decode_seconds:
            return None
        return self.num_round_tokens / self.decode_seconds

    @property
    def accepted_histogram(self) -> list[int]:
        """How many rounds kept 0, 1, ... `num_draft_tokens` drafts."""
        counts = [0] * (self.num_draft_tokens + 1)
        for accepted in self.accepted_per_round:
            counts[accepted] += 1
        return counts

    def to_json(self) -> dict[str, object]:
        """Returns all of it as plain values."""
        return {
            "num_rounds": self.num_rounds,
            "num_target_calls": self.num_target_calls,
            "num_proposed": self.num_proposed,
            "num_accepted": self.num_accepted,
            "num_wasted": self.num_proposed - self.num_accepted,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_target_call": self.tokens_per_target_call,
            "accepted_histogram": self.accepted_histogram,
            "accepted_per_round": list(self.accepted_per_round),
            "proposed_per_round": [a_round.num_proposed for a_round in self.rounds],
            "acceptance_by_position": acceptance_by_position(self.rounds),
            "conditional_acceptance_by_position": conditional_acceptance(self.rounds),
            "by_drafter": by_drafter(self.rounds),
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "device_seconds": self.device_seconds,
            "host_seconds": max(self.decode_seconds - self.device_seconds, 0.0),
            "compile_seconds": self.compile_seconds,
            "tokens_per_second": self.tokens_per_second,
        }


Rounds = Sequence[RoundCounts]


def acceptance_rate(rounds: Rounds) -> float | None:
    """Returns drafts kept of those proposed; None where none were."""
    num_proposed = sum(a_round.num_proposed for a_round in rounds)
    return sum(a_round.num_accepted for a_round in rounds) / num_proposed if num_proposed else None


def acceptance_by_position(rounds: Rounds) -> list[float]:
    """Returns, for each place in a proposal, how often its draft was kept where there was one."""
    return _rates(rounds, is_conditional=False)


def conditional_acceptance(rounds: Rounds) -> list[float]:
    """Returns the same of the rounds alone in which all drafts before it had been kept."""
    return _rates(rounds, is_conditional=True)


def _rates(rounds: Rounds, *, is_conditional: bool) -> list[float]:
    rates = []
    for place in range(max((a_round.num_proposed for a_round in rounds), default=0)):
        had = [r for r in rounds if r.num_proposed > place]
        if is_conditional:
            had = [r for r in had if r.num_accepted >= place]
        if not had:
            break
        rates.append(sum(r.num_accepted > place for r in had) / len(had))
    return rates


def by_drafter(rounds: Rounds) -> dict[str, dict[str, float | int | None]]:
    """Returns the counts of each drafter that proposed anything."""
    names = sorted({a_round.drafter for a_round in rounds if a_round.num_proposed})
    report = {}
    for name in names:
        own = [r for r in rounds if r.num_proposed and r.drafter == name]
        report[name] = {
            "num_rounds": len(own),
            "num_proposed": sum(r.num_proposed for r in own),
            "num_accepted": sum(r.num_accepted for r in own),
            "acceptance_rate": acceptance_rate(own),
        }
    return report
