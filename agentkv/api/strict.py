"""Bodies hold what is named, as JSON says it: no other fields, no text that stands for a number, no ``true`` for 1."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict

__all__ = ["Whole", "exactly"]


def exactly(*examples: dict[str, Any]) -> ConfigDict:
    """Of a body: no other fields. ``examples``: for the document."""
    return ConfigDict(extra="forbid", json_schema_extra={"examples": list(examples)} if examples else None)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
"""An integer. ``1.0`` is one, as in JSON Schema: some clients have no other numbers."""
