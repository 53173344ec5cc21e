"""The open suite: every drafter that fits, by every lossless rule, beside plain decoding.

A row is a drafter with a rule at temperature 0 or the sampled temperature. It takes turns with
plain decoding, prompt by prompt, so that rows that were measured at different times can be compared
by their speed-ups. At temperature 0 all lossless rules compare tokens, which makes one row. A row
that fails says why, and the others go on. The audits come last, each unless its finding is kept
already.
"""

import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jspec.common.errors import InputError, describe_error, say
from jspec.common.json_lines import title_of
from jspec.common.memory import tree_bytes
from jspec.common.progress import counted
from jspec.drafters import (
    DRAFTERS,
    check_options,
    choose_drafter,
    drafters_needing,
    make_drafter,
    needs_draft_model,
    without_unread,
)
from jspec.generation.auto import AUTO
from jspec.generation.generator import Generator
from jspec.generation.options import make_spec
from jspec.generation.request import SamplingParams
from jspec.lab.auditing.subject import Subject, cast, file_digests, find_stamp, keep_stamp
from jspec.lab.benchmarking.answers import (
    JSPEC_PLAIN,
    answer_with,
    columns_by_method,
    gives_one_text,
    summarise,
    time_in_turn,
)
from jspec.lab.benchmarking.measurement import (
    Measurement,
    Outcome,
    choose_prompts,
    digest_of_prompts,
    parse_methods,
)
from jspec.lab.reports.leaderboard import leaderboard_text
from jspec.speculation.acceptance import RULES, RuleOptions, get_rule
from jspec.speculation.types import Temperatures
from jspec.weights.resolver import LoadedModel, find_model, has_mtp_layer

_GREEDY = "greedy"
_ON_TREES = "k_seq"  # which on a chain is `rejection`
_AUDITED_TOKENS = 16  # of the answers whose parity and seeds are checked
_USUAL_ROW, _USUAL_AUDIT = 40.0, 60.0  # seconds, until the first has been timed


class Row(NamedTuple):
    """One line of the leaderboard."""

    drafter: str
    num_draft_tokens: int | str
    acceptance: str
    temperature: float
    is_default: bool = False

    @property
    def label(self) -> str:
        """Its name, which no other row has."""
        name = f"auto ({self.drafter})" if self.is_default else self.drafter
        return f"{name}, {self.acceptance}, T={self.temperature:g}"


class Models(NamedTuple):
    """What all rows have in common, and drafters that do not fit it, with the reason."""

    target: LoadedModel
    draft: LoadedModel | None
    drafters: dict[str, int]
    left_out: dict[str, str]

    def draft_for(self, drafter: str) -> LoadedModel | None:
        """Returns the draft model, for a drafter that needs one."""
        return self.draft if needs_draft_model(drafter) else None


def measure_suite(asked: Measurement) -> Iterator[Outcome]:
    """Measures all rows, then audits them; yields after every step.

    What a run that was broken off, or that `--minutes` has cut, has measured is not measured again.

    Raises:
      InputError: prompts without categories, or other ones than the run was begun with; or a draft
        or an option that no drafter takes.
    """
    clock = _Clock(60.0 * asked.minutes)
    prompts, _ = choose_prompts(asked)
    if not all(prompt.category for prompt in prompts):
        where = title_of(asked.prompts_file)
        raise InputError(f"expected a category of each prompt of {where}, got one without")
    models = fit_drafters(asked, *asked.models())
    rows = rows_of(models, asked)
    plain = Generator(models.target, drafter="none", max_seq_len=asked.max_seq_len)
    ids = [plain.encode_prompt(prompt.text) for prompt in prompts]
    done = {name: row for name, row in asked.begun.get("rows", {}).items() if "error" not in row}
    record = _head_of(asked, models) | {
        "prompts_digest": digest_of_prompts(asked, ids),
        "categories": [prompt.category for prompt in prompts],
        "rows": done,
    }
    for number, row in enumerate(rows):
        if row.label not in done and clock.has_time(row.label, len(rows) - number):
            measure = functools.partial(_measure, asked, models, plain, row, ids)
            done[row.label] = _or_failed(row, measure, record["categories"])
            yield Outcome(record)
    clock.begin_audits()
    measured = [row for row in rows if "error" not in done.get(row.label, {"error": ""})]
    audited = [row for row in measured if row.acceptance != _GREEDY and row.acceptance in RULES]
    for number, row in enumerate(audited):
        _audit(models, asked, row, done[row.label], clock, len(audited) - number)
        yield Outcome(record)
    record["rows"] = {row.label: done[row.label] for row in rows if row.label in done}
    # Without --audit_rows the same command may still add the audits.
    is_audited = all("audit" in done[row.label] for row in audited)
    yield Outcome(record, leaderboard_text(record), is_audited and not clock.is_over)


