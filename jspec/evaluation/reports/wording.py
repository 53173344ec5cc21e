"""Numbers and labels as a report writes them, and its words explained."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.evaluation.analysis.ratios import Ratio

NOTHING = "-"
CONTROL = "random"  # the drafter that shows how far times can be off

COST = "cost of a round (plain steps)"

WORDS = {
    "method": "of generating: a drafter, the most drafts that it may propose a round, its options.",
    "speed-up": "tokens a second from the first token of an answer to its last, divided by those "
    "of plain decoding. Above 1 is faster. That of **whole answers** counts the time to read the "
    "prompt too, which no drafter shortens.",
    "[a, b]": "a 95 % interval: the range of values that the measured prompts leave open for "
    "prompts of their kind, estimated by drawing prompts anew from them (the bootstrap). Of few "
    "prompts it is too narrow; of one prompt it says how far its timings differ and nothing of "
    "other prompts. A number in a table that could have an interval and has none is of one prompt, "
    "timed once.",
    "drafts kept": "the share of the proposed drafts that the target keeps. Behind the first one "
    "that it refuses all drafts of a round are thrown away unseen, so that the share falls with "
    "the number of drafts.",
    "alpha": "the share of the drafts whose turn came that the target keeps: those behind a "
    "refused one do not count. How good a drafter guesses, whatever the number of drafts.",
    "tokens per call": "tokens that one call of the target gives: the kept drafts and one of its "
    "own. 1 is plain decoding.",
    "cost of a round": "its time, in plain steps. A round pays if it gives more tokens per call "
    "than it costs.",
}

EXPLAIN_INTERVALS = "In brackets 95 % bootstrap intervals over prompts."

LOSSY_RULES = ("lenient", "lenient_argmax", "typical")


def code(text: object) -> str:
    """Returns a label or a message as code, which no character in it can end."""
    return f"`{' '.join(str(text).replace('`', chr(39)).split()) or ' '}`"


def number(value: float | None, digits: int = 2) -> str:
    """Returns a number with so many digits behind the point."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 0) -> str:
    """Returns a share of 1 in percent."""
    return NOTHING if value is None else f"{value:.{digits}%}".replace("%", " %")


def interval(ratio: Ratio | None, digits: int = 2, *, is_once: bool = False) -> str:
    """Returns a ratio and its interval, or that there is none: it was timed once."""
    if ratio is None:
        return NOTHING
    if is_once:
        return f"{ratio.median:.{digits}f} (timed once)"
    if math.isclose(ratio.low, ratio.high):  # of prompts that are all alike
        return f"{ratio.median:.{digits}f}"
    has_one = ratio.low <= 1 <= ratio.high
    middle = number(ratio.median, digits) if has_one else bound(ratio.median, digits)
    return f"{middle} [{bound(ratio.low, digits)}, {bound(ratio.high, digits)}]"


def bound(value: float, digits: int = 2) -> str:
    """Returns an end of an interval; on which side of 1 it lies shows, however near it is."""
    text = f"{value:.{digits}f}"
    if float(text) != 1 or math.isclose(value, 1, rel_tol=1e-6):
        return text
    step = 10.0 ** -(digits + 1)
    apart = max(value, 1 + step) if value > 1 else min(value, 1 - step)
    return f"{apart:.{digits + 1}f}"


def percent_interval(ratio: Ratio | None) -> str:
    """Returns a share and its interval in percent."""
    if ratio is None:
        return NOTHING
    return f"{percent(ratio.median)} [{100 * ratio.low:.0f}, {100 * ratio.high:.0f}]"


def column_texts(values: Sequence[Any]) -> list[str]:
    """Returns the values of a column: numbers with equally many digits behind the point, enough for
    three that count; texts as they are.
    """
    shortest = [f"{value:.3g}" for value in values if isinstance(value, float)]
    digits = max((len(text.partition(".")[2]) for text in shortest if "e" not in text), default=0)
    return [_in_column(value, digits) for value in values]


def _in_column(value: Any, digits: int) -> str:
    if value is None:
        return NOTHING
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if "e" in f"{value:.3g}" else f"{value:.{digits}f}"


def listed(names: list[str], before_last: str = "and") -> str:
    """Returns names as a sentence lists them."""
    *most, last = names
    return f"{', '.join(most)} {before_last} {last}" if most else last


def explain_setting(setting: Mapping[str, Any]) -> str:
    """Returns how tokens are chosen at a setting, in a few words."""
    temperature = setting.get("temperature", 0.0)
    how = "the most likely token is always taken"
    if temperature > 0:
        how = f"tokens are drawn at random, at temperature {temperature:g}"
    rest = {name: value for name, value in setting.items() if name != "temperature"}
    return ", ".join([how, *map(code, assignments(rest))])


def assignments(fields: Mapping[str, Any]) -> list[str]:
    """Returns fields of a config and their values, those that are None left out."""
    return [
        f"{name} = {_plain_value(value)}" for name, value in fields.items() if value is not None
    ]


def _plain_value(value: Any) -> str:
    """Returns a value as JSON has it, a text bare, a run of numbers by its ends."""
    if isinstance(value, list) and len(value) > 2 and all(isinstance(one, int) for one in value):
        first, last = value[0], value[-1]
        if value == list(range(first, last + 1)):
            return f"{first}-{last}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
