"""Reading a JSON Schema that outputs are to follow: every keyword is honoured, or refused by its name and place.

The dialect is draft 2020-12, as far as a grammar can express it without looking back: what an array contains, whether
its items differ, conditions and negations are refused. Places are JSON pointers, ``#/properties/age/minimum``.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import quote, unquote

from agentkv.errors import InvalidRequest, Unsupported

__all__ = ["Node", "Schema", "children", "mapped", "places", "pointer", "read", "resolve"]

Node = dict[str, Any]
"""A schema that is an object, read: no annotations, only keywords that are honoured."""
Schema = Node | bool

_DIALECTS = ("2020-12", "2019-09", "draft-07", "draft-06")
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_LARGEST = 1_000_000
"""Characters of the whole schema, as compact JSON."""
_DEEPEST = 96
"""Levels of nesting. llguidance's own reader ends at 128."""

_HUGE = 1e300

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ANNOTATIONS = frozenset(
    ("$comment", "$schema", "default", "deprecated", "description", "discriminator", "examples", "readOnly", "title")
) | {"writeOnly"}
_REFUSED = {
    "$anchor": "refer to definitions by their place, #/$defs/NAME",
    "$dynamicAnchor": "refer to definitions by their place, #/$defs/NAME",
    "$dynamicRef": "refer to definitions by their place, #/$defs/NAME",
    "additionalItems": "say prefixItems and items",
    "contains": "a grammar does not look back; check it in what was parsed",
    "contentEncoding": "say pattern",
    "contentMediaType": "make its content a part of the schema",
    "contentSchema": "make its content a part of the schema",
    "dependencies": "list the combinations under anyOf",
    "dependentRequired": "list the combinations under anyOf",
    "dependentSchemas": "list the combinations under anyOf",
    "else": "list the combinations under anyOf",
    "id": "refer to definitions by their place, #/$defs/NAME",
    "if": "list the combinations under anyOf",
    "maxContains": "a grammar does not look back; check it in what was parsed",
    "minContains": "a grammar does not look back; check it in what was parsed",
    "not": "say what is allowed instead",
    "nullable": "say type: [..., 'null']",
    "propertyNames": "say patternProperties, and additionalProperties: false",
    "then": "list the combinations under anyOf",
    "unevaluatedItems": "say items: false",
    "unevaluatedProperties": "say additionalProperties: false",
    "uniqueItems": "a grammar does not look back; say array, and check it in what was parsed (in pydantic: list)",
    "x-guidance": "the form of the output is fixed: one line, one space after each comma and colon",
}


def read(schema: Any) -> Schema:
    """A copy of ``schema`` with what is honoured, its references checked.

    Raises ``InvalidRequest`` for what is no JSON Schema, ``Unsupported`` for a keyword that would have to be ignored.
    """
    if not isinstance(schema, Mapping | bool):
        raise _malformed("#", "must be an object", schema)
    if isinstance(schema, Mapping):
        _check_dialect(schema)
        schema = {key: value for key, value in schema.items() if key != "$id"}
    document = _read(schema, "#", 0)
    try:
        size = len(json.dumps(document, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"schema: it holds what JSON has no form for: {error}", param="schema") from None
    if size > _LARGEST:
        raise InvalidRequest(f"schema: {size:,} characters of JSON, at most {_LARGEST:,} are read", param="schema")
    _check_references(document)
    return document


def children(node: Schema) -> Iterator[tuple[str, Schema]]:
    """The schemas directly inside a schema, each with the part of the pointer that leads to it."""
    if isinstance(node, bool):
        return
    for key in _SINGLES:
        if key in node:
            yield f"/{key}", node[key]
    for key in _LISTS:
        for index, child in enumerate(node.get(key, ())):
            yield f"/{key}/{index}", child
    for key in _MAPS:
        for name, child in node.get(key, {}).items():
            yield f"/{key}/{pointer(name)}", child


def places(node: Schema, place: str = "#") -> Iterator[tuple[str, Schema]]:
    """The schema at ``place`` and all that it holds."""
    yield place, node
    for step, child in children(node):
        yield from places(child, place + step)


def mapped(node: Node, change: Callable[[Schema, str], Schema]) -> Node:
    """A copy of a schema with those directly inside it changed; ``change`` is given what ``children`` yields."""
    out = dict(node)
    for key in _SINGLES:
        if key in out:
            out[key] = change(out[key], f"/{key}")
    for key in _LISTS:
        if key in out:
            out[key] = [change(child, f"/{key}/{index}") for index, child in enumerate(out[key])]
    for key in _MAPS:
        if key in out:
            out[key] = {name: change(child, f"/{key}/{pointer(name)}") for name, child in out[key].items()}
    return out


def pointer(name: str) -> str:
    """One step of a JSON pointer in a URI fragment."""
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="~!$&'()*+,;=:@-._")


