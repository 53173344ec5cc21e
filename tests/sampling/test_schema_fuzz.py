"""What comes out of schemas and patterns that hypothesis makes, by the opinion of `jsonschema`."""

import json
import random
import re
import warnings

import jsonschema
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from jspec.common.errors import InputError
from jspec.sampling.json_schema import FORMATS, schema_pattern
from jspec.sampling.patterns import compile_pattern
from jspec.serving.tools import CallReader, Tool, demanded_call
from tests.sampling.test_json_schema import random_text

# Letters, what JSON escapes, controls, spaces beyond ASCII, other planes, halves of a pair.
_LETTERS = 'aZ09_-"\\/\b\n\r\t\x00\x1f\x7f\x85\xa0\u2028\u3000\ufeffé٣ß😀'
_HALVES = "\ud83d\ude00"
_CLASSES = [r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", "."]


def _classes() -> st.SearchStrategy[str]:
    parts = st.one_of(
        st.sampled_from(_CLASSES[:-1]),
        st.sampled_from(_LETTERS + _HALVES).map(re.escape),
        st.sampled_from(["a-z", "0-9", "\x00-\x1f", "\x20-\x7e", "\x80-\uffff", "!-~"]),
    )
    return st.builds(
        lambda sign, parts: f"[{sign}{''.join(parts)}]",
        st.sampled_from(["", "", "^"]), st.lists(parts, min_size=1, max_size=3),
    )  # fmt: skip


def _patterns() -> st.SearchStrategy[str]:
    letters = st.sampled_from(_LETTERS + _HALVES).map(re.escape)
    atoms = st.one_of(letters, letters, st.sampled_from(_CLASSES), _classes())

    def extended(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(
            st.lists(inner, min_size=1, max_size=3).map("".join),
            st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
            st.builds(lambda part, times: f"(?:{part}){times}", inner,
                      st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "+?", "{0}"])),
            inner.map(lambda part: f"^{part}$"), inner.map(lambda part: f"^{part}"),
            inner.map(lambda part: f"{part}$"), st.builds("{}|{}".format, inner, inner),
        )  # fmt: skip

    return st.recursive(atoms, extended, max_leaves=4)


_TEXTS = st.text(_LETTERS, max_size=4)
_NAMES = st.text(_LETTERS, min_size=0, max_size=3)
_VALUES = st.one_of(
    _TEXTS, st.text(_LETTERS + _HALVES, max_size=2), st.integers(-20, 300), st.none(),
    st.booleans(), st.floats(allow_nan=False, allow_infinity=False),
    st.lists(st.integers(0, 3), max_size=2), st.dictionaries(_NAMES, st.none(), max_size=1),
)  # fmt: skip


def _sizes(name: str) -> st.SearchStrategy[dict]:
    sizes = st.fixed_dictionaries(
        {}, optional={f"min{name}": st.integers(0, 2), f"max{name}": st.integers(0, 4)}
    )
    return sizes.filter(lambda part: part.get(f"min{name}", 0) <= part.get(f"max{name}", 9))


def _strings() -> st.SearchStrategy[dict]:
    return st.one_of(
        _patterns().map(lambda part: {"type": "string", "pattern": part}),
        _sizes("Length").map(lambda part: {"type": "string"} | part),
        st.sampled_from(sorted(FORMATS)).map(lambda part: {"type": "string", "format": part}),
    )


def _numbers() -> st.SearchStrategy[dict]:
    bounds = st.fixed_dictionaries({}, optional={
        "minimum": st.integers(-30, 5), "exclusiveMinimum": st.floats(-30, 5),
        "maximum": st.integers(6, 2000), "exclusiveMaximum": st.floats(7, 2000),
    })  # fmt: skip
    return st.one_of(st.just({"type": "number"}), bounds.map({"type": "integer"}.__or__))


def _objects(inner: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    def made(properties: dict, required: int, more: dict) -> dict:
        return {"type": "object", "properties": properties,
                "required": list(properties)[: required], **more}  # fmt: skip

    more = st.sampled_from([{}, {"additionalProperties": False}, {"additionalProperties": True}])
    return st.builds(made, st.dictionaries(_NAMES, inner, max_size=3), st.integers(0, 3), more)


def _schemas() -> st.SearchStrategy[dict]:
    simple = st.one_of(
        _strings(), _strings(), _numbers(), st.just({"type": "boolean"}), st.just({"type": "null"}),
        st.lists(_VALUES, min_size=1, max_size=3).map(lambda some: {"enum": some}),
        _VALUES.map(lambda part: {"const": part}),
        st.lists(st.sampled_from(["string", "integer", "null"]), min_size=1, max_size=3,
                 unique=True).map(lambda some: {"type": some}),
    )  # fmt: skip

    def nested(inner: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
        return st.one_of(
            _objects(inner), _objects(inner),
            st.builds(lambda of, size: {"type": "array", "items": of} | size, inner,
                      _sizes("Items")),
            st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
            st.lists(inner, min_size=1, max_size=2).map(lambda some: {"oneOf": some}),
            inner.map(lambda part: {"type": "object", "additionalProperties": part}),
        )  # fmt: skip

    whole = st.recursive(simple, nested, max_leaves=4)
    return whole | whole.map(lambda part: {"$ref": "#/$defs/a", "$defs": {"a": part}})


def _texts(pattern: str, rng: random.Random) -> list[str]:
    """Returns texts that an expression matches; an InputError for one that the server refuses."""
    automaton = compile_pattern(pattern, 4095, 60_000)
    return [random_text(automaton, rng) for _ in range(4)]


def _check(schema: dict, rng: random.Random) -> None:
    """Checks that answers satisfy the schema; an InputError where it is refused."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    for text in _texts(schema_pattern(schema), rng):
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # no half of a surrogate pair
        validator.validate(value)


def _check_call(schema: dict, rng: random.Random) -> None:
    """The same of a call that must be made, as the server takes it out of the answer."""
    parameters = {"type": "object", "properties": {"p": schema}, "required": ["p"],
                  "$defs": schema.get("$defs", {})}  # fmt: skip
    function = {"name": "f", "parameters": parameters}
    tool = Tool.model_validate({"type": "function", "function": function})
    for text in _texts(demanded_call("required", [tool]) or "", rng):
        reader, cut = CallReader(is_forced=True), rng.randint(0, len(text))
        deltas = [reader.push(text[:cut], is_last=False), reader.push(text[cut:], is_last=True)]
        (call,) = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert not any("content" in delta for delta in deltas)
        jsonschema.validate(json.loads(call["function"]["arguments"]), parameters)


def _fuzz(number: int, first: int) -> None:
    refusals, count = [], 0

    @seed(first)
    @settings(
        max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(_schemas(), st.randoms(use_true_random=False), st.booleans())
    def run(schema: dict, rng: random.Random, is_call: bool) -> None:
        nonlocal count
        count += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of `re`, about what is taken literally in a class
            try:
                (_check_call if is_call else _check)(schema, rng)
            except InputError as error:
                refusals.append(str(error))

    run()
    assert all("schema at " in part or "pattern" in part for part in refusals), "with their place"
    assert len(refusals) < count / 2, "most schemas are of the kinds that are supported"


def test_what_comes_out_of_a_schema_satisfies_it():
    _fuzz(15, 0)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_what_comes_out_of_two_thousand_schemas_satisfies_them(part):
    _fuzz(200, 1 + part)
