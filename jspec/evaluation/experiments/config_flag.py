"""The flags --config, whose fields are overridden by --config.FIELD=VALUE, and --workdir."""

import pathlib
import re
import sys
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from jspec.common.errors import InputError
from jspec.common.plain_values import check_known
from jspec.evaluation.experiments.config import load_config

_OVERRIDE = re.compile(r"--?(?:no)?config\.([\w.]+)")
_VALUE = re.compile(r"--?config\.([\w.]+)=(.*)", re.DOTALL)
_NUMBERS = {
    int: (flags.IntegerParser(), "a whole number"),
    float: (flags.FloatParser(), "a number"),
}


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
        for found in filter(None, map(_VALUE.fullmatch, sys.argv[1:])):
            check_value(config, found[1], found[2])
        return config.lock()


CONFIG = config_flags.DEFINE_config_file(
    "config", None, "The config file; --config.FIELD=VALUE overrides a field of it."
)
WORKDIR = flags.DEFINE_string("workdir", None, "The folder of what the run writes.")
flags.FLAGS["config"].parser = _ConfigParser()


def config_file() -> pathlib.Path:
    """Returns the path of the file that --config names."""
    given = config_flags.get_config_filename(flags.FLAGS["config"])
    return pathlib.Path(given.partition(":")[0])


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


def check_value(config: ConfigDict, name: str, text: str) -> None:
    """Checks that a text is what a field can be set to, where it is a number or a group.

    Args:
      config: the config.
      name: "FIELD", or "GROUP.FIELD"; there is one.
      text: of the command line.

    Raises:
      InputError: it is something else.
    """
    *groups, field = name.split(".")
    group: Any = config
    for part in groups:
        group = group[part]
    kind = group.get_type(field)
    expected = "a group of fields"
    is_right = kind is not ConfigDict or text.startswith("{")
    if kind in _NUMBERS:
        parser, expected = _NUMBERS[kind]
        try:
            parser.parse(text)
        except (TypeError, ValueError):
            is_right = False
    if not is_right:
        raise InputError(f"expected {name} to be {expected}, got {text!r}")
