"""Mistral: a list behind ``[TOOL_CALLS]``, or from tokenizer version 11 on a name and its arguments, each behind one.

::

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "9aBcD0123"}]
    [TOOL_CALLS]get_weather[CALL_ID]9aBcD0123[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from agentkv.engine.encode import special_tokens
from agentkv.engine.toolcalls.blocks import BlockParser
from agentkv.engine.toolcalls.calls import call_of, loaded
from agentkv.engine.toolcalls.contract import TOOL_FORMATS, Markup, Schemas, TextPart, ToolFormat
from agentkv.engine.toolcalls.cursor import SPACE, Cursor, Reader, json_object, one_of, peek, space, word
from agentkv.engine.toolcalls.forcing import arguments_rule, call_rules, literal_of, marker_of

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
    forces = True

    def markers(self, tokenizer: Any) -> Collection[str]:
        """See ``ToolFormat``."""
        return _CALLS, _ID, _ARGS

    def parser(self, tools: Schemas, tokenizer: Any, *, prompt: str = "") -> _Parser:
        """See ``ToolFormat``."""
        return _Parser(tools)

    def forced(self, tools: Schemas, tokenizer: Any, *, many: bool) -> str:
        """See ``ToolFormat``. By name where the tokenizer has a token for that, else as a list."""
        calls, args_marker = marker_of(tokenizer, _CALLS), marker_of(tokenizer, _ARGS)

        def named(name: str, prefix: str, args: str) -> tuple[str, str]:
            return f"{calls} {literal_of(name)} {args_marker} {args}", arguments_rule(args, name, tools)

        def listed(name: str, prefix: str, args: str) -> tuple[str, str]:
            head = literal_of(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ')
            before, behind = literal_of(', "id": "'), literal_of('"}')
            return f"{head} {args} {before} ID {behind}", arguments_rule(args, name, tools)

        if _ARGS in special_tokens(tokenizer):
            return f"start: call{'+' if many else ''}\n{call_rules(tools, named)}"
        inside = f"call ({literal_of(', ')} call)*" if many else "call"
        start = f"{calls} {literal_of(' [')} {inside} {literal_of(']')}"
        return f"start: {start}\nID: /[a-zA-Z0-9]{{9}}/\n{call_rules(tools, listed)}"


TOOL_FORMATS.register(MistralFormat.name)(MistralFormat())
