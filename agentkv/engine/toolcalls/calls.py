"""From JSON to a call, or not: what a call must be whatever the format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentkv.engine.toolcalls.contract import CallPart, Schemas

__all__ = ["call_of", "loaded", "sound"]

_DEEPEST = 100
"""Levels of nesting: whoever reads the arguments later recurses."""
_ARGUMENTS = ("arguments", "parameters")
_BARE = {"name", "type", *_ARGUMENTS}


def loaded(text: str) -> Any:
    """The JSON value; ``None`` for what ``json`` does not read, such as a number of 5,000 digits."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def sound(value: Any) -> bool:
    """Whether it can be stored and sent on: no infinity (``1e999``), no half of a surrogate pair, not too deep."""
    if not _within(value, _DEEPEST):
        return False
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


def _within(value: Any, depth: int) -> bool:
    """Whether it nests at most so deep."""
    if not isinstance(value, dict | list):
        return True
    inside = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_within(each, depth - 1) for each in inside)


def call_of(value: Any, tools: Schemas, *, marked: bool = True) -> CallPart | None:
    """The call that ``{"name": …, "arguments": {…}}`` is, its ``raw`` empty yet; ``None`` where it is none.

    ``parameters`` means ``arguments``; missing ones are empty; they may be JSON in a string. Other keys do not count.
    Without a marker that says so (``marked=False``), an object is a call only where it has a call's keys and no others.
    """
    if not isinstance(value, Mapping):
        return None
    name = value.get("name")
    given = [key for key in _ARGUMENTS if key in value]
    if not isinstance(name, str) or name not in tools or len(given) > 1:
        return None
    if not marked and (not given or not value.keys() <= _BARE):
        return None
    arguments = value[given[0]] if given else {}
    if marked and isinstance(arguments, str):
        arguments = loaded(arguments)
    if not isinstance(arguments, dict) or not sound(arguments):
        return None
    identifier = value.get("id")
    return CallPart("", name, arguments, identifier if isinstance(identifier, str) and sound(identifier) else None)
