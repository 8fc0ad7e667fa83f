"""Function definitions in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentkv.errors import InvalidRequest, Unsupported
from agentkv.schemas.fields import typed

__all__ = ["check_tool"]

_FORM = "{'type': 'function', 'function': {'name': …, 'parameters': …}}"
_TYPES: Mapping[str, type] = {"description": str, "parameters": Mapping, "strict": bool}


def check_tool(tool: Any, where: str) -> Mapping[str, Any]:
    """The function that it defines. Raises ``InvalidRequest`` by the name of what is wrong."""
    if not isinstance(tool, Mapping):
        raise InvalidRequest(f"{where}: pass {_FORM}", param=where)
    if (kind := tool.get("type", "function")) != "function":
        raise Unsupported(f"tool type {kind!r}", f"{where}: only functions can be called", param=f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequest(f"{where}: pass {_FORM}", param=where)
    typed(function, _TYPES, f"{where}.function")
    return function
