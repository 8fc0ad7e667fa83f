"""Fields of objects that are checked by hand: what is not known is refused, and so is what has another type."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from agentkv.errors import InvalidRequest, Unsupported

__all__ = ["known_only", "typed"]

_NAMES: Mapping[type, str] = {str: "a string", Mapping: "an object", bool: "true or false"}


def known_only(given: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """``Unsupported`` for a field that is not ``known``, and no null."""
    for name, value in given.items():
        if name not in known and value is not None:
            raise Unsupported(f"field {where}.{name}", "leave it out", param=f"{where}.{name}")


def typed(given: Mapping[str, Any], types: Mapping[str, type], where: str) -> None:
    """``InvalidRequest`` where a field that is there, and no null, has another type than it should."""
    for name, wanted in types.items():
        if (value := given.get(name)) is not None and not isinstance(value, wanted):
            raise InvalidRequest(
                f"{where}.{name} must be {_NAMES[wanted]}, not {type(value).__name__}", param=f"{where}.{name}"
            )
