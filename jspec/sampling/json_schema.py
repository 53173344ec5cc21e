"""A JSON schema as a regular expression: every text that it matches satisfies the schema.

Properties come in the schema's order, each at most once, and nothing else with them. Between the
parts of a text may be what `json.dumps` puts there, without indent or with one of 2 or 4. A keyword
that an expression cannot say, such as `multipleOf`, is refused; outlines-core, which compiles
schemas too, leaves it out in silence.
"""

import itertools
import json
import math
import re
import re._parser as parser  # type: ignore[import-untyped]
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

from jspec.common.errors import InputError
from jspec.sampling.patterns import Ranges, complement, ranges_of, why_unsupported

_INTEGER = r"-?(?:0|[1-9][0-9]*)"
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
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
MAX_DEPTH = 3  # of nested objects and arrays, where the schema leaves it open
_MAX_LEVELS = 16
_MAX_CHARACTERS = 400_000
# No exponents that readers take for infinity.
_NUMBER_PATTERN = _INTEGER + r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?"
_SIMPLE = {
    "integer": _INTEGER,
    "number": _NUMBER_PATTERN,
    "boolean": "(?:true|false)",
    "null": "null",
}
# The types, and the keywords that say something of their values.
_KEYWORDS: dict[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    **dict.fromkeys(_SIMPLE, ()),
    "integer": _BOUNDS,
}
_NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
          "discriminator", "$schema", "$id", "$comment", "$defs", "definitions"}  # fmt: skip


def schema_pattern(schema: Any) -> str:
    """Returns the expression of JSON texts that satisfy a schema.

    Raises:
      InputError: no schema, a keyword or a reference that is not supported, or one too large.
    """
    try:
        return _Compiler(schema).value(schema, 0, "schema")
    except RecursionError:  # of references that lead to references
        raise InputError("expected a smaller JSON schema, got one too deep") from None


