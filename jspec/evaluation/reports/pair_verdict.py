"""Whether a pair of models pays on a machine, in a sentence: from the table of kind "predict"."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jspec.evaluation.reports.wording import code, listed, number

_NUMBER, _BREAK_EVEN = "drafts a round", "break-even alpha"
_SPEED = re.compile(r"speed at alpha (.+)")


class Best(NamedTuple):
    """The best that a pair does at one acceptance.

    Attributes:
      alpha: as the table names it.
      num_drafts: a round.
      speed: in times plain decoding's.
    """

    alpha: str
    num_drafts: int
    speed: float


def pair_verdict(label: str, pair: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """Returns the sentence.

    Args:
      label: of the pair.
      pair: its fields in the config; see `PairSpec`.
      record: its table, with columns "drafts a round", "break-even alpha" and "speed at alpha ...".
    """
    return f"{code(label)}{_models(pair)}: {_outcome(pair, record)}"


def _models(pair: Mapping[str, Any]) -> str:
    sides = [
        f"{side} {code(pair[side])}" + ("" if weights == "none" else f" in {weights}")
        for side in ("target", "draft")
        if pair.get(side)
        for weights in [pair.get(f"{side}_quantization") or "none"]
    ]
    return f" ({', '.join(sides)})" if sides else ""


def _outcome(pair: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    is_given = all(pair.get(name) is not None for name in ("bandwidth", "flop_rate"))
    where = "on a machine like the one given" if is_given else "on this machine"
    paying = [one for one in best_by_alpha(record) if one.speed > 1]
    if (least := least_alpha(record)) is None and not paying:
        return f"**does not pay** {where}, whatever alpha is."
    text = f"**can pay** {where}"
    if least is not None:
        alpha, num_drafts = least
        text += f" if alpha is above {number(alpha)} ({_drafts(num_drafts)})"
    if not paying:
        return f"{text}; at none of the alphas looked at."
    first, *rest = paying
    described = [
        f"{number(first.speed)} times plain decoding's speed at alpha {first.alpha} "
        f"({_drafts(first.num_drafts)})",
        *(f"{number(one.speed)} at {one.alpha} ({one.num_drafts})" for one in rest),
    ]
    return f"{text}: at best {listed(described)}."


def _drafts(count: int) -> str:
    return f"{count} draft a round" if count == 1 else f"{count} drafts a round"


def least_alpha(record: Mapping[str, Any]) -> tuple[float, int] | None:
    """Returns from which alpha on drafting pays, and with how many drafts; None if from none on."""
    known = [
        (float(alpha), int(count))
        for count, alpha in zip(
            _column(record, _NUMBER), _column(record, _BREAK_EVEN), strict=False
        )
        if count and alpha is not None
    ]
    return min(known, default=None)


def best_by_alpha(record: Mapping[str, Any]) -> list[Best]:
    """Returns the best number of drafts at each alpha of the table."""
    counts = _column(record, _NUMBER)
    found = []
    for name in record["columns"]:
        if match := _SPEED.fullmatch(name):
            speeds = [
                (speed, -count)  # of equals the one with the fewest drafts
                for count, speed in zip(counts, _column(record, name), strict=False)
                if speed is not None
            ]
            if speeds:
                speed, count = max(speeds)
                found.append(Best(match[1], -count, speed))
    return found


def _column(record: Mapping[str, Any], name: str) -> Sequence[Any]:
    columns = list(record["columns"])
    return [row[columns.index(name)] for row in record["rows"]] if name in columns else []
