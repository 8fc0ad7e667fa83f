"""Schemas are read keyword by keyword: honoured, or refused by name and place. What is left out stays valid."""

from __future__ import annotations

import datetime
import json
import re
from ipaddress import IPv4Address, IPv6Address
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import UUID4, BaseModel, ConfigDict, Field, HttpUrl, IPvAnyAddress, TypeAdapter

from agentkv.errors import InvalidRequest, Unsupported
from agentkv.schemas.constraints import Constraint
from agentkv.schemas.formats import FORMATS
from agentkv.schemas.json_schema import _REFUSED
from agentkv.schemas.sampling import SamplingParams


def compiled(schema: Any) -> Any:
    return json.loads(Constraint.json(schema).text)


DEEP: dict[str, Any] = {}
DEEP["items"] = DEEP

REFUSED: list[tuple[Any, str]] = [
    ({"properties": {"tags": {"type": "array", "uniqueItems": True}}}, "'uniqueItems' at #/properties/tags"),
    ({"items": {"not": {}}}, "'not' at #/items"),
    ({"$defs": {"a/b ~": {"if": {}}}}, "'if' at #/$defs/a~1b%20~0"),
    ({"prefixItems": [{}, {"propertyNames": {}}]}, "'propertyNames' at #/prefixItems/1"),
    ({"properties": {"a": {"typ": "string"}}}, "'typ' at #/properties/a is not supported: did you mean 'type'"),
    ({"frobnicate": 1}, "'frobnicate' at # is not supported"),
    ({"properties": {"a": {"$id": "x"}}}, "'$id' at #/properties/a"),
    ({"x-guidance": {"lenient": True}}, "'x-guidance' at #"),
    ({"items": [{}]}, "'items' as a list, at #/items"),
    ({"anyOf": [{"$ref": "https://example.com/x"}]}, "at #/anyOf/0/$ref"),
    ({"$schema": "http://json-schema.org/draft-04/schema#"}, "at #/$schema"),
    ({"items": {"format": "frob"}}, "the format 'frob' at #/items"),
    ({"items": {"format": "date", "type": "integer"}}, "the format 'date' at #/items"),
    ({"items": {"type": "number", "multipleOf": 0.07}}, "'multipleOf' of 0.07 at #/items"),
    ({"type": "object", "minProperties": 1}, "'minProperties' of 1 at #"),
    ({"items": {"const": [0.30000000000000004]}}, "at #/items/const/0"),
    ({"enum": [2**53]}, "at #/enum/0"),
]


@pytest.mark.parametrize(("schema", "words"), REFUSED, ids=str)
def test_what_would_have_to_be_ignored_is_refused_by_name_and_place(schema: Any, words: str) -> None:
    with pytest.raises(Unsupported) as caught:
        Constraint.json(schema)
    assert words in str(caught.value) and caught.value.param == "schema"


