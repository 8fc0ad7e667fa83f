"""Numbers of a body. Bodies are read as JSON says them: no text stands for a number, and no ``true`` for 1."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

__all__ = ["Whole"]


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
"""An integer. ``1.0`` is one, as in JSON Schema: some clients have no other numbers."""
