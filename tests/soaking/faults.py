"""Faults, through the interfaces through which they come: files, the file system, the database, the clock, memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sqlite3
import subprocess
import time
from collections import Counter
from pathlib import Path

from agentkv import AgentKV

__all__ = ["Clock", "Faults", "SmallDisk"]


_OF_THE_DISK = {"full", "read_only"}
"""One at a time: each is ended by writing to that disk."""


class Clock:
    """The process's wall clock, which somebody sets: everything reads it from ``time.time``."""

    def __init__(self) -> None:
        self._real = time.time
        self.offset = 0.0

    def __enter__(self) -> Clock:
        time.time = lambda: self._real() + self.offset
        return self

    def __exit__(self, *_exc: object) -> None:
        time.time = self._real


class SmallDisk:
    """A file system of its own for the chunk files, where this user may mount one; ``mounted`` says so."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=700", "none", str(folder)]
        self.mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0

    def remount(self, mode: str) -> None:
        """``ro`` or ``rw``. Whoever writes just now makes the first wait a little."""
        for _ in range(50):
            done = subprocess.run(["mount", "-o", f"remount,{mode}", str(self.folder)], capture_output=True)
            if done.returncode == 0:
                return
            time.sleep(0.02)

    def close(self) -> None:
        """Unmount."""
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)


class Faults:
    """Injects into one home. ``counts``: what was done. ``altered``: bytes taken from or added to files behind the
    runtime's back since it opened. ``damaged``: chunks whose files were. ``locked_at``: when the database last was.

    ``orphaned``: whether since then a file may have been left without a row: the transaction that follows it failed, or
    a disk that became read-only in the middle of a group keeps what is to be taken back. The next start sweeps those.
    """

    def __init__(self, draw: random.Random, home: Path, disk: SmallDisk, clock: Clock) -> None:
        self._draw = draw
        self._home = home
        self._disk = disk
        self._wall = clock
        self.counts: Counter[str] = Counter()
        self.damaged: set[str] = set()
        self.altered = 0
        self.orphaned = False
        self.locked_at = -1e9
        self._active: set[str] = set()
        self.unsettled = False
        """Whether device_budget is below what it was when sessions were admitted."""

    def reopened(self) -> None:
        """The runtime counts its files anew."""
        self.altered = 0
        self.orphaned = False

    @property
    def kinds(self) -> list[str]:
        """Those that are possible here."""
        kinds = ["flip", "truncate", "remove", "budget", "locked", "clock", "squeeze"]
        if self._disk.mounted:
            kinds += ["full", "read_only"]
        elif os.geteuid() != 0:
            kinds += ["forbidden"]
        return kinds

    async def one(self, kv: AgentKV) -> None:
        """One fault, which ends by itself."""
        busy = self._active | (_OF_THE_DISK if self._active & _OF_THE_DISK else set())
        kind = self._draw.choice([kind for kind in self.kinds if kind not in busy])
        self.counts[kind] += 1
        if kind in ("flip", "truncate", "remove"):
            self._spoil(kv, kind)
            return
        self._active.add(kind)
        self.orphaned = self.orphaned or kind in ("locked", "read_only", "forbidden")
        try:
            await getattr(self, f"_{kind}")(kv)
        finally:
            self._active.remove(kind)

    def _files(self) -> list[Path]:
        folders = (self._home / "blobs").glob("??")
        return sorted(path for folder in folders for path in folder.iterdir() if not path.name.startswith("."))

    def _spoil(self, kv: AgentKV, kind: str) -> None:
        """A file is changed between two instructions of the runtime, whose workers may be reading it."""
        blobs = kv.sessions.tiers.blobs
        # The lock keeps a deletion from running between our look at the length and the change of it.
        with contextlib.suppress(FileNotFoundError, OSError), blobs._lock:  # type: ignore[attr-defined]
            files = self._files()
            if not files:
                return
            path = self._draw.choice(files)
            nbytes = path.stat().st_size
            if kind == "flip":
                data = bytearray(path.read_bytes())
                data[self._draw.randrange(len(data))] ^= 1 << self._draw.randrange(8)
                with path.open("r+b") as out:
                    out.write(data)
            elif kind == "truncate":
                left = self._draw.randrange(nbytes)
                os.truncate(path, left)
                self.altered += nbytes - left
            else:
                path.unlink()
                self.altered += nbytes
            self.damaged.add(path.name)

    async def _budget(self, kv: AgentKV) -> None:
        blobs = kv.sessions.tiers.blobs
        before = blobs.budget_bytes
        blobs.budget_bytes = blobs.used_bytes() + self._draw.randrange(4000)  # type: ignore[misc]
        try:
            await asyncio.sleep(self._draw.uniform(0.1, 1.5))
        finally:
            blobs.budget_bytes = before  # type: ignore[misc]

    async def _full(self, kv: AgentKV) -> None:
        filler = self._disk.folder.parent / "blobs" / "quarantine" / ".filler"
        with contextlib.suppress(OSError), filler.open("wb") as out:
            while True:
                out.write(bytes(1 << 16))
        try:
            await asyncio.sleep(self._draw.uniform(0.1, 1.5))
        finally:
            filler.unlink(missing_ok=True)

    async def _read_only(self, kv: AgentKV) -> None:
        await asyncio.to_thread(self._disk.remount, "ro")
        try:
            await asyncio.sleep(self._draw.uniform(0.1, 1.5))
        finally:
            self._disk.remount("rw")

    async def _forbidden(self, kv: AgentKV) -> None:
        folders = [self._home / "blobs", *(self._home / "blobs").glob("??")]
        for folder in folders:
            folder.chmod(0o500)
        try:
            await asyncio.sleep(self._draw.uniform(0.1, 1.5))
        finally:
            for folder in folders:
                folder.chmod(0o700)

    async def _locked(self, kv: AgentKV) -> None:
        with await asyncio.to_thread(self._lock) as other:
            self.locked_at = time.monotonic()
            try:
                await asyncio.sleep(self._draw.uniform(0.05, 2.0))
            finally:
                other.execute("ROLLBACK")
                self.locked_at = time.monotonic()

    def _lock(self) -> contextlib.closing[sqlite3.Connection]:
        other = sqlite3.connect(self._home / "agentkv.db", isolation_level=None, timeout=30, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        return contextlib.closing(other)

    async def _clock(self, kv: AgentKV) -> None:
        self._wall.offset = self._draw.choice([0.0, -86400.0, 86400.0, self._draw.uniform(-10, 10)])

    async def _squeeze(self, kv: AgentKV) -> None:
        tiers = kv.sessions.tiers
        before = tiers.device_budget
        self.unsettled = True
        tiers.device_budget = before // 2
        try:
            await asyncio.sleep(self._draw.uniform(0.1, 1.5))
        finally:
            tiers.device_budget = before
            self.unsettled = False