def resolve(document: Any, reference: str) -> Any:
    """What a reference into this document points to. Raises ``KeyError`` where that is nothing."""
    if not reference.startswith("#"):
        raise KeyError(reference)
    place = document
    steps = reference[1:].split("/")
    if steps[0]:
        raise KeyError(reference)
    for step in steps[1:]:
        name = _name(step)
        try:
            place = place[int(name)] if isinstance(place, list) else place[name]
        except (KeyError, IndexError, TypeError, ValueError):
            raise KeyError(reference) from None
    return place


def _read(node: Any, place: str, depth: int) -> Schema:
    if isinstance(node, bool):
        return node
    if not isinstance(node, Mapping):
        raise _malformed(place, "must be a schema: an object, true or false", node)
    if depth > _DEEPEST:
        raise InvalidRequest(f"schema: {place} is more than {_DEEPEST} levels deep", param="schema")
    found: Node = {}
    for key, value in node.items():
        if not isinstance(key, str):
            raise _malformed(place, "must have strings as keys", key)
        if key in _ANNOTATIONS or (key.startswith("x-") and key not in _REFUSED):
            continue
        if key == "uniqueItems" and value is False:
            continue
        reader = _READERS.get(key)
        if reader is None:
            raise _unknown(key, place)
        found[key] = reader(value, f"{place}/{pointer(key)}", depth + 1)
    return found


def _read_map(value: Any, place: str, depth: int) -> dict[str, Schema]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise _malformed(place, "must be an object of schemas", value)
    return {name: _read(child, f"{place}/{pointer(name)}", depth + 1) for name, child in value.items()}


def _read_list(value: Any, place: str, depth: int) -> list[Schema]:
    if not isinstance(value, list | tuple) or not value:
        raise _malformed(place, "must be a list of schemas, one at least", value)
    return [_read(child, f"{place}/{index}", depth + 1) for index, child in enumerate(value)]


def _read_items(value: Any, place: str, depth: int) -> Schema:
    if isinstance(value, list | tuple):
        raise Unsupported(f"'items' as a list, at {place},", "say prefixItems", param="schema")
    return _read(value, place, depth)


def _read_count(value: Any, place: str, _depth: int) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise _malformed(place, "must be a whole number, not negative and less than 2^31", value)
    return value


def _read_number(value: Any, place: str, _depth: int) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _HUGE:
        raise _malformed(place, f"must be a number smaller than {_HUGE:g}", value)
    return value


def _read_text(value: Any, place: str, _depth: int) -> str:
    if not isinstance(value, str):
        raise _malformed(place, "must be a string", value)
    return value


