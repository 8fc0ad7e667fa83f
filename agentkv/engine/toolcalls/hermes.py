"""Hermes, Qwen 2.5 and Qwen 3, and ``toolblocks`` for models whose template knows no tools.

::

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from agentkv.engine.toolcalls.blocks import BlockParser
from agentkv.engine.toolcalls.calls import call_of, loaded
from agentkv.engine.toolcalls.contract import TOOL_FORMATS, Schemas, ToolFormat
from agentkv.engine.toolcalls.cursor import Cursor, Reader, json_object, literal, space
from agentkv.engine.toolcalls.forcing import arguments_rule, call_rules, literal_of, marker_of

__all__ = ["HermesFormat"]

_OPEN, _CLOSE, _BETWEEN = "<tool_call>", "</tool_call>", "\n"


class _Parser(BlockParser):
    openers = (_OPEN,)

    def __init__(self, tools: Schemas) -> None:
        super().__init__()
        self._tools = tools

    def read(self, cursor: Cursor, opener: str) -> Reader[None]:
        yield from space(cursor)
        text = yield from json_object(cursor)
        if text is None:
            return
        yield from space(cursor)
        if (yield from literal(cursor, _CLOSE)):
            call = call_of(loaded(text), self._tools)
            if call is not None:
                cursor.say(call)


class HermesFormat(ToolFormat):
    """JSON in ``<tool_call>`` tags, one call a block."""

    name = "hermes"
    forces = True

    def markers(self, tokenizer: Any) -> Collection[str]:
        """See ``ToolFormat``."""
        return _OPEN, _CLOSE

    def parser(self, tools: Schemas, tokenizer: Any, *, prompt: str = "") -> _Parser:
        """See ``ToolFormat``."""
        return _Parser(tools)

    def forced(self, tools: Schemas, tokenizer: Any, *, many: bool) -> str:
        """See ``ToolFormat``."""
        opening, closing = marker_of(tokenizer, _OPEN), marker_of(tokenizer, _CLOSE)

        def write(name: str, prefix: str, args: str) -> tuple[str, str]:
            head = literal_of(f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ')
            tail = literal_of("}\n")
            return f"{opening} {head} {args} {tail} {closing}", arguments_rule(args, name, tools)

        start = f"call ({literal_of(_BETWEEN)} call)*" if many else "call"
        return f"start: {start}\n{call_rules(tools, write)}"


TOOL_FORMATS.register(HermesFormat.name)(HermesFormat())
