"""Hermes, Qwen 2.5 and Qwen 3, and ``toolblocks`` for models whose template knows no tools.

::

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from agentkv.engine.toolcalls.blocks import BlockParser
from agentkv.engine.toolcalls.calls import call_of, loaded
from agentkv.engine.toolcalls.contract import TOOL_FORMATS, Schemas, ToolFormat
from agentkv.engine.toolcalls.cursor import Cursor, Reader, json_object, literal, space

__all__ = ["HermesFormat"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


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

    def markers(self, tokenizer: Any) -> Collection[str]:
        """See ``ToolFormat``."""
        return _OPEN, _CLOSE

    def parser(self, tools: Schemas, tokenizer: Any, *, prompt: str = "") -> _Parser:
        """See ``ToolFormat``."""
        return _Parser(tools)


TOOL_FORMATS.register(HermesFormat.name)(HermesFormat())