def _read_names(value: Any, place: str, _depth: int) -> list[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise _malformed(place, "must be a list of strings", value)
    return list(dict.fromkeys(value))


def _read_type(value: Any, place: str, _depth: int) -> str | list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or any(name not in _TYPES for name in names):
        raise _malformed(place, f"must be one of {', '.join(_TYPES)}, or a list of them", value)
    return value if isinstance(value, str) else list(names)


def _read_values(value: Any, place: str, depth: int) -> list[Any]:
    if not isinstance(value, list | tuple) or not value:
        raise _malformed(place, "must be a list of values, one at least", value)
    return [_read_value(each, f"{place}/{index}", depth + 1) for index, each in enumerate(value)]


def _read_value(value: Any, place: str, depth: int) -> Any:
    """A JSON value, copied."""
    if depth > _DEEPEST:
        raise InvalidRequest(f"schema: {place} is more than {_DEEPEST} levels deep", param="schema")
    if isinstance(value, Mapping):
        return {name: _read_value(each, f"{place}/{pointer(str(name))}", depth + 1) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_read_value(each, f"{place}/{index}", depth + 1) for index, each in enumerate(value)]
    if isinstance(value, int | float) and not isinstance(value, bool) and not _is_exact(value):
        raise Unsupported(f"a number of so many digits, at {place},", "at most 15 are read exactly", param="schema")
    return value


def _is_exact(value: int | float) -> bool:
    """Whether every reader of JSON, llguidance's too, reads the same number."""
    if isinstance(value, int):
        return abs(value) < 2**53
    if not math.isfinite(value):
        return True  # it has no form in JSON; that is another complaint
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    return len(digits) <= 15 and -22 <= int(exponent) <= 22


def _read_reference(value: Any, place: str, _depth: int) -> str:
    text = _read_text(value, place, _depth)
    if text != "#" and not text.startswith("#/"):
        raise Unsupported(
            f"the reference {text[:100]!r} at {place}", "only places in this schema, #/…, are read", param="schema"
        )
    # A name that people write as it is, List[int], is quoted in a URI.
    return "/".join(["#", *(pointer(_name(step)) for step in text.split("/")[1:])])


def _name(step: str) -> str:
    """The name behind one step of a pointer."""
    return unquote(step).replace("~1", "/").replace("~0", "~")


_READERS: dict[str, Callable[[Any, str, int], Any]] = {
    **dict.fromkeys(_MAPS, _read_map),
    **dict.fromkeys(_LISTS, _read_list),
    **dict.fromkeys(_COUNTS, _read_count),
    **dict.fromkeys(_NUMBERS, _read_number),
    "items": _read_items,
    "additionalProperties": _read,
    "required": _read_names,
    "type": _read_type,
    "enum": _read_values,
    "const": _read_value,
    "pattern": _read_text,
    "format": _read_text,
    "$ref": _read_reference,
}


def _check_dialect(schema: Mapping[Any, Any]) -> None:
    named = schema.get("$schema")
    if named is not None and not (isinstance(named, str) and any(dialect in named for dialect in _DIALECTS)):
        raise Unsupported(
            f"the dialect {str(named)[:100]!r} at #/$schema", f"known are {', '.join(_DIALECTS)}", param="schema"
        )


def _check_references(document: Schema) -> None:
    found = dict(places(document))
    for place, node in found.items():
        reference = None if isinstance(node, bool) else node.get("$ref")
        if reference is not None and reference not in found:
            raise InvalidRequest(f"schema: {place}/$ref points to {reference}, where no schema is", param="schema")


def _malformed(place: str, what: str, value: object) -> InvalidRequest:
    shown = repr(value) if isinstance(value, str | bool | float | None) else f"a value of type {type(value).__name__}"
    return InvalidRequest(f"schema: {place} {what}, got {shown[:80]}", param="schema")


def _unknown(key: str, place: str) -> Unsupported:
    if key in _REFUSED:
        return Unsupported(f"{key!r} at {place}", _REFUSED[key], param="schema")
    if key == "$id":
        return Unsupported(f"'$id' at {place}", "it may name the whole schema only", param="schema")
    near = difflib.get_close_matches(key, _known(), n=1)
    hint = f"did you mean {near[0]!r}?" if near else "it is no keyword of JSON Schema, and would have to be ignored"
    return Unsupported(f"{key[:60]!r} at {place}", hint, param="schema")


def _known() -> Sequence[str]:
    return [*_READERS, *_ANNOTATIONS]
