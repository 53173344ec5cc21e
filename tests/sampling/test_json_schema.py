"""JSON schemas as expressions: what they match satisfies the schema, and nothing is left out."""

import datetime
import json
import random
import re

import jsonschema
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.sampling import json_schema
from jspec.sampling.json_schema import FORMATS, schema_pattern
from jspec.sampling.patterns import compile_pattern

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n", None, 1.5]}, "maxItems": 2},
        "home": {"$ref": "#/$defs/Place"},
    },
    "required": ["age"],
    "additionalProperties": False,
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": ["number", "null"]}}}},
}
_SHAPES = {"oneOf": [
    {"type": "object", "properties": {"kind": {"const": name}, "r": {"type": "integer"}},
     "required": ["kind"]} for name in ("circle", "ring")
]}  # fmt: skip
_NAMED = {"type": "string", "pattern": r"^[A-Z][^\s]{1,3}-\d{2,}$"}
SCHEMAS = [
    _PERSON,
    _NAMED,
    {"type": "string", "pattern": "a.c"},
    {"type": "string", "pattern": r"^\W[^\w][^\W]\D$"},
    {"anyOf": [{"type": "boolean"}, {"type": "array", "minItems": 2, "items": {"const": "x"}}]},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object"},
    {"type": ["integer", "string"], "enum": [1, 2.5, "two", None]},
    {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}}},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "integer", "minimum": -12, "maximum": 105},
    {"type": ["integer", "null"], "exclusiveMinimum": 17.5},
    {"type": "array", "items": {"type": "integer", "exclusiveMaximum": -3}},
    *({"type": "string", "format": name} for name in FORMATS),
    _SHAPES,
    {"oneOf": [{"type": "null"}, {"enum": ["a", 1, True]}, {"$ref": "#/$defs/A"}],
     "$defs": {"A": {"type": "array", "items": {"type": "null"}}}},
    {},
]  # fmt: skip


def random_text(automaton, rng):
    """Returns a text that an automaton matches: all next states are equally likely."""
    state, text = 0, bytearray()
    while not automaton.is_end[state] or rng.random() < 0.5:
        goals = sorted(set(automaton.next_state[state].tolist()) - {-1})
        if not goals:
            break
        # Strings end soon.
        ends = [automaton.next_state[state, ord(sign)] for sign in '"}]']
        ends = [goal for goal in ends if goal >= 0]
        goal = rng.choice(ends if ends and rng.random() < 0.3 else goals)
        text.append(rng.choice(np.flatnonzero(automaton.next_state[state] == goal).tolist()))
        state = goal
    return text.decode()


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_what_is_matched_satisfies_the_schema(schema, monkeypatch):
    """By another program's opinion of it, and by `re`'s. Control: another schema's texts fail."""
    monkeypatch.setattr(json_schema, "MAX_DEPTH", 2)
    pattern, rng = schema_pattern(schema), random.Random(0)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    automaton = compile_pattern(pattern, 4000, 60_000)
    texts = {random_text(automaton, rng) for _ in range(100)}
    assert len(texts) > 1
    for text in texts:
        assert re.fullmatch(pattern, text)
        if not re.search(r"\\u[dD][89a-fA-F]", text):  # half a surrogate pair
            assert validator.is_valid(json.loads(text)), text
        if "time" in schema.get("format", ""):  # of which that program has no opinion
            day = "" if "date" in schema["format"] else "2024-01-01T"
            datetime.datetime.fromisoformat(day + json.loads(text))
    if schema:
        assert not validator.is_valid(["x"])


