"""The flags --config, whose fields are overridden by --config.FIELD=VALUE, and --workdir."""

import pathlib
import re
import sys

from absl import flags
from ml_collections import ConfigDict, config_flags

from jspec.common.dataclass_fields import check_known
from jspec.common.errors import InputError
from jspec.lab.experiments.config import find_config, load_config

_OVERRIDE = re.compile(r"--?(?:no)?config\.([\w.]+)(?:=(.*))?", re.DOTALL)


class _ConfigParser(flags.ArgumentParser):
    def parse(self, path: str) -> ConfigDict:
        """Returns the config, after a look at the fields that the command line overrides."""
        config = load_config(path)
        for found in filter(None, map(_OVERRIDE.match, sys.argv[1:])):
            _check_field(config, found[1].rstrip("."), found[2])
        return config.lock()


CONFIG = config_flags.DEFINE_config_file(
    "config",
    None,
    "The config, the name of one of jspec's own, such as smoke, or a Python file; "
    "--config.FIELD=VALUE overrides a field.",
)
WORKDIR = flags.DEFINE_string(
    "workdir", None, "The folder that the run writes to, and in which the same command resumes it."
)
flags.FLAGS["config"].parser = _ConfigParser()


def read_workdir() -> str:
    """Returns the folder that --workdir names, where --config is given, too.

    Raises:
      InputError: one of them is not; the message names it.
    """
    if CONFIG.value is None:
        raise InputError("expected --config=NAME, such as --config=smoke, got none")
    if not WORKDIR.value:
        raise InputError("expected --workdir=DIR, the folder that the run writes to, got none")
    return WORKDIR.value


def config_file() -> pathlib.Path:
    """Returns the path of the file that --config names."""
    given = config_flags.get_config_filename(flags.FLAGS["config"])
    return pathlib.Path(find_config(given.partition(":")[0]))


def _check_field(config: ConfigDict, name: str, text: str | None) -> None:
    """Checks that a config has a field, "FIELD" or "GROUP.FIELD", and no text for a group."""
    group, prefix = config, ""
    for part in name.split("."):
        if not isinstance(group, ConfigDict):
            raise InputError(f"the config has no field {name!r}; {prefix[:-1]!r} is no group")
        check_known(prefix, [part], list(group))
        group, prefix = group[part], f"{prefix}{part}."
    if isinstance(group, ConfigDict) and text is not None and not text.startswith("{"):
        raise InputError(f"expected {name} to be a group of fields, got {text!r}")
