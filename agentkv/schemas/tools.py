"""Function definitions in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentkv.errors import InvalidRequest, Unsupported

__all__ = ["check_tool", "typed"]

_FORM = "{'type': 'function', 'function': {'name': …, 'parameters': …}}"
_TYPES: Mapping[str, type] = {"description": str, "parameters": Mapping, "strict": bool}
_NAMES: Mapping[type, str] = {str: "a string", Mapping: "an object", bool: "true or false"}


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


def typed(given: Mapping[str, Any], types: Mapping[str, type], where: str) -> None:
    """``InvalidRequest`` where a field that is there, and no null, has another type than it should."""
    for name, wanted in types.items():
        if (value := given.get(name)) is not None and not isinstance(value, wanted):
            raise InvalidRequest(
                f"{where}.{name} must be {_NAMES[wanted]}, not {type(value).__name__}", param=f"{where}.{name}"
            )
