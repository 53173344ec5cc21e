"""Config files: what they are built from, how they are loaded, and what they say as plain JSON."""

import dataclasses
import importlib.util
import inspect
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict, config_dict

from jspec.common.errors import InputError
from jspec.evaluation.experiments.method_spec import MethodSpec
from jspec.evaluation.experiments.pair_spec import PairSpec
from jspec.evaluation.experiments.spec import Experiment
from jspec.generation.generator import DEFAULT_NUM_DRAFT_TOKENS

_GET_CONFIG = "get_config"


def defaults() -> ConfigDict:
    """Returns a config of every field's default; see `Experiment` for what they mean.

    It has no ways, and one setting, "T=0".
    """
    fields = dataclasses.asdict(Experiment()) | {"settings": {"T=0": {"temperature": 0.0}}}
    return ordered(fields)


def ordered(entries: Mapping[str, Any]) -> ConfigDict:
    """Returns a group of fields that keeps its order: the first way is the base of all ratios."""
    group = ConfigDict(sort_keys=False, allow_dotted_keys=True)
    for name, value in entries.items():
        group[name] = ordered(value) if isinstance(value, Mapping) else value
    return group


def method(
    drafter: str, num_draft_tokens: int | str = DEFAULT_NUM_DRAFT_TOKENS, **fields: Any
) -> dict[str, Any]:
    """Returns one method of generating, with all its fields, for `config.ways`.

    Args:
      drafter: its name.
      num_draft_tokens: a round, or "auto".
      **fields: others of `MethodSpec`; `options` is a dict.
    """
    own = _plain_method() | {"drafter": drafter, "num_draft_tokens": num_draft_tokens} | fields
    # Fields that may be of two types, or None, can be overridden with either.
    own["num_draft_tokens"] = config_dict.FieldReference(own["num_draft_tokens"], field_type=object)
    if own["draft"] is None:
        own["draft"] = config_dict.placeholder(str)
    return own


def _plain_method() -> dict[str, Any]:
    return dataclasses.asdict(MethodSpec()) | {"options": {}}


def pair(target: str, draft: str, **fields: Any) -> dict[str, Any]:
    """Returns a pair of models, with all its fields, for `config.predict`.

    Args:
      target: a preset, or a Hugging Face folder.
      draft: likewise.
      **fields: others of `PairSpec`.
    """
    own = dataclasses.asdict(PairSpec(target, draft)) | fields
    for name in ("target_bytes_per_weight", "draft_bytes_per_weight", "bandwidth", "flop_rate"):
        if own[name] is None:
            own[name] = config_dict.placeholder(float)
    return own


def load_config(path: str) -> ConfigDict:
    """Returns what a config file's `get_config()` returns.

    Args:
      path: of the file; "FILE:TEXT" gives `get_config` the text.

    Raises:
      InputError: no such file, it raises, or it returns something else; one line.
    """
    name, colon, text = path.partition(":")
    if not pathlib.Path(name).is_file():
        raise InputError(f"no config file {name!r}")
    spec = importlib.util.spec_from_file_location("jspec_config", name)
    if spec is None or spec.loader is None:
        raise InputError(f"{name}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = _call(name, getattr(module, _GET_CONFIG, None), [text] * bool(colon))
    except InputError:
        raise
    except Exception as error:  # whatever the user's file raises is the user's error
        message = " ".join(str(error).split())
        raise InputError(f"{name}: {type(error).__name__}: {message}") from None
    if not isinstance(config, ConfigDict):
        raise InputError(f"{name}: expected {_GET_CONFIG}() to return a ConfigDict, got "
                         f"{type(config).__name__}")  # fmt: skip
    return config


def _call(name: str, get_config: Any, texts: Sequence[str]) -> Any:
    """Returns what a config file's function returns for the text, if one was given."""
    if not callable(get_config):
        raise InputError(f"{name}: expected a function {_GET_CONFIG}(), got none")
    if texts and not inspect.signature(get_config).parameters:
        raise InputError(f"{name}: expected no text behind the colon, got {texts[0]!r}")
    return get_config(*texts)


def split_pair(text: str) -> tuple[str, str]:
    """Returns target and draft of a config's text "TARGET,DRAFT".

    Raises:
      InputError: it is none.
    """
    target, comma, draft = text.partition(",")
    if not (target and comma and draft):
        raise InputError(f"expected TARGET,DRAFT behind the colon, got {text!r}")
    return target, draft


def to_plain(config: ConfigDict) -> dict[str, Any]:
    """Returns a config as JSON has it, ways with all their fields.

    Raises:
      InputError: a value that JSON does not have.
    """
    try:
        plain = json.loads(json.dumps(config.to_dict()))
    except (TypeError, ValueError) as error:
        raise InputError(f"expected a config of plain values: {error}") from None
    methods = plain.get("methods")
    if isinstance(methods, dict):
        for label, own in methods.items():
            if isinstance(own, dict):
                methods[label] = _plain_method() | own
    return plain
