"""Llama 3: a bare object that begins the reply, or one behind ``<|python_tag|>``; further ones after a semicolon.

::

    {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}

Code that the built-in interpreter would run after ``<|python_tag|>`` is text.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from agentkv.engine.toolcalls.blocks import BlockParser
from agentkv.engine.toolcalls.calls import call_of, loaded
from agentkv.engine.toolcalls.contract import TOOL_FORMATS, Schemas, ToolFormat
from agentkv.engine.toolcalls.cursor import Cursor, Reader, json_object, literal, space
from agentkv.engine.toolcalls.forcing import arguments_rule, call_rules, literal_of

__all__ = ["Llama3Format"]

_TAG = "<|python_tag|>"


class _Parser(BlockParser):
    openers = (_TAG,)
    bare = "{"

    def __init__(self, tools: Schemas) -> None:
        super().__init__()
        self._tools = tools

    def read(self, cursor: Cursor, opener: str) -> Reader[None]:
        while True:
            yield from space(cursor)
            text = yield from json_object(cursor)
            call = None if text is None else call_of(loaded(text), self._tools, marked=opener == _TAG)
            if call is None:
                return
            cursor.say(call)
            yield from space(cursor)
            if not (yield from literal(cursor, ";")):
                return


class Llama3Format(ToolFormat):
    """JSON with ``parameters``."""

    name = "llama3"
    forces = True

    def markers(self, tokenizer: Any) -> Collection[str]:
        """See ``ToolFormat``."""
        return (_TAG,)

    def parser(self, tools: Schemas, tokenizer: Any, *, prompt: str = "") -> _Parser:
        """See ``ToolFormat``."""
        return _Parser(tools)

    def forced(self, tools: Schemas, tokenizer: Any, *, many: bool) -> str:
        """See ``ToolFormat``. One call: these templates show no more."""

        def write(name: str, prefix: str, args: str) -> tuple[str, str]:
            head = literal_of(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": ')
            return f"{head} {args} {literal_of('}')}", arguments_rule(args, name, tools)

        return f"start: call\n{call_rules(tools, write)}"


TOOL_FORMATS.register(Llama3Format.name)(Llama3Format())
