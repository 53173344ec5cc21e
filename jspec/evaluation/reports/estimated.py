"""Estimates along answers: the finished cells of an experiment of kind "estimate", summed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jspec.common.errors import InputError
from jspec.evaluation.analysis.ratios import Ratio
from jspec.evaluation.reports.methods import share


class Lenience(NamedTuple):
    """What a lenience does.

    Attributes:
      lenience: 1 is none.
      acceptance: drafts that it keeps.
      total_variation: between the distribution that comes out and the target's, 0 to 1, on average.
    """

    lenience: float
    acceptance: Ratio
    total_variation: Ratio


class EntropyBin(NamedTuple):
    """The tokens before which the target was about equally unsure.

    Attributes:
      middle: of the bin, in nats.
      alpha: probability that a draft there is kept.
      num_places: tokens.
    """

    middle: float
    alpha: Ratio
    num_places: int


class Estimate(NamedTuple):
    """One way at one setting; intervals are over prompts.

    Attributes:
      method: its label.
      setting: its label.
      distribution: "sampled" or "deterministic", how the drafter chooses its drafts.
      num_tokens: of the texts.
      num_places: before how many of them the drafter had a proposal.
      alpha: probability that the draft there is kept; None without a place.
      by_category: likewise, of the prompts of each category.
      entropy: the bins that hold any place.
      leniences: what each does.
    """

    method: str
    setting: str
    distribution: str
    num_tokens: int
    num_places: int
    alpha: Ratio | None
    by_category: dict[str, Ratio]
    entropy: list[EntropyBin]
    leniences: list[Lenience]


def parse_estimates(config: Mapping[str, Any], done: Iterable[Mapping[str, Any]]) -> list[Estimate]:
    """Returns the estimates of each setting and way, in the config's order.

    Raises:
      InputError: a cell of another kind.
    """
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for line in done:
        try:
            place = str(line["key"]["setting"]), str(line["key"]["method"])
        except KeyError as error:
            raise InputError(_wrong(line, error)) from None
        grouped.setdefault(place, []).append(line)
    estimates = []
    for setting in config.get("settings", {}):
        for method in config.get("methods", {}):
            if lines := grouped.get((setting, method)):
                try:
                    estimates.append(_estimate(method, setting, lines))
                except (KeyError, TypeError, ValueError) as error:
                    raise InputError(_wrong(lines[0], error)) from None
    return estimates


def _wrong(line: Mapping[str, Any], error: Exception) -> str:
    return f"expected a cell of kind estimate, got {line.get('cell')!r} ({error!r})"


def _estimate(method: str, setting: str, lines: Sequence[Mapping[str, Any]]) -> Estimate:
    records = [line["record"] for line in lines]
    kept = [
        _Part(line["key"]["prompt"], record["sum_overlap"], record["num_places"])
        for line, record in zip(lines, records, strict=True)
    ]
    by_category: dict[str, list[_Part]] = {}
    for part, record in zip(kept, records, strict=True):
        if record.get("category") is not None:
            by_category.setdefault(str(record["category"]), []).append(part)
    alphas = {category: _share(own) for category, own in by_category.items()}
    return Estimate(
        method=method,
        setting=setting,
        distribution=str(records[0]["distribution"]),
        num_tokens=sum(int(record["num_tokens"]) for record in records),
        num_places=sum(int(record["num_places"]) for record in records),
        alpha=_share(kept),
        by_category={category: alpha for category, alpha in alphas.items() if alpha is not None},
        entropy=_entropy(lines),
        leniences=_leniences(lines),
    )


class _Part(NamedTuple):
    """What a cell adds to a ratio: the sum above the line, and the one below."""

    prompt: int
    part: float
    whole: float


def _share(parts: Iterable[_Part]) -> Ratio | None:
    """Returns a ratio of sums, with its interval over prompts; None where there is nothing."""
    by_prompt: dict[int, np.ndarray] = {}
    for one in parts:  # a prompt has a cell a seed
        by_prompt[one.prompt] = by_prompt.get(one.prompt, 0) + np.array(
            [one.part, one.whole], float
        )
    counts = [(part, whole) for part, whole in by_prompt.values() if whole]
    return share(counts) if counts else None


def _entropy(lines: Sequence[Mapping[str, Any]]) -> list[EntropyBin]:
    """Returns the bins that hold any place."""
    own = [(line["key"]["prompt"], line["record"]["entropy"]) for line in lines]
    edges = np.array(own[0][1]["edges"], float)
    bins = []
    for index, middle in enumerate((edges[:-1] + edges[1:]) / 2):
        parts = [_Part(prompt, e["sums"][index], e["counts"][index]) for prompt, e in own]
        if (alpha := _share(parts)) is not None:
            bins.append(EntropyBin(float(middle), alpha, int(sum(part.whole for part in parts))))
    return bins


def _leniences(lines: Sequence[Mapping[str, Any]]) -> list[Lenience]:
    kept: dict[float, list[_Part]] = {}
    apart: dict[float, list[_Part]] = {}
    for line in lines:
        prompt, record = line["key"]["prompt"], line["record"]
        for one in record["lenience"]:
            for parts, name in ((kept, "sum_acceptance"), (apart, "sum_total_variation")):
                part = _Part(prompt, one[name], record["num_places"])
                parts.setdefault(one["lenience"], []).append(part)
    found = []
    for lenience in sorted(kept, reverse=True):
        acceptance, total_variation = _share(kept[lenience]), _share(apart[lenience])
        if acceptance is not None and total_variation is not None:
            found.append(Lenience(lenience, acceptance, total_variation))
    return found
