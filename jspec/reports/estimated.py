"""Estimates along answers: the finished cells of an experiment of kind "estimate", summed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jspec.analysis.ratios import Ratio
from jspec.errors import InputError
from jspec.reports.ways import share


class Lenience(NamedTuple):
    """What a lenience does.

    Attributes:
      lenience: 1 is none.
      acceptance: drafts that it keeps.
      total_variation: between the law that comes out and the target's, 0 to 1, on average.
    """

    lenience: float
    acceptance: float
    total_variation: float


class Estimate(NamedTuple):
    """One way at one setting.

    Attributes:
      way: its label.
      setting: its label.
      law: "sampled" or "deterministic", how the drafter chooses its drafts.
      num_tokens: of the texts.
      num_places: before how many of them the drafter had a proposal.
      alpha: probability that the draft there is kept; None without a place.
      by_category: likewise, of the prompts of each category.
      entropy: middle of each bin in nats, alpha in it, and the places.
      leniences: what each does.
    """

    way: str
    setting: str
    law: str
    num_tokens: int
    num_places: int
    alpha: Ratio | None
    by_category: dict[str, Ratio]
    entropy: list[tuple[float, float, int]]
    leniences: list[Lenience]


def parse_estimates(config: Mapping[str, Any], done: Iterable[Mapping[str, Any]]) -> list[Estimate]:
    """Returns the estimates of each setting and way, in the config's order.

    Raises:
      InputError: a cell of another kind.
    """
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for line in done:
        try:
            place = str(line["key"]["setting"]), str(line["key"]["way"])
        except KeyError as error:
            raise InputError(_wrong(line, error)) from None
        grouped.setdefault(place, []).append(line)
    estimates = []
    for setting in config.get("settings", {}):
        for way in config.get("ways", {}):
            if lines := grouped.get((setting, way)):
                try:
                    estimates.append(_estimate(way, setting, lines))
                except (KeyError, TypeError, ValueError) as error:
                    raise InputError(_wrong(lines[0], error)) from None
    return estimates


def _wrong(line: Mapping[str, Any], error: Exception) -> str:
    return f"expected a cell of kind estimate, got {line.get('cell')!r} ({error!r})"


def _estimate(way: str, setting: str, lines: Sequence[Mapping[str, Any]]) -> Estimate:
    records = [line["record"] for line in lines]
    by_prompt: dict[Any, np.ndarray] = {}
    by_category: dict[str, list[tuple[float, float]]] = {}
    for line, record in zip(lines, records, strict=True):
        pair = np.array([record["sum_overlap"], record["num_places"]], float)
        prompt = line["key"]["prompt"]
        by_prompt[prompt] = by_prompt.get(prompt, 0) + pair
        if record.get("category") is not None and pair[1]:
            by_category.setdefault(str(record["category"]), []).append((pair[0], pair[1]))
    counted = [(pair[0], pair[1]) for pair in by_prompt.values() if pair[1]]
    return Estimate(
        way=way,
        setting=setting,
        law=str(records[0]["law"]),
        num_tokens=sum(int(record["num_tokens"]) for record in records),
        num_places=sum(int(record["num_places"]) for record in records),
        alpha=share(counted) if counted else None,
        by_category={category: share(own) for category, own in by_category.items()},
        entropy=_entropy(records),
        leniences=_leniences(records),
    )


def _entropy(records: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, int]]:
    """Returns the bins that hold any place."""
    edges = np.array(records[0]["entropy"]["edges"], float)
    counts = np.sum([record["entropy"]["counts"] for record in records], axis=0)
    sums = np.sum([record["entropy"]["sums"] for record in records], axis=0)
    middles = (edges[:-1] + edges[1:]) / 2
    return [
        (float(middle), float(total / count), int(count))
        for middle, total, count in zip(middles, sums, counts, strict=True)
        if count
    ]


def _leniences(records: Sequence[Mapping[str, Any]]) -> list[Lenience]:
    num_places = sum(record["num_places"] for record in records)
    totals: dict[float, np.ndarray] = {}
    for record in records:
        for one in record["lenience"]:
            pair = np.array([one["sum_acceptance"], one["sum_total_variation"]], float)
            totals[one["lenience"]] = totals.get(one["lenience"], 0) + pair
    if not num_places:
        return []
    return [
        Lenience(lenience, *(float(total) / num_places for total in pair))
        for lenience, pair in sorted(totals.items(), reverse=True)
    ]
