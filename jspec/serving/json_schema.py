"""A JSON schema as a regular expression: every text that it matches satisfies the schema.

Properties come in the schema's order, each at most once, and nothing else with them. Between the
parts of a text may be what `json.dumps` puts there, without indent or with one of 2 or 4. A keyword
that an expression cannot say, such as `minimum`, is refused; outlines-core, which compiles schemas
too, leaves it out in silence.
"""

import json
import re
import re._parser as parser  # type: ignore[import-untyped]
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jspec.common.errors import InputError
from jspec.drafters.pattern_regex import complement, ranges_of

MAX_DEPTH = 3  # of objects and arrays in each other, where the schema leaves it open
_MAX_LEVELS = 16
_MAX_CHARACTERS = 400_000
_PLAIN = r'[^"\\\x00-\x1f]'  # a character of a string that stands for itself
# What no text by a `pattern` has: what JSON escapes, and spaces beyond ASCII, which `\S` means too.
_NOT_PLAIN = [(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x80, 0xA0), (0x1680, 0x1680),
              (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F),
              (0x3000, 0x3000), (0xFEFF, 0xFEFF)]  # fmt: skip
_SHORT = r'\\["\\/bfnrt]'  # one that is escaped
_INTEGER = r"-?(?:0|[1-9][0-9]*)"
_NUMBER = _INTEGER + r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_SIMPLE = {"integer": _INTEGER, "number": _NUMBER, "boolean": "(?:true|false)", "null": "null"}
# The types, and the keywords that say something of their values.
_KEYWORDS: dict[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern"),
    **dict.fromkeys(_SIMPLE, ()),
}
_NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
          "$schema", "$id", "$comment", "$defs", "definitions"}  # fmt: skip


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
            found = self._reference(asked["$ref"], level, where)
        elif "anyOf" in asked:
            _check_keywords(asked, ["anyOf"], where)
            choices = _list(asked["anyOf"], f"{where}.anyOf")
            found = _any_of([self.value(one, level, f"{where}.anyOf") for one in choices])
        else:
            found = self._of_types(asked, level, where)
        if len(found) > _MAX_CHARACTERS:
            _refuse(where, "a smaller JSON schema", f"{len(found)} characters of an expression")
        return found

    def _reference(self, name: Any, level: int, where: str) -> str:
        found, (root, *parts) = self._root, str(name).split("/")
        for part in parts:
            found = found.get(part) if isinstance(found, Mapping) else None
        if root != "#" or found is None or name in self._open:
            _refuse(f"{where}.$ref", "a part such as #/$defs/NAME, without recursion", name)
        self._open.append(name)
        pattern = self.value(found, level, name)
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
                texts = [_dumps(one) for one in (
                    [asked[name]] if name == "const" else _list(asked[name], f"{where}.{name}")
                )]  # fmt: skip
                if "type" in asked:
                    kind = _any_of([self._of_type(kind, {}, level, where) for kind in types])
                    texts = [one for one in texts if re.fullmatch(kind, one)]
                return _any_of([re.escape(one) for one in _list(texts, f"{where}.{name}")])
        known = [name for kind in types for name in _KEYWORDS[kind]]
        _check_keywords(asked, ["type", *known], where)
        return _any_of([self._of_type(kind, asked, level, where) for kind in types])

    def _of_type(self, kind: str, asked: dict[str, Any], level: int, where: str) -> str:
        if kind == "object":
            return self._object(asked, level, where)
        if kind == "string":
            return _string(asked, where)
        if kind != "array":
            return _SIMPLE[kind]
        value = self.value(asked.get("items", {}), level + 1, f"{where}.items")
        return _repeated("[]", value, level, *_limits(asked, "Items", where))

    def _object(self, asked: dict[str, Any], level: int, where: str) -> str:
        properties, required = asked.get("properties", {}), asked.get("required", [])
        if not isinstance(properties, Mapping):
            _refuse(f"{where}.properties", "an object", properties)
        for name in _list(required, f"{where}.required", 0):
            if name not in list(properties):
                _refuse(f"{where}.required", "some of the properties", name)
        others = asked.get("additionalProperties", True)
        if not properties and others is not False:
            value = self.value(others, level + 1, f"{where}.additionalProperties")
            return _repeated("{}", f"{_string({}, where)}: ?{value}", level, 0, None)
        members = [
            re.escape(_dumps(name)) + ": ?" + self.value(one, level + 1, f"{where}.{name}")
            for name, one in properties.items()
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
        others = [f"(?:{after}{one}){'' if must else '?'}" for one, must in rest]
        firsts.append(member + "".join(others))
        if is_required[place]:
            break
    whole = _space(level + 1) + _any_of(firsts) + _space(level) if firsts else ""
    return rf"\{{(?:{whole}){'' if any(is_required) else '?'}\}}"


def _string(asked: dict[str, Any], where: str) -> str:
    fewest, most = _limits(asked, "Length", where)
    if "pattern" in asked:
        _check_keywords(asked, ["type", "pattern"], where)
        return f'"{_plain_pattern(asked["pattern"], where)}"'
    if (fewest, most) == (0, None):
        return rf'"(?:{_PLAIN}|{_SHORT}|\\u[0-9A-Fa-f]{{4}})*"'
    # Two escapes with \u may be one character, so there are none where characters are counted.
    return rf'"(?:{_PLAIN}|{_SHORT}){{{fewest},{"" if most is None else most}}}"'


def _plain_pattern(pattern: Any, where: str) -> str:
    """Returns a pattern, which may match in the middle, without characters that JSON escapes."""
    try:
        parsed: Any = parser.parse(pattern, re.ASCII)
        items = list(parsed)
        first, last = (str(items[end][1]) if items else "" for end in (0, -1))
        is_bound = first == "AT_BEGINNING", last == "AT_END"
        text = _sequence(items[is_bound[0] : len(items) - is_bound[1]])
    except (re.error, TypeError, ValueError, OverflowError, RecursionError, Warning):
        _refuse(f"{where}.pattern", "an expression of literals, classes, groups and repetitions",
                pattern)  # fmt: skip
    before, after = ("" if bound else f"(?:{_PLAIN})*" for bound in is_bound)
    return f"{before}{text}{after}"


def _sequence(items: Any) -> str:
    return "".join(_part(str(op), value) for op, value in items)


def _part(op: str, value: Any) -> str:
    if op in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
        rest = complement([*complement(ranges_of(op, value)), *_NOT_PLAIN])
        return "[" + "".join(rf"\U{low:08x}-\U{high:08x}" for low, high in rest) + "]"
    if op == "SUBPATTERN":
        return f"(?:{_sequence(value[3])})"
    if op == "BRANCH":
        return _any_of([_sequence(one) for one in value[1]])
    if op in ("MAX_REPEAT", "MIN_REPEAT"):
        fewest, most, one = value
        return f"(?:{_sequence(one)}){{{fewest},{'' if str(most) == 'MAXREPEAT' else most}}}"
    raise ValueError(op)


def _limits(asked: dict[str, Any], of: str, where: str) -> tuple[int, int | None]:
    fewest, most = asked.get(f"min{of}", 0), asked.get(f"max{of}")
    given = [one for one in (fewest, most) if one is not None]
    if any(type(one) is not int or one < 0 for one in given) or given != sorted(given):
        _refuse(where, f"min{of} and max{of} as numbers, 0 or more, in order", (fewest, most))
    return fewest, most


def _dumps(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise InputError("expected a JSON schema with numbers that are finite") from None


def _check_keywords(asked: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in asked:
        if name not in known:
            _refuse(where, f"nothing but {', '.join(dict.fromkeys(known))}", name)


def _list(value: Any, where: str, fewest: int = 1) -> list[Any]:
    if not isinstance(value, list) or len(value) < fewest:
        _refuse(where, f"a list of {fewest} or more of its type", value)
    return value


def _refuse(where: str, expected: str, found: object) -> NoReturn:
    raise InputError(f"expected {expected} in the JSON schema at {where[:60]}, got {found!r}"[:400])


def _any_of(patterns: Sequence[str]) -> str:
    return patterns[0] if len(patterns) == 1 else f"(?:{'|'.join(patterns)})"
