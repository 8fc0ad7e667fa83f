"""Mistral: a list behind ``[TOOL_CALLS]``, or from tokenizer version 11 on a name and its arguments, each behind one.

::

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "9aBcD0123"}]
    [TOOL_CALLS]get_weather[CALL_ID]9aBcD0123[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from agentkv.engine.toolcalls.blocks import BlockParser
from agentkv.engine.toolcalls.calls import call_of, loaded
from agentkv.engine.toolcalls.contract import TOOL_FORMATS, Markup, Schemas, TextPart, ToolFormat
from agentkv.engine.toolcalls.cursor import SPACE, Cursor, Reader, json_object, one_of, peek, space, word

__all__ = ["MistralFormat"]

_CALLS, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ENDS_NAME = f"[{{{SPACE}"


class _Parser(BlockParser):
    openers = (_CALLS,)

    def __init__(self, tools: Schemas) -> None:
        super().__init__()
        self._tools = tools

    def read(self, cursor: Cursor, opener: str) -> Reader[None]:
        yield from space(cursor)
        if (yield from peek(cursor)) == "[":
            yield from self._list(cursor)
        else:
            yield from self._named(cursor)

    def _list(self, cursor: Cursor) -> Reader[None]:
        called = False
        separator = yield from one_of(cursor, ("[",))
        while separator != "]":
            yield from space(cursor)
            text = yield from json_object(cursor)
            if text is None:
                return
            call = call_of(loaded(text), self._tools)
            called = called or call is not None
            cursor.say(call or TextPart(""))
            yield from space(cursor)
            separator = yield from one_of(cursor, (",", "]"))
            if separator is None:
                return
        if called:
            cursor.say(Markup(""))

    def _named(self, cursor: Cursor) -> Reader[None]:
        name = yield from word(cursor, _ENDS_NAME, inside=False)
        identifier = None
        if (yield from peek(cursor)) == "[":
            marker = yield from one_of(cursor, (_ID, _ARGS))
            if marker == _ID:
                identifier = yield from word(cursor, _ENDS_NAME, inside=False)
                marker = yield from one_of(cursor, (_ARGS,))
            if marker is None:
                return
        yield from space(cursor)
        text = yield from json_object(cursor)
        if text is None:
            return
        call = call_of({"name": name, "arguments": loaded(text)}, self._tools)
        if call is not None:
            cursor.say(replace(call, id=identifier or None))


class MistralFormat(ToolFormat):
    """``[TOOL_CALLS]``, both ways."""

    name = "mistral"

    def markers(self, tokenizer: Any) -> Collection[str]:
        """See ``ToolFormat``."""
        return _CALLS, _ID, _ARGS

    def parser(self, tools: Schemas, tokenizer: Any, *, prompt: str = "") -> _Parser:
        """See ``ToolFormat``."""
        return _Parser(tools)


TOOL_FORMATS.register(MistralFormat.name)(MistralFormat())
