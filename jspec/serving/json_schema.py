"""A JSON schema as a regular expression: every text that it matches satisfies the schema.

Properties come in the schema's order, each at most once, and nothing else with them. Between the
parts of a text may be what `json.dumps` puts there, without indent or with one of 2 or 4. A keyword
that an expression cannot say, such as `multipleOf`, is refused; outlines-core, which compiles
schemas too, leaves it out in silence.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.common.errors import InputError
from jspec.serving.json_branches import exclude_each_other
from jspec.serving.json_values import (
    BOUNDS,
    INTEGER,
    any_of,
    check_keywords,
    integer,
    limits,
    list_of,
    refuse,
    string,
)

MAX_DEPTH = 3  # of objects and arrays in each other, where the schema leaves it open
_MAX_LEVELS = 16
_MAX_CHARACTERS = 400_000
# No exponents that readers take for infinity.
_NUMBER = INTEGER + r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?"
_SIMPLE = {"integer": INTEGER, "number": _NUMBER, "boolean": "(?:true|false)", "null": "null"}
# The types, and the keywords that say something of their values.
_KEYWORDS: dict[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    **dict.fromkeys(_SIMPLE, ()),
    "integer": BOUNDS,
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
            refuse(where, f"a JSON schema of at most {_MAX_LEVELS} levels", schema)
        asked = {name: of for name, of in schema.items() if name not in _NOTES}
        if "$ref" in asked:
            check_keywords(asked, ["$ref"], where)
            found = self._reference(asked["$ref"], level, where)
        elif name := next((name for name in ("anyOf", "oneOf") if name in asked), None):
            check_keywords(asked, [name], where)
            choices = list_of(asked[name], f"{where}.{name}")
            found = any_of([self.value(one, level, f"{where}.{name}") for one in choices])
            if name == "oneOf" and not exclude_each_other(choices, self._resolve):
                refuse(where, "a oneOf whose parts exclude each other by type or const", choices)
        else:
            found = self._of_types(asked, level, where)
        if len(found) > _MAX_CHARACTERS:
            refuse(where, "a smaller JSON schema", f"{len(found)} characters of an expression")
        return found

    def _resolve(self, schema: Any) -> Any:
        """Returns what a schema refers to, which is known to be there."""
        is_reference = isinstance(schema, Mapping) and "$ref" in schema
        return self._resolve(self._find(schema["$ref"])) if is_reference else schema

    def _find(self, name: Any) -> Any:
        found, (root, *parts) = self._root, str(name).split("/")
        for part in parts:
            found = found.get(part) if isinstance(found, Mapping) else None
        return found if root == "#" else None

    def _reference(self, name: Any, level: int, where: str) -> str:
        found = self._find(name)
        if found is None or name in self._open:
            refuse(f"{where}.$ref", "a part such as #/$defs/NAME, without recursion", name)
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
                refuse(f"{where}.type", f"one of {', '.join(_KEYWORDS)}", kind)
        for name in ("const", "enum"):
            if name in asked:
                check_keywords(asked, ["type", name], where)
                texts = [_dumps(one, f"{where}.{name}") for one in (
                    [asked[name]] if name == "const" else list_of(asked[name], f"{where}.{name}")
                )]  # fmt: skip
                if "type" in asked:
                    kind = any_of([self._of_type(kind, {}, level, where) for kind in types])
                    texts = [one for one in texts if re.fullmatch(kind, one)]
                if not texts:
                    refuse(f"{where}.{name}", f"a value of the type {asked['type']}", asked[name])
                return any_of([re.escape(one) for one in texts])
        # Bounds of integers would say nothing of other numbers.
        known = [name for kind in types for name in _KEYWORDS[kind]
                 if not ("number" in types and name in BOUNDS)]  # fmt: skip
        check_keywords(asked, ["type", *known], where)
        return any_of([self._of_type(kind, asked, level, where) for kind in types])

    def _of_type(self, kind: str, asked: dict[str, Any], level: int, where: str) -> str:
        if kind == "object":
            return self._object(asked, level, where)
        if kind == "string":
            return string(asked, where)
        if kind == "integer" and any(name in asked for name in BOUNDS):
            return integer(asked, where)
        if kind != "array":
            return _SIMPLE[kind]
        value = self.value(asked.get("items", {}), level + 1, f"{where}.items")
        return _repeated("[]", value, level, *limits(asked, "Items", where))

    def _object(self, asked: dict[str, Any], level: int, where: str) -> str:
        properties, required = asked.get("properties", {}), asked.get("required", [])
        if not isinstance(properties, Mapping):
            refuse(f"{where}.properties", "an object", properties)
        for name in list_of(required, f"{where}.required", 0):
            if name not in list(properties):
                refuse(f"{where}.required", "some of the properties", name)
        others = asked.get("additionalProperties", True)
        if not properties and others is not False:
            value = self.value(others, level + 1, f"{where}.additionalProperties")
            return _repeated("{}", f"{string({}, where)}: ?{value}", level, 0, None)
        members = [
            re.escape(_dumps(name, f"{where}.properties"))
            + ": ?"
            + self.value(one, level + 1, f"{where}.{name}")
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
    whole = _space(level + 1) + any_of(firsts) + _space(level) if firsts else ""
    return rf"\{{(?:{whole}){'' if any(is_required) else '?'}\}}"


def _dumps(value: Any, where: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeError:
        refuse(where, "characters of UTF-8", "half a surrogate pair")
    except ValueError:
        refuse(where, "numbers that are finite", "others")
    return text