def _head_of(asked: Measurement, models: Models) -> dict[str, Any]:
    files = {}
    for role, model in (("target", models.target), ("draft", models.draft)):
        if model is not None and (path := find_model(model.name)) is not None:
            files[role] = file_digests(path)
    return {
        "suite": asked.suite,
        "files": files,
        "target_bytes": tree_bytes(models.target.params),
        "left_out": models.left_out,
    }


class _Clock:
    """Says how long what is left will take, and whether there is time to begin any of it."""

    def __init__(self, limit: float) -> None:
        self._begin = self._first = time.monotonic()
        self._limit, self._usual, self._num_begun = limit, _USUAL_ROW, 0
        self.is_over = False

    def begin_audits(self) -> None:
        """From now on audits are timed, no rows."""
        self._first, self._usual, self._num_begun = time.monotonic(), _USUAL_AUDIT, 0

    def has_time(self, label: str, num_left: int) -> bool:
        """Returns whether there is time to begin, and says so; `is_over` remembers where not."""
        moment = time.monotonic()
        if moment - self._begin >= self._limit:
            if not self.is_over:
                say(f"--minutes={self._limit / 60:g} have passed; the same command continues")
            self.is_over = True
            return False
        if self._num_begun:
            self._usual = (moment - self._first) / self._num_begun
        self._num_begun += 1
        estimate = min(num_left * self._usual, self._limit - (moment - self._begin)) / 60
        about = f"about {counted(round(estimate), 'minute')}" if estimate >= 1 else "under a minute"
        say(f"{label} ({num_left} left, {about})")
        return True


def fit_drafters(asked: Measurement, target: LoadedModel, draft: LoadedModel | None) -> Models:
    """Returns the drafters that can draft for the target, each with its number of drafts.

    Raises:
      InputError: no drafter that fits, a draft model with which none of them drafts, or an option
        that none reads.
    """
    names = asked.drafters or [name for name in DRAFTERS if name != "none"]
    if "none" in names:
        raise InputError("expected no drafter none in a suite: all rows are beside plain decoding")
    wanted = parse_methods(names, asked.num_draft_tokens).values()
    fitting: dict[str, int] = {}
    left_out: dict[str, str] = {}
    for drafter, number, *_ in wanted:
        if isinstance(number, str):
            raise InputError(f"expected a number of drafts a round in a suite, got {number}")
        reason = _why_not(asked, target, draft, drafter, number)
        if reason is None:
            fitting[drafter] = number
        else:
            left_out[drafter] = reason
            say(f"note: {drafter} is left out: {reason}")
    if not fitting and draft is None:
        raise InputError(f"expected a drafter that fits {target.name}, got {', '.join(names)}")
    if draft is not None and not any(map(needs_draft_model, fitting)):
        reasons = [left_out[name] for name in drafters_needing("draft") if name in left_out]
        reason = reasons[0] if reasons else f"--drafters={','.join(names)}"
        raise InputError(
            f"expected a draft model that fits {target.name}, got {draft.name}: {reason}"
        )
    check_options(list(fitting), asked.options)
    return Models(target, draft, fitting, left_out)


def _why_not(
    asked: Measurement, target: LoadedModel, draft: LoadedModel | None, drafter: str, number: int
) -> str | None:
    needs_draft = needs_draft_model(drafter)
    if needs_draft and draft is None:
        return "it needs a draft model (--draft)"
    needed_draft, options = draft if needs_draft else None, without_unread(drafter, asked.options)
    try:
        make_drafter(drafter, make_spec(target, needed_draft, drafter, options, number))
    except InputError as error:
        return str(error)
    return None


