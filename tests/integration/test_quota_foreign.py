"""A budget that is full: KV of other models makes room, the longest unused first; then the known refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from homes import check_home, check_session, model_folder, opened, prompt, said, turns, written

from agentkv import AgentKV

NEXT = prompt(9, 55)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


async def talked(kv: AgentKV, past: list[list[int]]) -> tuple[str, int]:
    """A session with that past at rest, and the bytes that it takes."""
    before = kv.sessions.tiers.blobs.used_bytes()
    session = await kv.sessions.create()
    await said(session, past)
    await session.suspend()
    return session.id, kv.sessions.tiers.blobs.used_bytes() - before


async def stored_tokens(kv: AgentKV, name: str) -> int:
    return (await (await kv.sessions.get(name)).state()).stored_tokens


async def foreign(home: Path, model: Path, count: int) -> tuple[list[str], int]:
    """``count`` sessions of about the same size, the first the longest unused but for one that was used again."""
    async with opened(home, model) as kv:
        made = [await talked(kv, turns(2, tokens=60, seed=10 + i)) for i in range(count)]
        again = await kv.sessions.get(made[0][0])
        await said(again, [NEXT])
        await again.suspend()
        used = kv.sessions.tiers.blobs.used_bytes()
    return [name for name, _ in (*made[1:], made[0])], used


async def test_kv_of_another_model_makes_room_the_longest_unused_session_first(models: Path, tmp_path: Path) -> None:
    home, model, other = tmp_path / "home", model_folder(models), model_folder(models, seed=1)
    async with opened(tmp_path / "twin", other) as kv:
        twin = await kv.sessions.create()
        past = turns(2, tokens=60, seed=11)
        await said(twin, past)
        (expected,) = await said(twin, [NEXT], 12)
    names, used = await foreign(home, other, 4)
    assert used > 0
    async with opened(home, model, disk_budget=used + 1000) as kv:
        gone = 0
        for round_ in range(3):
            mine, _ = await talked(kv, turns(2, tokens=60, seed=30 + round_))
            assert kv.sessions.tiers.behind.storage_error is None
            assert await stored_tokens(kv, mine) > 0
            left = [(await kv.sessions.repository.manifest(name)).length > 0 for name in names]
            assert left == sorted(left), "the longest unused first"
            assert left.count(False) == gone + 1, "one session's bytes are enough for one of the same size"
            gone = left.count(False)
            assert kv.sessions.tiers.blobs.used_bytes() <= used + 1000
            await check_home(kv)
    async with opened(home, other) as kv:
        session = await kv.sessions.get(names[0])
        (reply,) = await said(session, [NEXT], 12)
        assert reply.ids == expected.ids
        assert reply.restore.source == "recompute"
        assert reply.restore.reason is not None
        last = await kv.sessions.get(names[-1])
        (reply,) = await said(last, [NEXT], 4)
        assert (reply.restore.source, reply.restore.reason) == ("disk", None), "the control: what was left is good"
        await check_session(kv, session)
        await written(kv)
        await check_home(kv)


async def test_when_nothing_foreign_is_left_the_session_stays_at_host(models: Path, tmp_path: Path) -> None:
    home, model, other = tmp_path / "home", model_folder(models), model_folder(models, seed=1)
    names, used = await foreign(home, other, 2)
    async with opened(home, model, disk_budget=used + 1000) as kv:
        talks = []
        for i in range(8):
            session = await kv.sessions.create()
            await said(session, turns(2, tokens=60, seed=30 + i))
            report = await session.suspend()
            talks.append((session, report))
            if report.tier == "host":
                break
        assert len(talks) > 2
        session, report = talks[-1]
        assert (report.tier, "disk_budget" in report.details["storage"]) == ("host", True)
        assert [(await kv.sessions.repository.manifest(name)).length for name in names] == [0, 0]
        for earlier, before in talks[:-1]:
            assert before.tier == "disk"
            assert (await earlier.resume()).reason is None, "its own model's sessions are nobody's reserve"
        (reply,) = await said(session, [NEXT])
        assert (reply.restore.source, reply.restore.reason) == ("host", None)
        for earlier, _ in talks[:-1]:
            assert await earlier.delete() > 0
        await said(session, [NEXT])
        await written(kv)
        assert kv.sessions.tiers.behind.storage_error is None
        assert (await session.suspend()).tier == "disk"
        await check_home(kv)


async def test_what_foreign_sessions_share_is_free_when_the_last_has_given_it_up(models: Path, tmp_path: Path) -> None:
    """The least recently used one alone frees nothing: that is no reason to refuse."""
    home, model, other = tmp_path / "home", model_folder(models), model_folder(models, seed=1)
    async with opened(home, other) as kv:
        doubles = [await talked(kv, turns(2, tokens=60, seed=5)) for _ in range(10)]
        assert [nbytes for _, nbytes in doubles[1:]] == [0] * 9, "the same tokens, the same files"
        used = kv.sessions.tiers.blobs.used_bytes()
    async with opened(home, model, disk_budget=used + 1000) as kv:
        mine, _ = await talked(kv, turns(2, tokens=60, seed=6))
        assert kv.sessions.tiers.behind.storage_error is None
        assert await stored_tokens(kv, mine) > 0
        assert kv.sessions.tiers.blobs.used_bytes() <= used + 1000
        await check_home(kv)


@pytest.mark.parametrize("settings", [{"default_policy": "sink:120"}, {"idle_codec": "int8"}])
async def test_evicting_and_lossy_foreign_sessions_answer_later(
    models: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    home, model, other = tmp_path / "home", model_folder(models), model_folder(models, seed=1)
    async with opened(home, other, **settings) as kv:
        theirs, _ = await talked(kv, [prompt(430, 1), prompt(40, 2)])
        used = kv.sessions.tiers.blobs.used_bytes()
    async with opened(home, model, disk_budget=used + 100) as kv:
        await talked(kv, turns(2, tokens=60))
        assert (await kv.sessions.repository.manifest(theirs)).length == 0
        await check_home(kv)
    async with opened(home, other, **settings) as kv:
        session = await kv.sessions.get(theirs)
        (reply,) = await said(session, [NEXT], 6)
        assert (len(reply.ids), reply.restore.source) == (6, "recompute")
        await session.suspend()
        assert (await session.resume()).reason is None
        await check_session(kv, session)
        await check_home(kv)
