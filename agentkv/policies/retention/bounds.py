"""The numbers that every window has in common: how long, and how much one eviction frees."""

from __future__ import annotations

from typing import Final, cast

from agentkv.errors import InvalidRequest

__all__ = ["AN_EIGHTH", "MIN_WINDOW", "is_number", "slack_within"]

MIN_WINDOW: Final = 16

AN_EIGHTH: Final = cast("int", None)
"""Default of a ``slack`` field. Typed as what it becomes: ``__post_init__`` replaces it by an eighth of the window."""


def slack_within(name: str, window: int, slack: int) -> int:
    """The slack to use. ``InvalidRequest`` unless ``window >= 16`` and ``1 <= slack <= window // 2``."""
    if not is_number(window) or window < MIN_WINDOW:
        raise InvalidRequest(
            f"policy {name!r} needs a window of at least {MIN_WINDOW} tokens, not {window!r}", param="policy"
        )
    if slack is AN_EIGHTH:
        return window // 8
    if not is_number(slack) or not 1 <= slack <= window // 2:
        raise InvalidRequest(
            f"policy {name!r} needs a slack of 1 to {window // 2:,} tokens (half its window of {window:,}), "
            f"not {slack!r}",
            param="policy",
        )
    return slack


def is_number(value: object) -> bool:
    """Whether ``value`` is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)
