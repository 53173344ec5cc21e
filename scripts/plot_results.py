"""Draws what the benchmark has written: `python scripts/plot_results.py RECORD.jsonl ...`.

RECORD.jsonl is what `python -m jspec.benchmark --roofline --output_json=RECORD.jsonl` or
`--synthetic_acceptance` has written; beside it go RECORD.png and RECORD.svg. A benchmark of answers
is passed over. Needs matplotlib: `pip install -e ".[report]"`.
"""

import pathlib

from jspec.common import cli
from jspec.common.errors import InputError
from jspec.common.json_lines import read_json_lines
from jspec.evaluation.benchmarking.figures import draw_record


def main(*paths: str) -> None:
    """Draws every record; one that cannot be drawn is no reason to leave out those after it."""
    if not paths:
        raise InputError("expected records: python scripts/plot_results.py RECORD.jsonl ...")
    errors = []
    for path in map(pathlib.Path, paths):
        try:
            _draw(path)
        except InputError as error:
            errors.append(str(error))
    if errors:
        raise InputError("; ".join(errors))


def _draw(path: pathlib.Path) -> None:
    """Writes the figure of the last record of a file beside it, if it is one of those drawn."""
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


if __name__ == "__main__":
    cli.run_main(main, max_arguments=1000)
