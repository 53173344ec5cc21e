"""Makes the report of an experiment: `python -m jspec.report DIR`.

DIR is the --workdir of `python -m jspec.experiment`, whose run may still be going on. Into it go
report.md, report.html, which is one file that needs nothing else, and the figures as PNG and SVG.
Traces that `scripts/trace.py` has written there are part of the report, and so are costs of rounds
in costs.json. Figures of an earlier report there that this one does not have are removed. Needs
matplotlib: `pip install -e ".[report]"`.

With --publish=FOLDER what is worth committing goes there, and nothing into DIR: the report without
its HTML and SVG, and all that it is made from, without the folders of this machine. That folder can
be DIR of another call, which makes the whole report anew.
"""

import pathlib

from absl import flags

from jspec.common import cli
from jspec.common.errors import InputError
from jspec.evaluation.reports.report import make_report, publish, write_report
from jspec.evaluation.reports.workdir import read_workdir

_WORKDIR = flags.DEFINE_string("workdir", None, "The folder, if it is not given as DIR.")
_PUBLISH = flags.DEFINE_string(
    "publish", None, "A folder that gets what is worth committing, in the place of DIR."
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