@pytest.mark.parametrize("keyword", sorted(_REFUSED))
def test_every_keyword_that_no_grammar_can_follow_is_refused(keyword: str) -> None:
    with pytest.raises(Unsupported, match=re.escape(f"{keyword!r} at #/properties/a")):
        Constraint.json({"properties": {"a": {keyword: True}}})


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (3, "# must be an object"),
        ({"properties": {"a": 3}}, "#/properties/a must be a schema"),
        ({"type": "objekt"}, "#/type must be one of null, boolean"),
        ({"items": {"minItems": -1}}, "#/items/minItems must be a whole number"),
        ({"minimum": "3"}, "#/minimum must be a number"),
        ({"minimum": True}, "#/minimum must be a number"),
        ({"minimum": 10**400}, "#/minimum must be a number"),
        ({"required": "a"}, "#/required must be a list of strings"),
        ({"anyOf": []}, "#/anyOf must be a list of schemas, one at least"),
        ({"enum": []}, "#/enum must be a list of values, one at least"),
        ({"pattern": 3}, "#/pattern must be a string"),
        ({"properties": []}, "#/properties must be an object of schemas"),
        ({"items": {"$ref": "#/$defs/gone"}}, "#/items/$ref points to #/$defs/gone, where no schema is"),
        ({"$defs": {}, "items": {"$ref": "#/$defs"}}, "#/items/$ref points to #/$defs, where no schema is"),
        ({"const": float("nan")}, "what JSON has no form for"),
        ({"const": {1, 2}}, "what JSON has no form for"),
        ({"enum": ["x" * 1_000_000]}, "characters of JSON"),
        (DEEP, "levels deep"),
        ({"type": "number", "minimum": 2, "maximum": 1}, "# allows no number: its ends are 2 and 1"),
        ({"items": {"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 3}}, "#/items allows no number"),
        ({"type": "integer", "minimum": 2**54}, "# allows no number"),
        (int, "int is no pydantic class"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_no_schema_is_refused_with_its_place(schema: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Constraint.json(schema)
    assert words in str(caught.value) and caught.value.param == "schema"


def test_annotations_are_no_part_of_the_grammar() -> None:
    notes = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/person",
        "$comment": "c",
        "title": "t",
        "description": "d",
        "default": 1,
        "examples": [2],
        "deprecated": True,
        "readOnly": True,
        "writeOnly": True,
        "x-order": 7,
        "uniqueItems": False,
    }
    assert compiled({"type": "boolean", **notes}) == {"type": "boolean"}


def test_an_object_has_the_keys_that_it_names_unless_it_says_otherwise() -> None:
    names = {"properties": {"a": {}}}
    assert compiled(names)["additionalProperties"] is False
    assert compiled({**names, "additionalProperties": {"type": "null"}})["additionalProperties"] == {"type": "null"}
    assert "additionalProperties" not in compiled({"type": "object"}), "a free object stays free"
    assert "additionalProperties" not in compiled({**names, "required": ["b"]}), "what is required may come"
    merged = {"allOf": [{"properties": {"b": {}}, "required": ["b"]}], **names}
    assert "additionalProperties" not in compiled(merged), "closed, both halves would exclude one another"
    assert "additionalProperties" not in compiled({"$defs": {"p": names}, "$ref": "#/$defs/p", "required": ["b"]})


def test_integers_end_where_json_numbers_are_exact() -> None:
    largest = 2**53 - 1
    assert compiled({"type": "integer"}) == {"type": "integer", "minimum": -largest, "maximum": largest}
    assert compiled({"type": "integer", "exclusiveMinimum": 0})["minimum"] == 1
    assert compiled({"type": "integer", "minimum": 0.5, "exclusiveMaximum": 2.5}) == {
        "type": "integer",
        "minimum": 1,
        "maximum": 2,
    }
    assert compiled({"type": "integer", "format": "int32"})["maximum"] == 2**31 - 1
    assert compiled({"type": "integer", "enum": [1]}) == {"type": "integer", "enum": [1]}
    assert compiled({"type": "number"}) == {"type": "number"}


@given(
    st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
    st.floats(-1e15, 1e15) | st.sampled_from([0.9999999999999999, 5e-324, -5e-324, 0.30000000000000004, 1.0, 0.0]),
)
def test_the_ends_of_a_number_move_inwards_and_have_few_digits(keyword: str, bound: float) -> None:
    low, high = (compiled({"type": "number", keyword: bound})[key] for key in ("minimum", "maximum"))
    end = low if keyword.endswith("inimum") else high
    inside = end >= bound if keyword.endswith("inimum") else end <= bound
    assert inside and (end != bound or not keyword.startswith("exclusive"))
    assert abs(end - bound) <= max(abs(bound) * 1e-10, 2e-15), "and not by much"
    assert len(re.sub(r"e.*|\D", "", repr(end)).strip("0")) <= 15


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    good: bool


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


def test_alternatives_that_a_tag_tells_apart_must_have_the_tag() -> None:
    owner = compiled(Owner)
    assert owner["properties"]["pet"] == {"anyOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}
    assert owner["$defs"]["Cat"]["required"] == ["kind"]
    assert owner["$defs"]["Dog"]["required"] == ["good", "kind"]


@pytest.mark.parametrize("values", [(1, 1.0), ("x", "x")])
def test_alternatives_with_the_same_tag_stay_one_of_them(values: tuple[Any, Any]) -> None:
    branches = [{"type": "object", "properties": {"k": {"const": value}}} for value in values]
    assert "oneOf" in compiled({"oneOf": branches})


def test_multiples_that_overflow_together_are_refused() -> None:
    both = [{"type": "integer", "multipleOf": 65_536}, {"type": "integer", "multipleOf": 65_537}]
    with pytest.raises(Unsupported, match="'multipleOf' at #/allOf/1"):
        Constraint.json({"allOf": both})
    assert compiled({"prefixItems": both}), "apart they are fine"


PARSERS: dict[str, Any] = {
    "date": datetime.date,
    "time": datetime.time,
    "date-time": datetime.datetime,
    "duration": datetime.timedelta,
    "ipv4": IPv4Address,
    "ipv6": IPv6Address,
    "ipvanyaddress": IPvAnyAddress,
    "uri": HttpUrl,
    "uuid": UUID,
    "uuid4": UUID4,
}


@pytest.mark.short(4)
@pytest.mark.parametrize("name", PARSERS)
def test_whatever_a_format_allows_parses(name: str) -> None:
    adapter = TypeAdapter(PARSERS[name])

    @settings(max_examples=150)
    @given(st.from_regex(re.compile(FORMATS[name]), fullmatch=True))
    def check(text: str) -> None:
        adapter.validate_python(text)

    check()


def test_days_exist() -> None:
    def is_date(text: str) -> bool:
        return re.fullmatch(FORMATS["date"], text) is not None

    days = [f"{y:04}-{m:02}-{d:02}" for y in (1900, 2000, 2023, 2024) for m in range(14) for d in range(33)]

    def exists(text: str) -> bool:
        try:
            datetime.date.fromisoformat(text)
        except ValueError:
            return False
        return True

    assert [day for day in days if is_date(day) != exists(day)] == []


class Strict(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


def test_a_class_that_takes_more_keys_says_so() -> None:
    assert compiled(Strict)["additionalProperties"] is True


def test_the_schema_is_no_part_of_what_is_printed() -> None:
    constraint = Constraint.json({"const": "a secret"})
    params = SamplingParams.build(constraint=constraint)
    assert "secret" in constraint.text
    assert "secret" not in f"{constraint!r} {params!r} {params}"


def test_the_same_schema_has_the_same_digest_and_another_another() -> None:
    def digest(schema: Any) -> str:
        return Constraint.json(schema).digest

    assert digest({"type": "integer", "title": "a"}) == digest({"type": "integer"}) != digest({"type": "number"})
    assert digest({"properties": {"a": {}, "b": {}}}) != digest({"properties": {"b": {}, "a": {}}}), "order is kept"
    assert Constraint.regex("a").digest != Constraint.grammar("a").digest


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, '{"type": "object"}'),
        ({"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"type": "null"}}}, None),
        (Strict, None),
    ],
)
def test_response_format_is_read_in_openais_form(wanted: Any, text: str | None) -> None:
    constraint = SamplingParams.build(response_format=wanted).constraint
    if wanted == {"type": "text"}:
        assert constraint is None
    elif wanted is Strict:
        assert constraint == Constraint.json(Strict)
    else:
        assert constraint is not None and constraint.text == (text or '{"type": "null"}')


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"schema": {}, "response_format": {"type": "text"}}, "response_format"),
        ({"schema": {}, "constraint": Constraint.regex("a")}, "constraint"),
        ({"constraint": "a"}, "constraint"),
        ({"schema": {}, "ignore_eos": True}, "ignore_eos"),
        ({"schema": {}, "beams": 2}, "beams"),
        ({"schemas": {}}, "schemas"),
        ({"schema": {"type": "x"}}, "schema"),
    ],
    ids=str,
)
def test_a_request_that_asks_for_two_things_is_refused_by_the_parameters_name(
    arguments: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams.build(**arguments)
    assert caught.value.param == param


class Picky(BaseModel):
    word: str

    def model_post_init(self, _context: Any) -> None:
        if self.word == "boom":
            raise RuntimeError("no schema says this")
        if self.word == "no":
            raise ValueError("no is no word")


def test_what_becomes_of_an_output_is_the_class_or_plain_json() -> None:
    picky = Constraint.json(Picky)
    assert picky.parse('{"word": "yes"}') == Picky(word="yes")
    assert Constraint.json({"type": "object"}).parse('{"a": [1]}') == {"a": [1]}
    assert Constraint.regex("a+").parse("aa") == "aa"
    with pytest.raises(ValueError, match=r"Picky refused it: .*no is no word"):
        picky.parse('{"word": "no"}')
    with pytest.raises(ValueError, match="RuntimeError"):
        picky.parse('{"word": "boom"}')
    with pytest.raises(ValueError, match="RecursionError"):
        Constraint.json({}).parse("[" * 100_000 + "]" * 100_000)
