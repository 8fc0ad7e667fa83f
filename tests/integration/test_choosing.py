"""Restore or recompute, in a runtime: real files on a disk, host memory or a model that is made slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from homes import chat_folder, check_home, check_session, model_folder, opened, prompt, said, written
from retaining import assert_equal_replies

from agentkv import AgentKV, Session
from agentkv.engine.adapter import ModelAdapter
from agentkv.errors import EngineFailed, InvalidRequest
from agentkv.sessions.events import LifecycleEvent
from agentkv.storage.host import HostTier
from agentkv.storage.local import LocalBlobs
from agentkv.types import Span

LONG, SHORT = prompt(300, 1), prompt(10, 2)
SLOW = 0.6
"""Seconds that a slow part takes for each read or step; a fast one, on the busiest of machines, less than a tenth."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@contextmanager
def slow(owner: type, name: str, seconds: float = SLOW) -> Iterator[None]:
    """Each call takes so much longer."""
    real = getattr(owner, name)

    def slowly(*args: Any, **given: Any) -> Any:
        time.sleep(seconds)
        return real(*args, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, slowly)
        yield


SLOW_DISK = (LocalBlobs, "read_into")
SLOW_HOST = (HostTier, "get")


@asynccontextmanager
async def resting(
    home: Path, model: Path, tier: str = "disk", **settings: Any
) -> AsyncIterator[tuple[AgentKV, Session]]:
    """A session of some 300 tokens that has been suspended, in a runtime that has measured a prefill."""
    async with opened(home, model, **{"restore": "measured", "idle_codec": "int8", **settings}) as kv:
        session = await kv.sessions.create()
        await said(session, [LONG])
        assert (await session.suspend(tier)).tier == tier
        yield kv, session
        await check_session(kv, session)
        await check_home(kv)


async def measured(session: Session, tier: str = "disk") -> float:
    """Seconds of one restore, which nobody was asked about; then it rests again."""
    report = await session.resume()
    assert (report.source, report.reason, report.estimated_restore_seconds) == (tier, None, None)
    await session.suspend(tier)
    return report.seconds


async def events_of(kv: AgentKV, seen: list[LifecycleEvent]) -> None:
    """Those about restores, until the runtime closes."""
    kinds = ("restored", "recomputed", "fallback")
    seen.extend([event async for event in kv.events() if event.kind in kinds])


@pytest.mark.parametrize(("tier", "part"), [("disk", SLOW_DISK), ("host", SLOW_HOST)])
async def test_a_restore_slower_than_the_prefill_is_passed_over_once_that_was_measured(
    models: Path, tmp_path: Path, tier: str, part: tuple[type, str]
) -> None:
    model, seen = model_folder(models), list[LifecycleEvent]()
    async with opened(tmp_path / "twin", model) as kv:
        _, twin = await said(await kv.sessions.create(), [LONG, SHORT], logprobs=1)
    async with resting(tmp_path / "home", model, tier) as (kv, session):
        watcher = asyncio.create_task(events_of(kv, seen))
        await asyncio.sleep(0)
        length, files = session._core.record.kv_length, dict(kv.sessions.tiers.blobs.list())
        with slow(*part):
            seconds = await measured(session, tier)
            (reply,) = await said(session, [SHORT], logprobs=1)
        report = reply.restore
        assert (report.source, report.tokens, report.codec, report.recomputed_tokens) == ("recompute", 0, None, length)
        assert report.estimated_restore_seconds == pytest.approx(seconds)
        assert seconds > SLOW
        assert report.estimated_recompute_seconds is not None
        assert max(report.seconds, report.estimated_recompute_seconds) < SLOW
        assert report.seconds > 0
        expected = f"{report.estimated_recompute_seconds:.3f} s, restoring them from {tier} {seconds:.3f} s"
        assert report.reason == f"cheaper: computing {length} tokens is expected to take {expected}"
        assert (reply.usage.cached_tokens, reply.usage.prompt_tokens) == (0, len(LONG) + 6 + len(SHORT))
        assert_equal_replies(reply, twin)

        stats = kv.stats()
        assert (stats.restores, stats.fallbacks) == ({f"{tier}:whole": 1, "recompute:chosen": 1}, {})
        assert stats.rates.keys() == {"prefill", tier}
        assert stats.rates[tier] == pytest.approx(seconds * 1000 / length)
        assert 'agentkv_restores_total{outcome="chosen",source="recompute"} 1.0' in kv.metrics().decode()
        await written(kv)
        assert files.items() <= dict(kv.sessions.tiers.blobs.list()).items(), "what is stored stays where it is"
        assert (await session.state()).host_bytes == 0
        turn = (await kv.sessions.repository.turns(session.id))[-1]
        assert turn.restore is not None
        assert turn.restore["estimated_restore_seconds"] == report.estimated_restore_seconds
    await watcher
    assert [event.kind for event in seen] == ["restored", "recomputed"]
    assert seen[0].details["estimated_recompute_seconds"] > 0
    assert seen[1].details == {
        "tokens": length,
        "seconds": round(report.seconds, 4),
        "estimated_restore_seconds": round(seconds, 4),
        "estimated_recompute_seconds": round(report.estimated_recompute_seconds, 4),
    }


