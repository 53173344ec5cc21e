"""What of an experiment's folder is worth keeping under version control.

```
  report.md, figures/*.png            the report, without its pages and pictures for the screen
  config.json, runs.jsonl             without the folders of the machine
  costs.json, trace*.json             as they are
  results.jsonl.gz                    packed
```

It is enough to make the report anew, which is the same then.
"""

import gzip
import json
import pathlib

from jspec.common.errors import InputError
from jspec.evaluation.reports.portable import portable
from jspec.evaluation.reports.report import make_report, write_report
from jspec.evaluation.reports.workdir import PACKED, RESULTS, read_file, read_workdir


def publish(folder: pathlib.Path, target: pathlib.Path) -> list[pathlib.Path]:
    """Writes what is worth keeping of an experiment into another folder.

    Args:
      folder: of the experiment, or one that this function has written.
      target: the other one; it is made where there is none.

    Returns:
      The files.

    Raises:
      InputError: the folder is no experiment's, the other one is that of a run, or cannot be
        written.
    """
    if (target / RESULTS).exists():
        raise InputError(f"expected a folder to publish into, got that of a run: {target}")
    files = _data(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (target / name).write_bytes(content)
    except OSError as error:
        raise InputError(f"cannot publish to {target}: {error.strerror}") from None
    report = write_report(target, make_report(read_workdir(target)), is_small=True)
    return [*(target / name for name in files), *report]


def _data(folder: pathlib.Path) -> dict[str, bytes]:
    """Returns the contents of all files but the report's, by name."""
    workdir = read_workdir(folder)
    files = {"config.json": json.dumps(portable(workdir.config), indent=1).encode() + b"\n"}
    if workdir.runs:
        lines = (json.dumps(portable(run)) for run in workdir.runs)
        files["runs.jsonl"] = "".join(f"{line}\n" for line in lines).encode()
    if results := read_file(folder / RESULTS) or read_file(folder / PACKED):
        files[PACKED] = gzip.compress(results, 9, mtime=0)  # the same each time
    for path in (folder / "costs.json", *sorted(folder.glob("trace*.json"))):
        if content := read_file(path):
            files[path.name] = content
    return files
