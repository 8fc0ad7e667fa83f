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
        properties = self._tools.get(name, {}).get("properties")
        schemas = properties if isinstance(properties, Mapping) else {}
        arguments = {key: _typed(_trimmed(text), schemas.get(key)) for key, text in given.items()}
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


def _typed(text: str, schema: Any) -> Any:
    """The value that ``text`` is under ``schema``: JSON where it is of a type named there, else itself, a string."""
    value = _WORDS.get(text.strip(), loaded(text))
    for kind in _kinds(schema):
        if kind == "integer" and isinstance(value, float) and value.is_integer():
            return int(value)
        known = _TYPES.get(kind, ())
        if isinstance(value, known) and (kind == "boolean") is isinstance(value, bool):
            return value
        if kind == "null" and text.strip() in _NULLS:
            return None
    return text


def _kinds(schema: Any) -> Iterator[str]:
    """The JSON types that a schema names, in unions too."""
    if not isinstance(schema, Mapping):
        return
    declared = schema.get("type")
    yield from (kind for kind in (declared if isinstance(declared, list) else [declared]) if isinstance(kind, str))
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            yield from _kinds(choice)


class QwenCoderFormat(ToolFormat):
    """Tags within ``<tool_call>``."""

    name = "qwen-coder"

    def markers(self, tokenizer: Any) -> Collection[str]:
        """See ``ToolFormat``."""
        return _OPEN, _CLOSE, _FUNCTION, _END_FUNCTION, _PARAMETER, _END_PARAMETER

    def parser(self, tools: Schemas, tokenizer: Any, *, prompt: str = "") -> _Parser:
        """See ``ToolFormat``."""
        return _Parser(tools)


TOOL_FORMATS.register(QwenCoderFormat.name)(QwenCoderFormat())
