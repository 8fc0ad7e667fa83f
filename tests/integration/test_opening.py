"""An opening that is cancelled, or interrupted from the keyboard, gives back all that it has taken."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from homes import model_folder, opened, said, turns
from striking import interrupted

from agentkv import AgentKV
from agentkv.cli.background import BackgroundLoop
from agentkv.cli.chat import chat


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models"))


def _threads() -> list[str]:
    """Threads of a runtime that outlive its opening; a model that was being loaded is loaded to the end."""
    return [t.name for t in threading.enumerate() if t.name.startswith("agentkv") and t.name != "agentkv-load"]


async def _cancelled(work: Coroutine[Any, Any, Any], at: int) -> asyncio.Task[Any]:
    """``work``'s task once it has ended, cancelled when it waited for the ``at``-th time."""
    task: asyncio.Task[Any] = asyncio.create_task(interrupted(work, at, lambda: task.cancel()))
    await asyncio.wait([task])
    return task


def _ctrl_c() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


async def test_an_opening_cancelled_at_any_await_leaves_a_home_to_open(tmp_path: Path, model: Path) -> None:
    home = tmp_path / "home"
    async with opened(home, model) as kv:
        session = await kv.sessions.create()
        await said(session, turns(1), 8)
        ledger = await session.token_ids()
    before = _threads()
    for at in range(1, 200):
        kv = opened(home, model)
        opening = await _cancelled(kv._start(), at)
        if not opening.cancelled():
            opening.result()
            await kv.close()
            break
        assert _threads() == before, f"cancelled at await {at}"
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not (home / "control.sock").exists()
        gc.collect()  # what was not closed warns here, and warnings are errors
        async with opened(home, model) as again:
            assert await (await again.sessions.get(session.id)).token_ids() == ledger
    assert at > 8, "an opening has more awaits than that"
    assert not opening.cancelled(), "the runtime never opened"


def test_ctrl_c_when_the_runtime_has_just_opened_closes_it(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, made = AgentKV._start, []

    async def interrupted_at_its_end(self: AgentKV) -> AgentKV:
        made.append(await start(self))
        _ctrl_c()  # the main thread finds it when it looks for the result
        return self

    monkeypatch.setattr(AgentKV, "_start", interrupted_at_its_end)
    before = _threads()
    with pytest.raises(KeyboardInterrupt):
        chat(home=tmp_path / "home", model=str(model), device="cpu")
    assert [kv._state for kv in made] == ["closed"]
    assert _threads() == before


def test_ctrl_c_cancels_the_coroutine_and_waits_for_it() -> None:
    said: list[str] = []

    async def work() -> None:
        try:
            _ctrl_c()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            said.append("ended")

    with BackgroundLoop() as loop, pytest.raises(KeyboardInterrupt):
        loop.run(work())
    assert said == ["ended"]


def test_a_task_that_is_left_is_cancelled_when_the_loop_ends() -> None:
    said: list[str] = []
    tasks = []

    async def forever() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            said.append("ended")

    async def work() -> None:
        tasks.append(asyncio.create_task(forever()))
        await asyncio.sleep(0)

    with BackgroundLoop() as loop:
        loop.run(work())
        assert not said
    assert said == ["ended"]
