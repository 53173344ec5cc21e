"""What is audited, the outcome of one check, and findings of audits on this machine.

Findings are kept in the user's cache by all that they depend on: the files of the models and of a
trained head, by their SHA-256; jspec's own sources; the versions, the device and the processor; the
drafter, the rule and the settings. Where any of these has changed, no finding applies.
"""

import dataclasses
import datetime
import functools
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jspec import kernels
from jspec.common.user_cache import cache_dir, keep, read_kept
from jspec.drafters import DrafterOptions, needs_draft_model, with_shipped_head, without_unread
from jspec.drafters.spec import find_head
from jspec.generation import provenance
from jspec.generation.generator import Generator
from jspec.generation.options import DRAFTER_DEFAULTS, RULE_DEFAULTS
from jspec.generation.request import SamplingParams
from jspec.models import CompactKernel
from jspec.speculation.acceptance import RuleOptions, get_rule
from jspec.speculation.types import AcceptanceRule
from jspec.weights.resolver import LoadedModel, find_model

# A check that says nothing of the distribution when it fails, and what to do then.
INCONCLUSIVE = {
    "drafts": "no draft was accepted, so that the rule was not put to the test",
    "negative control": "too few rows to tell: try --num_rows={more_rows}",
    "tree control": "too few rows to tell: try --num_rows={more_rows}",
}

_FILE = "audits.json"
_KNOWN = ("jax", "jaxlib", "numpy")  # packages whose versions may change what is computed
_UNREAD = ("max_new_tokens", "seed")  # settings that a finding does not rest on


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the audit: what was checked, and the outcome, in words and in numbers."""

    name: str
    has_passed: bool
    detail: str
    data: dict[str, Any]

    @property
    def kind(self) -> str:
        """Its name without details."""
        return self.name.partition(",")[0]


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is audited: models, and the options of `Generator`.

    Distribution and caches are checked with the models as they are; `generator` casts them.
    """

    target: LoadedModel
    draft: LoadedModel | None
    drafter: str
    num_draft_tokens: int | str
    acceptance: str
    settings: SamplingParams
    rule_options: RuleOptions = RULE_DEFAULTS
    drafter_options: DrafterOptions = DRAFTER_DEFAULTS

    @property
    def dtype(self) -> str:
        """Name of the type of the target's floats."""
        return self.target.params["embedding"].dtype.name

    @property
    def rule(self) -> AcceptanceRule:
        """The acceptance rule."""
        return get_rule(self.acceptance, self.rule_options)

    @property
    def has_tree(self) -> bool:
        """Whether the drafter is asked for trees."""
        return self.drafter_options.tree_depth > 0

    def generator(self, dtype: str = "float32", **changes: Any) -> Generator:
        """Returns a Generator of the subject; `changes` replace its options."""
        drafter = changes.get("drafter", self.drafter)
        read = without_unread(drafter, self.drafter_options)
        options: dict[str, Any] = {"acceptance": self.acceptance, "drafter_options": read}
        if drafter != "none":  # which reads neither
            options["num_draft_tokens"] = self.num_draft_tokens
            options["rule_options"] = self.rule_options
        draft = None
        if self.draft is not None and needs_draft_model(drafter):
            draft = cast(self.draft, dtype)
        options |= changes | {"drafter": drafter}
        return Generator(cast(self.target, dtype), draft, **options)


def cast(model: LoadedModel, dtype: str) -> LoadedModel:
    """Returns the model with its weights in another dtype."""
    if model.params["embedding"].dtype == jnp.dtype(dtype):
        return model
    params = jax.tree.map(
        lambda leaf: leaf.astype(jnp.dtype(dtype)),
        model.params,
        is_leaf=lambda leaf: isinstance(leaf, CompactKernel),
    )
    return dataclasses.replace(model, params=params)


_SOURCES = pathlib.Path(__file__).parents[2]


