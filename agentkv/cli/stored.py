"""A home's sessions without its model: what can be said and done from the database and the files alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentkv.errors import AgentKVError

if TYPE_CHECKING:
    from agentkv.sessions.db.records import Manifest
    from agentkv.sessions.db.repository import Repository
    from agentkv.settings import Settings
    from agentkv.storage.blobs import BlobStore

__all__ = ["StoredHome", "is_empty", "settings_of_session", "stored_home"]


@dataclass(frozen=True, slots=True)
class StoredHome:
    """A locked home's database and files. Methods block no loop for long: they look at sizes, not at content."""

    repository: Repository
    blobs: BlobStore
    secret: bytes

    def nbytes(self, manifest: Manifest) -> int:
        """Bytes on disk of a manifest's chunks; missing ones count nothing."""
        size = 0
        for segment in manifest.segments:
            try:
                size += self.blobs.size(segment.chunk_id)
            except AgentKVError:
                continue
        return size

    async def delete(self, session_id: str, tenant: str = "default") -> int:
        """Delete a session and the files that no other needs; the bytes freed. ``SessionNotFound`` if there is none."""
        await self.repository.delete_session(session_id, tenant)
        return await self.collect_garbage()

    async def collect_garbage(self) -> int:
        """Delete the files that no session needs. The bytes freed."""
        before = self.blobs.used_bytes()
        while claimed := await self.repository.claim_garbage(100):
            for name in claimed:
                self.blobs.delete(name)
            await self.repository.forget_chunks(claimed)
        return before - self.blobs.used_bytes()


def is_empty(settings: Settings) -> bool:
    """Whether nothing was ever stored here: then there is nothing to open, and looking must not create it."""
    return settings.database is None and not (settings.home / "agentkv.db").exists()


@asynccontextmanager
async def stored_home(settings: Settings) -> AsyncIterator[StoredHome]:
    """Lock the home and open its database. Raises ``HomeLocked`` with the pid of the process that has it."""
    from agentkv.sessions.db.repository import Repository
    from agentkv.sessions.home import Home
    from agentkv.sessions.opening import open_store

    home = await asyncio.to_thread(Home, settings.home)
    try:
        async with await Repository.open(settings.database_url) as repository:
            yield StoredHome(repository, await asyncio.to_thread(open_store, settings, home.secret), home.secret)
    finally:
        home.close()


async def settings_of_session(settings: Settings, session_id: str, tenant: str = "default") -> Settings:
    """Settings with the model that the session was written with, where that model is here under its name.

    Raises ``SessionNotFound``.
    """
    from agentkv.errors import SessionNotFound
    from agentkv.models import resolve

    if is_empty(settings):
        raise SessionNotFound(session_id)
    async with stored_home(settings) as home:
        record = await home.repository.get_session(session_id, tenant)
    if record.model != settings.model and resolve(record.model, settings) is not None:
        return settings.model_copy(update={"model": record.model})
    return settings