def test_integers_between_bounds_are_all_of_them_and_no_others():
    """Pairs of bounds by chance, either of which may be missing."""
    rng, numbers = random.Random(0), range(-1300, 1300)
    for _ in range(40):
        low, high = sorted(rng.choices(numbers, k=2))
        asked = rng.choice([{"minimum": low}, {"maximum": high}, {"minimum": low, "maximum": high}])
        pattern = re.compile(schema_pattern({"type": "integer"} | asked))
        matching = {number for number in numbers if pattern.fullmatch(str(number))}
        least, most = asked.get("minimum", -1300), asked.get("maximum", 1299)
        assert matching == set(range(least, most + 1)), asked
        assert not any(pattern.fullmatch(bad) for bad in ("", "-0", "007", "-", "1.0", "+3"))


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (_PERSON, {"name": "Zoë", "age": -3, "tags": ["b\n", 1.5], "home": {"x": None}}),
        (_PERSON, {"age": 0}),
        (_PERSON, {"age": 12, "home": {}}),
        (_NAMED, "Ab-12"),
        ({"type": "object"}, {"a": [1, "x", {"b": 2, "c": 1.5e-7}], "": {}, "d": [[], [None]]}),
        ({"properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {}}}, {"b": 2, "c": [True]}),
        ({"additionalProperties": {"type": "integer"}}, {"x": 1, "y": 20}),
        ({"const": {"a": [1, "*"]}}, {"a": [1, "*"]}),
        (_SHAPES, {"kind": "ring", "r": 2}),
        ({"const": [[[[[1]]]]]}, [[[[[1]]]]]),
    ],
)
def test_a_text_is_laid_out_as_json_writes_it(schema, value):
    """With any of the usual indents; not with a line break where none belongs."""
    pattern = re.compile(schema_pattern(schema))
    layouts = [{}, {"separators": (",", ":")}, {"indent": 2}, {"indent": 4}]
    for layout in layouts[: 1 if "const" in schema else 4]:  # constants have one layout
        text = json.dumps(value, ensure_ascii=False, **layout)
        assert pattern.fullmatch(text), text
        assert not pattern.fullmatch(text + "\n\n")
        assert not pattern.fullmatch("[" + text)


# Flat JSON, and references a thousand deep.
CHAIN = {"$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(1000)}, "$ref": "#/$defs/0"}


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"type": "number", "minimum": 3}, "nothing but type in the JSON schema at schema, got"),
        ({"type": ["number", "integer"], "minimum": 3}, "got 'minimum'"),
        ({"type": "integer", "minimum": "3"}, "bounds with an integer between them"),
        ({"type": "integer", "minimum": float("nan")}, "bounds with an integer between them"),
        ({"type": "integer", "minimum": 1e300}, "bounds with an integer between them"),
        ({"exclusiveMinimum": 3, "maximum": 3.5}, "got (4, 3)"),
        ({"type": "string", "format": "uri"}, "one of date, time, date-time, uuid, email, ipv4"),
        ({"type": "string", "format": ["date"]}, "one of date, time"),
        ({"format": "date", "minLength": 3}, "nothing but type, format"),
        *(({"oneOf": both}, "exclude each other") for both in (
            [{}, {}], [{"type": "integer"}, {"type": "number"}], [{"const": 1}, {"enum": [1.0]}],
            [{"const": [1]}, {"const": [1.0]}], [{"anyOf": [{}]}, {"type": "null"}],
            [{"properties": {}}, {"type": "null"}], _SHAPES["oneOf"][:1] * 2,
            [one | {"required": []} for one in _SHAPES["oneOf"]],
        )),
        ({"oneOf": [{"type": [[]]}, {}]}, "one of object, array"),
        ({"type": "array", "items": {"type": "integer", "multipleOf": 2}}, "at schema.items"),
        ({"type": "object", "properties": {"a": 3}}, "at schema.a, got 3"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "some of the properties"),
        ({"type": "thing"}, "one of object, array"),
        ({"type": [[]]}, "one of object, array"),
        ({"enum": []}, "a list of 1 or more"),
        ({"type": "integer", "enum": ["a"]}, "a value of the type integer"),
        ({"type": "string", "const": 3}, "at schema.const, got 3"),
        ({"type": "string", "pattern": "(?=a)"}, "expected a regular expression in the JSON schema "
         "at schema.pattern, got '(?=a)': look-around is not supported"),
        ({"type": "string", "pattern": "a\\b"}, "^, $ and \\b inside it are not supported"),
        ({"type": "string", "pattern": "(?i)a"}, "flags are not supported"),
        ({"type": "string", "pattern": "("}, "got '(': missing ), unterminated subpattern"),
        ({"type": "string", "pattern": "[[a]"}, "Possible nested set"),  # a warning of `re`
        ({"type": "string", "pattern": 3}, "a regular expression in the JSON schema at "
         "schema.pattern, got 3"),
        ({"type": "string", "pattern": "a", "maxLength": 2}, "got 'maxLength'"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "got (3, 2)"),
        ({"type": "array", "maxItems": True}, "as numbers, 0 or more"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "without recursion"),
        ({"$ref": "https://example.com"}, "a part such as"),
        ({"const": float("nan")}, "finite"),
        ([], "a JSON schema of at most"),
        (False, "a JSON schema of at most"),
        ({"anyOf": [{}] * 100}, "a smaller JSON schema"),
        (CHAIN, "got one too deep"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_is_refused(schema, part):
    with pytest.raises(InputError, match=re.escape(part)) as caught:
        schema_pattern(schema)
    assert len(str(caught.value)) <= 400
