"""A head that is prewarmed is computed once, before anybody comes, and stays as long as its holder."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from homes import chat_folder, check_home, check_session, opened

from agentkv.errors import InvalidRequest

SYSTEM = "You are Bolt, a terse assistant who looks things up before answering, and says where each answer comes from."
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
async def test_sessions_begin_with_a_prewarmed_head_also_after_a_restart(
    tmp_path: Path, models: Path, family: str
) -> None:
    model = chat_folder(models, family)
    async with opened(tmp_path, model) as kv:
        holder = await kv.sessions.prewarm(SYSTEM, tools=TOOLS)
        pinned = len(await holder.token_ids())
        assert (await holder.state()).tier == "disk"
        engine, computed = kv.model.engine, kv.model.engine.computed_tokens
        again = await asyncio.gather(*(kv.sessions.prewarm(SYSTEM, tools=TOOLS) for _ in range(3)))
        assert holder.id in {session.id for session in again}
        assert engine.computed_tokens == computed
        first = await (await kv.sessions.create(SYSTEM, tools=TOOLS)).send("How?", max_tokens=6)
        assert first.usage.cached_tokens == pinned
        await check_session(kv, holder)
    async with opened(tmp_path, model) as kv:
        session = await kv.sessions.create(SYSTEM, tools=TOOLS)
        reply = await session.send("How?", max_tokens=6)
        assert (reply.usage.cached_tokens, reply.restore.source, reply.ids) == (pinned, "disk", first.ids)
        for record in await kv.sessions.list():
            await kv.sessions.delete(record.id)
        assert not list(kv.sessions.tiers.blobs.list())
        await check_home(kv)


async def test_one_holder_is_made_where_nobody_was_faster(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path, chat_folder(models)) as kv:
        one = await kv.sessions.prewarm(SYSTEM)
        two = await kv.sessions.prewarm(SYSTEM)
        other = await kv.sessions.prewarm(SYSTEM + " Be brief.")
        assert one.id == two.id != other.id
        assert len(await kv.sessions.list()) == 2


async def test_a_head_that_cannot_be_leaves_nothing(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path, chat_folder(models)) as kv:
        with pytest.raises(InvalidRequest):
            await kv.sessions.prewarm("x" * 40_000)
        with pytest.raises(InvalidRequest):
            await kv.sessions.prewarm(SYSTEM, idle_codec="nothing")
        assert await kv.sessions.list() == []
