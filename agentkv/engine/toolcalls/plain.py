"""No format: calls stay text. For models whose way of calling no other format reads."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from agentkv.engine.toolcalls.contract import TOOL_FORMATS, Part, Schemas, TextPart, ToolFormat, ToolParser

__all__ = ["TextFormat"]


class _Parser(ToolParser):
    def feed(self, text: str) -> list[Part]:
        return [TextPart(text)] if text else []

    def finish(self) -> list[Part]:
        return []


class TextFormat(ToolFormat):
    """Everything is text."""

    name = "text"

    def markers(self, tokenizer: Any) -> Collection[str]:
        """See ``ToolFormat``."""
        return ()

    def parser(self, tools: Schemas, tokenizer: Any, *, prompt: str = "") -> _Parser:
        """See ``ToolFormat``."""
        return _Parser()


TOOL_FORMATS.register(TextFormat.name)(TextFormat())
