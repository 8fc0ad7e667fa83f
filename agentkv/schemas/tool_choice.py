"""Whether a turn may, must or must not call tools."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

from agentkv.errors import InvalidRequest

__all__ = ["ToolChoice"]

_Mode = Literal["auto", "none", "required"]
_FORMS = '"auto", "none", "required", or {"name": …} for one of the tools'


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """``auto``: as the model likes. ``none``: what it writes is text. ``required``: it calls, and nothing else.

    ``name``: the one tool that is called, under ``required``.
    """

    SCHEMA: ClassVar[dict[str, Any]] = {
        "anyOf": [
            {"enum": list(get_args(_Mode))},
            {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        ]
    }
    """What ``parse`` takes, as JSON Schema."""

    mode: _Mode = "auto"
    name: str | None = None

    @classmethod
    def parse(cls, value: Any) -> Self:
        """From what callers pass: a mode, ``{"name": …}``, OpenAI's form of that, or ``None`` for ``auto``.

        Raises ``InvalidRequest`` for anything else.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value in get_args(_Mode):
            return cls(value)  # type: ignore[arg-type]
        if isinstance(value, Mapping):
            named = value
            if value.get("type") == "function" and value.keys() == {"type", "function"}:
                named = value["function"]
            if isinstance(named, Mapping) and named.keys() == {"name"} and isinstance(named["name"], str):
                return cls("required", named["name"])
        raise InvalidRequest(f"tool_choice: pass {_FORMS}; got {value!r}", param="tool_choice")

    def check(self, tools: Collection[str]) -> None:
        """``InvalidRequest`` where a session with ``tools`` cannot do as it says."""
        if self.mode == "required" and not tools:
            raise InvalidRequest(
                "tool_choice 'required': this session has no tools; create it with tools=[…]", param="tool_choice"
            )
        if self.name is not None and self.name not in tools:
            raise InvalidRequest(
                f"tool_choice: there is no tool {self.name!r}; this session has: {', '.join(sorted(tools))}",
                param="tool_choice",
            )
