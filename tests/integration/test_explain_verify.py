"""``explain`` names the first message that differs and what following it costs; ``verify`` sees what is not right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from homes import chat_folder, check_session, model_folder, opened, prompt, said, turns, written

from agentkv import AgentKV, Session

SYSTEM = "You are a helpful assistant."
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


async def talked(kv: AgentKV, **created: Any) -> tuple[Session, list[dict[str, Any]]]:
    """A session of two turns, and its history as a client without sessions holds it."""
    session = await kv.sessions.create(system=SYSTEM, **created)
    history: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for text in ("How is the weather?", "Paris?"):
        reply = await session.send(text, max_tokens=6)
        history += [{"role": "user", "content": text}, {"role": "assistant", "content": reply.text}]
    return session, history


async def test_a_history_that_goes_on_costs_its_new_messages(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path, chat_folder(models)) as kv:
        session, history = await talked(kv)
        history.append({"role": "user", "content": "weather in Paris"})
        told = await session.explain(history)
        assert told.diverges is None
        assert told.matched == 5
        before = await session.token_ids()
        assert told.matched_tokens == len(before)
        engine = kv.model.engine
        computed = engine.computed_tokens
        reply = await session.send("weather in Paris", max_tokens=1)
        assert engine.computed_tokens - computed == told.compute_tokens
        assert reply.usage.cached_tokens == told.reused_tokens
        assert told.compute_seconds is None or told.compute_seconds > 0


async def test_the_first_message_that_differs_is_named_with_its_place(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path, chat_folder(models)) as kv:
        session, history = await talked(kv)
        items, ledger = await session.items(), await session.token_ids()
        for message, change, reason in (
            (3, {"role": "user", "content": "Paris!"}, "at character 5, '?' is stored, '!' is given"),
            (1, {"role": "assistant", "content": "How is the weather?"}, "role 'user' is stored, 'assistant'"),
            (0, {"role": "system", "content": SYSTEM + " Be brief."}, "another system prompt: at character 28"),
        ):
            changed = [*history[:message], change, *history[message + 1 :]]
            told = await session.explain(changed)
            assert told.diverges is not None
            assert told.diverges.message == message
            assert reason in told.diverges.reason
            if message:
                assert told.diverges.item == items[message].id
                assert told.diverges.position == items[message].span.start == told.matched_tokens
                assert told.diverges.span == items[message].span
            else:
                assert (told.matched, told.reused_tokens) == (0, 0)
            assert told.compute_tokens > 0
        short = await session.explain(history[:3])
        assert short.diverges is not None
        assert short.diverges.item == items[3].id
        assert "2 more items" in short.diverges.reason
        assert (await session.explain(history, tools=TOOLS)).diverges is not None
        assert await session.token_ids() == ledger


async def test_what_an_edited_history_costs_is_what_a_fork_computes(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path, chat_folder(models)) as kv:
        session, history = await talked(kv)
        told = await session.explain([*history[:3], {"role": "user", "content": "weather in Paris"}])
        engine, computed = kv.model.engine, kv.model.engine.computed_tokens
        branch = await session.edit((await session.items())[3].id, "weather in Paris", max_tokens=1)
        assert branch.reply is not None
        assert engine.computed_tokens - computed == told.compute_tokens
        assert branch.reply.usage.cached_tokens == told.reused_tokens


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("where", ["live", "disk"])
async def test_a_sound_session_is_verified(tmp_path: Path, models: Path, family: str, where: str) -> None:
    async with opened(tmp_path, model_folder(models, family)) as kv:
        session = await kv.sessions.create()
        await said(session, turns(3), 8)
        if where == "disk":
            await session.suspend("disk")
        ledger = await session.token_ids()
        found = await session.verify(tokens=100)
        assert (found.faults, found.tokens) == ({}, 100)
        assert found.chunks > 0
        assert found.deviation is not None
        assert found.deviation.relative < 1e-4
        assert found.codecs == ("exact" if where == "disk" else None)
        if family == "llama":
            assert found.mean_kl is not None
            assert found.mean_kl <= (found.max_kl or 0) < 1e-6
        assert await session.token_ids() == ledger
        await check_session(kv, session)
        twin = await kv.sessions.create()
        await said(twin, turns(3), 8)
        following = [(await said(each, [prompt(9)], 5))[0].ids for each in (session, twin)]
        assert following[0] == following[1], "looking changed what it says"


async def test_a_state_that_is_not_what_the_model_computes_is_seen(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path, model_folder(models)) as kv:
        session = await kv.sessions.create()
        await said(session, turns(3), 8)
        await written(kv)
        sound = await session.verify(tokens=64)
        core = session._core
        assert core.kv is not None
        assert sound.deviation is not None
        for value in core.kv.read(0, core.kv.visible(0)[0]).values:
            value[:, 20] += 0.5
        wrong = await session.verify(tokens=64)
        assert wrong.deviation is not None
        assert wrong.deviation.largest > 0.4 > 1000 * sound.deviation.largest
        assert (wrong.mean_kl or 0) > 1e-4
        manifest = await kv.sessions.repository.manifest(session.id)
        path = next(p for p in kv.settings.blobs_dir.rglob("*") if p.name.startswith(manifest.segments[0].chunk_id))
        raw = bytearray(path.read_bytes())
        raw[-40] ^= 1
        path.chmod(0o600)
        path.write_bytes(raw)
        assert sum((await session.verify(tokens=8)).faults.values()) == 1


async def test_what_a_policy_keeps_is_verified_as_far_as_it_reaches(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path, model_folder(models)) as kv:
        session = await kv.sessions.create(policy="sink:64,sinks=16")
        await said(session, turns(4), 8)
        found = await session.verify()
        assert found.tokens == 16
        assert found.deviation is not None
        assert found.deviation.relative < 1e-4
