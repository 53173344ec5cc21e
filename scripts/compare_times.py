"""Puts estimated times of programs beside measured ones: `python scripts/compare_times.py FOLDER`.

FOLDER holds records of `scripts/compile_for.py --output_json`, as estimate-NAME.jsonl, and of
`jspec.benchmark --measure=roofline`, as rounds-NAME.jsonl. What is measured there is chosen by the
models' names and the drafter. Caches were nearly empty; estimates are of full ones.
"""

import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jspec.common import cli
from jspec.common.errors import InputError
from jspec.common.text_table import format_table, number_cell
from jspec.generation.provenance import Recorder

_COLUMNS = "", "device", "estimated µs", "measured µs", "measured / estimated"


def main(folder: str = ".") -> None:
    """Prints the table, and writes it into the folder."""
    path = pathlib.Path(folder)
    estimates, measured = (_read(path, kind) for kind in ("estimate", "rounds"))
    if not estimates or not measured:
        raise InputError(f"expected estimate-*.jsonl and rounds-*.jsonl in {folder}")
    lines = [compare(estimate, measured) for estimate in estimates]
    Recorder(str(path / "roofline.jsonl"), {}).save({"lines": lines})
    forms = {"estimated_us": ",.0f", "measured_us": ",.0f", "ratio": ".2f"}
    rows = [
        [
            line["name"],
            line["device"],
            *(number_cell(line[key], form) for key, form in forms.items()),
        ]
        for line in lines
    ]
    print(format_table(_COLUMNS, rows))


def compare(estimate: dict[str, Any], measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns a program's name, estimated and measured µs, and their ratio; None: not measured."""
    settings = estimate["settings"]
    device, found = next(_seconds(estimate, measured), (None, None))
    models = " with ".join(filter(None, (settings["target"], settings["draft"])))
    microseconds = None if found is None else 1e6 * found
    return {
        "name": f"{estimate['program']} of {models}, {settings['drafter']}",
        "device": estimate["device"],
        "measured_on": device,
        "estimated_us": estimate["estimated_us"],
        "measured_us": microseconds,
        "ratio": microseconds and microseconds / estimate["estimated_us"],
    }


def _seconds(
    estimate: dict[str, Any], measured: Sequence[dict[str, Any]]
) -> Iterator[tuple[str, float]]:
    settings, (kind, _, width) = estimate["settings"], estimate["program"].partition(":")
    drafter, number = settings["drafter"], settings["num_draft_tokens"]
    pattern = {
        "call": rf"target: call on {width} tokens, \d+ before, {estimate['batch_size']} rows",
        "prefill": f"target: prefill of {width} tokens",
        "run": f".*: a round of {drafter}, {number} drafts",
    }[kind]
    if kind == "run" and drafter == "none":
        pattern = ".*: a round without drafts"
    for record in measured:
        flags = record["flags"]
        is_pair = settings["draft"] in (None, flags.get("draft"))
        for line in record["lines"] if is_pair and flags["target"] == settings["target"] else ():
            if re.fullmatch(pattern, line["name"]):
                yield record["device"], line["seconds"]


def _read(folder: pathlib.Path, kind: str) -> list[dict[str, Any]]:
    paths = sorted(folder.glob(f"{kind}-*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


if __name__ == "__main__":
    cli.run_main(main, max_arguments=1)
