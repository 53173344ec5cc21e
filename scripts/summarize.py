"""Makes the report of an experiment: `python scripts/summarize.py DIR`.

DIR is the --workdir of `python -m jspec.experiment`, whose run may still be going on. Into it go
report.md, report.html, which is one file that needs nothing else, and the figures as PNG and SVG.
Traces that `scripts/trace.py` has written there are part of the report, and so are costs of rounds
in costs.json. Figures of an earlier report there that this one does not have are removed. Needs
matplotlib: `pip install -e ".[report]"`.
"""

import pathlib

from absl import flags

from jspec import cli
from jspec.errors import InputError
from jspec.reports.report import make_report, write_report
from jspec.reports.workdir import read_workdir

_WORKDIR = flags.DEFINE_string("workdir", None, "The folder, if it is not given as DIR.")


def main(folder: str | None = None) -> None:
    """Reads the folder and writes the report."""
    if (folder is None) == (_WORKDIR.value is None):
        raise InputError("expected one folder: python scripts/summarize.py DIR")
    path = pathlib.Path(folder or _WORKDIR.value or "")
    workdir = read_workdir(path)
    for file in write_report(path, make_report(workdir)):
        print(file)


if __name__ == "__main__":
    cli.run_main(main, max_arguments=1)
