"""Random traffic with a fault every second, over one home: nothing may be wrong, lost, leaked or growing.

``python tests/soak.py --minutes 30``. The runtime is opened again and again, with other budgets, layouts and residency
policies, closed in the middle of things, and now and then another process has the home and is killed there. The last
line is a summary in JSON; exit status 1, and the seed, at the first violation.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from homes import chat_folder, opened
from soaking.checks import Watch, at_any_moment, at_rest, resident_bytes
from soaking.faults import Clock, Faults, SmallDisk
from soaking.oracle import Oracle, Violation
from soaking.traffic import Traffic
from soaking.victim import Victim

from agentkv import AgentKV
from agentkv.sessions.db import repository
from agentkv.sessions.db.transactions import Patience

__all__ = ["Soak", "Summary", "main", "soaked"]

_LAYOUTS = ("dynamic", "dynamic", "static", "paged")
_GROWTH_BYTES = 96 << 20
_LEAST_TELLING = 100.0
"""Seconds of a soak from which its memory says something: before, caches fill."""


@dataclass
class Summary:
    """What happened. ``rss``: resident bytes, one a second."""

    seed: int
    family: str
    seconds: float = 0.0
    opened: int = 0
    killed: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    committed: Counter[str] = field(default_factory=Counter)
    restores: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    orphans: int = 0
    rss: list[int] = field(default_factory=list)

    def line(self) -> str:
        """As JSON."""
        facts = {name: value for name, value in vars(self).items() if name != "rss"}
        first, last = self.fifths()
        return json.dumps({**facts, "rss_first_fifth": first, "rss_last_fifth": last}, sort_keys=True)

    def fifths(self) -> tuple[int, int]:
        """Median resident bytes of the first and the last fifth."""
        n = max(1, len(self.rss) // 5)
        return int(statistics.median(self.rss[:n] or [0])), int(statistics.median(self.rss[-n:] or [0]))


class Soak:
    """One home, one model, one seed."""

    def __init__(self, root: Path, seed: int, family: str, *, sessions: int = 16, workers: int = 6) -> None:
        self.summary = Summary(seed, family)
        self._root = root
        self._home = root / "home"
        self._draw = random.Random(seed)
        self._model = chat_folder(root, family)
        self._sessions = sessions
        self._workers = workers
        self._victim: Victim | None = None

    async def run(self, seconds: float) -> Summary:
        """Raises ``Violation`` at the first one."""
        repository.Patience = lambda: Patience(attempts=2, pause_seconds=0.02, busy_seconds=0.3)  # type: ignore[assignment, misc]
        began = time.monotonic()
        oracle = Oracle(self._model, self._root / "oracle")
        disk = SmallDisk(self._home / "blobs", 12)
        try:
            async with oracle:
                with Clock() as clock:
                    self._faults = Faults(self._draw, self._home, disk, clock)
                    self._traffic = Traffic(self._draw, oracle, self._sessions)
                    self._traffic.may_be_locked = lambda: time.monotonic() - self._faults.locked_at < 10
                    while (left := began + seconds - time.monotonic()) > 0:
                        await self._opened_for(min(left, self._draw.uniform(3, max(5.0, min(60.0, seconds / 8)))))
                        if self._draw.random() < 0.4 or not self.summary.killed:
                            await self._killed()
                    await self._emptied()
        finally:
            if self._victim is not None:
                self._victim.close()
            disk.close()
            self.summary.seconds = round(time.monotonic() - began, 1)
            self.summary.tokens = oracle.counts
        self._check_memory()
        return self.summary

    # -- one life of the runtime --------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        draw = self._draw
        layout = draw.choice(_LAYOUTS)
        return {
            "layout": layout,
            "residency": draw.choice(["cost", "lru", "lfu", "ttl:2"]),
            "device_budget": draw.choice([2, 4, 8]) * (450_000 if layout == "static" else 150_000),
            "host_budget": draw.choice([100_000, 1_000_000]),
            "restore": "measured",
            "disk_budget": draw.choice([2_000_000, 8_000_000]),
            "idle_seconds": draw.choice([0.5, 2.0]),
            "disk_seconds": draw.choice([1.0, 4.0]),
            "admission_seconds": 3.0,
            "admission_queue": draw.choice([2, 32]),
        }

    async def _opened_for(self, seconds: float) -> None:
        summary, traffic, faults = self.summary, self._traffic, self._faults
        settings = self._settings()
        kv = await opened(self._home, self._model, **settings)
        watch = Watch(kv)
        await asyncio.sleep(0)
        try:
            traffic.opened(kv)
            faults.reopened()
            summary.opened += 1
            await self._caught_up(kv, watch)
            traffic.totals.clear()
            if self._victim is None and self._draw.random() < 0.6:
                self._victim = Victim()
            until = time.monotonic() + seconds
            workers = [asyncio.create_task(traffic.work(until)) for _ in range(self._workers)]
            await self._faulty(kv, until, workers)
            if self._draw.random() < 0.6:
                await self._finished(workers)
                await asyncio.sleep(0)
                counted = await at_rest(
                    kv,
                    watch.counts,
                    traffic.totals,
                    altered=faults.altered,
                    damaged=faults.damaged,
                    orphans=faults.orphaned,
                )
                summary.orphans += counted
            summary.committed.update({"turns": traffic.totals["turns"]})
            stats = kv.stats()
            summary.restores.update(stats.restores)
            summary.fallbacks.update(stats.fallbacks)
        finally:
            await kv.close()
        # Where it was closed in the middle of things: each operation ends, with Closed.
        await self._finished(workers)
        await watch.ended()
        summary.faults, summary.operations, summary.refusals = faults.counts, traffic.counts, traffic.refusals

    async def _faulty(self, kv: AgentKV, until: float, workers: list[asyncio.Task[None]]) -> None:
        """A fault a second, and a look at everything ten times a second."""
        pending: set[asyncio.Task[None]] = set()
        due = time.monotonic() + self._draw.random()
        while (now := time.monotonic()) < until:
            if now >= due:
                due += 1.0
                self.summary.rss.append(resident_bytes())
                pending.add(asyncio.create_task(self._faults.one(kv)))
            at_any_moment(kv, squeezed=self._faults.unsettled)
            done = [task for task in (*pending, *workers) if task.done()]
            for task in done:
                task.result()
            pending -= set(done)
            await asyncio.sleep(0.1)
        if pending:
            await asyncio.gather(*pending)

    @staticmethod
    async def _finished(workers: list[asyncio.Task[None]]) -> None:
        done, stuck = await asyncio.wait(workers, timeout=120)
        if stuck:
            for task in stuck:
                task.print_stack()
            raise Violation(f"{len(stuck)} workers never ended")
        for task in done:
            task.result()

    async def _caught_up(self, kv: AgentKV, watch: Watch) -> None:
        """What the last owner of the home left: every session as it was told, nothing half-done, no byte nobody's."""
        traffic = self._traffic
        there = {record.id for record in await kv.sessions.list(limit=1000)}
        if lost := traffic.sessions.keys() - there:
            raise Violation(f"sessions {lost} are gone")
        for stranger in there - traffic.sessions.keys():
            session = await kv.sessions.get(stranger)
            await session.token_ids()
            await session.delete()
        for known in list(traffic.sessions.values()):
            await traffic.look(known)
        found = Counter({"deleted": watch.counts["deleted"]})
        await asyncio.sleep(0)
        found["deleted"] = watch.counts["deleted"]
        await at_rest(kv, watch.counts, found, altered=0, damaged=self._faults.damaged, orphans=False)
        watch.counts.clear()

    async def _killed(self) -> None:
        """Another process has the home for a moment."""
        traffic = self._traffic
        if not traffic.sessions:
            return
        victim, self._victim = self._victim or Victim(), None
        order = {
            "home": str(self._home),
            "model": str(self._model),
            "sessions": {known.id: known.plan.chat for known in traffic.sessions.values()},
            "seed": self._draw.randrange(10**9),
            "settings": self._settings(),
        }
        try:
            told = await asyncio.to_thread(victim.killed, self._draw.uniform(0.0, 3.0), **order)
        finally:
            victim.close()
        self.summary.killed += 1
        for session, turn, ids in told:
            traffic.sessions[session].told[turn] = ids

    async def _emptied(self) -> None:
        """All sessions are deleted: nothing is left in any tier."""
        async with opened(self._home, self._model) as kv:
            self._traffic.opened(kv)
            for known in list(self._traffic.sessions.values()):
                await self._traffic.look(known)
            for record in await kv.sessions.list(limit=1000):
                await kv.sessions.delete(record.id)
            tiers = kv.sessions.tiers
            left = dict(tiers.blobs.list())
            rows = await kv.sessions.repository.known_chunk_ids()
            if left or rows or tiers.device_bytes or tiers.host.used_bytes or kv.sessions.cores():
                raise Violation(
                    f"all sessions are deleted; left are {len(left)} files, {len(rows)} rows, {tiers.device_bytes} "
                    f"bytes on the device and {tiers.host.used_bytes} in host memory"
                )

    def _check_memory(self) -> None:
        first, last = self.summary.fifths()
        if self.summary.seconds >= _LEAST_TELLING and last - first > _GROWTH_BYTES:
            raise Violation(f"resident memory grew from {first >> 20} MiB to {last >> 20} MiB")


def soaked(root: Path, seed: int, family: str, seconds: float) -> Summary:
    """Run one; prints the summary, whatever happens."""
    print(f"soak: seed {seed}, {family}, {seconds:.0f} s", flush=True)
    soak = Soak(root, seed, family)
    try:
        return asyncio.run(soak.run(seconds))
    finally:
        print(soak.summary.line(), flush=True)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None, help="reproduces what was drawn, not what raced")
    parser.add_argument("--families", default="gemma3,llama", help="the time is shared among them")
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)  # faults are what this is for
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    families = arguments.families.split(",")
    for family in families:
        with tempfile.TemporaryDirectory(prefix="agentkv-soak-", ignore_cleanup_errors=True) as root:
            try:
                soaked(Path(root), seed, family, 60 * arguments.minutes / len(families))
            except BaseException:
                traceback.print_exc()
                print(f"soak: violated; again with --seed {seed} --families {family}", flush=True)
                return 1
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
