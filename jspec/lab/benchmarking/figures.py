"""Figures of records: rooflines, and speed against acceptance."""

import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jspec.common.errors import InputError
from jspec.common.figures import Curves, Picture, draw
from jspec.common.json_lines import read_json_lines
from jspec.lab.benchmarking.compare import format_record

_Lines = Sequence[Mapping[str, Any]]
_CALL = re.compile(r"(\w+): call on (\d+) tokens, (\d+) before, (\d+) rows")
_SECONDS = {"measured": "seconds", "at least": "least_seconds"}


def draw_files(paths: Sequence[str]) -> None:
    """Writes a PNG and an SVG beside each record that has a figure, and prints their names.

    Of a whole record of methods the tables are printed instead.

    Raises:
      InputError: some cannot be drawn; those after them are drawn all the same.
    """
    errors = []
    for path in map(pathlib.Path, paths):
        try:
            lines = [record for _, record in read_json_lines(str(path), "a record")]
            record = lines[-1] if lines else None
            if isinstance(record, dict) and record.keys() >= {"plain_of", "spec_bench"}:
                print(format_record(record))
                continue
            picture = draw_record(path.stem, record)
            if picture is None:
                said = "no roofline and no synthetic rates: no figure"
                print(f"note: {path}: {said}", file=sys.stderr, flush=True)
                continue
            for suffix, content in (("png", picture.png), ("svg", picture.svg.encode())):
                goal = path.with_suffix(f".{suffix}")
                goal.write_bytes(content)
                print(goal)
        except (InputError, OSError) as error:
            errors.append(str(error))
    if errors:
        raise InputError("; ".join(errors))


def draw_record(name: str, record: Any) -> Picture | None:
    """Returns the figure of a record; None where it is neither of a roofline nor synthetic.

    Raises:
      InputError: it is something else, or nothing was measured.
    """
    try:
        # Every record of a measurement has versions.
        flags = record.get("flags", {}) if record["versions"] else {}
        kind = flags.get("measure")
        if kind is None and flags.get("roofline"):  # as records before `measure` have it
            kind = "roofline"
        if kind not in _KINDS:
            return None
        title, make_curves = _KINDS[kind]
        curves = make_curves(record["lines"])
    except (AttributeError, KeyError, TypeError):
        raise InputError(f"{name}: expected a record of python -m jspec.benchmark") from None
    if not curves[0].x:
        raise InputError(f"{name}: expected lines of what was measured, got none")
    parts = (flags.get("target"), flags.get("dtype"), record.get("processor"), record.get("date"))
    subtitle = " · ".join(str(part) for part in parts if part)
    return draw(name, curves, caption="", title=title, subtitle=subtitle, share_y=True)


def roofline_curves(lines: _Lines) -> list[Curves]:
    """Returns what calls take by width, by context and by rows, in milliseconds."""
    calls: dict[str, dict[tuple[int, ...], Mapping[str, Any]]] = {}
    for line in lines:
        if match := _CALL.fullmatch(line["name"]):
            calls.setdefault(match[1], {})[tuple(map(int, match.groups()[1:]))] = line
    panels = []
    for axis, label in enumerate(("tokens a row", "tokens in the cache", "rows")):
        along = {role: _along(axis, own) for role, own in calls.items()}
        places = sorted(set().union(*along.values()))
        times: dict[str, Sequence[float | None]] = {
            f"{role}, {title}": [own.get(place, {}).get(key) for place in places]
            for role, own in along.items()
            for title, key in _SECONDS.items()
        }
        panels.append(Curves(places, times, label, "milliseconds", begins_at_zero=True))
    return panels


def _along(axis: int, calls: Mapping[tuple[int, ...], Mapping[str, Any]]) -> dict[int, Any]:
    """Returns the milliseconds of calls that differ from the first one along an axis only."""
    first = list(next(iter(calls)))
    return {
        shape[axis]: {key: 1e3 * line[key] for key in _SECONDS.values()}
        for shape, line in calls.items()
        if [*shape[:axis], first[axis], *shape[axis + 1 :]] == first
    }


def synthetic_curves(lines: _Lines) -> list[Curves]:
    """Returns each method's speed by the probability that a draft is accepted."""
    rates = sorted({line["rate"] for line in lines})
    by_method: dict[str, Sequence[float | None]] = {}
    for name in dict.fromkeys(line["name"] for line in lines):
        own = {line["rate"]: line for line in lines if line["name"] == name}
        by_method[f"{name}, measured"] = [own[rate]["speedup"]["median"] for rate in rates]
        if all(own[rate]["expected_speedup"] is not None for rate in rates):
            by_method[f"{name}, Theorem 3.8"] = [own[rate]["expected_speedup"] for rate in rates]
    x_label, y_label = "probability that a draft is accepted", "times plain decoding"
    return [Curves(rates, by_method, x_label, y_label, begins_at_zero=True)]


_KINDS: dict[str | None, tuple[str, Callable[[_Lines], list[Curves]]]] = {
    "roofline": (
        "Calls of a model: measured, and the least possible time",
        roofline_curves,
    ),
    "synthetic": ("Speed against the probability that a draft is accepted", synthetic_curves),
}
