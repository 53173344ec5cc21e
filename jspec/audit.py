"""Audits speculative decoding: `python -m jspec.audit --acceptance=block --temperature=0.8`.

For a target, a drafter, a rule and settings, on the machine at hand: greedy parity in float32 and
bfloat16, the joint distribution of what the compiled rounds emit against the target's own
probabilities, a negative control that must be rejected, how many drafts were proposed and accepted,
the caches, the seeds, and the smallest uniform. Ends with status 0 only if all of it is as it
should be, which for a lossy rule it is not.
"""

import dataclasses
import sys
import time
from typing import Any

from absl import flags

from jspec.common import cli
from jspec.common.errors import InputError
from jspec.common.json_lines import JsonLinesWriter
from jspec.drafters import DrafterOptions, choose_drafter
from jspec.evaluation.auditing.subject import Check, Subject
from jspec.generation import drafter_flags, generator, provenance, settings_flags
from jspec.generation.drafter_flags import read_drafter
from jspec.generation.flag_values import QUANTIZATIONS, parse_num_draft_tokens, parse_quantization
from jspec.generation.request import Settings
from jspec.generation.rows import check_temperature
from jspec.generation.settings_flags import read_rule, read_settings
from jspec.generation.validate_options import check_read
from jspec.speculation.acceptance import get_rule
from jspec.speculation.acceptance.types import Temperatures
from jspec.weights.resolver import LoadedModel, load_model

flags.adopt_module_key_flags(drafter_flags)  # so that --help lists them
flags.adopt_module_key_flags(settings_flags)
_TARGET = flags.DEFINE_string("target", generator.DEFAULT_TARGET, "The target; see jspec.generate.")
_DRAFT = flags.DEFINE_string("draft", None, "A draft model; likewise.")
_NUM_DRAFT_TOKENS = flags.DEFINE_string(
    "num_draft_tokens", str(generator.DEFAULT_NUM_DRAFT_TOKENS), "Drafts a round."
)
_TARGET_QUANTIZATION = flags.DEFINE_enum(
    "target_quantization", "none", QUANTIZATIONS, "Rounds the target's weights: another model."
)
_DRAFT_QUANTIZATION = flags.DEFINE_enum(
    "draft_quantization", "none", QUANTIZATIONS, "Rounds the draft's weights."
)
_DTYPE = flags.DEFINE_enum(
    "dtype",
    "float32",
    ["float32", "bfloat16"],
    "Of the weights whose distribution and caches are checked.",
)
_NUM_ROWS = flags.DEFINE_integer(
    "num_rows", 1024, "Independent rows of the test of the distribution."
)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 32, "Tokens of an answer, for parity.")
_OUTPUT_JSON = flags.DEFINE_string("output_json", None, "Write what was found to this file.")

# a check that says nothing of the distribution when it fails, and what to do then
_INCONCLUSIVE = {
    "drafts": "the drafter proposed nothing",
    "negative control": "too few rows to tell: try --num_rows={more_rows}",
}


def main() -> None:
    """Runs the checks, prints them one by one, and ends with the verdict."""
    writer = None if _OUTPUT_JSON.value is None else JsonLinesWriter(_OUTPUT_JSON.value)
    if _NUM_ROWS.value < 1:
        raise InputError(f"expected num_rows of at least 1, got {_NUM_ROWS.value}")
    subject = make_subject()
    if not subject.rule.is_lossless:
        print(f"the rule {subject.acceptance!r} is lossy: the distribution is not expected to hold")
    from jspec.evaluation.auditing.checks import run_checks

    checks = []
    begin = time.perf_counter()
    for check in run_checks(
        subject, num_rows=_NUM_ROWS.value, max_new_tokens=_MAX_NEW_TOKENS.value
    ):
        checks.append(check)
        failure = "weak" if check.name in _INCONCLUSIVE else "FAIL"
        outcome = "pass" if check.has_passed else failure
        print(f"{outcome}  {check.name}: {check.detail}", flush=True)
    seconds = time.perf_counter() - begin
    has_passed = subject.rule.is_lossless and all(check.has_passed for check in checks)
    failed = {check.name for check in checks if not check.has_passed}
    verdict = "lossless" if has_passed else "NOT lossless"
    if failed and failed <= _INCONCLUSIVE.keys():
        reasons = " and ".join(_INCONCLUSIVE[name] for name in sorted(failed))
        verdict = f"inconclusive, {reasons.format(more_rows=8 * _NUM_ROWS.value)}"
    print(f"{verdict}: {describe(subject)} ({seconds:.0f} s)")
    if writer is not None:
        with writer:
            writer.write(make_record(subject, checks, has_passed, seconds))
    if not has_passed:
        sys.exit(1)