async def test_a_restore_faster_than_the_prefill_goes_on(models: Path, tmp_path: Path) -> None:
    """The model is the slow part here: a tenth of a second for each 32 tokens."""
    with slow(ModelAdapter, "run", 0.1):
        async with resting(tmp_path / "home", model_folder(models)) as (kv, session):
            await measured(session)
            for ids in ([1], [2], [3]):
                (reply,) = await said(session, [ids], max_tokens=1)
                report = reply.restore
                assert (report.source, report.reason) == ("disk", None)
                assert report.tokens == reply.usage.cached_tokens >= len(LONG)
                assert (report.estimated_recompute_seconds or 0) > 0.9 > (report.estimated_restore_seconds or 1)
                await session.suspend()
            assert kv.stats().restores == {"disk:whole": 4}
            assert kv.stats().seconds_saved > 1


async def test_it_is_tried_again_and_restored_from_then_on_once_the_disk_is_fast(models: Path, tmp_path: Path) -> None:
    """A choice never ends what it was made by. What a trial finds out counts at once."""

    async def next_one() -> str:
        (reply,) = await said(session, [[1]], max_tokens=1)
        await session.suspend()
        return reply.restore.source

    with slow(ModelAdapter, "run", 0.03):
        async with resting(tmp_path / "home", model_folder(models)) as (kv, session):
            with slow(*SLOW_DISK, 2.5):
                await measured(session)
                assert [await next_one() for _ in range(2)] == ["recompute"] * 2
            assert [await next_one() for _ in range(3)] == ["disk"] * 3
            assert kv.stats().restores == {"disk:whole": 4, "recompute:chosen": 2}


