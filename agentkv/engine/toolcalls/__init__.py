"""Tool calls in generated text: how models write them, and reading them while they are written."""

from __future__ import annotations

from agentkv.engine.toolcalls.contract import (
    TOOL_FORMATS,
    CallPart,
    Markup,
    Part,
    Schemas,
    TextPart,
    ToolFormat,
    ToolParser,
)
from agentkv.engine.toolcalls.hermes import HermesFormat
from agentkv.engine.toolcalls.llama3 import Llama3Format
from agentkv.engine.toolcalls.mistral import MistralFormat
from agentkv.engine.toolcalls.plain import TextFormat
from agentkv.engine.toolcalls.qwen_coder import QwenCoderFormat
from agentkv.engine.toolcalls.response_template import ResponseTemplateFormat, has_response_template

__all__ = [
    "TOOL_FORMATS",
    "CallPart",
    "HermesFormat",
    "Llama3Format",
    "Markup",
    "MistralFormat",
    "Part",
    "QwenCoderFormat",
    "ResponseTemplateFormat",
    "Schemas",
    "TextFormat",
    "TextPart",
    "ToolFormat",
    "ToolParser",
    "has_response_template",
]