def make_subject() -> Subject:
    """Returns what the flags ask to audit."""
    settings = read_settings(max_new_tokens=_MAX_NEW_TOKENS.value)
    acceptance, rule_options = read_rule()
    rule = get_rule(acceptance, rule_options)
    if settings.temperature > 0:
        check_temperature(acceptance, rule.temperatures, settings.temperature)
    if settings.temperature == 0 and rule.temperatures is not Temperatures.ZERO:
        print("note: the distribution is audited at temperature 1; at 0 greedy parity says it all")
        settings = dataclasses.replace(settings, temperature=1.0)
    drafter, drafter_options = read_drafter()
    if _DRAFT.value is None and _DRAFT_QUANTIZATION.value != "none":
        raise InputError("expected --draft with --draft_quantization")
    drafter = choose_drafter(
        drafter,
        has_draft=_DRAFT.value is not None,
        target=_TARGET.value,
        options=drafter_options,
    )
    num_draft_tokens = parse_num_draft_tokens(_NUM_DRAFT_TOKENS.value)
    check_read(
        drafter,
        drafter_options,
        settings,
        num_draft_tokens=num_draft_tokens,
        acceptance=acceptance,
        rule_options=rule_options,
    )
    draft = None if _DRAFT.value is None else _load(_DRAFT.value, _DRAFT_QUANTIZATION.value)
    return Subject(
        target=_load(_TARGET.value, _TARGET_QUANTIZATION.value),
        draft=draft,
        drafter=drafter,
        drafter_options=drafter_options,
        num_draft_tokens=num_draft_tokens,
        acceptance=acceptance,
        rule_options=rule_options,
        settings=settings,
    )


def _load(name: str, quantization: str) -> LoadedModel:
    return load_model(name, dtype=_DTYPE.value, quantization=parse_quantization(quantization))


def describe(subject: Subject) -> str:
    """Returns what was audited, in one line."""
    changed = _changed(subject.settings)
    changed.pop("max_new_tokens", None)
    options = _list(_changed(subject.drafter_options))
    drafter = f"drafter {subject.drafter}" + (f" ({options})" if options else "")
    if subject.draft is not None:
        drafter += f" with {_title(subject.draft)}"
    rule, settings = f"rule {subject.acceptance}", _list(changed) or "default settings"
    return ", ".join([_title(subject.target), subject.dtype, drafter, rule, settings])


def _changed(values: Settings | DrafterOptions) -> dict[str, Any]:
    """Returns the fields that are not at their defaults."""
    pairs = {field.name: field.default for field in dataclasses.fields(values)}
    return {name: getattr(values, name) for name in pairs if getattr(values, name) != pairs[name]}


def _list(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _title(model: LoadedModel) -> str:
    return model.name if model.quantization is None else f"{model.name} in {model.quantization}"


def make_record(
    subject: Subject, checks: list[Check], has_passed: bool, seconds: float
) -> dict[str, object]:
    """Returns the whole audit as plain values."""
    from jspec.evaluation.auditing.distribution import FALSE_ALARM

    return {
        **provenance.environment(),
        "subject": describe(subject),
        "dtype": subject.dtype,
        "settings": dataclasses.asdict(subject.settings),
        "num_draft_tokens": subject.num_draft_tokens,
        "drafter_options": dataclasses.asdict(subject.drafter_options),
        "false_alarm_rate": FALSE_ALARM,
        "is_lossless": has_passed,
        "seconds": seconds,
        "checks": [dataclasses.asdict(check) for check in checks],
    }


if __name__ == "__main__":
    cli.run_main(main)
