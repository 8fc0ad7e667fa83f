"""Sessions that begin together with one head: the first computes it, the others wait for that and nothing else."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from homes import chat_folder, check_home, check_session, opened

from agentkv import AgentKV
from agentkv.sessions.session import Session

SYSTEM = " ".join(f"{i}. You are Bolt, who looks things up and says where each answer comes from." for i in range(4))
QUESTION = "How is the weather in Paris?"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


async def alone(home: Path, model: Path, **create: Any) -> tuple[int, ...]:
    async with opened(home, model) as kv:
        session = await kv.sessions.create(**create)
        return (await session.send(QUESTION, max_tokens=6, ignore_eos=True)).ids


async def made(kv: AgentKV, count: int, **create: Any) -> list[Session]:
    return [await kv.sessions.create(**create) for _ in range(count)]


@pytest.mark.parametrize(("family", "policy"), [("llama", "full"), ("llama", "sink:480"), ("gemma3", "full")])
async def test_a_head_is_computed_once_by_sessions_that_begin_together(
    models: Path, tmp_path: Path, family: str, policy: str
) -> None:
    model, create = chat_folder(models, family), {"system": SYSTEM, "policy": policy}
    twin = await alone(tmp_path / "twin", model, **create)
    async with opened(tmp_path / "home", model) as kv:
        sessions = await made(kv, 6, **create)
        pinned = sessions[0]._core.record.pinned
        before = kv.model.engine.computed_tokens
        replies = await asyncio.gather(*(s.send(QUESTION, max_tokens=6, ignore_eos=True) for s in sessions))
        computed = kv.model.engine.computed_tokens - before
        assert {reply.ids for reply in replies} == {twin}
        rest = replies[0].usage.prompt_tokens - pinned + 5  # the last generated token is not computed
        assert computed == pinned + 6 * rest
        assert sorted(reply.usage.cached_tokens for reply in replies) == [0, *[pinned] * 5]
        for session in sessions:
            await check_session(kv, session)
        await check_home(kv)


async def test_a_slow_disk_makes_the_others_wait_and_not_compute(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's turn has ended long before its head is stored."""
    model = chat_folder(models, "llama")
    async with opened(tmp_path / "home", model) as kv:
        blobs = kv.sessions.tiers.blobs
        put = blobs.put_many

        def slowly(items: Any) -> int:
            time.sleep(0.5)
            return put(items)

        monkeypatch.setattr(blobs, "put_many", slowly)
        sessions = await made(kv, 4, system=SYSTEM)
        replies = await asyncio.gather(*(s.send(QUESTION, max_tokens=1) for s in sessions))
        assert sorted(reply.usage.cached_tokens for reply in replies) == [0, *[sessions[0]._core.record.pinned] * 3]


@pytest.mark.parametrize("at", ["while it computes", "at once"])
async def test_where_the_first_one_is_cancelled_another_takes_over(models: Path, tmp_path: Path, at: str) -> None:
    model = chat_folder(models, "llama")
    twin = await alone(tmp_path / "twin", model, system=SYSTEM)
    async with opened(tmp_path / "home", model) as kv:
        first, *others = await made(kv, 4, system=SYSTEM)
        leader = asyncio.create_task(first.send(QUESTION, max_tokens=6, ignore_eos=True))
        while at != "at once" and kv.model.engine.computed_tokens == 0:  # noqa: ASYNC110
            await asyncio.sleep(0)
        waiting = [asyncio.create_task(s.send(QUESTION, max_tokens=6, ignore_eos=True)) for s in others]
        await asyncio.sleep(0.01)
        leader.cancel()
        replies = await asyncio.gather(*waiting)
        assert {reply.ids for reply in replies} == {twin}
        await asyncio.wait([leader])
        await check_session(kv, first)
        assert (await first.send(QUESTION, max_tokens=6, ignore_eos=True)).ids == twin
        assert kv.sessions.tiers.attaching._leading == {}
        await check_home(kv)


async def test_a_disk_that_refuses_the_head_stops_nobody(models: Path, tmp_path: Path) -> None:
    model = chat_folder(models, "llama")
    twin = await alone(tmp_path / "twin", model, system=SYSTEM)
    async with opened(tmp_path / "home", model, disk_budget=1000) as kv:
        sessions = await made(kv, 4, system=SYSTEM)
        replies = await asyncio.gather(*(s.send(QUESTION, max_tokens=6, ignore_eos=True) for s in sessions))
        assert {reply.ids for reply in replies} == {twin}
        assert [reply.usage.cached_tokens for reply in replies] == [0] * 4
