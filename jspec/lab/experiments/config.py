"""Config files: what they are built from, loading them, and their contents as plain JSON."""

import dataclasses
import inspect
import json
import pathlib
import runpy
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict, config_dict

from jspec.common.errors import InputError, describe_error
from jspec.common.shipped import config_folder, find_shipped
from jspec.drafters import DEFAULT_NUM_DRAFT_TOKENS
from jspec.lab.experiments.spec import Experiment, FunctionsSpec, MethodSpec, PairSpec

_METHOD_DEFAULTS = dataclasses.asdict(MethodSpec()) | {"options": {}}


def defaults() -> ConfigDict:
    """Returns a config of every field's default (see `Experiment`), with one setting, "T=0"."""
    return ordered(dataclasses.asdict(Experiment()) | {"settings": {"T=0": {"temperature": 0.0}}})


def ordered(entries: Mapping[str, Any]) -> ConfigDict:
    """Returns a group of fields in their order: the first method is the baseline of all ratios."""
    group = ConfigDict(sort_keys=False, allow_dotted_keys=True)
    for name, value in entries.items():
        group[name] = ordered(value) if isinstance(value, Mapping) else value
    return group


def method(
    drafter: str, num_draft_tokens: int | str = DEFAULT_NUM_DRAFT_TOKENS, **fields: Any
) -> dict[str, Any]:
    """Returns one method of generating, with all its fields, for `config.methods`.

    The other fields are those of `MethodSpec`; `options` is a dict.
    """
    given = {"drafter": drafter, "num_draft_tokens": num_draft_tokens, "options": {}} | fields
    complete = _METHOD_DEFAULTS | given
    # A field that may be of two types, or None, can then be overridden with either.
    complete["num_draft_tokens"] = config_dict.FieldReference(
        complete["num_draft_tokens"], field_type=object
    )
    if complete["draft"] is None:
        complete["draft"] = config_dict.placeholder(str)
    return complete


def methods(*labels: str) -> ConfigDict:
    """Returns methods for `config.methods`: "plain", and one for each label, DRAFTER:NUMBER."""
    group = {"plain": method("none")}
    for label in labels:
        drafter, _, number = label.rpartition(":")
        group[label] = method(drafter, int(number) if number.isdecimal() else number)
    return ordered(group)


def training(fields: Any) -> ConfigDict:
    """Returns the config of a `TrainingConfig`, on what scripts/make_answers.py writes."""
    return ordered(dataclasses.asdict(fields) | {"texts": ("answers.jsonl",)})


def pair(target: str, draft: str, **fields: Any) -> dict[str, Any]:
    """Returns a pair of models, with all its fields (see `PairSpec`), for `config.predict`."""
    complete = dataclasses.asdict(PairSpec(target, draft)) | fields
    missing = {
        name: config_dict.placeholder(float) for name, value in complete.items() if value is None
    }
    return complete | missing


def chain(name: str, guess: str, **fields: Any) -> dict[str, Any]:
    """Returns a chain and who guesses, with all its fields, for `config.functions`.

    The other fields are those of `FunctionsSpec`.
    """
    return dataclasses.asdict(FunctionsSpec(name, guess, **fields))


def find_config(name: str) -> str:
    """Returns the path of a config: a Python file, or the name of a config in jspec, as "smoke".

    Raises:
      InputError: there is none.
    """
    for path in (name, f"configs/{name}", f"configs/{name}.py"):
        if pathlib.Path(path := find_shipped(path)).is_file():
            return path
    known = ", ".join(sorted(path.stem for path in config_folder().glob("*.py")))
    raise InputError(f"no config file {name!r}: expected a Python file, or one of {known}")


def load_config(path: str) -> ConfigDict:
    """Returns the config that a file's `get_config` returns; "FILE:TEXT" passes it the text.

    Raises:
      InputError: there is no such file (see `find_config`), it raises, or it returns something
        else; one line.
    """
    name, colon, text = path.partition(":")
    name = find_config(name)
    try:
        get_config = runpy.run_path(name).get("get_config")
        if not callable(get_config):
            raise InputError(f"{name}: expected a function get_config(), got none")
        if colon and not inspect.signature(get_config).parameters:
            raise InputError(f"{name}: expected no text after the colon, got {text!r}")
        config = get_config(*[text] * bool(colon))
    except InputError:
        raise
    except Exception as error:  # whatever the user's file raises is the user's error
        raise InputError(f"{name}: {describe_error(error)}") from None
    if not isinstance(config, ConfigDict):
        kind = type(config).__name__
        raise InputError(f"{name}: expected get_config() to return a ConfigDict, got {kind}")
    return config


def split_pair(text: str) -> tuple[str, str]:
    """Returns target and draft of a config's text "TARGET,DRAFT".

    Raises:
      InputError: the text is something else.
    """
    target, comma, draft = text.partition(",")
    if not (target and comma and draft):
        raise InputError(f"expected TARGET,DRAFT after the colon, got {text!r}")
    return target, draft


def to_plain(config: ConfigDict) -> dict[str, Any]:
    """Returns a config as JSON values, its methods with all their fields.

    Raises:
      InputError: a value that JSON does not have.
    """
    try:
        plain = json.loads(json.dumps(config.to_dict()))
    except (TypeError, ValueError) as error:
        raise InputError(f"expected a config of plain values: {error}") from None
    given = plain.get("methods")
    for label, group in given.items() if isinstance(given, dict) else ():
        if isinstance(group, dict):
            given[label] = _METHOD_DEFAULTS | group
    return plain
