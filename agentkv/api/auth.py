"""Whose call it is: keys, what they may do, and how often.

Without any key the server is its machine's own: it listens on loopback only, and everything belongs to tenant
``default``. From the first key on each request needs one.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from agentkv.api.calls import KV, TENANT, Tenant, route_of
from agentkv.api.errors import Forbidden, Unauthorized
from agentkv.api.origins import is_loopback
from agentkv.errors import LimitExceeded
from agentkv.sessions.db.records import KeyRecord

if TYPE_CHECKING:
    from agentkv.sessions.core import SessionCore
    from agentkv.sessions.db.repository import Repository
    from agentkv.types import Usage

__all__ = ["GUARD", "Bucket", "Guard", "tenant_of"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_FRESH = 5.0
"""Seconds for which what SQL says of a key is believed: a revoked one works for so long."""
_MOST = 4096
_USED = 60.0
"""Seconds between notes of when a key was last used."""


@dataclass(slots=True)
class Bucket:
    """So many a minute, all of them at once if nobody came before. ``left`` may fall below zero: what a turn costs is
    known when it is done."""

    limit: int
    left: float
    at: float

    @classmethod
    def full(cls, limit: int, now: float) -> Bucket:
        """Nobody came yet."""
        return cls(limit, float(limit), now)

    def refill(self, now: float) -> None:
        """Time has passed."""
        self.left = min(float(self.limit), self.left + (now - self.at) * self.limit / 60)
        self.at = now

    def wait(self, wanted: float) -> float:
        """Seconds until ``wanted`` are there; 0 where they are."""
        if self.left >= wanted:
            return 0.0
        return (wanted - self.left) * 60 / self.limit if self.limit else 3600.0


class Guard:
    """Knows the keys, as SQL has them, and how much each has used. On the event loop."""

    def __init__(self, repository: Repository, clock: Callable[[], float] = time.monotonic) -> None:
        self._repository = repository
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[float, KeyRecord | None]] = OrderedDict()
        self._asked = (-_FRESH, False)
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}
        self._noted: dict[str, float] = {}

    async def locked(self) -> bool:
        """Whether a key was ever made here, so that each request needs one. Revoking the last one opens nothing."""
        now = self._clock()
        if now - self._asked[0] >= _FRESH:
            self._asked = now, self._asked[1] or bool(await self._repository.keys())
        return self._asked[1]

    async def tenant(self, authorization: str | None) -> Tenant:
        """Whose the header is. Raises ``Unauthorized``, and ``LimitExceeded`` where the key has used up its rate."""
        if not await self.locked():
            return Tenant()
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise Unauthorized("this server needs a key: send it as `Authorization: Bearer akv_…`")
        key = await self._key(secret.strip())
        if key is None:
            raise Unauthorized("this key is not known here, or it was revoked; `agentkv keys create` makes another")
        self._count(key)
        await self._note(key)
        return Tenant(key.tenant, key.admin)

    def spent(self, core: SessionCore, usage: Usage) -> None:
        """A turn was committed: what was computed for it counts, not what was reused."""
        bucket = self._tokens.get(core.record.tenant)
        if bucket is not None:
            bucket.left -= usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens

    async def _key(self, secret: str) -> KeyRecord | None:
        digest, now = hashlib.sha256(secret.encode()).digest(), self._clock()
        found = self._known.get(digest)
        if found is None or now - found[0] >= _FRESH:
            found = now, await self._repository.find_key(secret)
            self._known[digest] = found
            while len(self._known) > _MOST:
                self._known.popitem(last=False)
        return found[1]

    def _count(self, key: KeyRecord) -> None:
        now = self._clock()
        for name, limit, buckets in (
            ("requests", key.requests_per_minute, self._requests),
            ("tokens", key.tokens_per_minute, self._tokens),
        ):
            if limit is None:
                buckets.pop(key.id, None)
                continue
            bucket = buckets.get(key.id)
            if bucket is None or bucket.limit != limit:
                bucket = buckets[key.id] = Bucket.full(limit, now)
            bucket.refill(now)
            if wait := bucket.wait(1):
                raise LimitExceeded(
                    f"key {key.name!r} may have {limit:,} {name} a minute and has used them up; "
                    f"come again in {wait:.0f} s",
                    limit=limit,
                    used=round(limit - bucket.left),
                    retry_after=wait,
                )
        if key.requests_per_minute is not None:
            self._requests[key.id].left -= 1

    async def _note(self, key: KeyRecord) -> None:
        now = self._clock()
        if now - self._noted.get(key.id, -_USED) >= _USED:
            self._noted[key.id] = now
            await asyncio.shield(self._repository.key_used(key.id, time.time()))


GUARD = web.AppKey("guard", Guard)


@web.middleware
async def tenant_of(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Find out whose call it is, and whether it may be made."""
    route = route_of(request)
    guard = request.app[GUARD]
    if route is None or route.scope == "open":
        request[TENANT] = Tenant(admin=False)
        return await handler(request)
    tenant = request[TENANT] = await guard.tenant(request.headers.get("Authorization"))
    if not await guard.locked() and not is_loopback(request.url.host or ""):
        # A page elsewhere may have had its name point here.
        raise Forbidden(f"this server has no keys and answers to loopback names only, not to {request.url.host!r}")
    if route.scope == "admin" and not tenant.admin:
        raise Forbidden("this call needs a key that was made with --admin")
    return await handler(request)


async def guarded(app: web.Application) -> None:
    """Count what turns use, from now on."""
    app[KV].sessions.tiers.observer.on_turn = app[GUARD].spent
