"""What must hold over a runtime at any moment, and what once it is at rest."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections import Counter
from collections.abc import Set as AbstractSet

from homes import check_session, written

from agentkv import AgentKV
from agentkv.sessions.events import LifecycleEvent
from soaking.oracle import Violation

__all__ = ["Watch", "at_any_moment", "at_rest", "resident_bytes"]


class Watch:
    """Counts the events of one runtime from its opening on."""

    def __init__(self, kv: AgentKV) -> None:
        self.counts: Counter[str] = Counter()
        self._kv = kv
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self._kv.events():
            self._count(event)

    def _count(self, event: LifecycleEvent) -> None:
        self.counts[event.kind] += 1

    async def ended(self) -> None:
        """The runtime is closed: the last event was read."""
        await asyncio.wait_for(self._task, 10)


def at_any_moment(kv: AgentKV, *, squeezed: bool) -> None:
    """Memory is inside its budgets, and what idle sessions have reserved is what they hold. Runs between two steps of
    the loop. ``squeezed``: the budget was lowered below what is admitted."""
    tiers = kv.sessions.tiers
    cores = kv.sessions.cores()
    tiers.host.check_integrity()
    if tiers.device_bytes != sum(core.reserved for core in cores):
        raise Violation("device_bytes is not the sum of what is reserved")
    if not squeezed and tiers.device_bytes > tiers.device_budget:
        raise Violation(f"{tiers.device_bytes:,} bytes on the device, budget {tiers.device_budget:,}")
    for core in cores:
        live = core.kv.nbytes if core.kv is not None else 0
        if core.idle and core.reserved != live:
            raise Violation(f"{core.id} is idle ({core.state}), holds {live:,} bytes, reserved {core.reserved:,}")
        if core.idle and (core.kv is not None) != (str(core.state) == "live"):
            raise Violation(f"{core.id} is {core.state}, with KV: {core.kv is not None}")
        if core.idle and core.kv is not None and core.held:
            raise Violation(f"{core.id} is live and holds {len(core.held)} chunks in host memory")
    stats = kv.stats()
    if (stats.hit_rate or 0) > 1 or min(stats.waiting, stats.running, stats.prompt_tokens - stats.cached_tokens) < 0:
        raise Violation(f"impossible counts: {stats}")


async def at_rest(
    kv: AgentKV, events: Counter[str], totals: Counter[str], *, altered: int, damaged: AbstractSet[str], orphans: bool
) -> int:
    """No operation is under way: every byte in every tier is somebody's, and counted; counts and events agree.

    ``altered``: bytes of files that were changed from outside. ``damaged``: chunks whose files may be gone.
    ``orphans``: whether the index may have missed files, since the database failed. Returns how many it did.
    """
    await written(kv)
    sessions, tiers, repository = kv.sessions, kv.sessions.tiers, kv.sessions.repository
    for core in sessions.cores():
        async with core.gate:
            await check_session(kv, await sessions.get(core.id))
    held = {name for core in sessions.cores() for name in core.held}
    if held != set(tiers.host._entries):
        raise Violation(f"host memory holds {set(tiers.host._entries) - held}, sessions want {held}")

    known = await repository.known_chunk_ids()
    there = dict(tiers.blobs.list())
    if (strangers := there.keys() - known) and not orphans:
        raise Violation(f"{len(strangers)} live files without a row: {sorted(strangers)[:3]}")
    before = None
    while page := await repository.list_sessions("default", None, 200, before):
        for record in page:
            for segment in (await repository.manifest(record.id)).segments:
                if segment.chunk_id not in there and segment.chunk_id not in damaged:
                    raise Violation(f"{record.id} names {segment.chunk_id}, which nobody has touched and is gone")
        before = page[-1].id
    files = [path for path in kv.settings.blobs_dir.rglob("*") if path.is_file()]
    if temporaries := [path.name for path in files if path.name.startswith(".tmp")]:
        raise Violation(f"half-written files: {temporaries}")
    found = sum(path.stat().st_size for path in files)
    if tiers.blobs.used_bytes() != found + altered:
        raise Violation(f"{tiers.blobs.used_bytes():,} bytes counted on disk, {found:,} there, {altered:,} were taken")
    await asyncio.sleep(0)
    stats = kv.stats()
    told = {
        "turns": (stats.turns, totals["turns"]),
        "prompt tokens": (stats.prompt_tokens, totals["prompt"]),
        "completion tokens": (stats.completion_tokens, totals["said"]),
        "cached tokens": (stats.cached_tokens, totals["cached"]),
        "fallbacks": (sum(stats.fallbacks.values()), events["fallback"]),
        "created": (events["created"], totals["created"]),
        "deleted": (events["deleted"], totals["deleted"]),
        "lost events": (events["lost"], 0),
    }
    if wrong := {what: pair for what, pair in told.items() if pair[0] != pair[1]}:
        raise Violation(f"counts disagree: {wrong}")
    return len(strangers)


def resident_bytes() -> int:
    """Of this process, now, without what the C library keeps for later: how much that is says nothing about leaks."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * 4096
