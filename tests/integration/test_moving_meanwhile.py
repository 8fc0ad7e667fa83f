"""Exports and imports beside turns, sweeps and cancellations; and from the command line."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import pytest
from homes import chat_folder, check_home, check_session, model_folder, opened, prompt, said, written

from agentkv.sessions import moving
from agentkv.sessions.exporting import Exporter
from agentkv.sessions.manager import Sessions
from agentkv.storage.container import Container

TOKENS = 8
NEXT = prompt(21, 5)
PATIENCE = 60.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


class Held:
    """Export's copying waits at its first chunk until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        copied = Exporter._bytes

        def waiting(exporter: Exporter, *arguments: Any) -> Any:
            self.reached.set()
            assert self.go.wait(PATIENCE), "the test never let it go"
            return copied(exporter, *arguments)

        monkeypatch.setattr(Exporter, "_bytes", waiting)

    async def here(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, PATIENCE), "nothing was copied"


async def test_a_turn_that_begins_meanwhile_is_not_waited_for_and_not_in_the_file(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it seals and gives up stays until it is copied, and goes then."""
    async with opened(tmp_path / "home", model_folder(models), idle_codec="int8") as kv:
        session = await kv.sessions.create()
        await said(session, [prompt(100, 1)], TOKENS)
        ledger = await session.token_ids()
        held = Held(monkeypatch)
        exporting = asyncio.create_task(session.export(tmp_path / "file"))
        await held.here()
        before = {segment.chunk_id for segment in (await kv.sessions.repository.manifest(session.id)).segments}
        later = (await said(session, [prompt(600, 2)], TOKENS))[0]
        await session.suspend()
        await kv.sessions.tiers.writer.collect_garbage()
        after = {segment.chunk_id for segment in (await kv.sessions.repository.manifest(session.id)).segments}
        assert not before & after, "the control: that turn gave all of them up"
        held.go.set()
        report = await exporting
        assert (report.tokens, report.kv_tokens, report.reason) == (len(ledger), len(ledger) - 1, None)
        monkeypatch.undo()
        await check_home(kv)
        there = {name for name, _ in kv.sessions.tiers.blobs.list()}
        assert there == after == await kv.sessions.repository.known_chunk_ids(), "nothing stays behind"
        moved = await kv.sessions.import_(tmp_path / "file")
        assert await moved.token_ids() == ledger
        assert (await said(moved, [prompt(600, 2)], TOKENS))[0].ids == later.ids


async def test_a_turn_under_way_is_waited_for_and_in_the_file(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path / "home", model_folder(models)) as kv:
        session = await kv.sessions.create()
        talking = asyncio.create_task(session.generate_tokens(prompt(200, 1), max_tokens=60))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert session._core.turns
        report = await session.export(tmp_path / "file")
        assert talking.done()
        reply = talking.result()
        assert report.tokens == 200 + len(reply.ids)
        assert report.kv_tokens == report.tokens - 1, "write-behind was flushed first"
        moved = await kv.sessions.import_(tmp_path / "file")
        replies = [(await said(each, [NEXT], TOKENS))[0].ids for each in (session, moved)]
        assert replies[0] == replies[1]


async def test_many_at_once(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path / "home", model_folder(models)) as kv:
        sessions = [await kv.sessions.create() for _ in range(3)]
        await asyncio.gather(*(said(s, [prompt(100, i)], TOKENS) for i, s in enumerate(sessions)))
        talking = [asyncio.create_task(said(s, [NEXT], TOKENS)) for s in sessions]
        await asyncio.gather(*(s.export(tmp_path / s.id) for s in sessions), sessions[0].export(tmp_path / "too"))
        expected = [(await each)[0].ids for each in talking]
        moved = await asyncio.gather(*(kv.sessions.import_(tmp_path / s.id) for s in sessions for _ in range(2)))
        for each, old in zip(moved, [s for s in sessions for _ in range(2)], strict=True):
            ledger = await old.token_ids()
            assert (await each.token_ids()) in (ledger, ledger[: 100 + TOKENS])
            if len(await each.token_ids()) != len(ledger):
                assert (await said(each, [NEXT], TOKENS))[0].ids == expected[sessions.index(old)]
            await check_session(kv, each)
        await check_home(kv)


# -- cancelled ---------------------------------------------------------------------------------------------------------


class Waits:
    """Counts what tasks wait for; calls ``strike`` at the ``at``-th."""

    def __init__(self, at: int, strike: Callable[[], object]) -> None:
        self._left, self._strike = at, strike

    @types.coroutine
    def of(self, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Drive ``work``."""
        given, raised = None, None
        while True:
            try:
                waited = work.send(given) if raised is None else work.throw(raised)
            except StopIteration as end:
                return end.value
            self._left -= 1
            if self._left == 0:
                asyncio.get_running_loop().call_soon(self._strike)
            given = raised = None
            try:
                given = yield waited
            except BaseException as error:
                raised = error


async def cancelled_at_await(
    monkeypatch: pytest.MonkeyPatch, at: int, work: Callable[[], Coroutine[Any, Any, Any]]
) -> bool:
    """Run ``work`` and cancel it when its inner tasks together wait for the ``at``-th time; whether it was."""
    tracked = Sessions.tracked
    task: asyncio.Task[Any]
    waits = Waits(at, lambda: task.cancel())

    def watched(sessions: Sessions, inner: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        async def outer() -> Any:
            return await waits.of(inner)

        return tracked(sessions, outer())

    with monkeypatch.context() as patch:
        patch.setattr(Sessions, "tracked", watched)
        task = asyncio.create_task(work())
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()
    return task.cancelled()


async def cancelled_at_step(
    monkeypatch: pytest.MonkeyPatch, at: int, work: Callable[[], Coroutine[Any, Any, Any]]
) -> bool:
    """Run ``work`` and cancel it when it asks for the ``at``-th time, between its steps, whether to go on."""
    loop, steps = asyncio.get_running_loop(), 0
    task: asyncio.Task[Any]

    class Striking(threading.Event):
        def is_set(self) -> bool:
            nonlocal steps
            steps += 1
            if steps == at:
                loop.call_soon_threadsafe(task.cancel)
                if threading.current_thread() is not threading.main_thread():
                    assert self.wait(PATIENCE)
            return super().is_set()

    with monkeypatch.context() as patch:
        patch.setattr(moving.threading, "Event", Striking)
        task = asyncio.create_task(work())
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()
    return task.cancelled()


@pytest.mark.parametrize("strike", [cancelled_at_await, cancelled_at_step])
async def test_an_export_cancelled_anywhere_leaves_no_file_and_no_trace(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch, strike: Any
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    async with opened(tmp_path / "home", model_folder(models)) as kv:
        session = await kv.sessions.create()
        await said(session, [prompt(600, 1)], TOKENS)
        outcomes = []
        for at in range(1, 60):
            outcomes.append(await strike(monkeypatch, at, lambda: session.export(folder / "file")))
            if not outcomes[-1]:
                break
            left = [path.name for path in folder.iterdir()]
            assert left in ([], ["file"]), left
            if left:
                with Container(folder / "file") as file:
                    assert file.header, "whole, or not there"
                (folder / "file").unlink()
            assert not kv.sessions.tiers.writer._spared
            assert session._core.idle
        assert outcomes[-1] is False and len(outcomes) > 3, outcomes
        assert [path.name for path in folder.iterdir()] == ["file"]
        await check_session(kv, session)
        await check_home(kv)


@pytest.mark.parametrize("strike", [cancelled_at_await, cancelled_at_step])
async def test_an_import_cancelled_anywhere_leaves_nothing(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch, strike: Any
) -> None:
    model = model_folder(models)
    async with opened(tmp_path / "here", model) as kv:
        session = await kv.sessions.create()
        await said(session, [prompt(900, 1)], TOKENS)
        await session.export(tmp_path / "file")
    async with opened(tmp_path / "there", model) as kv:
        outcomes = []
        for at in range(1, 80):
            outcomes.append(await strike(monkeypatch, at, lambda: kv.sessions.import_(tmp_path / "file")))
            sessions = await kv.sessions.list()
            assert len(sessions) == (not outcomes[-1])
            if not outcomes[-1]:
                break
            assert kv.sessions.cores() == []
            assert list(kv.sessions.tiers.blobs.list()) == []
            assert await kv.sessions.repository.known_chunk_ids() == set()
        assert outcomes[-1] is False and len(outcomes) > 5, outcomes
        moved = await kv.sessions.get(sessions[0].id)
        assert (await said(moved, [NEXT], TOKENS))[0].usage.cached_tokens == 907
        await check_home(kv)


async def test_a_runtime_that_closes_waits_for_what_is_being_written(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path / "home", model_folder(models)) as kv:
        session = await kv.sessions.create()
        await said(session, [prompt(300, 1)], TOKENS)
        held = Held(monkeypatch)
        exporting = asyncio.create_task(session.export(tmp_path / "file"))
        await held.here()
        closing = asyncio.create_task(kv.close())
        await asyncio.sleep(0.05)
        held.go.set()
        await closing
        assert (await exporting).kv_tokens == 307
    async with opened(tmp_path / "there", model_folder(models)) as kv:
        assert (await kv.sessions.import_(tmp_path / "file")).imported.kv_tokens == 307  # type: ignore[union-attr]


# -- the command line --------------------------------------------------------------------------------------------------


def agentkv(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agentkv.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "AGENTKV_DISK_MARGIN": "0", "AGENTKV_PREFILL_TOKENS": "32", **environment},
    )


@pytest.mark.full
async def test_from_one_home_to_another_on_the_command_line(tmp_path: Path, models: Path) -> None:
    model, file = chat_folder(models), tmp_path / "file"
    async with opened(tmp_path / "here", model) as kv:
        session = await kv.sessions.create("You are helpful.")
        await session.send("How is the weather in Paris?", max_tokens=9)
        await written(kv)
        tokens = len(await session.token_ids())
    done = agentkv("sessions", "export", session.id, file, "--home", tmp_path / "here", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "session_id": session.id,
        "path": str(file),
        "nbytes": file.stat().st_size,
        "tokens": tokens,
        "kv_tokens": tokens - 1,
        "chunks": 2,
        "reason": None,
    }
    again = agentkv("sessions", "export", session.id, file, "--home", tmp_path / "here")
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr == f"error: {file} exists already: name another file, or pass replace=True (--replace)\n"
    options = ("--home", tmp_path / "there", "--model", model, "--device", "cpu", "--dtype", "float32")
    moved = agentkv("sessions", "import", file, *options, "--json")
    assert moved.returncode == 0, moved.stderr
    report = json.loads(moved.stdout)
    assert (report["imported_from"], report["kv_tokens"], report["reason"]) == (session.id, tokens - 1, None)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    bad = agentkv("sessions", "import", file, *options)
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr.startswith(f"error: {file} is not imported: checksum: ")
    async with opened(tmp_path / "there", model) as kv:
        assert [record.id for record in await kv.sessions.list()] == [report["session_id"]]
        reply = await (await kv.sessions.get(report["session_id"])).send("And?", max_tokens=5)
        assert reply.usage.cached_tokens == tokens - 1


def test_nothing_is_made_where_there_is_nothing_to_export(tmp_path: Path) -> None:
    done = agentkv("sessions", "export", "sess_none", tmp_path / "file", "--home", tmp_path / "home")
    assert done.returncode == 1
    assert "there is no session 'sess_none'" in done.stderr
    assert list(tmp_path.iterdir()) == []
