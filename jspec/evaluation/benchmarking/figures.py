"""Figures of records of `python -m jspec.benchmark`: rooflines, and speed against acceptance."""

import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jspec.common.errors import InputError
from jspec.common.figures import Curves, Picture, draw
from jspec.common.json_lines import read_json_lines

_CALL = re.compile(r"(\w+): call on (\d+) tokens, (\d+) before, (\d+) rows")
_SECONDS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "measured": lambda line: line["seconds"],
    "predicted": lambda line: line["seconds"] * line["expected_ratio"] / line["ratio"],
    "at least": lambda line: line["least_seconds"],
}
_TITLES = {
    "roofline": "Calls: measured, predicted from their parts, and the least possible time",
    "synthetic": "Speed against the probability that a draft is kept",
}
_CAPTIONS = {
    "roofline": "Calls of a model, by tokens a row, by tokens in the cache and by rows: the time "
    "measured, the least possible one, and what its parts predict from the call on one token.",
    "synthetic": "Decoding with drafts that are kept with a given probability, in the "
    "speed of plain decoding: measured, and by Theorem 3.8 of Leviathan et al. (arXiv 2211.17192).",
}


def draw_files(paths: Sequence[str]) -> None:
    """Writes a PNG and an SVG beside each record that has a figure, and prints their names.

    Raises:
      InputError: some cannot be drawn; those after them are drawn all the same.
    """
    errors = []
    for path in map(pathlib.Path, paths):
        try:
            _draw_file(path)
        except InputError as error:
            errors.append(str(error))
    if errors:
        raise InputError("; ".join(errors))


def _draw_file(path: pathlib.Path) -> None:
    lines = [record for _, record in read_json_lines(str(path), "a record")]
    picture = draw_record(path.stem, lines[-1] if lines else None)
    if picture is None:
        return
    for suffix, content in (("png", picture.png), ("svg", picture.svg.encode())):
        goal = path.with_suffix(f".{suffix}")
        try:
            goal.write_bytes(content)
        except OSError as error:
            raise InputError(f"cannot write {goal}: {error.strerror}") from None
        print(goal)


def draw_record(name: str, record: Any) -> Picture | None:
    """Returns the figure of a record; None where it is neither of a roofline nor synthetic.

    Args:
      name: of the figure's files.
      record: what the benchmark has written.

    Raises:
      InputError: it is something else, or nothing was measured.
    """
    try:
        kind = _kind_of(record)
        curves = _CURVES[kind](record["lines"]) if kind else []
    except (AttributeError, KeyError, TypeError):
        raise InputError(f"{name}: expected a record of python -m jspec.benchmark") from None
    if kind is None:
        return None
    if not curves[0].x:
        raise InputError(f"{name}: expected lines of what was measured, got none")
    flags = record["flags"]
    parts = (flags.get("target"), flags.get("dtype"), record.get("processor"), record.get("date"))
    subtitle = " · ".join(str(part) for part in parts if part)
    title, caption = _TITLES[kind], _CAPTIONS[kind]
    return draw(name, curves, caption=caption, title=title, subtitle=subtitle, share_y=True)


def _kind_of(record: Any) -> str | None:
    """Returns which of `_CURVES` the record has; every record of a measurement has versions."""
    kind = record.get("flags", {}).get("measure") if record["versions"] else None
    return kind if kind in _CURVES else None


def roofline_curves(lines: Sequence[Mapping[str, Any]]) -> list[Curves]:
    """Returns what calls take by width, by context and by rows, in milliseconds.

    Args:
      lines: of `measure_roofline`, as JSON.
    """
    calls: dict[str, dict[tuple[int, ...], Mapping[str, Any]]] = {}
    for line in lines:
        if match := _CALL.fullmatch(line["name"]):
            calls.setdefault(match[1], {})[tuple(map(int, match.groups()[1:]))] = line
    panels = []
    for axis, label in enumerate(("tokens a row", "tokens in the cache", "rows")):
        along = {
            role: {shape[axis]: line for shape, line in own.items() if _is_along(axis, shape, own)}
            for role, own in calls.items()
        }
        places = sorted(set().union(*along.values()))
        times: dict[str, Sequence[float | None]] = {}
        for role, own in along.items():
            for title, seconds in _SECONDS.items():
                times[f"{role}, {title}"] = [
                    1e3 * seconds(own[place]) if place in own else None for place in places
                ]
        panels.append(Curves(places, times, label, "milliseconds", begins_at_zero=True))
    return panels


def _is_along(axis: int, shape: Sequence[int], shapes: Iterable[Sequence[int]]) -> bool:
    """Returns whether a shape differs from the first one along an axis only."""
    first = next(iter(shapes))
    return all(a == b for i, (a, b) in enumerate(zip(shape, first, strict=True)) if i != axis)


def synthetic_curves(lines: Sequence[Mapping[str, Any]]) -> list[Curves]:
    """Returns the speed of each method of generating by the probability that a draft is kept.

    Args:
      lines: of `measure_synthetic`, as JSON.
    """
    rates = sorted({line["rate"] for line in lines})
    by_method: dict[str, Sequence[float | None]] = {}
    for name in dict.fromkeys(line["name"] for line in lines):
        own = {line["rate"]: line for line in lines if line["name"] == name}
        by_method[f"{name}, measured"] = [own[rate]["speedup"]["median"] for rate in rates]
        if all(own[rate]["expected_speedup"] is not None for rate in rates):
            by_method[f"{name}, Theorem 3.8"] = [own[rate]["expected_speedup"] for rate in rates]
    x_label, y_label = "probability that a draft is kept", "times plain decoding"
    return [Curves(rates, by_method, x_label, y_label, begins_at_zero=True)]


_CURVES: dict[str, Callable[[Sequence[Mapping[str, Any]]], list[Curves]]] = {
    "roofline": roofline_curves,
    "synthetic": synthetic_curves,
}
