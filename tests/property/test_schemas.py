"""Whatever is drawn from what a schema's grammar allows, and ends, validates against the schema as it was given."""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from walking import grammars, tokens_of, walked

from agentkv.errors import InvalidRequest
from agentkv.schemas.constraints import Constraint

NAMES = st.sampled_from(["a", "b", "name", "ä", 'q"', "a b", "~/", "$ref"])
TEXTS = st.text('aé\n"\\/', max_size=4)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(10**6), 10**6), st.floats(-1e6, 1e6), TEXTS)
EXACT = st.one_of(st.none(), st.booleans(), st.integers(-(2**53) + 1, 2**53 - 1), st.sampled_from([0.5, -2.25]), TEXTS)
BOUNDS = st.one_of(
    st.integers(-(10**4), 10**4), st.floats(-1e4, 1e4), st.floats(-1e-4, 1e-4), st.integers(-(2**60), 2**60)
)
WEIRD = st.sampled_from([0.1, 0.30000000000000004, 0.9999999999999999, 1e-17, 5e-324, 1.0, 0.0, -0.0, 2.0**53, 1e22])
NUMBERS = st.builds(
    lambda kind, ends, low, high: {"type": kind, **dict(zip((low, high), sorted(ends), strict=False))},
    st.sampled_from(["integer", "number", ["number", "null"]]),
    st.lists(BOUNDS | WEIRD, max_size=2),
    st.sampled_from(["minimum", "exclusiveMinimum"]),
    st.sampled_from(["maximum", "exclusiveMaximum"]),
)
MULTIPLES = st.integers(1, 1000).map(lambda n: {"type": "integer", "multipleOf": n})
STRINGS = st.one_of(
    st.fixed_dictionaries({}, optional={"minLength": st.integers(0, 2), "maxLength": st.integers(2, 6)}),
    st.sampled_from(["^[a-c]+$", "b{1,3}", "^(x|yy)?$", r"^\d{2}", r"^\w\s\w$", "é"]).map(lambda p: {"pattern": p}),
    st.sampled_from(["date", "time", "uuid", "ipv4", "duration", "password"]).map(lambda f: {"format": f}),
).map(lambda rest: {"type": "string", **rest})
LEAVES = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean", "title": "a title"}),
    NUMBERS,
    MULTIPLES,
    STRINGS,
    st.builds(lambda values: {"enum": values}, st.lists(SCALARS, min_size=1, max_size=3)),
    st.builds(lambda value: {"const": value}, SCALARS | st.lists(SCALARS, max_size=2)),
    st.just({"$ref": "#/$defs/leaf~0 x"}),
)


def composed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    objects = st.dictionaries(NAMES, inner, max_size=3).flatmap(
        lambda properties: st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.just(properties)},
            optional={
                "required": st.lists(st.sampled_from(sorted(properties)), unique=True) if properties else st.just([]),
                "additionalProperties": st.booleans() | inner,
                "minProperties": st.just(0),
            },
        )
    )
    arrays = st.builds(
        lambda items, prefix, least, more: {
            "type": "array",
            "items": items,
            **({"prefixItems": prefix} if prefix else {}),
            "minItems": least,
            "maxItems": least + more,
        },
        inner,
        st.lists(inner, max_size=2),
        st.integers(0, 2),
        st.integers(0, 2),
    )
    tagged = st.builds(
        lambda first, second: {
            "oneOf": [
                {"type": "object", "properties": {"kind": {"const": "x"}, "v": first}},
                {"type": "object", "properties": {"v": second, "kind": {"enum": ["y", 1]}}},
            ]
        },
        inner,
        inner,
    )
    merged = st.builds(
        lambda first, second: {
            "type": "object",
            "properties": {"a": first},
            "required": ["a"],
            "allOf": [{"properties": {"b": second}, "required": ["b"]}],
        },
        inner,
        inner,
    )
    either = st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
    return st.one_of(objects, arrays, tagged, merged, either)


SCHEMAS = st.builds(
    lambda schema, leaf: {**schema, "$defs": {"leaf~ x": leaf}, "$schema": Draft202012Validator.META_SCHEMA["$id"]},
    st.recursive(LEAVES, composed, max_leaves=6),
    NUMBERS | STRINGS,
)


@settings(max_examples=100)
@given(SCHEMAS, st.integers(0, 2**32))
def test_what_ends_validates(schema: dict[str, Any], seed: int) -> None:
    Draft202012Validator.check_schema(schema)
    try:
        constraint = Constraint.json(schema)
        text = walked(constraint, seed)
    except InvalidRequest as error:
        event(f"refused: {str(error).split(':')[-1][:40]}")
        assert error.param == "schema" and "#" in str(error), "refused by name and place"
        return
    event("ended" if text is not None else "cut")
    assume(text is not None)
    assert text is not None
    value = json.loads(text)
    Draft202012Validator(schema).validate(value)
    assert not re.search(r"  |[^ -~]| [,:\]}]", re.sub(r'"(\\.|[^"\\])*"', '""', text)), "one line, single spaces"


@settings(max_examples=100)
@given(st.recursive(EXACT, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3)))
def test_a_constant_is_written_as_python_writes_it_and_is_whole(value: Any) -> None:
    matcher = grammars().start(Constraint.json({"const": value}))
    text = json.dumps(value, ensure_ascii=False)
    for token in tokens_of(text):
        assert not matcher.finished and matcher.allowed().any()
        matcher.advance(token)
    assert json.loads(text) == value
