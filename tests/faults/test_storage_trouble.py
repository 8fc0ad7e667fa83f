"""Disks that are full or read-only, a locked database, a second process, other users: what the user then sees."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from homes import check_home, check_session, model_folder, opened, said, turns, written
from managing.trouble import armed

from agentkv import AgentKV
from agentkv.errors import DatabaseUnavailable, HomeLocked, StorageFull
from agentkv.sessions.db import repository
from agentkv.sessions.db.transactions import Patience

TOKENS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models"), "gemma3")


@pytest.fixture(scope="module")
def twin(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """What an undisturbed session says to ``turns(6)``."""

    async def talk() -> list[tuple[int, ...]]:
        async with opened(tmp_path_factory.mktemp("twin"), model) as kv:
            return [reply.ids for reply in await said(await kv.sessions.create(), turns(6), TOKENS)]

    return asyncio.run(talk())


# -- a disk that takes no more -----------------------------------------------------------------------------------------


class Disk:
    """A disk that can be made to refuse, in one of three real ways."""

    def __init__(self, home: Path, way: str) -> None:
        self.home = home
        self.way = way
        self._filler = home / "blobs" / "filler"

    def refuse(self, kv: AgentKV) -> None:
        blobs = kv.sessions.tiers.blobs
        if self.way == "budget":
            blobs.budget_bytes = blobs.used_bytes() + 100  # type: ignore[attr-defined]
        elif self.way == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", self.home / "blobs"], check=True)
        else:
            with contextlib.suppress(OSError), self._filler.open("wb") as out:
                while True:
                    out.write(bytes(4096))

    def accept(self, kv: AgentKV) -> None:
        if self.way == "budget":
            kv.sessions.tiers.blobs.budget_bytes = 2**40  # type: ignore[attr-defined]
        elif self.way == "read-only":
            subprocess.run(["mount", "-o", "remount,rw", self.home / "blobs"], check=True)
        else:
            self._filler.unlink()


def can_mount(folder: Path) -> bool:
    """Whether this user may mount a file system of its own here."""
    if os.geteuid() != 0:
        return False
    done = subprocess.run(["mount", "-t", "tmpfs", "none", folder], capture_output=True)
    if done.returncode == 0:
        subprocess.run(["umount", folder], check=True)
    return done.returncode == 0


@pytest.fixture(params=["budget", "full", "read-only"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    home = tmp_path / "home"
    blobs = home / "blobs"
    blobs.mkdir(parents=True)
    if request.param == "budget":
        yield Disk(home, "budget")
        return
    if not can_mount(blobs):
        pytest.skip("mounting a small file system needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", blobs], check=True)
    try:
        yield Disk(home, request.param)
    finally:
        subprocess.run(["umount", "-l", blobs], check=True)


def half_written(home: Path) -> list[Path]:
    return list((home / "blobs").rglob(".tmp*"))


async def test_a_disk_that_refuses_stops_the_session_at_host_memory(
    model: Path, twin: list[tuple[int, ...]], disk: Disk
) -> None:
    async with opened(disk.home, model) as kv:
        session = await kv.sessions.create()
        assert (await said(session, turns(6)[:1], TOKENS))[0].ids == twin[0]
        await written(kv)
        stored = (await session.state()).stored_tokens
        disk.refuse(kv)

        assert (await said(session, turns(6)[1:2], TOKENS))[0].ids == twin[1], "the session stays usable"
        report = await session.suspend(tier="disk")
        assert report.tier == "host"
        assert report.details["storage"]
        state = await session.state()
        assert (state.tier, state.stored_tokens) == ("host", stored)
        assert state.host_bytes > 0
        assert half_written(disk.home) == []
        await check_session(kv, session)

        (reply,) = await said(session, turns(6)[2:3], TOKENS)
        assert (reply.ids, reply.restore.reason) == (twin[2], None)
        assert reply.restore.tokens == report.tokens == reply.usage.cached_tokens, "exactly from there"
        assert (await session.suspend()).tier == "host"
        assert (await session.suspend()).tier == "host", "idempotent"

        disk.accept(kv)
        (reply,) = await said(session, turns(6)[3:4], TOKENS)
        assert reply.ids == twin[3]
        await written(kv)
        state = await session.state()
        assert state.stored_tokens == state.kv_tokens, "when space returns the next turn stores everything"
        assert kv.sessions.tiers.behind.storage_error is None
        report = await session.suspend()
        assert (report.tier, report.details) == ("disk", {})
        assert (await session.state()).host_bytes == kv.sessions.tiers.host.used_bytes == 0
        await check_home(kv)
    async with opened(disk.home, model) as kv:
        session = await kv.sessions.get(session.id)
        (reply,) = await said(session, turns(6)[4:5], TOKENS)
        assert (reply.ids, reply.restore.source, reply.restore.reason) == (twin[4], "disk", None)


async def test_a_closed_runtime_whose_disk_refused_lost_no_turn(
    model: Path, twin: list[tuple[int, ...]], disk: Disk
) -> None:
    async with opened(disk.home, model) as kv:
        session = await kv.sessions.create()
        await said(session, turns(6)[:1], TOKENS)
        await written(kv)
        disk.refuse(kv)
        await said(session, turns(6)[1:3], TOKENS)
    disk.accept(kv)
    async with opened(disk.home, model) as kv:
        session = await kv.sessions.get(session.id)
        (reply,) = await said(session, turns(6)[3:4], TOKENS)
        assert reply.ids == twin[3]
        assert reply.restore.source == "disk"
        assert reply.restore.reason is not None
        assert reply.restore.reason.startswith("unstored")
        assert reply.restore.recomputed_tokens > 0
        await check_home(kv)


async def test_without_room_in_host_memory_either_the_session_stays_live(
    model: Path, twin: list[tuple[int, ...]], tmp_path: Path
) -> None:
    async with opened(tmp_path / "home", model, disk_budget=1000, host_budget=1000) as kv:
        session = await kv.sessions.create()
        for i in range(3):
            (reply,) = await said(session, [turns(6)[i]], TOKENS)
            assert reply.ids == twin[i]
            with pytest.raises(StorageFull, match="host_budget") as caught:
                await session.suspend()
            assert session.id in str(caught.value)
            state = await session.state()
            assert (state.tier, state.host_bytes, state.stored_tokens) == ("device", 0, 0)
            await check_session(kv, session)
            await check_home(kv)
        assert reply.restore.source == "device"


async def test_a_session_of_which_only_a_part_fits_host_memory_leaves_nothing_there(
    model: Path, tmp_path: Path
) -> None:
    async with opened(tmp_path / "home", model, disk_budget=0) as kv:
        host = kv.sessions.tiers.host
        session = await kv.sessions.create()
        await said(session, turns(1, tokens=400), TOKENS)
        report = await session.suspend()
        assert report.tier == "host"
        assert len(host) == 2
        await session.resume()
        assert host.used_bytes == 0
        host.budget_bytes = report.nbytes - 100
        with pytest.raises(StorageFull):
            await session.suspend()
        assert host.used_bytes == 0
        assert (await session.state()).tier == "device"
        host.budget_bytes = report.nbytes
        assert (await session.suspend()).tier == "host"
        await check_session(kv, session)


async def test_a_turn_that_needs_the_memory_of_a_session_that_cannot_move_is_told_the_numbers(
    model: Path, tmp_path: Path
) -> None:
    from agentkv.errors import CapacityExceeded

    async with opened(tmp_path / "home", model, disk_budget=0, host_budget=0, admission_seconds=0.5) as kv:
        stuck, other = await kv.sessions.create(), await kv.sessions.create()
        await said(stuck, turns(1), TOKENS)
        kv.sessions.tiers.device_budget = (await stuck.state()).device_bytes + 1000
        with pytest.raises(CapacityExceeded, match="device_budget"):
            await said(other, turns(1), TOKENS)
        assert (await stuck.state()).tier == "device"
        kv.sessions.tiers.device_budget = 2**30
        await said(other, turns(1), TOKENS)
        await check_session(kv, stuck)


# -- the database ------------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real retries, in less time."""
    monkeypatch.setattr(repository, "Patience", lambda: Patience(attempts=2, pause_seconds=0.02, busy_seconds=0.2))


