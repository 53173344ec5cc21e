"""The flags --config, whose fields are overridden by --config.FIELD=VALUE, and --workdir."""

import pathlib
import re
import sys
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from jspec.common.dataclass_fields import check_known
from jspec.common.errors import InputError
from jspec.evaluation.experiments.config import load_config

_OVERRIDE = re.compile(r"--?(?:no)?config\.([\w.]+)(?:=(.*))?", re.DOTALL)
_NUMBERS = {
    int: (flags.IntegerParser(), "a whole number"),
    float: (flags.FloatParser(), "a number"),
}


class _ConfigParser(flags.ArgumentParser):
    """Loads a config file; any error is one line."""

    def parse(self, path: str) -> ConfigDict:
        """Returns the config, after a look at the fields that the command line overrides.

        Raises:
          InputError: see `load_config`; or there is no such field, or it is of another type.
        """
        config = load_config(path)
        for argument in sys.argv[1:]:
            if found := _OVERRIDE.match(argument):
                _check_field(config, found[1].rstrip("."))
            if (found := _OVERRIDE.fullmatch(argument)) and found[2] is not None:
                _check_value(config, found[1], found[2])
        return config.lock()


CONFIG = config_flags.DEFINE_config_file(
    "config", None, "The config file; --config.FIELD=VALUE overrides a field of it."
)
WORKDIR = flags.DEFINE_string("workdir", None, "The folder that the run writes to.")
flags.FLAGS["config"].parser = _ConfigParser()


def config_file() -> pathlib.Path:
    """Returns the path of the file that --config names."""
    given = config_flags.get_config_filename(flags.FLAGS["config"])
    return pathlib.Path(given.partition(":")[0])


def _check_field(config: ConfigDict, name: str) -> None:
    """Checks that a config has a field, "FIELD" or "GROUP.FIELD"."""
    group, prefix = config, ""
    for part in name.split("."):
        if not isinstance(group, ConfigDict):
            raise InputError(f"the config has no field {name!r}; {prefix[:-1]!r} is no group")
        check_known(prefix, [part], list(group))
        group, prefix = group[part], f"{prefix}{part}."


def _check_value(config: ConfigDict, name: str, text: str) -> None:
    """Checks that a text of the command line fits a field that is a number or a group."""
    *groups, field = name.split(".")
    group: Any = config
    for part in groups:
        group = group[part]
    kind = group.get_type(field)
    if kind is ConfigDict and not text.startswith("{"):
        raise InputError(f"expected {name} to be a group of fields, got {text!r}")
    if kind in _NUMBERS:
        parser, expected = _NUMBERS[kind]
        try:
            parser.parse(text)
        except (TypeError, ValueError):
            raise InputError(f"expected {name} to be {expected}, got {text!r}") from None