class _Compiler:
    """Knows the whole schema, and the references in it that are being followed."""

    def __init__(self, root: Any) -> None:
        self._root, self._open = root, list[Any]()

    def value(self, schema: Any, level: int, where: str) -> str:
        """Returns the expression of a value that stands in this many objects and arrays."""
        schema = {} if schema is True else schema
        if not isinstance(schema, Mapping) or level > _MAX_LEVELS:
            _refuse(where, f"a JSON schema of at most {_MAX_LEVELS} levels", schema)
        asked = {name: of for name, of in schema.items() if name not in _NOTES}
        if "$ref" in asked:
            _check_keywords(asked, ["$ref"], where)
            pattern = self._reference(asked["$ref"], level, where)
        elif name := next((name for name in ("anyOf", "oneOf") if name in asked), None):
            _check_keywords(asked, [name], where)
            choices = _list_of(asked[name], f"{where}.{name}")
            pattern = _any_of([self.value(choice, level, f"{where}.{name}") for choice in choices])
            if name == "oneOf" and not _exclude_each_other(choices, self._resolve):
                _refuse(where, "a oneOf whose parts exclude each other by type or const", choices)
        else:
            pattern = self._of_types(asked, level, where)
        if len(pattern) > _MAX_CHARACTERS:
            _refuse(where, "a smaller JSON schema", f"{len(pattern)} characters of an expression")
        return pattern

    def _resolve(self, schema: Any) -> Any:
        """Returns what a schema refers to, which is known to be there."""
        is_reference = isinstance(schema, Mapping) and "$ref" in schema
        return self._resolve(self._find(schema["$ref"])) if is_reference else schema

    def _find(self, name: Any) -> Any:
        part_of_schema, (root, *parts) = self._root, str(name).split("/")
        for part in parts:
            part_of_schema = (
                part_of_schema.get(part) if isinstance(part_of_schema, Mapping) else None
            )
        return part_of_schema if root == "#" else None

    def _reference(self, name: Any, level: int, where: str) -> str:
        schema = self._find(name)
        if schema is None or name in self._open:
            _refuse(f"{where}.$ref", "a part such as #/$defs/NAME, without recursion", name)
        self._open.append(name)
        pattern = self.value(schema, level, name)
        self._open.pop()
        return pattern

    def _of_types(self, asked: dict[str, Any], level: int, where: str) -> str:
        types = asked.get("type") or [
            kind for kind, names in _KEYWORDS.items() if any(name in asked for name in names)
        ]
        if not types:  # anything
            simple = ["string", "number", "boolean", "null"]
            types = simple + ["object", "array"] * (level < MAX_DEPTH)
        types = types if isinstance(types, list) else [types]
        for kind in types:
            if kind not in list(_KEYWORDS):
                _refuse(f"{where}.type", f"one of {', '.join(_KEYWORDS)}", kind)
        for name in ("const", "enum"):
            if name in asked:
                _check_keywords(asked, ["type", name], where)
                texts = [_dumps(text, f"{where}.{name}") for text in (
                    [asked[name]] if name == "const" else _list_of(asked[name], f"{where}.{name}")
                )]  # fmt: skip
                if "type" in asked:
                    kind = _any_of([self._of_type(kind, {}, level, where) for kind in types])
                    texts = [text for text in texts if re.fullmatch(kind, text)]
                if not texts:
                    _refuse(f"{where}.{name}", f"a value of the type {asked['type']}", asked[name])
                return _any_of([re.escape(text) for text in texts])
        # Bounds of integers would say nothing of other numbers.
        known = [name for kind in types for name in _KEYWORDS[kind]
                 if not ("number" in types and name in _BOUNDS)]  # fmt: skip
        _check_keywords(asked, ["type", *known], where)
        return _any_of([self._of_type(kind, asked, level, where) for kind in types])

    def _of_type(self, kind: str, asked: dict[str, Any], level: int, where: str) -> str:
        if kind == "object":
            return self._object(asked, level, where)
        if kind == "string":
            return _string(asked, where)
        if kind == "integer" and any(name in asked for name in _BOUNDS):
            return _integer(asked, where)
        if kind != "array":
            return _SIMPLE[kind]
        value = self.value(asked.get("items", {}), level + 1, f"{where}.items")
        return _repeated("[]", value, level, *_limits(asked, "Items", where))

    def _object(self, asked: dict[str, Any], level: int, where: str) -> str:
        properties, required = asked.get("properties", {}), asked.get("required", [])
        if not isinstance(properties, Mapping):
            _refuse(f"{where}.properties", "an object", properties)
        for name in _list_of(required, f"{where}.required", 0):
            if name not in list(properties):
                _refuse(f"{where}.required", "some of the properties", name)
        others = asked.get("additionalProperties", True)
        if not properties and others is not False:
            value = self.value(others, level + 1, f"{where}.additionalProperties")
            return _repeated("{}", f"{_string({}, where)}: ?{value}", level, 0, None)
        members = [
            re.escape(_dumps(name, f"{where}.properties"))
            + ": ?"
            + self.value(subschema, level + 1, f"{where}.{name}")
            for name, subschema in properties.items()
        ]
        return _members(members, [name in required for name in properties], level)


def _space(level: int, otherwise: str = "") -> str:
    """Returns what may stand before a part: a line break with its indent, or something else."""
    indent = " " * (2 * level)
    return rf"(?:{otherwise}\n{indent}{f'(?:{indent})?' * (level > 0)})?"


def _repeated(signs: str, value: str, level: int, fewest: int, most: int | None) -> str:
    begin, end = map(re.escape, signs)
    if most == 0:
        return begin + end
    times = f"{{{max(fewest - 1, 0)},{'' if most is None else most - 1}}}"
    others = rf"(?:,{_space(level + 1, ' |')}{value}){times}"
    whole = rf"(?:{_space(level + 1)}{value}{others}{_space(level)})"
    return f"{begin}{whole}{'' if fewest else '?'}{end}"