@pytest.mark.short(2)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"idle_codec": "exact"}),
        ("llama", {"idle_codec": "raw"}),
        ("llama", {"default_policy": "sink:400"}),
        ("gemma3", {}),
        ("llama", {"restore": "always"}),
    ],
    ids=["exact", "raw", "evicts", "sliding layers", "always"],
)
async def test_what_a_recompute_would_not_give_back_is_restored_however_long_that_takes(
    models: Path, tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    async with resting(tmp_path / "home", model_folder(models, family), **settings) as (kv, session):
        with slow(*SLOW_DISK):
            await measured(session)
            (reply,) = await said(session, [SHORT])
        assert (reply.restore.source, reply.restore.reason) == ("disk", None)
        assert (
            (reply.restore.estimated_restore_seconds or 0) > SLOW > (reply.restore.estimated_recompute_seconds or SLOW)
        )
        assert kv.stats().restores == {"disk:whole": 2}


async def test_who_brings_it_back_ahead_of_time_gets_it_restored(models: Path, tmp_path: Path) -> None:
    """Nobody waits, and the model has others to serve."""
    async with resting(tmp_path / "home", model_folder(models)) as (kv, session):
        with slow(*SLOW_DISK):
            await measured(session)
            computed = kv.model.engine.computed_tokens
            assert (await session.resume()).source == "disk"
            await session.suspend()
            assert (await session.prefetch()).outcome == "accepted"
            assert kv.model.engine.computed_tokens == computed
        (reply,) = await said(session, [SHORT])
        assert (reply.restore.source, reply.restore.reason) == ("device", None)
        assert reply.usage.cached_tokens == reply.restore.tokens


@pytest.mark.short(1)
@pytest.mark.parametrize("tokens", [8, 60, 300])
async def test_in_a_new_process_what_is_stored_is_restored_short_as_it_may_be(
    models: Path, tmp_path: Path, tokens: int
) -> None:
    settings: dict[str, Any] = {"idle_codec": "int8", "restore": "measured"}
    async with opened(tmp_path / "home", model_folder(models), **settings) as kv:
        session = await kv.sessions.create()
        await said(session, [prompt(tokens, 1)])
    with slow(*SLOW_DISK):
        async with opened(tmp_path / "home", model_folder(models), **settings) as kv:
            (reply,) = await said(await kv.sessions.get(session.id), [[1]])
    assert (reply.restore.source, reply.restore.reason, reply.usage.cached_tokens) == ("disk", None, tokens + 5)


@pytest.mark.short(2)
@pytest.mark.parametrize("tier", ["disk", "host"])
@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_a_recompute_that_comes_to_nothing_leaves_the_session_where_it_was(
    models: Path, tmp_path: Path, tier: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, part = model_folder(models), SLOW_DISK if tier == "disk" else SLOW_HOST
    async with opened(tmp_path / "twin", model) as kv:
        _, twin = await said(await kv.sessions.create(), [LONG, SHORT], logprobs=1)
    async with resting(tmp_path / "home", model, tier) as (kv, session):
        with slow(*part):
            await measured(session, tier)
        core, engine, run = session._core, kv.model.engine, ModelAdapter.run
        held, manifest = dict(core.held), await kv.sessions.repository.manifest(session.id)
        begun = asyncio.Event()
        loop, calls = asyncio.get_running_loop(), []

        def third_fails(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                loop.call_soon_threadsafe(begun.set)
                if how == "failed":
                    raise RuntimeError("the third step fails")
                time.sleep(0.1)
            return run(*args)

        with monkeypatch.context() as patch:
            patch.setattr(ModelAdapter, "run", third_fails)
            turn = asyncio.create_task(session.generate_tokens(SHORT, max_tokens=6))
            await begun.wait()
            if how == "cancelled":
                turn.cancel()
            with pytest.raises((asyncio.CancelledError, EngineFailed)):
                await turn
        assert engine.alive
        assert len(calls) <= 4, "it does not go on for nobody"
        assert (core.state, core.kv, core.reserved) == (tier, None, 0)
        assert dict(core.held) == held
        assert await kv.sessions.repository.manifest(session.id) == manifest
        assert kv.stats().restores == {f"{tier}:whole": 1}
        await check_session(kv, session)
        (reply,) = await said(session, [SHORT], logprobs=1)
        assert reply.restore.chosen
        assert_equal_replies(reply, twin)


async def test_a_turn_that_fails_after_a_recompute_leaves_all_of_it_live(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with resting(tmp_path / "home", model_folder(models)) as (kv, session):
        with slow(*SLOW_DISK):
            await measured(session)
            length = session._core.record.kv_length
            with pytest.raises(InvalidRequest, match="stop strings"):
                await session.generate_tokens(SHORT, max_tokens=6, stop=["x"])
        assert (await session.state()).state == "live"
        await check_session(kv, session)
        (reply,) = await said(session, [SHORT])
        assert (reply.restore.source, reply.restore.reason, reply.restore.tokens) == ("device", None, length)


async def test_what_follows_a_recompute_is_stored_behind_what_was_there_and_sealed_with_it(
    models: Path, tmp_path: Path
) -> None:
    """The new KV goes on from the recomputed one, the manifest from the stored one: together they are the session."""
    inputs = [LONG, *(prompt(60, i) for i in range(5))]
    async with opened(tmp_path / "twin", model_folder(models)) as kv:
        twin = await kv.sessions.create()
        for ids in inputs:
            await twin.append_tokens(ids)
        (expected,) = await said(twin, [SHORT], logprobs=1)
    async with opened(tmp_path / "home", model_folder(models), idle_codec="int8", restore="measured") as kv:
        session = await kv.sessions.create()
        await session.append_tokens(inputs[0])
        await session.suspend()
        with slow(*SLOW_DISK):
            await measured(session)
            for ids in inputs[1:3]:
                await session.append_tokens(ids)
                await session.suspend()
        assert kv.stats().restores == {"disk:whole": 1, "recompute:chosen": 2}
        for ids in inputs[3:]:
            await session.append_tokens(ids)
        await session.suspend()
        manifest = await kv.sessions.repository.manifest(session.id)
        assert (manifest.segments[0].span, manifest.segments[0].codec) == (Span(0, 256), "int8")
        assert manifest.length == session._core.record.kv_length
        report = await session.resume()
        assert (report.source, report.tokens, report.reason) == ("disk", manifest.length, None)
        (reply,) = await said(session, [SHORT], logprobs=1)
        assert reply.logprobs is not None and expected.logprobs is not None
        assert reply.logprobs[0].logprob == pytest.approx(expected.logprobs[0].logprob, abs=0.1)
        await check_session(kv, session)
        await check_home(kv)


async def test_while_the_disk_refuses_a_recompute_stands_for_what_host_memory_held(
    models: Path, tmp_path: Path
) -> None:
    """The only copy of the last turn's KV: once it is computed again, it is stored as soon as the disk takes it."""
    inputs = [LONG, prompt(60, 5), SHORT, [7, 8, 9]]
    async with opened(tmp_path / "twin", model_folder(models)) as kv:
        twin = await said(await kv.sessions.create(), inputs, logprobs=1)
    async with resting(tmp_path / "home", model_folder(models)) as (kv, session):
        blobs = kv.sessions.tiers.blobs
        with slow(*SLOW_DISK):
            await measured(session)
            budget, blobs.budget_bytes = blobs.budget_bytes, blobs.used_bytes() + 100
            replies = await said(session, inputs[1:2], logprobs=1)
            assert (await session.suspend("disk")).tier == "host", "it takes no more"
            assert session._core.unsaved is not None
            replies += await said(session, inputs[2:3], logprobs=1)
        assert [reply.restore.chosen for reply in replies] == [True, True]
        assert (await session.state()).host_bytes == 0
        blobs.budget_bytes = budget
        replies += await said(session, inputs[3:], logprobs=1)
        await written(kv)
        state = await session.state()
        assert state.stored_tokens == state.kv_tokens
        await session.suspend()
        report = await session.resume()
        assert (report.source, report.tokens, report.reason) == ("disk", state.kv_tokens, None)
        for reply, expected in zip(replies, twin[1:], strict=True):
            assert_equal_replies(reply, expected)


async def test_a_head_that_others_stored_is_computed_where_that_is_faster(models: Path, tmp_path: Path) -> None:
    """And is theirs all the same: nothing is stored a second time."""
    model, system = chat_folder(models), "You look things up and say where each answer comes from. " * 6
    question: dict[str, Any] = {"messages": "How is the weather in Paris?", "max_tokens": 6, "ignore_eos": True}
    async with opened(tmp_path / "home", model, idle_codec="int8", restore="measured") as kv:
        first = await kv.sessions.create(system=system)
        said_first = await first.send(**question)
        await first.suspend()
        with slow(*SLOW_DISK):
            await measured(first)
            second = await kv.sessions.create(system=system)
            reply = await second.send(**question)
        pinned = second._core.record.pinned
        assert reply.restore.chosen
        assert (reply.restore.recomputed_tokens, reply.usage.cached_tokens, reply.ids) == (pinned, 0, said_first.ids)
        await written(kv)
        manifests = [await kv.sessions.repository.manifest(session.id) for session in (first, second)]
        heads = [[s.chunk_id for s in manifest.segments if s.span.stop <= pinned] for manifest in manifests]
        assert heads[0] == heads[1] != []
        for session in (first, second):
            await check_session(kv, session)
        await check_home(kv)
