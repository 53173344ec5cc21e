"""Audits speculative decoding: `python -m jspec.audit --acceptance=block --temperature=0.8`.

Checks a target, a drafter, a rule and settings on this machine: greedy parity in float32 and
bfloat16; the joint distribution of what the compiled rounds emit, with two drafts at most, against
the target's own probabilities; a negative control, which must be rejected; how many drafts were
proposed and accepted; the caches; the seeds; drafts of probability 0. With --temperature=0 the
distribution is tested at temperature 1, unless the rule is for temperature 0 only. Ends with status
0 only if every check passes; with a lossy rule, one does not. docs/audit.md explains the checks.
"""

import dataclasses
import sys
import time
from collections.abc import Iterable, Sequence

from absl import flags
from jax.sharding import Mesh

from jspec.cli import answer_flags, mesh_flags
from jspec.cli import program as cli
from jspec.cli.answer_flags import load_models, read_method, read_settings
from jspec.common.errors import InputError, check_count, say
from jspec.common.json_lines import JsonLinesWriter
from jspec.drafters import DrafterOptions, name_of
from jspec.generation import provenance
from jspec.generation.auto import parse_num_draft_tokens
from jspec.generation.options import check_temperature
from jspec.generation.request import SamplingParams
from jspec.lab.auditing.subject import INCONCLUSIVE, Check, Subject
from jspec.speculation.acceptance import RuleOptions
from jspec.speculation.types import Temperatures
from jspec.weights.resolver import LoadedModel

flags.adopt_module_key_flags(answer_flags)  # so that --help lists them
flags.adopt_module_key_flags(mesh_flags)
flags.FLAGS.set_default("dtype", "float32")
flags.FLAGS.set_default("max_new_tokens", 32)
for _name, _help in {
    "dtype": "<bfloat16|float32>: The number type in which distribution and caches are checked.",
    "logprobs": "Has no effect here.",
    "max_new_tokens": "Tokens per answer in the checks of parity and seeds.",
    "seed": "Seed of the first answer in the check of seeds; other checks have their own seeds.",
}.items():
    flags.FLAGS[_name].help = _help
_NUM_ROWS = flags.DEFINE_integer(
    "num_rows", 1024, "Number of independent rows in the test of the distribution."
)
_LIST_RULES = flags.DEFINE_bool(
    "list_rules", False, "List the acceptance rules and their negative controls, and end."
)
_FUNCTIONS = flags.DEFINE_string(
    "functions",
    None,
    "Audit jspec.speculate instead: a Python file that defines f, g, state and, if need be, update "
    "(docs/speculate.md); --num_draft_tokens and --num_rows are read.",
)
_OUTPUT_JSON = flags.DEFINE_string(
    "output_json", None, "Write the results of all checks to this JSON file."
)

_NUM_GUESSES = 2  # a round, where nothing else is asked for


def main() -> None:
    """Runs the checks, prints them one at a time, and ends with the verdict."""
    if _LIST_RULES.value:
        from jspec.lab.auditing.controls import list_rules

        print(list_rules())
        return
    if _FUNCTIONS.value is not None:
        audit_functions(_FUNCTIONS.value)
        return
    if given := mesh_flags.given_of_processes():
        raise InputError(f"expected an audit in one process, got --{', --'.join(given)}")
    with mesh_flags.flagged_mesh() as mesh:
        audit(mesh)


def audit_functions(path: str) -> None:
    """Audits two functions of a file."""
    from jspec.lab.auditing.functions import FALSE_ALARM, check_speculate, read_functions

    modules = (answer_flags, mesh_flags)
    unread = [f for module in modules for f in flags.FLAGS.get_key_flags_for_module(module)]
    names = {flag.name for flag in unread if flag.present}
    if given := sorted(names - {"num_draft_tokens"}):
        raise InputError(
            "expected only --num_draft_tokens, --num_rows and --output_json with --functions, "
            f"got --{', --'.join(given)}"
        )
    writer = None if _OUTPUT_JSON.value is None else JsonLinesWriter(_OUTPUT_JSON.value)
    number = parse_num_draft_tokens(flags.FLAGS.num_draft_tokens)
    number = number if isinstance(number, int) else _NUM_GUESSES
    check_count("num_draft_tokens", number, 1, 4096)
    check_count("num_rows", _NUM_ROWS.value, 1, 10**7)
    begin = time.perf_counter()
    checks = _print_checks(check_speculate(read_functions(path), number, _NUM_ROWS.value))
    subject, seconds = f"f and g of {path}, {number} guesses a round", time.perf_counter() - begin
    has_passed = _print_verdict(checks, True, subject, seconds)
    about = {"subject": subject, "num_draft_tokens": number, "false_alarm_rate": FALSE_ALARM}
    _end(writer, about, checks, has_passed, seconds)


