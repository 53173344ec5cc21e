"""Makes the report of an experiment: `python -m jspec.report DIR`.

DIR is the --workdir of `python -m jspec.experiment`, finished or still running. The program writes
report.md, tables.csv (all cells of its tables) and figures/ into DIR.
The report includes the traces that `scripts/trace.py` has written there, and the costs of rounds in
costs.json. It removes the figures of an earlier report that this one does not have. Figures need
matplotlib: `pip install -e ".[report]"`.

With --publish=FOLDER, everything worth committing goes into that folder, and nothing into DIR: the
report, and the data that it is made from, without paths of this machine.
That folder can be DIR of another call, which makes the whole report again.
"""

import pathlib

from absl import flags

from jspec.cli import program as cli
from jspec.common.errors import InputError
from jspec.lab.reports.report import make_report, publish, write_report
from jspec.lab.reports.workdir import read_workdir

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "The experiment's folder; may also be given without a flag, as DIR."
)
_PUBLISH = flags.DEFINE_string(
    "publish", None, "Write what is worth committing into this folder, and nothing into DIR."
)


def main(folder: str | None = None) -> None:
    """Reads the folder and writes the report."""
    if (folder is None) == (_WORKDIR.value is None):
        raise InputError("expected one folder: python -m jspec.report DIR")
    if _PUBLISH.value == "":
        raise InputError("expected a folder: --publish=FOLDER")
    path = pathlib.Path(folder or _WORKDIR.value or "")
    if path.is_dir() and not (path / "config.json").exists():
        raise InputError(
            f"expected the --workdir of python -m jspec.experiment, got {path}, without config.json"
        )
    if _PUBLISH.value:
        files = publish(path, pathlib.Path(_PUBLISH.value))
    else:
        files = write_report(path, make_report(read_workdir(path)))
    for file in files:
        print(file)


if __name__ == "__main__":
    cli.run_main(main, max_arguments=1)
