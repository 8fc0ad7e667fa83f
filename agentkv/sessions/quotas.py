"""What a tenant may have on disk: asked before anything is written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from agentkv.errors import QuotaReached
from agentkv.logs import Log
from agentkv.sessions.db.repository import Repository

__all__ = ["Quotas"]

log = Log(__name__)


class Quotas:
    """Holds tenants to the ``max_disk`` of their keys. Runs on the event loop."""

    def __init__(self, repository: Repository, kv_fingerprint: str, collect: Callable[[], Awaitable[int]]) -> None:
        """``collect`` deletes the files that no session needs any more."""
        self._repository = repository
        self._fingerprint = kv_fingerprint
        self._collect = collect
        self._locks: dict[str, asyncio.Lock] = {}

    @asynccontextmanager
    async def room(self, tenant: str, chunks: Mapping[str, int]) -> AsyncIterator[None]:
        """Inside, chunks (ids and bytes) may be written and listed: ``QuotaReached`` where the tenant's key is too
        small for them. One write at a time of a tenant with a limit; those without one do not wait.

        Where they do not fit, the tenant's own KV of other models makes room, the longest unused first.
        """
        if await self._repository.disk_use(tenant) is None:
            yield
            return
        async with self._locks.setdefault(tenant, asyncio.Lock()):
            needed = sum(chunks.values())
            while (use := await self._repository.disk_use(tenant, list(chunks))) and use.used + needed > use.limit:
                if not await self._repository.release_foreign(self._fingerprint, tenant):
                    raise QuotaReached(use.name, limit=use.limit, used=use.used, needed=needed)
                log.warning("foreign_kv_makes_room", tenant=tenant, chunks=len(chunks))
                await self._collect()
            yield