def subject_key(subject: Subject) -> dict[str, Any]:
    """Returns all that an audit of the subject depends on, as plain values."""
    where, number = provenance.environment(), subject.num_draft_tokens
    options = without_unread(subject.drafter, subject.drafter_options)
    head = with_shipped_head(subject.drafter, options, subject.target.name).draft_head
    settings = dataclasses.asdict(subject.settings)
    key = {
        "jspec": kernels.sources_digest(_SOURCES),
        "versions": {name: where["versions"][name] for name in _KNOWN},
        "device": {**kernels.describe_device(), "processor": where["processor"]},
        "target": _model_digests(subject.target),
        "draft": None if subject.draft is None else _model_digests(subject.draft),
        "head": None if head is None else file_digests(find_head(head)),
        "dtype": subject.dtype,
        "drafter": subject.drafter,
        # More drafts are audited by rounds of two, but for trees.
        "num_draft_tokens": number if subject.has_tree or isinstance(number, str) else "fixed",
        "drafter_options": dataclasses.asdict(options),
        "acceptance": subject.acceptance,
        "rule_options": dataclasses.asdict(subject.rule_options),
        "settings": {name: settings[name] for name in settings if name not in _UNREAD},
    }
    return json.loads(json.dumps(key))  # tuples are lists there


def _model_digests(model: LoadedModel) -> dict[str, str | None]:
    path = find_model(model.name)
    digests = {"random weights": model.name} if path is None else file_digests(path)
    return {**digests, "quantization": model.quantization}


def file_digests(path: pathlib.Path) -> dict[str, str]:
    """Returns the SHA-256 of a file, or of each file of a folder, by name."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    digests = {}
    for file in files:
        name = file.name if file == path else file.relative_to(path).as_posix()
        about = file.stat()
        digests[name] = _file_digest(file, about.st_size, about.st_mtime_ns)
    return digests


@functools.cache  # a suite asks for those of the same gigabytes for each of its rows
def _file_digest(file: pathlib.Path, size: int, modified: int) -> str:
    del size, modified  # of another file of this name
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def keep_stamp(subject: Subject, checks: Sequence[Check], num_rows: int) -> dict[str, Any]:
    """Keeps the finding of an audit, unless a kept one outweighs it; returns the kept finding.

    A kept finding with more rows stays, but gives way to a check that fails, and, where it is
    inconclusive itself, to a finding that is not.

    Returns:
      `date`; `is_lossless`; the names of the checks that have `failed`, and whether all these say
      nothing of the distribution (`is_inconclusive`); `num_checks`; `num_rows`, those of the test
      of the distribution; and `of`, what it depends on, see `subject_key`.
    """
    key = subject_key(subject)
    bad = [check for check in checks if not check.has_passed]
    stamp = {
        "date": datetime.date.today().isoformat(),
        "is_lossless": subject.rule.is_lossless and not bad,
        "failed": [check.name for check in bad],
        "is_inconclusive": bool(bad) and all(check.kind in INCONCLUSIVE for check in bad),
        "num_checks": len(checks),
        "num_rows": num_rows,
        "of": key,
    }
    path = cache_dir() / _FILE
    stamps = read_kept(path)
    earlier = stamps.get(_digest(key))
    if earlier is not None and _outweighs(earlier, stamp):
        return earlier
    keep(path, stamps | {_digest(key): stamp}, "the audit")
    return stamp


def _outweighs(earlier: dict[str, Any], stamp: dict[str, Any]) -> bool:
    if earlier["num_rows"] <= stamp["num_rows"]:
        return False
    has_passed = not stamp["failed"]
    return stamp["is_inconclusive"] or (has_passed and not earlier["is_inconclusive"])


def find_stamp(subject: Subject) -> dict[str, Any] | None:
    """Returns the kept finding for the same files and settings; None if there is none.

    See `keep_stamp`.
    """
    return read_kept(cache_dir() / _FILE).get(_digest(subject_key(subject)))


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