@contextlib.contextmanager
def locked(home: Path) -> Iterator[None]:
    """Another connection's write transaction."""
    other = sqlite3.connect(home / "agentkv.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


@pytest.mark.usefixtures("impatient")
async def test_a_locked_database_fails_the_turn_in_bounded_time_and_rolls_it_back(
    model: Path, twin: list[tuple[int, ...]], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    async with opened(home, model) as kv:
        session = await kv.sessions.create()
        await said(session, turns(6)[:1], TOKENS)
        await written(kv)
        length = (await session.state()).kv_tokens
        with locked(home):
            began = time.monotonic()
            with pytest.raises(DatabaseUnavailable, match="locked"):
                await said(session, turns(6)[1:2], TOKENS)
            assert time.monotonic() - began < 20
            assert (await session.state()).kv_tokens == length, "the KV is rolled back"
            await check_session(kv, session)
            with pytest.raises(DatabaseUnavailable):
                await kv.sessions.create()
        for i in range(1, 4):
            (reply,) = await said(session, turns(6)[i : i + 1], TOKENS)
            assert reply.ids == twin[i]
        assert (await session.state()).turns == 4
        await check_session(kv, session)
        await check_home(kv)


@pytest.mark.usefixtures("impatient")
async def test_a_lock_that_is_let_go_in_time_costs_nothing_but_time(
    model: Path, twin: list[tuple[int, ...]], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    async with opened(home, model) as kv:
        session = await kv.sessions.create()
        with locked(home):
            turn = asyncio.create_task(said(session, turns(6)[:1], TOKENS))
            await asyncio.sleep(0.15)
        assert (await turn)[0].ids == twin[0]


@pytest.mark.usefixtures("impatient")
async def test_a_database_that_is_locked_while_closing_keeps_nothing_from_being_given_back(
    model: Path, twin: list[tuple[int, ...]], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    kv = await opened(home, model, disk_budget=0, host_budget=0)
    session = await kv.sessions.create()
    await said(session, turns(6)[:2], TOKENS)
    await written(kv)
    kv.sessions.tiers.blobs.budget_bytes = 2**30  # type: ignore[attr-defined]
    with locked(home):
        await kv.close()
    assert not kv.sessions._model.engine.alive
    async with opened(home, model) as kv:
        (reply,) = await said(await kv.sessions.get(session.id), turns(6)[2:3], TOKENS)
        assert reply.ids == twin[2]
        assert (reply.restore.source, reply.restore.reason) == ("disk", None), "the files say whose KV they are"


# -- other processes and users -----------------------------------------------------------------------------------------

SECOND = """
import sys
from pathlib import Path
from agentkv.errors import HomeLocked
from agentkv.sessions.home import Home
try:
    Home(Path(sys.argv[1]))
except HomeLocked as error:
    print(error.pid, error.host, error, sep="\\n")
"""


async def test_a_second_process_is_refused_with_the_first_ones_pid(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with opened(home, model):
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", SECOND, str(home)], capture_output=True, text=True, check=True
        )
        pid, host, message = done.stdout.splitlines()
        assert pid == str(os.getpid())
        assert host and host in message and str(home) in message
        with pytest.raises(HomeLocked) as caught:
            await opened(home, model)
        assert caught.value.pid == os.getpid()
    async with opened(home, model) as kv:
        assert await kv.sessions.list() == []


async def test_everything_in_a_home_is_the_owners_alone(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "outer" / "home"
    before = os.umask(0)
    try:
        async with opened(home, model) as kv:
            session = await kv.sessions.create()
            await said(session, turns(2), TOKENS)
            await session.suspend()
            await said(session, turns(1), TOKENS)
            await written(kv)
            found = {path: stat.S_IMODE(path.stat().st_mode) for path in (home, *home.rglob("*"))}
    finally:
        os.umask(before)
    names = {path.name for path in found}
    assert {"agentkv.db", "agentkv.db-wal", "agentkv.db-shm", "lock", "secret", "blobs", "quarantine"} <= names
    assert sum(path.parent.parent.name == "blobs" for path in found) >= 3, "chunk files"
    wrong: dict[str, Any] = {}
    for path, mode in found.items():
        if mode != (0o700 if path.is_dir() else 0o600):
            wrong[str(path)] = oct(mode)
    assert wrong == {}


async def test_files_whose_rows_could_not_be_written_go_with_the_next_collection(
    model: Path, tmp_path: Path, twin: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is lost between a chunk's file and its row. Its session stores it anew with its next turn."""
    monkeypatch.setattr(repository, "Patience", lambda: Patience(2, 0.01, 0.1))
    home = tmp_path / "home"
    async with opened(home, model) as kv:
        blobs, rows = kv.sessions.tiers.blobs, kv.sessions.repository
        one, two = await kv.sessions.create(), await kv.sessions.create()
        await said(one, [[7, 8, 9] * 10], TOKENS)
        await written(kv)
        with contextlib.closing(sqlite3.connect(home / "agentkv.db", isolation_level=None)) as other:
            with armed("store.before_manifest", 1, lambda: other.execute("BEGIN IMMEDIATE")):
                spoken = await said(two, turns(1), TOKENS)
                await written(kv)
            other.execute("ROLLBACK")
        assert set(dict(blobs.list())) - await rows.known_chunk_ids(), "the control: a file is nobody's"
        await one.delete()
        assert set(dict(blobs.list())) == await rows.known_chunk_ids() == set()
        spoken += await said(two, turns(3)[1:], TOKENS)
        assert [reply.ids for reply in spoken] == twin[:3]
        await two.suspend()
        assert (await two.resume()).reason is None
        await check_home(kv)
