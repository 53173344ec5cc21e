"""Expressions of JSON strings and of integers between bounds, and what refuses a schema."""

import json
import math
import re
import re._parser as parser  # type: ignore[import-untyped]
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

from jspec.common.errors import InputError
from jspec.sampling.patterns import Ranges, complement, ranges_of

INTEGER = r"-?(?:0|[1-9][0-9]*)"
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_PLAIN = r'[^"\\\x00-\x1f]'  # a character of a string that stands for itself
# What Python or ECMAScript takes for a space.
_SPACES = [(0x09, 0x0D), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680),
           (0x180E, 0x180E), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
           (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]  # fmt: skip
_BEYOND_ASCII = (0x80, 0x10FFFF)
_BREAKS = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]  # no dot matches them
_ESCAPED = [(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]  # by JSON
_SHORT = r'\\["\\/bfnrt]'  # one that is escaped
# One by its number, which is no surrogate but in a pair.
_NUMBER = (r"\\u(?:[0-9A-Ca-cE-Fe-f][0-9A-Fa-f]{3}|[Dd][0-7][0-9A-Fa-f]{2}"
           r"|[Dd][89ABab][0-9A-Fa-f]{2}\\u[Dd][C-Fc-f][0-9A-Fa-f]{2})")  # fmt: skip
_MOST_DIGITS = 18  # of a bound
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAYS = ("(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"
         "02-(?:0[1-9]|1[0-9]|2[0-8]))")  # fmt: skip
_DATE = f"(?:{_YEAR}-{_DAYS}|{_LEAP}-02-29)"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
# Without leap seconds, which most readers refuse.
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_CLOCK})"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_NAME, _LABEL = "[A-Za-z0-9_+-]{1,32}", "[A-Za-z0-9](?:[A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
_HEX = "[0-9A-Fa-f]"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    # Not all that RFC 5321 allows: what people have.
    "email": rf"{_NAME}(?:\.{_NAME})?@{_LABEL}(?:\.{_LABEL}){{1,2}}",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
}


def integer(asked: dict[str, Any], where: str) -> str:
    """Returns the expression of an integer between the bounds that a schema has."""
    try:
        return _integer_between(*_integer_bounds(asked))
    except ValueError as error:
        refuse(where, "bounds with an integer between them", error.args[0])


def _integer_bounds(asked: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Returns the least and the greatest integer that a schema allows; None for no such bound.

    Raises:
      ValueError: a bound is no number or a huge one, or no integer lies between them.
    """
    given = {name: asked[name] for name in BOUNDS if name in asked}
    for one in given.values():
        # A bound that is no number compares as none, which NaN does, too.
        if type(one) not in (int, float) or not abs(one) < 10**_MOST_DIGITS:
            raise ValueError(one)
    lows = [math.ceil(one) if name == "minimum" else math.floor(one) + 1
            for name, one in given.items() if "inimum" in name]  # fmt: skip
    highs = [math.floor(one) if name == "maximum" else math.ceil(one) - 1
             for name, one in given.items() if "aximum" in name]  # fmt: skip
    low, high = max(lows, default=None), min(highs, default=None)
    if low is not None and high is not None and low > high:
        raise ValueError((low, high))
    return low, high


def _integer_between(low: int | None, high: int | None) -> str:
    """Returns the expression of the integers between two, both included; None for no bound."""
    choices = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        choices.append("-" + _whole_between(least, None if low is None else -low))
    if high is None or high >= 0:
        choices.append(_whole_between(max(low or 0, 0), high))
    return any_of(choices)


def _whole_between(low: int, high: int | None) -> str:
    """Returns the expression of the integers between two that are not below 0."""
    longest = len(str(low if high is None else high))
    choices = []
    for length in range(len(str(low)), longest + 1):
        first = max(low, 10 ** (length - 1) if length > 1 else 0)
        last = 10**length - 1 if high is None else min(high, 10**length - 1)
        choices.append(_digits_between(str(first), str(last)))
    if high is None:
        choices.append(f"[1-9][0-9]{{{longest},}}")
    return any_of(choices)


def _digits_between(low: str, high: str) -> str:
    """Returns the expression of the digits between two that are as long."""
    count = len(low) - 1
    if (low, high) == ("0" * (count + 1), "9" * (count + 1)):
        return f"[0-9]{{{count + 1}}}"
    if low[:1] == high[:1]:
        return low[:1] + (_digits_between(low[1:], high[1:]) if low else "")
    zeros, nines = "0" * count, "9" * count
    choices = [low[0] + _digits_between(low[1:], nines), high[0] + _digits_between(zeros, high[1:])]
    first, last = int(low[0]) + 1, int(high[0]) - 1
    if first <= last:
        choices.append(f"[{first}-{last}][0-9]{{{count}}}")
    return any_of(choices)


def string(asked: dict[str, Any], where: str) -> str:
    """Returns the expression of a string in quotation marks."""
    fewest, most = limits(asked, "Length", where)
    if "format" in asked:
        check_keywords(asked, ["type", "format"], where)
        if asked["format"] not in list(FORMATS):
            refuse(f"{where}.format", f"one of {', '.join(FORMATS)}", asked["format"])
        return f'"{FORMATS[asked["format"]]}"'
    if "pattern" in asked:
        check_keywords(asked, ["type", "pattern"], where)
        return f'"{_searched(asked["pattern"], where)}"'
    if (fewest, most) == (0, None):
        return f'"(?:{_PLAIN}|{_SHORT}|{_NUMBER})*"'
    # Two escapes with \u may be one character, so there are none where characters are counted.
    return rf'"(?:{_PLAIN}|{_SHORT}){{{fewest},{"" if most is None else most}}}"'


def _searched(pattern: Any, where: str) -> str:
    """Returns the expression of the texts in JSON of strings in which a pattern matches.

    Of what Python's `re` and ECMAScript read differently, only what both read alike is taken.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parsed: Any = parser.parse(pattern, re.ASCII)
        if parsed.state.flags & ~(re.ASCII | re.VERBOSE):
            raise ValueError("flags")
        anything = f"(?:{_PLAIN}|{_SHORT})*"
        return _anywhere(list(parsed), anything, anything)
    except (re.error, TypeError, ValueError, OverflowError, RecursionError, Warning):
        refuse(f"{where}.pattern", "an expression of literals, classes, groups and repetitions, in "
               "which each class has a character", pattern)  # fmt: skip


def _anywhere(items: Any, before: str, after: str) -> str:
    """Returns the expression of items between others, unless an anchor says that none are there."""
    items = list(items)
    if items and str(items[0][1]) == "AT_BEGINNING":
        return _anywhere(items[1:], "", after)
    if items and str(items[-1][1]) == "AT_END":
        return _anywhere(items[:-1], before, "")
    op, value = items[0] if len(items) == 1 else ("", cast(Any, None))
    if str(op) == "BRANCH":
        return any_of([_anywhere(one, before, after) for one in value[1]])
    if str(op) == "SUBPATTERN" and not any(value[1:3]):
        return _anywhere(value[3], before, after)
    return before + _sequence(items) + after


def _sequence(items: Any) -> str:
    return "".join(_part(str(op), value) for op, value in items)


def _part(op: str, value: Any) -> str:
    if op in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
        return _character(_agreed(op, value))
    if op == "SUBPATTERN" and not any(value[1:3]):  # flags
        return f"(?:{_sequence(value[3])})"
    if op == "BRANCH":
        return any_of([_sequence(one) for one in value[1]])
    if op in ("MAX_REPEAT", "MIN_REPEAT"):
        fewest, most, one = value
        return f"(?:{_sequence(one)}){{{fewest},{'' if str(most) == 'MAXREPEAT' else most}}}"
    raise ValueError(op)


def _agreed(op: str, value: Any, *, is_wide: bool = False) -> Ranges:
    """Returns the characters of a class by Python and ECMAScript; if `is_wide`, by either."""
    if op == "ANY":
        return complement(_BREAKS[: 1 if is_wide else None])
    if op == "CATEGORY":
        is_not, ranges = "NOT_" in str(value), ranges_of(op, str(value).replace("NOT_", ""))
        if is_wide != is_not:  # all digits and letters there are, of which nobody asks
            ranges = _SPACES if "SPACE" in str(value) else [*ranges, _BEYOND_ASCII]
        return complement(ranges) if is_not else ranges
    if op != "IN":
        return ranges_of(op, value)
    is_negated = str(value[0][0]) == "NEGATE"
    parts = [one for part, what in value[is_negated:]
             for one in _agreed(str(part), what, is_wide=is_wide != is_negated)]  # fmt: skip
    return complement(parts) if is_negated else parts


def _character(ranges: Ranges) -> str:
    """Returns the expression of one character of some in a JSON string.

    Controls are there that have a short escape, or if there is nothing else: each takes states.
    """
    plain = complement([*complement(ranges), *_ESCAPED, (0xD800, 0xDFFF)])
    text = "".join(rf"\U{low:08x}-\U{high:08x}" for low, high in plain)
    inside = [code for low, high in _ESCAPED for code in range(low, high + 1)
              if any(first <= code <= last for first, last in ranges)]  # fmt: skip
    escapes = [json.dumps(chr(code))[1:-1] for code in inside]
    short = [escape for escape in escapes if len(escape) == 2]
    choices = [f"[{text}]"] * bool(plain) + [re.escape(one) for one in short]
    choices = choices or [re.escape(one) for one in escapes]
    if not choices:
        raise ValueError("a class without characters")
    return any_of(choices)


def limits(asked: dict[str, Any], of: str, where: str) -> tuple[int, int | None]:
    """Returns the fewest and the most parts, of `min...` and `max...`; None for no limit."""
    fewest, most = asked.get(f"min{of}", 0), asked.get(f"max{of}")
    given = [one for one in (fewest, most) if one is not None]
    if any(type(one) is not int or one < 0 for one in given) or given != sorted(given):
        refuse(where, f"min{of} and max{of} as numbers, 0 or more, in order", (fewest, most))
    return fewest, most


def check_keywords(asked: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Refuses a schema with other keywords than those that are known."""
    for name in asked:
        if name not in known:
            refuse(where, f"nothing but {', '.join(dict.fromkeys(known))}", name)


def list_of(value: Any, where: str, fewest: int = 1) -> list[Any]:
    """Returns a value that must be a list of at least `fewest`."""
    if not isinstance(value, list) or len(value) < fewest:
        refuse(where, f"a list of {fewest} or more", value)
    return value


def refuse(where: str, expected: str, found: object) -> NoReturn:
    """Raises an `InputError` about a place in the schema."""
    raise InputError(f"expected {expected} in the JSON schema at {where[:60]}, got {found!r}"[:400])


def any_of(patterns: Sequence[str]) -> str:
    """Returns the expression of what one of several matches."""
    return patterns[0] if len(patterns) == 1 else f"(?:{'|'.join(patterns)})"
