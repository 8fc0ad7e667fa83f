"""Making a schema smaller, so that a grammar for it ends, and whatever follows it parses and validates.

Every output of the smaller schema is one of the schema that was given. What is left out:

- keys that an object with ``properties`` does not name, unless ``additionalProperties`` says what they are;
- integers beyond those that a JSON number holds exactly, and the outer ends of a number's range: digits are compared as
  they are written, so the last ones that a float tells apart are given away;
- values of a ``format`` that not everybody reads (see ``formats``);
- alternatives of ``oneOf`` without the tag that tells them apart.
"""

from __future__ import annotations

import json
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

from agentkv.errors import InvalidRequest, Unsupported
from agentkv.schemas.formats import ANY_TEXT, FORMATS, NUMERIC_FORMATS
from agentkv.schemas.json_schema import Node, Schema, mapped, places, resolve

__all__ = ["narrowed"]

_EXACT = 2**53 - 1
"""The largest whole number that all readers of JSON agree on (RFC 8259, 6)."""
_DIGITS = 12
"""Significant digits of a bound: 15 are read exactly, and one unit in the twelfth is more than a float's last digit."""
_TINY = Decimal("1e-15")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COMBINING = ("$ref", "anyOf", "oneOf", "allOf")
_ASIDE = frozenset(("$defs", "definitions"))


def narrowed(document: Schema) -> Schema:
    """The smaller schema of one that was read. Raises ``Unsupported`` for what no grammar can be made for."""
    return document if isinstance(document, bool) else _Narrowing(document).node(document, "#")


class _Narrowing:
    """One walk over a document. ``tags``: by the identity of a schema, properties that it has to have."""

    def __init__(self, document: Node) -> None:
        self._document = document
        self._tags: dict[int, set[str]] = {}
        self._told_apart: set[int] = set()
        self._combines = False
        multiples: dict[Decimal, str] = {}
        for place, node in places(document):
            if isinstance(node, bool):
                continue
            constraints = node.keys() - _ASIDE
            combining = constraints.intersection(_COMBINING)
            self._combines |= "allOf" in combining or bool(combining and len(constraints) > 1)
            if "multipleOf" in node:
                multiples.setdefault(Decimal(repr(node["multipleOf"])), place)
            if "oneOf" in node:
                self._tell_apart(node)
        if self._combines:
            _check_together(multiples)

    def node(self, node: Schema, place: str) -> Schema:
        """The smaller form of ``node``."""
        if isinstance(node, bool):
            return node
        out = mapped(node, lambda child, step: self.node(child, place + step))
        if id(node) in self._told_apart:
            out["anyOf"] = out.pop("oneOf")
        if tags := self._tags.get(id(node)):
            out["required"] = list(dict.fromkeys([*out.get("required", ()), *sorted(tags)]))
        self._object(out, place)
        _text(out, place)
        _number(out, place)
        return out

    def _object(self, out: Node, place: str) -> None:
        names = out.get("properties", {}).keys()
        required = set(out.get("required", ()))
        if not self._combines and names and required <= names and not out.keys() & {"patternProperties", *_COMBINING}:
            out.setdefault("additionalProperties", False)
        if "minProperties" in out:
            if out["minProperties"] > len(required):
                # A grammar does not know which keys were there already, and a key that comes twice counts once.
                raise Unsupported(
                    f"'minProperties' of {out['minProperties']} at {place} with {len(required)} required",
                    "name what is required",
                    param="schema",
                )
            del out["minProperties"]

    def _tell_apart(self, node: Node) -> None:
        """Where each alternative has a property whose values no other's has, ``oneOf`` is ``anyOf``, given that each
        has to have that property."""
        branches = [self._target(branch) for branch in node["oneOf"]]
        if "anyOf" in node or any(branch is None for branch in branches):
            return
        found = [branch for branch in branches if branch is not None]
        for name in found[0].get("properties", {}):
            values = [_values(branch, name) for branch in found]
            together = set().union(*values)
            if all(values) and len(together) == sum(map(len, values)):
                self._told_apart.add(id(node))
                for branch in found:
                    self._tags.setdefault(id(branch), set()).add(name)
                return

    def _target(self, branch: Schema) -> Node | None:
        """The object schema that an alternative is, through its references."""
        for _ in range(16):
            if isinstance(branch, bool):
                return None
            if branch.keys() != {"$ref"}:
                return branch if branch.get("type") == "object" else None
            branch = resolve(self._document, branch["$ref"])
        return None


def _values(branch: Node, name: str) -> set[str]:
    """The values that property ``name`` may have, as JSON; none where it may have any."""
    prop = branch.get("properties", {}).get(name)
    if not isinstance(prop, dict) or not prop.keys() & {"const", "enum"}:
        return set()
    values = [prop["const"]] if "const" in prop else prop["enum"]
    # 1 and 1.0 are the same number; true is neither.
    return {json.dumps(int(v) if isinstance(v, float) and v.is_integer() else v, sort_keys=True) for v in values}


def _kinds(node: Node) -> frozenset[str]:
    """The types that a schema names; none where it names none."""
    named = node.get("type", ())
    return frozenset([named] if isinstance(named, str) else named)


