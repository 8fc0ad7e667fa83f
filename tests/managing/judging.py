"""Which errors an operation may end with, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from homes import CONTEXT
from soaking.oracle import Violation

from agentkv.errors import (
    CapacityExceeded,
    Closed,
    ContextTooLong,
    DatabaseUnavailable,
    InvalidRequest,
    SessionBusy,
    SessionNotFound,
    StorageFull,
)
from managing.reference import Asked

__all__ = ["Circumstances"]


@dataclass(frozen=True)
class Circumstances:
    """``together``: several operations at once. ``locked``: the database is. ``refusing``: the disk takes no files.

    ``small``: sessions compete for the device. ``closing``: the runtime is being closed.
    """

    together: bool = False
    locked: bool = False
    refusing: bool = False
    small: bool = False
    closing: bool = False

    def check(self, asked: Sequence[Asked]) -> None:
        """``Violation`` for an error that nothing here explains."""
        for one in asked:
            if one.error is None or isinstance(one.error, asyncio.CancelledError):
                continue
            if not self._may(one, one.error, [other for other in asked if other is not one]):
                raise Violation(f"{one.what} of {one.known.id} raised {one.error!r}") from one.error

    def _may(self, one: Asked, error: BaseException, others: Sequence[Asked]) -> bool:
        others = [other for other in others if other.known is one.known]
        match error:
            case SessionBusy():
                return bool(others)
            case SessionNotFound():
                return any(other.is_delete for other in others)
            case Closed():
                return self.closing or any(other.is_delete for other in others)
            case ContextTooLong():
                full = one.known.policy == "full" or any(other.policy == "full" for other in others)
                return full and one.is_turn and error.tokens > error.limit == CONTEXT
            case CapacityExceeded():
                return self.small and (self.together or error.needed > error.available)
            case DatabaseUnavailable():
                return self.locked
            case StorageFull():
                return self.refusing and one.what == "Suspend"
            case InvalidRequest():
                return one.policy is not None and bool(one.known.pinned)
        return False
