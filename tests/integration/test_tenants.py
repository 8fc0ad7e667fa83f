"""One runtime for many tenants: they share model, budgets and database, and nothing of what was said."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from homes import chat_folder, check_home, check_session, model_folder, opened, prompt, said, turns, written

from agentkv import AgentKV
from agentkv.errors import InvalidRequest, SessionNotFound
from agentkv.sessions.session import Session

SYSTEM = "You are Bolt, a terse assistant who looks things up before answering, and says where each answer comes from."
NEXT = prompt(11, 77)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


async def chunks_of(kv: AgentKV, *sessions: Session) -> set[str]:
    repository = kv.sessions.repository
    return {s.chunk_id for session in sessions for s in (await repository.manifest(session.id)).segments}


async def test_tenants_with_the_same_prompts_share_no_chunk_and_no_cached_token(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path, chat_folder(models)) as kv:
        one, two = kv.tenant("one"), kv.tenant("two")
        holder = await one.prewarm(SYSTEM)
        pinned = len(await holder.token_ids())
        mine, also_mine, theirs = (
            await one.create(SYSTEM),
            await kv.tenant("one").create(SYSTEM),
            await two.create(SYSTEM),
        )
        replies = [await session.send("How is the weather?", max_tokens=6) for session in (mine, also_mine, theirs)]
        cached = [reply.usage.cached_tokens for reply in replies]
        assert cached == [pinned, pinned, 0], "the control: within a tenant the head is shared"
        assert len({reply.ids for reply in replies}) == 1
        assert (await two.prewarm(SYSTEM)).id != holder.id == (await one.prewarm(SYSTEM)).id
        await kv.flush()
        assert await chunks_of(kv, mine) == await chunks_of(kv, also_mine)
        assert not await chunks_of(kv, mine, also_mine, holder) & await chunks_of(kv, theirs)
        assert (await theirs.state()).stored_tokens == (await mine.state()).stored_tokens > pinned
        reader, ledger = kv.sessions.tiers._reader, await mine._core.load(one.repository)
        manifest = await one.repository.manifest(mine.id)
        for tenant, fault in (("one", None), ("two", "fingerprint"), ("default", "fingerprint")):
            restored = await reader.restore(tenant, manifest, ledger, 0)
            restored.kv.close()
            assert (restored.fault and restored.fault.reason) == fault
        await check_session(kv, theirs)
    async with opened(tmp_path, chat_folder(models)) as kv:
        for tenant, session in (("one", mine), ("two", theirs)):
            report = await (await kv.tenant(tenant).get(session.id)).resume()
            assert (report.source, report.reason) == ("disk", None)
        assert await kv.sessions.list() == []
        await check_home(kv)


async def test_another_tenants_session_is_not_found(tmp_path: Path, models: Path) -> None:
    model, home = model_folder(models), tmp_path / "home"

    async def refused(kv: AgentKV, session_id: str) -> None:
        for sessions in (kv.sessions, kv.tenant("two")):
            for method in (sessions.get, sessions.delete):
                with pytest.raises(SessionNotFound):
                    await method(session_id)
            with pytest.raises(SessionNotFound):
                await sessions.list(before=session_id)
            assert session_id not in [record.id for record in await sessions.list()]

    async with opened(home, model) as kv:
        one, two = kv.tenant("one"), kv.tenant("two")
        session = await one.create()
        await said(session, turns(2))
        other = await two.create()
        await refused(kv, session.id)
        fork = await session.fork(turns=1)
        assert {record.id for record in await one.list()} == {session.id, fork.id}
        await refused(kv, fork.id)
        await fork.rewind(turns=1)
        await fork.set_policy("sink:64")
        await session.export(tmp_path / "file")
        moved = await two.import_(tmp_path / "file")
        assert moved.imported is not None and moved.imported.reason is None
        assert {record.id for record in await two.list()} == {other.id, moved.id}
        assert not await chunks_of(kv, session) & await chunks_of(kv, moved)
        replies = [(await said(handle, [NEXT]))[0] for handle in (session, moved)]
        assert replies[0].ids == replies[1].ids
        assert replies[1].restore.reason is None
        assert len(kv.sessions.cores()) == 4, "one residency over all of them"
        assert kv.stats().tiers["device"].used == sum(core.reserved for core in kv.sessions.cores())
        for wrong in ("", "x" * 129, "a\nb"):
            with pytest.raises(InvalidRequest):
                kv.tenant(wrong)
    async with opened(home, model) as kv:
        await refused(kv, session.id)
        assert await kv.tenant("one").delete(session.id) > 0
        assert await kv.tenant("two").delete(moved.id) > 0
        with pytest.raises(SessionNotFound):
            await kv.tenant("one").get(session.id)
        await check_home(kv)


async def test_lost_rows_of_every_tenant_are_found_again(tmp_path: Path, models: Path) -> None:
    model = model_folder(models)
    async with opened(tmp_path, model) as kv:
        made = {tenant: await kv.tenant(tenant).create() for tenant in ("default", "one", "two")}
        for session in made.values():
            await said(session, turns(2))
        await written(kv)
    db = sqlite3.connect(tmp_path / "agentkv.db")
    with db:
        for table in ("segments", "resume_points", "chunks"):
            db.execute(f"DELETE FROM agentkv_{table}")
    db.close()
    async with opened(tmp_path, model) as kv:
        for tenant, session in made.items():
            report = await (await kv.tenant(tenant).get(session.id)).resume()
            assert (report.source, report.reason) == ("disk", None), tenant
        await check_home(kv)