def _text(out: Node, place: str) -> None:
    """A format becomes the pattern that says what it means."""
    name = out.pop("format", None)
    kinds = _kinds(out)
    if name is None or (kinds and not kinds & {"string", "integer", "number"}):
        return
    if kinds and "string" not in kinds and name in NUMERIC_FORMATS:
        if (largest := NUMERIC_FORMATS[name]) is not None:
            out["minimum"] = max(out.get("minimum", -largest), -largest)
            out["maximum"] = min(out.get("maximum", largest), largest)
    elif (kinds and "string" not in kinds) or name not in FORMATS.keys() | ANY_TEXT:
        known = ", ".join(sorted(FORMATS.keys() | ANY_TEXT))
        raise Unsupported(f"the format {name[:60]!r} at {place}", f"known are {known}; or say pattern", param="schema")
    elif name in FORMATS:
        pattern = f"^(?:{FORMATS[name]})$"
        if "pattern" in out:
            out["allOf"] = [*out.get("allOf", ()), {"pattern": pattern}]
        else:
            out["pattern"] = pattern


def _number(out: Node, place: str) -> None:
    """Bounds become inclusive ones with few digits, one at either end. Integers get them in any case."""
    kinds = _kinds(out)
    if kinds and not kinds & {"integer", "number"}:
        return
    if "multipleOf" in out:
        _check_multiple(out["multipleOf"], place)
    whole = "integer" in kinds and "number" not in kinds
    if not out.keys() & set(_BOUNDS) and (not whole or out.keys() & {"enum", "const"}):
        return
    bounds = {key: _decimal(out.pop(key)) for key in _BOUNDS if key in out}
    ends = _whole_ends(bounds) if whole else _ends(bounds)
    low, high = max(ends[0], Decimal(-_EXACT)), min(ends[1], Decimal(_EXACT))
    if low > high:
        written = " and ".join(str(_plain(end)) if end.is_finite() else "none" for end in ends)
        raise InvalidRequest(
            f"schema: {place} allows no number: its ends are {written}, and none beyond {_EXACT:,} is written",
            param="schema",
        )
    out["minimum"], out["maximum"] = _plain(low), _plain(high)


def _decimal(bound: int | float) -> Decimal:
    """As it is written. What is far outside counts as just outside."""
    return max(min(Decimal(repr(bound)), Decimal(2 * _EXACT)), Decimal(-2 * _EXACT))


def _whole_ends(bounds: dict[str, Decimal]) -> tuple[Decimal, Decimal]:
    """The least and the greatest integer inside the bounds."""
    low, high = Decimal("-Infinity"), Decimal("Infinity")
    for key, bound in bounds.items():
        if key == "minimum":
            low = max(low, bound.to_integral_value(ROUND_CEILING))
        elif key == "exclusiveMinimum":
            low = max(low, bound.to_integral_value(ROUND_FLOOR) + 1)
        elif key == "maximum":
            high = min(high, bound.to_integral_value(ROUND_FLOOR))
        else:
            high = min(high, bound.to_integral_value(ROUND_CEILING) - 1)
    return low, high


def _ends(bounds: dict[str, Decimal]) -> tuple[Decimal, Decimal]:
    """Decimals inside the bounds, close to them, that every reader of JSON reads exactly."""
    low, high = Decimal("-Infinity"), Decimal("Infinity")
    for key, bound in bounds.items():
        step = Decimal(0)
        if key.startswith("exclusive"):
            step = Decimal((0, (1,), bound.adjusted() + 1 - _DIGITS)) if bound else _TINY
        if key.lower().endswith("minimum"):
            low = max(low, _rounded(bound + step, ROUND_CEILING))
        else:
            high = min(high, _rounded(bound - step, ROUND_FLOOR))
    return low, high


def _rounded(bound: Decimal, direction: str) -> Decimal:
    """To 15 digits and 22 places: a float whose digits and power of ten are both exact is read exactly."""
    few = Context(prec=15, rounding=direction).create_decimal(bound)
    return few.quantize(Decimal("1e-22"), rounding=direction, context=Context(prec=60))


def _plain(value: Decimal) -> int | float:
    return int(value) if value == value.to_integral_value() else float(value)


def _check_together(multiples: dict[Decimal, str]) -> None:
    """llguidance intersects multiples in 32 bits, without looking whether they suffice."""
    places = max((-min(int(m.as_tuple().exponent), 0) for m in multiples), default=0)
    product = 1
    for multiple, place in multiples.items():
        product *= max(1, int(multiple.scaleb(places)))
        if len(multiples) > 1 and product >= 2**32:
            raise Unsupported(
                f"'multipleOf' at {place}, beside {len(multiples) - 1} others and allOf or references with siblings,",
                "write the multiple that is meant in one place",
                param="schema",
            )


def _check_multiple(multiple: int | float, place: str) -> None:
    """llguidance multiplies by ten until nothing is left behind the point, and keeps the result in 32 bits."""
    value, places = float(multiple), 0
    while 0 < value < 2**32 and not value.is_integer():
        value, places = value * 10, places + 1
    if not 0 < value < 2**32 or Decimal(int(value)).scaleb(-places) != Decimal(repr(multiple)):
        raise Unsupported(f"'multipleOf' of {multiple!r} at {place}", "it has too many digits", param="schema")
