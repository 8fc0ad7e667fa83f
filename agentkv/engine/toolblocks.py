"""How tools are written for a model whose chat template does not know them.

The form is that of Hermes and Qwen: definitions as JSON lines in the system text, a call as a ``<tool_call>`` block in
the assistant's text, a result as a ``<tool_response>`` block in a user message. Many models have seen it in training,
and the parser of generated calls reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["calls_text", "result_text", "with_definitions"]

_INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{definitions}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def with_definitions(system: str | None, tools: Sequence[Mapping[str, Any]]) -> str:
    """The system text followed by the definitions of ``tools``."""
    text = _INTRODUCTION.format(definitions="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    return f"{system}\n\n{text}" if system else text


def calls_text(text: str, calls: Sequence[tuple[str, Mapping[str, Any] | str]]) -> str:
    """An assistant's text followed by its calls, each a name and its arguments."""
    blocks = [
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
        for name, arguments in calls
    ]
    return "\n".join([text, *blocks] if text else blocks)


def result_text(content: str) -> str:
    """One tool result."""
    return f"<tool_response>\n{content}\n</tool_response>"