def _members(members: Sequence[str], is_required: Sequence[bool], level: int) -> str:
    """Returns the expression of an object; its first member is one up to the first required."""
    after, firsts = rf",{_space(level + 1, ' |')}", []
    for place, member in enumerate(members):
        rest = zip(members[place + 1 :], is_required[place + 1 :], strict=True)
        others = [
            f"(?:{after}{pattern_after}){'' if must else '?'}" for pattern_after, must in rest
        ]
        firsts.append(member + "".join(others))
        if is_required[place]:
            break
    whole = _space(level + 1) + _any_of(firsts) + _space(level) if firsts else ""
    return rf"\{{(?:{whole}){'' if any(is_required) else '?'}\}}"


def _dumps(value: Any, where: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeError:
        _refuse(where, "characters of UTF-8", "half a surrogate pair")
    except ValueError:
        _refuse(where, "numbers that are finite", "others")
    return text


def _exclude_each_other(schemas: Sequence[Any], resolve: Callable[[Any], Any]) -> bool:
    """Returns whether it is plain that no value satisfies two of these schemas.

    They differ in type or constants, or are of objects that must have one property which does.
    `resolve` returns what a schema refers to.
    """
    pairs = itertools.combinations([resolve(first) for first in schemas], 2)
    return all(_are_apart(first, second, resolve) for first, second in pairs)


def _are_apart(first: Any, second: Any, resolve: Callable[[Any], Any]) -> bool:
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        return False
    types = [_types(schema) for schema in (first, second)]
    if not types[0] & types[1]:
        return True
    mine, theirs = _constants(first), _constants(second)
    if mine is not None and theirs is not None:
        return not mine & theirs
    if types != [{"object"}] * 2:
        return False
    return any(
        _exclude_each_other([schema["properties"][name] for schema in (first, second)], resolve)
        for name in first.get("required", ())
        if name in second.get("required", ())
        and all(name in schema.get("properties", {}) for schema in (first, second))
    )


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Returns the types that a schema's values may have; an integer is a number, too."""
    types = schema.get("type", ["object", "array", "string", "number", "boolean", "null"])
    types = set(types if isinstance(types, list) else [types])
    constants = _constants(schema)
    if constants is not None:
        types = {kind for kind, _ in constants}
    return {"number" if kind == "integer" else kind for kind in types}


def _constants(schema: Mapping[str, Any]) -> set[tuple[str, Any]] | None:
    """Returns type and value of all that a schema allows; None unless it lists simple values."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    names = {str: "string", bool: "boolean", type(None): "null", int: "number", float: "number"}
    if not isinstance(values, list) or any(type(value) not in names for value in values):
        return None
    return {(names[type(value)], value) for value in values}


def _integer(asked: dict[str, Any], where: str) -> str:
    """Returns the expression of an integer between the bounds that a schema has."""
    try:
        return _integer_between(*_integer_bounds(asked))
    except ValueError as error:
        _refuse(where, "bounds with an integer between them", error.args[0])


def _integer_bounds(asked: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Returns the least and the greatest integer that a schema allows; None for no such bound.

    Raises:
      ValueError: a bound is no number, or huge, or no integer lies between them.
    """
    given = {name: asked[name] for name in _BOUNDS if name in asked}
    for bound in given.values():
        # A bound that is no number compares as none, which NaN does, too.
        if type(bound) not in (int, float) or not abs(bound) < 10**_MOST_DIGITS:
            raise ValueError(bound)
    lows = [math.ceil(bound) if name == "minimum" else math.floor(bound) + 1
            for name, bound in given.items() if "inimum" in name]  # fmt: skip
    highs = [math.floor(bound) if name == "maximum" else math.ceil(bound) - 1
             for name, bound in given.items() if "aximum" in name]  # fmt: skip
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
    return _any_of(choices)


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
    return _any_of(choices)


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
    return _any_of(choices)


def _string(asked: dict[str, Any], where: str) -> str:
    """Returns the expression of a string in quotation marks."""
    fewest, most = _limits(asked, "Length", where)
    if "format" in asked:
        _check_keywords(asked, ["type", "format"], where)
        if asked["format"] not in list(FORMATS):
            _refuse(f"{where}.format", f"one of {', '.join(FORMATS)}", asked["format"])
        return f'"{FORMATS[asked["format"]]}"'
    if "pattern" in asked:
        _check_keywords(asked, ["type", "pattern"], where)
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
            raise ValueError("flags are not supported")
        anything = f"(?:{_PLAIN}|{_SHORT})*"
        return _anywhere(list(parsed), anything, anything)
    except TypeError:  # no text
        _refuse(f"{where}.pattern", "a regular expression", pattern)
    except (re.error, ValueError, OverflowError, RecursionError, Warning) as error:
        _refuse(f"{where}.pattern", "a regular expression", pattern, str(error))


def _anywhere(items: Any, before: str, after: str) -> str:
    """Returns the expression of items between others, unless an anchor says that none are there."""
    items = list(items)
    if items and str(items[0][1]) == "AT_BEGINNING":
        return _anywhere(items[1:], "", after)
    if items and str(items[-1][1]) == "AT_END":
        return _anywhere(items[:-1], before, "")
    op, value = items[0] if len(items) == 1 else ("", cast(Any, None))
    if str(op) == "BRANCH":
        return _any_of([_anywhere(branch, before, after) for branch in value[1]])
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
        return _any_of([_sequence(item) for item in value[1]])
    if op in ("MAX_REPEAT", "MIN_REPEAT"):
        fewest, most, item = value
        return f"(?:{_sequence(item)}){{{fewest},{'' if str(most) == 'MAXREPEAT' else most}}}"
    raise ValueError(why_unsupported(op))


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
    parts = [span for part, what in value[is_negated:]
             for span in _agreed(str(part), what, is_wide=is_wide != is_negated)]  # fmt: skip
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
    choices = [f"[{text}]"] * bool(plain) + [re.escape(escape_text) for escape_text in short]
    choices = choices or [re.escape(escape_text) for escape_text in escapes]
    if not choices:
        raise ValueError("a class without characters")
    return _any_of(choices)


def _limits(asked: dict[str, Any], of: str, where: str) -> tuple[int, int | None]:
    """Returns the fewest and the most parts, of `min...` and `max...`; None for no limit."""
    fewest, most = asked.get(f"min{of}", 0), asked.get(f"max{of}")
    given = [limit for limit in (fewest, most) if limit is not None]
    if any(type(limit) is not int or limit < 0 for limit in given) or given != sorted(given):
        _refuse(where, f"min{of} and max{of} as numbers, 0 or more, in order", (fewest, most))
    return fewest, most


def _check_keywords(asked: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Refuses a schema with other keywords than those that are known."""
    for name in asked:
        if name not in known:
            _refuse(where, f"nothing but {', '.join(dict.fromkeys(known))}", name)


def _list_of(value: Any, where: str, fewest: int = 1) -> list[Any]:
    """Returns a value that must be a list of at least `fewest`."""
    if not isinstance(value, list) or len(value) < fewest:
        _refuse(where, f"a list of {fewest} or more", value)
    return value


def _refuse(where: str, expected: str, value: object, reason: str = "") -> NoReturn:
    """Raises an `InputError` about a place in the schema."""
    message = f"expected {expected} in the JSON schema at {where[:60]}, got {value!r}"
    raise InputError(message[:300] + f": {reason}"[:100] * bool(reason))


def _any_of(patterns: Sequence[str]) -> str:
    """Returns the expression of what one of several matches."""
    return patterns[0] if len(patterns) == 1 else f"(?:{'|'.join(patterns)})"
