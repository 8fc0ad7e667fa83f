"""What the sessions of all tenants of one runtime have in common."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentkv.engine.loading import LoadedModel
from agentkv.errors import InvalidRequest
from agentkv.sessions.core import SessionCore
from agentkv.sessions.db.repository import Repository
from agentkv.settings import Settings

if TYPE_CHECKING:
    from agentkv.sessions.hints import Hints
    from agentkv.sessions.tiers import Tiers

__all__ = ["DEFAULT_TENANT", "Shared", "check_tenant"]

DEFAULT_TENANT = "default"
"""Who sessions belong to where nobody is named."""
_LONGEST = 128


@dataclass(slots=True)
class Shared:
    """One model, one database, one set of budgets. ``tiers`` and ``hints`` are there once the runtime has opened them.

    ``cores``: sessions that this process has touched, by id. ``tasks``: what ``close`` waits for. ``importing``: one
    import at a time, since a fit that one brings, and takes away again where it fails, may be the next one's.
    ``choosing_holder``: one task at a time looks whether a head is held already.
    """

    settings: Settings
    model: LoadedModel
    repository: Repository
    tiers: Tiers = field(init=False)
    hints: Hints = field(init=False)
    cores: dict[str, SessionCore] = field(default_factory=dict)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    closed: bool = False
    importing: asyncio.Lock = field(default_factory=asyncio.Lock)
    choosing_holder: asyncio.Lock = field(default_factory=asyncio.Lock)


def check_tenant(name: str) -> str:
    """``name``, or ``InvalidRequest`` where no tenant can be called so."""
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST or not name.isprintable():
        raise InvalidRequest(
            f"a tenant's name is a text of 1 to {_LONGEST} printable characters, got {name!r}", param="tenant"
        )
    return name