def rows_of(models: Models, asked: Measurement) -> list[Row]:
    """Returns all rows: first those of the default, then by drafter, rule and temperature.

    Where the drafters were named, the default has rows if its drafter is among them.
    """
    target, has_draft = models.target, models.draft is not None
    has_mtp = not has_draft and has_mtp_layer(target)
    usual = str(choose_drafter(None, has_draft=has_draft, target=target.name, has_mtp=has_mtp))
    has_default = not asked.drafters or usual in models.drafters
    methods = [(usual, AUTO, True)] if has_default else []
    methods += [(drafter, number, False) for drafter, number in models.drafters.items()]
    return [
        Row(drafter, number, rule, temperature, is_default)
        for temperature in (0.0, asked.temperature)
        for drafter, number, is_default in methods
        for rule in _rules_at(temperature, has_tree=asked.options.tree_depth > 0)
        if rule in (_GREEDY, "rejection") or not is_default
    ]


def _rules_at(temperature: float, *, has_tree: bool) -> list[str]:
    """Returns the lossless rules that differ there; at temperature 0 they all compare tokens."""
    if temperature == 0:
        return [_GREEDY]
    rules = {name: get_rule(name, RuleOptions()) for name in RULES if name != _ON_TREES or has_tree}
    return [
        name
        for name, rule in rules.items()
        if rule.is_lossless
        and rule.temperatures is not Temperatures.ZERO
        and (rule.tree is not None or not has_tree)
    ]


def _or_failed(row: Row, measure: Any, categories: Sequence[str]) -> dict[str, Any]:
    begin, about = time.monotonic(), row._asdict()
    try:
        measured = measure(categories)
    except Exception as error:  # of the drafter, the rule or the device: the other rows go on
        reason = str(error) if isinstance(error, InputError) else describe_error(error)
        say(f"note: {row.label} has failed: {reason}")
        return about | {"error": reason}
    return about | measured | {"seconds": time.monotonic() - begin}


def _measure(
    asked: Measurement,
    models: Models,
    plain: Generator,
    row: Row,
    ids: Sequence[list[int]],
    categories: Sequence[str],
) -> dict[str, Any]:
    generator = Generator(
        models.target, models.draft_for(row.drafter), drafter=row.drafter,
        num_draft_tokens=row.num_draft_tokens, acceptance=row.acceptance,
        max_seq_len=asked.max_seq_len, drafter_options=without_unread(row.drafter, asked.options),
    )  # fmt: skip
    settings = SamplingParams(asked.max_new_tokens, row.temperature)
    methods = {
        JSPEC_PLAIN: answer_with(plain, settings),
        row.drafter: answer_with(generator, settings),
    }
    timings = time_in_turn(methods, [generator], ids, asked.repeats, settings.max_new_tokens)
    is_one_text = gives_one_text(settings, row.acceptance)
    summary = summarise(timings, is_one_text=is_one_text)
    figures = summary[row.drafter]
    columns = columns_by_method(timings, dict.fromkeys(timings, JSPEC_PLAIN), categories)
    return {
        "speedup": figures.pop("ratio_to")[JSPEC_PLAIN],
        **figures,
        "plain_tokens_per_second": summary[JSPEC_PLAIN]["tokens_per_second"],
        "by_category": columns[row.drafter]["tasks"],
        "drafter_bytes": generator.describe()["drafter_bytes"],
        "timings": {name: timing.to_json() for name, timing in timings.items()},
    }


def _audit(
    models: Models,
    asked: Measurement,
    row: Row,
    entry: dict[str, Any],
    clock: _Clock,
    num_left: int,
) -> None:
    from jspec.lab.auditing.checks import run_checks

    draft = models.draft_for(row.drafter)
    subject = Subject(
        target=cast(models.target, "float32"),
        draft=None if draft is None else cast(draft, "float32"),
        drafter=row.drafter,
        num_draft_tokens=row.num_draft_tokens,
        acceptance=row.acceptance,
        settings=SamplingParams(_AUDITED_TOKENS, row.temperature),
        drafter_options=without_unread(row.drafter, asked.options),
    )
    stamp, num_rows = find_stamp(subject), asked.audit_rows
    if stamp and stamp.get("is_inconclusive") and stamp["num_rows"] < num_rows:
        stamp = None  # more rows may tell
    if stamp is None and num_rows and clock.has_time(f"audit of {row.label}", num_left):
        try:
            checks = run_checks(subject, num_rows=num_rows, max_new_tokens=_AUDITED_TOKENS)
            stamp = keep_stamp(subject, list(checks), num_rows=num_rows)
        except Exception as error:  # as above
            entry["audit"] = {"error": describe_error(error)}
            say(f"note: the audit of {row.label} has failed: {error}")
            return
    if stamp is not None:
        entry["audit"] = stamp
