"""Qwen 3 Coder: parameters as tagged text, read as the types that the tool's schema names.

::

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from agentkv.engine.toolcalls.blocks import BlockParser
from agentkv.engine.toolcalls.calls import call_of, loaded
from agentkv.engine.toolcalls.contract import TOOL_FORMATS, Schemas, ToolFormat
from agentkv.engine.toolcalls.cursor import Cursor, Reader, literal, one_of, space, until, word
from agentkv.engine.toolcalls.forcing import call_rules, literal_of, marker_of, schema_rule
from agentkv.errors import Unsupported
from agentkv.schemas.json_schema import resolve

__all__ = ["QwenCoderFormat"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
}
# Models that write much Python.
_WORDS = {"True": True, "False": False}
_NULLS = ("null", "None")
_BREAK = "\n"
_HOPS = 16
_SAID = frozenset(("type", "description", "title", "default", "examples", "deprecated", "$comment", "anyOf", "oneOf"))
"""Keywords of a string's schema that leave it any string."""


class _Parser(BlockParser):
    openers = (_OPEN,)

    def __init__(self, tools: Schemas) -> None:
        super().__init__()
        self._tools = tools

    def read(self, cursor: Cursor, opener: str) -> Reader[None]:
        yield from space(cursor)
        if not (yield from literal(cursor, _FUNCTION)):
            return
        name = yield from _tag(cursor)
        if name is None:
            return
        given: dict[str, str] = {}
        while True:
            yield from space(cursor)
            tag = yield from one_of(cursor, (_PARAMETER, _END_FUNCTION))
            if tag is None:
                return
            if tag == _END_FUNCTION:
                break
            key = yield from _tag(cursor)
            if key is None:
                return
            value = yield from until(cursor, _END_PARAMETER)
            if value is None:
                return
            given[key] = value
        yield from space(cursor)
        if not (yield from literal(cursor, _CLOSE)):
            return
        schema = self._tools.get(name, {})
        properties = schema.get("properties")
        schemas = properties if isinstance(properties, Mapping) else {}
        arguments = {key: _typed(_trimmed(text), schemas.get(key), schema) for key, text in given.items()}
        call = call_of({"name": name, "arguments": arguments}, self._tools)
        if call is not None:
            cursor.say(call)


def _tag(cursor: Cursor) -> Reader[str | None]:
    """The rest of an opening tag: what it names."""
    name = yield from word(cursor, ">\n", inside=False)
    return name if (yield from literal(cursor, ">")) else None


def _trimmed(text: str) -> str:
    """Without the line breaks that set a value apart from its tags."""
    return text.removeprefix("\n").removesuffix("\n")


def _typed(text: str, schema: Any, document: Any) -> Any:
    """The value that ``text`` is under ``schema``: JSON where it is of a type named there, else itself, a string."""
    value = _WORDS.get(text.strip(), loaded(text))
    for kind in _kinds(schema, document):
        if kind == "integer" and isinstance(value, float) and value.is_integer():
            return int(value)
        known = _TYPES.get(kind, ())
        if isinstance(value, known) and (kind == "boolean") is isinstance(value, bool):
            return value
        if kind == "null" and text.strip() in _NULLS:
            return None
    return text


def _kinds(schema: Any, document: Any, depth: int = 0) -> Iterator[str]:
    """The JSON types that a schema names, in unions too. References lead into ``document``."""
    schema = _followed(schema, document)
    if not isinstance(schema, Mapping) or depth > _HOPS:
        return
    declared = schema.get("type")
    yield from (kind for kind in (declared if isinstance(declared, list) else [declared]) if isinstance(kind, str))
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            yield from _kinds(choice, document, depth + 1)


def _followed(schema: Any, document: Any) -> Any:
    """The schema itself where there is a reference to it."""
    for _ in range(_HOPS):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        try:
            schema = resolve(document, schema["$ref"])
        except KeyError:
            return None
    return schema


class QwenCoderFormat(ToolFormat):
    """Tags within ``<tool_call>``."""

    name = "qwen-coder"
    forces = True

    def markers(self, tokenizer: Any) -> Collection[str]:
        """See ``ToolFormat``."""
        return _OPEN, _CLOSE, _FUNCTION, _END_FUNCTION, _PARAMETER, _END_PARAMETER

    def parser(self, tools: Schemas, tokenizer: Any, *, prompt: str = "") -> _Parser:
        """See ``ToolFormat``."""
        return _Parser(tools)

    def forced(self, tools: Schemas, tokenizer: Any, *, many: bool) -> str:
        """See ``ToolFormat``. Parameters come in the schema's order, optional ones or not at all."""
        opening, closing = marker_of(tokenizer, _OPEN), marker_of(tokenizer, _CLOSE)

        def write(name: str, prefix: str, args: str) -> tuple[str, str]:
            head, tail = literal_of(f"\n{_FUNCTION}{name}>\n"), literal_of(f"{_END_FUNCTION}\n")
            parts, further = _parameters(name, tools[name], prefix)
            return f"{opening} {head} {' '.join(parts)} {tail} {closing}", further

        start = f"call ({literal_of(_BREAK)} call)*" if many else "call"
        return f"start: {start}\n{call_rules(tools, write)}"


def _parameters(name: str, schema: Mapping[str, Any], prefix: str) -> tuple[list[str], str]:
    """What stands between a function's tags, and the rules of its parameters."""
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts, rules = [], []
    for index, (key, inner) in enumerate(properties.items()):
        rule = f"{prefix}{index}"
        part = f"{literal_of(f'{_PARAMETER}{key}>{_BREAK}')} {rule} {literal_of(_BREAK)}"
        parts.append(part if key in required else f"({part})?")
        words = _words(_followed(inner, schema))
        kinds = set(_kinds(inner, schema))
        if words is not None:
            rules.append(f"{rule}: ({words}) {literal_of(_BREAK + _END_PARAMETER)}")
        elif kinds and "string" not in kinds:
            value = schema_rule(name, {**inner, **shared})
            rules += [f"{rule}: {rule}_value {literal_of(_BREAK + _END_PARAMETER)}", f"{rule}_value: {value}"]
        else:
            _check_plain(name, key, inner, schema)
            rules.append(f"{rule}[suffix={literal_of(_END_PARAMETER)}]: /(?s:.*)/")
    return parts, "\n".join(rules)


def _words(schema: Any) -> str | None:
    """The strings that are allowed, where the schema lists them."""
    given = schema if isinstance(schema, Mapping) else {}
    values = [given["const"]] if "const" in given else given.get("enum")
    listed = isinstance(values, list) and values and all(isinstance(value, str) for value in values)
    return " | ".join(map(literal_of, values)) if listed and values else None


def _check_plain(name: str, key: str, schema: Any, document: Any, depth: int = 0) -> None:
    """``Unsupported`` where a string has to be more than a string: it is written as it is, up to its closing tag."""
    schema = _followed(schema, document)
    if not isinstance(schema, Mapping) or depth > _HOPS:
        return
    for unsaid in schema.keys() - _SAID:
        raise Unsupported(
            f"tool_choice for {name!r}",
            f"the format 'qwen-coder' writes strings as they are, so that {unsaid!r} of {key!r} cannot be promised",
            param="tool_choice",
        )
    for union in ("anyOf", "oneOf"):
        for choice in schema.get(union) or ():
            _check_plain(name, key, choice, document, depth + 1)


TOOL_FORMATS.register(QwenCoderFormat.name)(QwenCoderFormat())
