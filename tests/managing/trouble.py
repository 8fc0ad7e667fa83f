"""Faults that stay until they are ended, faults of one moment, and the death of the process without dying.

A process that is killed leaves what its files were at that moment. So a copy of the home, taken between two
instructions at a named place while nothing can be renamed, deleted or committed, is what the next start would find.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator, Set
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agentkv import AgentKV
from agentkv.storage import faultpoints

__all__ = ["POINTS", "Trouble", "armed", "copied", "held_up", "locked"]

POINTS = (
    "turn.before_commit",
    "turn.after_commit",
    "restore.before_read",
    "suspend.begin",
    "suspend.flushed",
    "suspend.end",
    "store.encoded",
    "store.before_manifest",
    "store.after_manifest",
    "blob.before_write",
    "blob.mid_write",
    "blob.after_write",
    "blob.before_rename",
    "blob.after_rename",
    "blob.after_folder_fsync",
    "gc.before_delete",
    "gc.before_forget",
)
"""Every named place of the code; ``test_kill9_turns`` holds that there are no others."""


class Trouble:
    """What is wrong with one home's disk.

    ``damaged``: chunk files that were changed or removed behind the runtime's back, with the inode of what is left.
    ``altered``: bytes that it counts and that are not there. ``orphans``: files that it could not put into the index;
    ``garbage``: it may have been kept from deleting what nobody needs.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.damaged: dict[str, int | None] = {}
        self.altered = 0
        self.orphans: set[str] = set()
        self.garbage = False
        self.refusing = False
        self.read_only = False

    @property
    def active(self) -> bool:
        """Whether the disk takes no new files now."""
        return self.refusing or self.read_only

    def path(self, name: str) -> Path:
        """Of a chunk file."""
        return self.home / "blobs" / name[:2] / name

    def files(self) -> dict[str, int]:
        """Bytes of every chunk file."""
        found = (path for folder in (self.home / "blobs").glob("??") for path in folder.iterdir())
        return {path.name: path.stat().st_size for path in found if not path.name.startswith(".")}

    # -- bad files ----------------------------------------------------------------------------------------------------

    def spoil(self, name: str, way: str, where: int) -> None:
        """Flip a bit of a chunk file, cut it short, or remove it."""
        path = self.path(name)
        nbytes = path.stat().st_size
        if way == "remove" or not nbytes:
            path.unlink()
            self.altered += nbytes
        elif way == "truncate":
            os.truncate(path, where % nbytes)
            self.altered += nbytes - where % nbytes
        else:
            with path.open("r+b") as file:
                file.seek(where % nbytes)
                byte = file.read(1)[0]
                file.seek(where % nbytes)
                file.write(bytes([byte ^ 1 << where % 8]))
        self.damaged[name] = _inode(path)

    def notice_repairs(self, named: Set[str]) -> None:
        """Files that were written anew are good; files that nobody names any more concern nobody."""
        for name, inode in list(self.damaged.items()):
            now = _inode(self.path(name))
            if (now is not None and now != inode) or name not in named:
                del self.damaged[name]
            else:
                self.damaged[name] = now

    # -- a disk that takes no more ------------------------------------------------------------------------------------

    def refuse(self, kv: AgentKV, room: int) -> None:
        """The budget is reached, but for ``room`` bytes."""
        blobs: Any = kv.sessions.tiers.blobs
        blobs.budget_bytes = blobs.used_bytes() + room
        self.refusing = True

    def make_read_only(self) -> bool:
        """The folder of chunk files, mounted over itself; ``False`` where this user may not."""
        folder = self.home / "blobs"
        if self.read_only or os.geteuid() != 0 or not _done("mount", "--bind", str(folder), str(folder)):
            return False
        self.read_only = _done("mount", "-o", "remount,ro,bind", str(folder))
        if not self.read_only:
            _done("umount", "-l", str(folder))
        return self.read_only

    def accept(self, kv: AgentKV | None) -> None:
        """The disk is well again."""
        if self.refusing and kv is not None:
            kv.sessions.tiers.blobs.budget_bytes = 2**40
        if self.read_only:
            _done("umount", "-l", str(self.home / "blobs"))
        self.refusing = self.read_only = False

    def moved(self, home: Path) -> Trouble:
        """The same trouble with the files, in a copy of the home that is not yet open."""
        found = Trouble(home)
        found.damaged = {name: _inode(found.path(name)) for name in self.damaged}
        return found


def _inode(path: Path) -> int | None:
    with suppress(FileNotFoundError):
        return path.stat().st_ino
    return None


def _done(*command: str) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """Another connection's write transaction."""
    with closing(sqlite3.connect(home / "agentkv.db", isolation_level=None, timeout=10)) as other:
        other.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            other.execute("ROLLBACK")


@contextmanager
def held_up(kv: AgentKV) -> Iterator[Callable[[], None]]:
    """A disk that takes its time: no file is written until what this yields is called."""
    blobs: Any = kv.sessions.tiers.blobs
    go_on, put_many = threading.Event(), blobs.put_many

    def slow(items: Any) -> int:
        assert go_on.wait(60)
        return int(put_many(items))

    blobs.put_many = slow
    try:
        yield go_on.set
    finally:
        go_on.set()
        del blobs.put_many


@contextmanager
def armed(point: str, passing: int, act: Callable[[], None]) -> Iterator[None]:
    """When the code comes to ``point`` for the ``passing``-th time (from 1), it calls ``act`` instead of dying."""
    faultpoints._name, faultpoints._left = point, passing
    real, faultpoints.os = faultpoints.os, SimpleNamespace(kill=lambda *_: act(), getpid=os.getpid)  # type: ignore[assignment]
    try:
        yield
    finally:
        faultpoints._name, faultpoints.os = None, real


def copied(kv: AgentKV, home: Path, to: Path) -> None:
    """The home as ``kill -9`` would leave it now: what is committed, and every file, finished or not. Blocking."""
    to.mkdir(mode=0o700)
    with kv.sessions.tiers.blobs._lock:  # type: ignore[attr-defined]
        with (
            closing(sqlite3.connect(home / "agentkv.db", timeout=10)) as source,
            closing(sqlite3.connect(to / "agentkv.db")) as target,
        ):
            source.backup(target)
        shutil.copytree(home / "blobs", to / "blobs")
    shutil.copy2(home / "secret", to / "secret")