def audit(mesh: Mesh | None) -> None:
    """Runs on the devices of a mesh, or on the default device."""
    writer = None if _OUTPUT_JSON.value is None else JsonLinesWriter(_OUTPUT_JSON.value)
    if _NUM_ROWS.value < 1:
        raise InputError(f"expected num_rows of at least 1, got {_NUM_ROWS.value}")
    subject = make_subject(mesh)
    if not subject.rule.is_lossless:
        print(f"the rule {subject.acceptance!r} is lossy: the distribution is not expected to hold")
    from jspec.lab.auditing.checks import run_checks
    from jspec.lab.auditing.subject import keep_stamp

    begin = time.perf_counter()
    checks = _print_checks(
        run_checks(
            subject,
            num_rows=_NUM_ROWS.value,
            max_new_tokens=subject.settings.max_new_tokens,
            say=lambda what: say(f"checking {what}"),
        )
    )
    seconds = time.perf_counter() - begin
    has_passed = _print_verdict(checks, subject.rule.is_lossless, describe(subject), seconds)
    if mesh is None:
        keep_stamp(subject, checks, _NUM_ROWS.value)
    _end(writer, make_record(subject), checks, has_passed, seconds)


def _print_checks(outcomes: Iterable[Check]) -> list[Check]:
    checks = []
    for check in outcomes:
        checks.append(check)
        failure = "weak" if check.kind in INCONCLUSIVE else "FAIL"
        outcome = "pass" if check.has_passed else failure
        print(f"{outcome}  {check.name}: {check.detail}", flush=True)
    return checks


def _print_verdict(
    checks: Sequence[Check], is_lossless: bool, subject: str, seconds: float
) -> bool:
    failed = {check.kind for check in checks if not check.has_passed}
    has_passed = is_lossless and not failed
    verdict = "lossless" if has_passed else "NOT lossless"
    if failed and failed <= INCONCLUSIVE.keys():
        reasons = " and ".join(dict.fromkeys(INCONCLUSIVE[kind] for kind in sorted(failed)))
        verdict = f"inconclusive, {reasons.format(more_rows=8 * _NUM_ROWS.value)}"
    print(f"{verdict}: {subject} ({seconds:.0f} s)")
    return has_passed


def make_subject(mesh: Mesh | None) -> Subject:
    """Returns what the flags ask to audit."""
    settings = read_settings()
    if settings.num_beams > 1:
        raise InputError(
            f"expected num_beams 1 in an audit, which compares distributions; got "
            f"{settings.num_beams}"
        )
    method = read_method(settings)
    if settings.temperature > 0:
        check_temperature(method.rule_name, method.rule.temperatures, settings.temperature)
    elif method.rule.temperatures is not Temperatures.ZERO:
        print("note: the distribution is audited at temperature 1; at 0 greedy parity says it all")
        settings = dataclasses.replace(settings, temperature=1.0)
    target, draft = load_models(mesh)
    context = target.config.max_seq_len
    if settings.max_new_tokens >= context:  # answers would be cut, hours later
        raise InputError(
            f"expected max_new_tokens below the context of {context} tokens, got "
            f"{settings.max_new_tokens}"
        )
    return Subject(
        target=target,
        draft=draft,
        drafter=name_of(method.drafter),
        num_draft_tokens=method.num_draft_tokens,
        acceptance=method.rule_name,
        settings=settings,
        rule_options=method.rule_options,
        drafter_options=method.drafter_options,
    )


def describe(subject: Subject) -> str:
    """Returns what was audited, in one line."""
    drafter = f"drafter {subject.drafter}{_in_brackets(_changed(subject.drafter_options))}"
    rule = f"rule {subject.acceptance}{_in_brackets(_changed(subject.rule_options))}"
    if subject.draft is not None:
        drafter += f" with {_title(subject.draft)}"
    models = _title(subject.target), subject.dtype, drafter
    if subject.target.mesh is not None:
        models += (f"mesh {dict(subject.target.mesh.shape)}",)
    return ", ".join([*models, rule, _changed(subject.settings) or "default settings"])


def _in_brackets(options: str) -> str:
    return f" ({options})" if options else ""


def _changed(values: SamplingParams | DrafterOptions | RuleOptions) -> str:
    """Returns the fields that are not at their defaults, without the length of answers."""
    names = (field.name for field in dataclasses.fields(values) if field.name != "max_new_tokens")
    usual, given = vars(type(values)()), vars(values)
    return ", ".join(f"{name}={given[name]}" for name in names if given[name] != usual[name])


def _title(model: LoadedModel) -> str:
    return model.name if model.quantization is None else f"{model.name} in {model.quantization}"


def make_record(subject: Subject) -> dict[str, object]:
    """Returns what is audited as plain values."""
    from jspec.lab.auditing.distribution import FALSE_ALARM

    return {
        "subject": describe(subject),
        "dtype": subject.dtype,
        "settings": dataclasses.asdict(subject.settings),
        "num_draft_tokens": subject.num_draft_tokens,
        "drafter_options": dataclasses.asdict(subject.drafter_options),
        "acceptance": subject.acceptance,
        "rule_options": dataclasses.asdict(subject.rule_options),
        "false_alarm_rate": FALSE_ALARM,
    }


def _end(
    writer: JsonLinesWriter | None,
    about: dict[str, object],
    checks: Sequence[Check],
    has_passed: bool,
    seconds: float,
) -> None:
    """Writes the record of an audit, and ends with status 1 unless it has passed."""
    if writer is not None:
        shown = [dataclasses.asdict(check) for check in checks]
        outcome = {"is_lossless": has_passed, "seconds": seconds, "checks": shown}
        with writer:
            writer.write(provenance.environment() | about | outcome)
    if not has_passed:
        sys.exit(1)


if __name__ == "__main__":
    cli.run_main(main)
