"""Draws what the benchmark has written: `python scripts/plot_results.py RECORD.jsonl ...`.

RECORD.jsonl is what `python -m jspec.benchmark --roofline --output_json=RECORD.jsonl` or
`--synthetic_acceptance` has written; beside it go RECORD.png and RECORD.svg. A benchmark of answers
is passed over. Needs matplotlib: `pip install -e ".[report]"`.
"""

import pathlib

from jspec import cli
from jspec.benchmarking.figures import draw_record
from jspec.errors import InputError
from jspec.json_lines import read_json_lines


def main(*paths: str) -> None:
    """Reads every file, then draws."""
    if not paths:
        raise InputError("expected records: python scripts/plot_results.py RECORD.jsonl ...")
    records = {}
    for path in paths:
        lines = [record for _, record in read_json_lines(path, "a record")]
        records[pathlib.Path(path)] = lines[-1] if lines else {}
    for path, record in records.items():
        picture = draw_record(path.stem, record)
        if picture is None:
            continue
        for suffix, content in (("png", picture.png), ("svg", picture.svg.encode())):
            goal = path.with_suffix(f".{suffix}")
            try:
                goal.write_bytes(content)
            except OSError as error:
                raise InputError(f"cannot write {goal}: {error.strerror}") from None
            print(goal)


if __name__ == "__main__":
    cli.run_main(main, max_arguments=1000)
