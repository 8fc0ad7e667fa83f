"""Little device memory: who waits, who gives way, what hints do, what is told and counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from homes import check_home, check_session, model_folder, opened, prompt, said
from typer.testing import CliRunner

from agentkv import AgentKV
from agentkv.cli.main import app
from agentkv.errors import CapacityExceeded, InvalidRequest
from agentkv.sessions.events import LifecycleEvent
from agentkv.sessions.session import Session


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models"))


def worth(kv: AgentKV, tokens: int) -> int:
    """Bytes of a session that may hold so many tokens."""
    return int(kv.sessions.tiers.layout.bytes_needed(None, tokens))


async def sessions(kv: AgentKV, count: int, tokens: int = 200) -> list[Session]:
    made = [await kv.sessions.create(agent_id=f"agent-{i % 2}") for i in range(count)]
    for i, session in enumerate(made):
        await said(session, [prompt(tokens, i)], 2)
    return made


async def tiers_of(made: list[Session]) -> list[str | None]:
    return [(await session.state()).tier for session in made]


async def soon(what: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_an_unknown_residency_is_refused_when_the_runtime_opens(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cost, lfu, lru, ttl"):
        async with opened(tmp_path / "home", model, residency="fifo"):
            pass


async def test_many_turns_over_memory_for_two_all_get_their_answer(model: Path, tmp_path: Path) -> None:
    """More turns at once than fit: they wait for one another, nobody fails, nobody is forgotten."""
    async with opened(tmp_path / "roomy", model) as kv:
        twins = [await said(s, [prompt(60, 9)], 4) for s in await sessions(kv, 6)]
    async with opened(tmp_path / "home", model, admission_seconds=120.0) as kv:
        kv.sessions.tiers.device_budget = worth(kv, 400) * 2
        made = await sessions(kv, 6)
        replies = await asyncio.gather(*(s.generate_tokens(prompt(60, 9), max_tokens=4) for s in made))
        assert [reply.ids for reply in replies] == [twin[0].ids for twin in twins]
        stats = kv.stats()
        assert stats.tiers["device"].used <= stats.tiers["device"].budget
        assert (stats.waiting, stats.turns) == (0, 12)
        for session in made:
            await check_session(kv, session)
        await check_home(kv)


async def test_a_session_that_can_never_fit_is_refused_at_once_with_what_would(model: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", model, admission_seconds=60.0) as kv:
        kv.sessions.tiers.device_budget = worth(kv, 256)
        session = await kv.sessions.create()
        async with asyncio.timeout(5):
            with pytest.raises(CapacityExceeded, match=r"policy 'sink:(\d+)' would fit") as caught:
                await session.generate_tokens(prompt(800), max_tokens=8)
        assert caught.value.retry_after is None
        window = int(str(caught.value).split("sink:")[1].split("'")[0])
        fitting = await kv.sessions.create(policy=f"sink:{window}")
        assert (await fitting.generate_tokens(prompt(800), max_tokens=8)).ids


async def test_a_turn_waits_its_time_and_no_longer_and_a_full_queue_refuses(model: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", model, admission_seconds=2.0, admission_queue=1, pin_budget="100%") as kv:
        holder, first, second = [await kv.sessions.create() for _ in range(3)]
        kv.sessions.tiers.device_budget = worth(kv, 500)
        await holder.generate_tokens(prompt(350), max_tokens=2)
        assert (await holder.pin(600)).outcome == "accepted"
        waiting = asyncio.create_task(first.generate_tokens(prompt(200), max_tokens=200))
        await soon(lambda: kv.stats().waiting == 1)
        with pytest.raises(CapacityExceeded, match="turns wait for memory already"):
            await second.generate_tokens(prompt(200), max_tokens=200)
        assert not waiting.done()
        with pytest.raises(CapacityExceeded, match="in time") as caught:
            await waiting
        assert caught.value.retry_after
        await holder.pin(0)
        assert (await first.generate_tokens(prompt(200), max_tokens=4)).ids
        assert kv.stats().waiting == 0


async def test_a_turn_that_was_taken_back_leaves_no_copies_of_windows(tmp_path: Path) -> None:
    async with opened(tmp_path / "home", model_folder(tmp_path, "gemma3")) as kv:
        session = await kv.sessions.create()
        await session.append_tokens(prompt(100))
        core, before = session._core, session._core.reserved
        turn = asyncio.create_task(session.generate_tokens(prompt(5), max_tokens=20, ignore_eos=True))
        await soon(lambda: core.kv is not None and core.kv.length > 103)
        turn.cancel()
        await asyncio.wait([turn])
        assert turn.cancelled() and core.kv is not None and core.kv.length == 99
        assert core.reserved == core.kv.nbytes == before


async def test_a_cancelled_turn_leaves_the_queue(model: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", model, admission_seconds=60.0) as kv:
        holder, first, second = [await kv.sessions.create() for _ in range(3)]
        kv.sessions.tiers.device_budget = worth(kv, 1000)
        running = asyncio.create_task(holder.generate_tokens(prompt(20), max_tokens=900, ignore_eos=True))
        await soon(lambda: holder._core.kv is not None)
        turns = [asyncio.create_task(s.generate_tokens(prompt(200), max_tokens=100)) for s in (first, second)]
        await soon(lambda: kv.stats().waiting == 2)
        turns[0].cancel()
        await asyncio.wait([turns[0]])
        assert kv.stats().waiting == 1
        running.cancel()
        assert (await turns[1]).ids
        await check_session(kv, first)


async def test_what_waits_holds_nothing(model: Path, tmp_path: Path) -> None:
    """Two live sessions that both want to grow into the same memory: neither keeps the other from it."""
    async with opened(tmp_path / "home", model, admission_seconds=60.0) as kv:
        one, other = await sessions(kv, 2, tokens=300)
        kv.sessions.tiers.device_budget = worth(kv, 700)
        async with asyncio.timeout(60):
            replies = await asyncio.gather(
                *(s.generate_tokens(prompt(200), max_tokens=100, ignore_eos=True) for s in (one, other))
            )
        assert [len(reply.ids) for reply in replies] == [100, 100]
        for session in (one, other):
            await check_session(kv, session)


async def test_pinned_sessions_stay_within_their_budget(model: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", model, residency="lru", admission_seconds=0.2, pin_budget=10**9) as kv:
        pinned, other = await sessions(kv, 2)
        assert (await pinned.pin(60)).outcome == "accepted"
        kv.sessions.tiers.device_budget = pinned._core.reserved + worth(kv, 400)
        newcomer = await kv.sessions.create()
        await said(newcomer, [prompt(200)], 2)
        assert await tiers_of([pinned, other, newcomer]) == ["device", "host", "device"]
        kv.sessions.hints._pin_budget = pinned._core.reserved + 10
        refused = await newcomer.pin(60)
        assert (refused.outcome, "pin_budget" in refused.detail) == ("rejected", True)
        assert (await other.pin(60)).outcome == "missing"
        assert (await pinned.pin(10**9)).outcome == "clipped"
        assert (await pinned.pin(0)).outcome == "accepted"
        await said(other, [prompt(100)], 2)
        assert (await pinned.state()).tier == "host"
        with pytest.raises(InvalidRequest, match="0 or more"):
            await pinned.pin(-1)


async def test_an_expected_session_is_back_before_it_is_wanted(model: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", model) as kv:
        (session,) = await sessions(kv, 1)
        empty = await kv.sessions.create()
        assert (await empty.expect(10)).outcome == "missing"
        assert (await session.expect(1.5)).outcome == "accepted"
        await session.suspend("disk")
        await soon(lambda: session._core.kv is not None, 10)
        reply = await session.generate_tokens([1], max_tokens=1)
        assert reply.restore.source == "device"
        assert (await session.expect(10**9)).outcome == "clipped"
        async with session.tool_wait(expected=30) as outcome:
            assert outcome.outcome == "accepted"
            assert session._core.expected_at is not None


async def test_prefetch_drives_nobody_away(model: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", model) as kv:
        one, other = await sessions(kv, 2)
        await one.suspend()
        kv.sessions.tiers.device_budget = other._core.reserved + 1000
        assert (await one.prefetch()).outcome == "deferred"
        assert await tiers_of([one, other]) == ["disk", "device"]
        kv.sessions.tiers.device_budget = 2**40
        assert (await one.prefetch()).outcome == "accepted"
        assert await tiers_of([one, other]) == ["device", "device"]
        closed = await one.close()
        assert (closed.outcome, (await one.state()).tier) == ("accepted", "disk")
        assert (await one.close()).outcome == "missing"


async def test_events_and_counts_say_what_happened(model: Path, tmp_path: Path) -> None:
    seen: list[LifecycleEvent] = []

    async def watch(kv: AgentKV) -> None:
        seen.extend([event async for event in kv.events()])

    async with opened(tmp_path / "home", model, default_policy="sink:128") as kv:
        watcher = asyncio.create_task(watch(kv))
        await asyncio.sleep(0)
        session = await kv.sessions.create(agent_id="scout")
        await said(session, [prompt(200)], 4)
        await session.suspend()
        reply = await session.generate_tokens([1, 2], max_tokens=3)
        usage, stats = session.usage(), kv.stats()
        assert (usage.turns, usage.completion_tokens, usage.agent_id) == (2, 7, "scout")
        assert usage.cached_tokens == reply.usage.cached_tokens > 0
        assert dict(usage.restores) == {"new:whole": 1, "disk:whole": 1} or dict(usage.restores) == {"disk:whole": 1}
        assert usage.device_byte_seconds > 0
        assert (stats.turns, stats.completion_tokens) == (2, 7)
        assert stats.hit_rate == 1.0
        assert stats.tiers["disk"].used == kv.sessions.tiers.blobs.used_bytes() > 0
        assert stats.byte_seconds["scout"] > 0
        text = kv.metrics().decode()
        assert "agentkv_turns_total 2.0" in text
        assert 'agentkv_tier_used_bytes{tier="device"}' in text
        assert 'agentkv_restores_total{outcome="whole",source="disk"} 1.0' in text
        assert session.id not in text, "ids make a metric without bounds"
        await session.delete()
    await watcher
    kinds = [event.kind for event in seen]
    assert [kind for kind in kinds if kind != "evicted"] == ["created", "demoted", "restored", "deleted"]
    assert kinds.count("evicted") >= 1
    assert "prompt" not in json.dumps([dict(event.details) for event in seen])


async def test_top_looks_into_a_running_process(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"

    def run(*args: str) -> Any:
        return CliRunner().invoke(app, ["top", "--home", str(home), *args])

    async with opened(home, model) as kv:
        (session,) = await sessions(kv, 1)
        shown = await asyncio.to_thread(run, "--once")
        assert shown.exit_code == 0, shown.output
        assert session.id[:12] in shown.output
        look = json.loads((await asyncio.to_thread(run, "--json")).output)
        assert (look["stats"]["turns"], look["sessions"][0]["id"]) == (1, session.id)
        assert (home / "control.sock").stat().st_mode & 0o077 == 0
    gone = await asyncio.to_thread(run, "--once")
    assert gone.exit_code == 1
    assert "no running agentkv process" in gone.output
