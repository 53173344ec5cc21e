"""Runs an experiment: `python -m jspec.experiment --config=configs/smoke.py --workdir=DIR`.

Fields of the config are overridden by `--config.FIELD=VALUE`. Every finished cell is appended to
DIR/results.jsonl at once: a run that was killed goes on where it was with the same command, and
several processes may work in one DIR, each cell done once (times then disturb each other). Failed
cells are recorded, and tried again by the next run; the status is 1 if there are any. Progress goes
to standard error. `python scripts/summarize.py DIR` makes the report.
"""

import re
import sys

from absl import flags
from ml_collections import ConfigDict, config_flags

from jspec import cli
from jspec.errors import InputError
from jspec.experiments.config import load_config, to_plain
from jspec.experiments.read_spec import check_known
from jspec.experiments.run import run_experiment

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "The config file; --config.FIELD=VALUE overrides a field of it."
)
_WORKDIR = flags.DEFINE_string("workdir", None, "The folder of the results.")
_OVERRIDE = re.compile(r"--?(?:no)?config\.([\w.]+)")


class _ConfigParser(flags.ArgumentParser):
    """Loads a config file; what is wrong with it is one line."""

    def parse(self, path: str) -> ConfigDict:
        """Returns the config, after a look at the fields that the command line overrides.

        Raises:
          InputError: see `load_config`; or there is no such field.
        """
        config = load_config(path)
        for found in filter(None, map(_OVERRIDE.match, sys.argv[1:])):
            check_field(config, found[1].rstrip("."))
        return config.lock()


flags.FLAGS["config"].parser = _ConfigParser()


def check_field(config: ConfigDict, name: str) -> None:
    """Checks that a config has a field.

    Args:
      config: the config.
      name: "FIELD", or "GROUP.FIELD".

    Raises:
      InputError: it has none.
    """
    group, prefix = config, ""
    for part in name.split("."):
        if not isinstance(group, ConfigDict):
            raise InputError(f"the config has no field {name!r}; {prefix[:-1]!r} is no group")
        check_known(prefix, [part], list(group))
        group, prefix = group[part], f"{prefix}{part}."


def main() -> None:
    """Reads the flags and runs the experiment."""
    if _CONFIG.value is None or not _WORKDIR.value:
        raise InputError("expected --config=configs/NAME.py and --workdir=DIR")
    argv = ["python", "-m", "jspec.experiment", *sys.argv[1:]]
    if run_experiment(to_plain(_CONFIG.value), _WORKDIR.value, argv):
        sys.exit(1)


if __name__ == "__main__":
    cli.run_main(main)
