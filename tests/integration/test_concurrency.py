"""Many sessions and tasks at once: nobody sees another's state, a turn is whole or never was, waits are bounded."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest
from homes import chat_folder, check_home, check_session, model_folder, opened, prompt, said, turns, written
from striking import interrupted

from agentkv import AgentKV, Session
from agentkv.errors import CapacityExceeded, Closed, SessionBusy, SessionNotFound
from agentkv.schemas.replies import TextDelta
from agentkv.sessions.turn import Turn

TOKENS = 8
LONG = 900


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return model_folder(models, "gemma3")


@pytest.fixture(scope="module")
def twin(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """What an undisturbed session says to ``turns(4)``."""

    async def talk() -> list[tuple[int, ...]]:
        async with opened(tmp_path_factory.mktemp("twin"), model) as kv:
            return [reply.ids for reply in await said(await kv.sessions.create(), turns(4), TOKENS)]

    return asyncio.run(talk())


def long_turn(session: Session) -> asyncio.Task[Any]:
    """A turn that takes seconds."""
    return asyncio.create_task(session.generate_tokens(prompt(20), max_tokens=LONG))


async def busy(session: Session) -> None:
    """Wait until a turn computes on it."""
    before = session._core.record.kv_length
    while session._core.kv is None or session._core.kv.length <= before:  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# -- sixteen at once ---------------------------------------------------------------------------------------------------


def marker(i: int) -> str:
    return f"<{chr(ord('A') + i) * 4}{i:02}>"


def messages(i: int, count: int) -> list[str]:
    return [f"{marker(i)} says {n} " + "word " * (i % 5) for n in range(count)]


async def disturbed(session: Session, text: str, draw: random.Random) -> None:
    """One turn, at last; before it others that are cancelled, timed out or left, and moves between tiers."""
    before = (await session.state()).turns
    while (await session.state()).turns == before:
        match draw.randrange(6):
            case 0:
                task = asyncio.create_task(session.send(text, max_tokens=TOKENS))
                await asyncio.sleep(draw.uniform(0, 0.2))
                task.cancel()
                await asyncio.wait([task])
            case 1:
                with suppress(TimeoutError):
                    async with asyncio.timeout(draw.uniform(0.01, 0.2)):
                        await session.send(text, max_tokens=TOKENS)
            case 2:
                leave = draw.randrange(1, 4)
                async with aclosing(session.stream(text, max_tokens=TOKENS)) as events:
                    async for _ in events:
                        leave -= 1
                        if not leave:
                            break
            case 3:
                await session.suspend(tier=draw.choice(["host", "disk"]))
            case 4:
                mover = asyncio.create_task(session.suspend(tier=draw.choice(["host", "disk"])))
                await session.send(text, max_tokens=TOKENS)
                await mover
            case _:
                async for event in session.stream(text, max_tokens=TOKENS):
                    last = event
                assert not isinstance(last, TextDelta)


async def sixteen(home: Path, model: Path, solo: list[list[int]], seed: int, **settings: Any) -> None:
    count = len(solo)
    async with opened(home, model, **settings) as kv:
        sessions = [await kv.sessions.create(system=f"You are {marker(i)}") for i in range(count)]

        async def live(i: int) -> None:
            draw = random.Random(f"{seed}/{i}")
            for text in messages(i, 3):
                before = (await sessions[i].state()).turns
                while (await sessions[i].state()).turns == before:
                    try:
                        await disturbed(sessions[i], text, draw)
                    except CapacityExceeded as error:
                        # A turn may find no room while others run: it says so, and nobody is the worse.
                        assert error.budget == settings["device_budget"]
                        await asyncio.sleep(draw.uniform(0, 0.1))
                await check_session_of(kv, sessions[i])

        async with asyncio.timeout(200), asyncio.TaskGroup() as group:
            for i in range(count):
                group.create_task(live(i))
        await check_home(kv)
        for i, session in enumerate(sessions):
            assert await session.token_ids() == solo[i], f"session {i} is not what it says alone"
            text = "".join(item.text for item in await session.items())
            assert marker(i) in text
            assert not [j for j in range(count) if j != i and marker(j) in text]
            await session.suspend()
            await check_session(kv, session)
        await check_home(kv)


async def check_session_of(kv: AgentKV, session: Session) -> None:
    async with session._core.gate:
        await check_session(kv, session)


async def alone(home: Path, model: Path, count: int) -> list[list[int]]:
    """The ledgers of sessions that have the runtime for themselves."""
    ledgers = []
    async with opened(home, model) as kv:
        for i in range(count):
            session = await kv.sessions.create(system=f"You are {marker(i)}")
            for text in messages(i, 3):
                await session.send(text, max_tokens=TOKENS)
            ledgers.append(await session.token_ids())
    return ledgers


@pytest.mark.parametrize("family", ["gemma3", pytest.param("llama", marks=pytest.mark.full)])
async def test_sixteen_sessions_that_are_cancelled_and_moved_at_random_say_what_each_says_alone(
    models: Path, tmp_path: Path, seed: int, family: str
) -> None:
    model = chat_folder(models, family)
    solo = await alone(tmp_path / "solo", model, 16)
    assert len({tuple(ledger) for ledger in solo}) == 16
    await sixteen(tmp_path / "home", model, solo, seed)


@pytest.mark.full
@pytest.mark.parametrize("round_", range(4))
async def test_sixteen_sessions_in_the_memory_of_six(models: Path, tmp_path: Path, seed: int, round_: int) -> None:
    model = chat_folder(models, "gemma3")
    solo = await alone(tmp_path / "solo", model, 16)
    async with opened(tmp_path / "one", model) as kv:
        session = await kv.sessions.create(system=f"You are {marker(4)}")
        for text in messages(4, 3):
            await session.send(text, max_tokens=TOKENS)
        size = (await session.state()).device_bytes
    await sixteen(tmp_path / "home", model, solo, 1000 * seed + round_, device_budget=6 * size)


# -- cancelled at every await ------------------------------------------------------------------------------------------


async def cancel_at(
    monkeypatch: pytest.MonkeyPatch, at: int, turn: Callable[[], Coroutine[Any, Any, Any]]
) -> BaseException | None:
    """Run ``turn`` and cancel its caller when the turn's own task waits for the ``at``-th time."""
    run = Turn.run
    consumer: asyncio.Task[Any]

    def watched(self: Turn, wait_seconds: float | None) -> Awaitable[None]:
        async def outer() -> None:
            await interrupted(run(self, wait_seconds), at, lambda: consumer.cancel())

        return outer()

    with monkeypatch.context() as patch:
        patch.setattr(Turn, "run", watched)
        consumer = asyncio.create_task(turn())
        await asyncio.wait([consumer])
    return asyncio.CancelledError() if consumer.cancelled() else consumer.exception()


@pytest.mark.parametrize("crowded", [False, True], ids=["restoring", "demoting-another"])
async def test_a_turn_cancelled_at_any_await_is_whole_or_never_was(
    model: Path, tmp_path: Path, twin: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, crowded: bool
) -> None:
    inputs = turns(4)
    outcomes: list[bool] = []
    async with opened(tmp_path / "home", model) as kv:
        tiers, roomy = kv.sessions.tiers, kv.sessions.tiers.device_budget
        for at in range(1, 200):
            session = await kv.sessions.create()
            await said(session, inputs[:1], TOKENS)
            await session.suspend()
            neighbour = await kv.sessions.create()
            await said(neighbour, inputs[:1], TOKENS)
            if crowded:  # room for one of them
                tiers.device_budget = tiers.layout.bytes_needed(None, 200)
            outcome = await cancel_at(
                monkeypatch, at, lambda s=session: s.generate_tokens(inputs[1], max_tokens=TOKENS)
            )
            tiers.device_budget = roomy
            async with session._core.gate, neighbour._core.gate:
                await check_session(kv, session)
                await check_session(kv, neighbour)
            committed = (await session.state()).turns == 2
            assert len(await session.token_ids()) == len(inputs[0]) + TOKENS + committed * (len(inputs[1]) + TOKENS)
            assert tiers.device_bytes == sum([(await s.state()).device_bytes for s in (session, neighbour)])
            for i in range(1 + committed, 3):
                (reply,) = await said(session, inputs[i : i + 1], TOKENS)
                assert reply.ids == twin[i], f"after a cancellation at await {at}"
                assert reply.restore.reason is None
            (reply,) = await said(neighbour, inputs[1:2], TOKENS)
            assert reply.ids == twin[1]
            await check_session(kv, neighbour)
            for s in (session, neighbour):
                assert (await s.suspend()).tier == "disk"
                await check_session(kv, s)
                await s.delete()
            assert tiers.host.used_bytes == 0, "a reference to host memory leaked"
            outcomes.append(committed)
            if outcome is None:
                break
        await check_home(kv)
    assert outcome is None, "the turn never got through"
    assert len(outcomes) > 5, "a turn has more awaits than that"
    assert outcomes == sorted(outcomes), "committed once it is past its commit, never before"


@pytest.mark.parametrize("tier", ["device", "disk"])
async def test_a_turn_cancelled_while_it_computes_leaves_the_state_before_it(
    model: Path, tmp_path: Path, twin: list[tuple[int, ...]], tier: str
) -> None:
    async with opened(tmp_path / "home", model) as kv:
        session = await kv.sessions.create()
        await said(session, turns(1), TOKENS)
        for computed in (1, 33, 70, 150, 400):  # sliding windows move to the front of their buffers meanwhile
            if tier == "disk":
                await session.suspend()
            ledger = await session.token_ids()
            running = asyncio.create_task(session.generate_tokens(prompt(100), max_tokens=LONG))
            while session._core.kv is None or session._core.kv.length < len(ledger) + computed:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await cancelled(running)
            assert await session.token_ids() == ledger
            assert (await session.state()).kv_tokens == len(ledger) - 1
            await check_session(kv, session)
        for i in range(1, 4):
            (reply,) = await said(session, turns(4)[i : i + 1], TOKENS)
            assert reply.ids == twin[i]
            assert reply.restore.reason is None
        await check_session(kv, session)


# -- one writer --------------------------------------------------------------------------------------------------------


async def test_a_second_turn_is_refused_at_once_or_waits_as_long_as_it_was_told(model: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", model, busy_wait_seconds=0.3) as kv:
        session = await kv.sessions.create()
        running = long_turn(session)
        await busy(session)
        began = time.monotonic()
        with pytest.raises(SessionBusy) as caught:
            await session.generate_tokens([1], max_tokens=1)
        assert time.monotonic() - began < 0.2
        assert (caught.value.session_id, caught.value.retry_after) == (session.id, 1.0)
        assert (await session.state()).busy
        with pytest.raises(SessionBusy):
            await session.generate_tokens([1], max_tokens=1, wait=True)
        assert 0.3 <= time.monotonic() - began < 5
        assert not running.done(), "the test is too short for this machine"
        await cancelled(running)
        assert not (await session.state()).busy
        await session.generate_tokens([1], max_tokens=1)
        await check_session(kv, session)


async def test_turns_that_wait_are_served_one_after_the_other(
    model: Path, tmp_path: Path, twin: list[tuple[int, ...]]
) -> None:
    async with opened(tmp_path / "home", model) as kv:
        session = await kv.sessions.create()
        jobs = [session.generate_tokens(ids, max_tokens=TOKENS, wait=True) for ids in turns(4)]
        assert [reply.ids for reply in await asyncio.gather(*jobs)] == twin
        # Told its answer, a caller may go on at once, though the KV is still being stored.
        again = await kv.sessions.create()
        assert [reply.ids for reply in await said(again, turns(4), TOKENS)] == twin
        await check_session(kv, session)


async def test_a_waiting_turn_that_is_cancelled_leaves_the_running_one_alone(
    model: Path, tmp_path: Path, twin: list[tuple[int, ...]]
) -> None:
    async with opened(tmp_path / "home", model) as kv:
        session = await kv.sessions.create()
        first = asyncio.create_task(session.generate_tokens(turns(1)[0], max_tokens=TOKENS))
        second = asyncio.create_task(session.generate_tokens([3], max_tokens=TOKENS, wait=True))
        await asyncio.sleep(0.01)
        second.cancel()
        assert (await first).ids == twin[0]
        await asyncio.wait([second])
        assert (await said(session, turns(4)[1:2], TOKENS))[0].ids == twin[1]
        assert (await session.state()).turns == 2


async def test_a_stream_left_early_is_rolled_back(models: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", chat_folder(models)) as kv:
        session = await kv.sessions.create(system="You are helpful")
        await session.send("How is the weather?", max_tokens=4)
        ledger = await session.token_ids()
        async with aclosing(session.stream("Tell me all", max_tokens=LONG // 2)) as events:
            async for event in events:
                assert isinstance(event, TextDelta)
                break
        assert await session.token_ids() == ledger, "closing the stream waits for the rollback"
        await check_session(kv, session)
        async for _ in session.stream("Tell me all", max_tokens=LONG // 2):
            break
        reply = await session.send("How is Paris?", max_tokens=4, wait=True)  # the garbage collector closes the stream
        assert (await session.token_ids())[: len(ledger)] == ledger
        assert len(await session.token_ids()) == reply.usage.total_tokens
        await check_session(kv, session)


# -- moves and deletions -----------------------------------------------------------------------------------------------


async def test_a_deletion_waits_for_the_turn_and_frees_the_files(model: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", model) as kv:
        kept, session = await kv.sessions.create(), await kv.sessions.create()
        await said(kept, turns(1, seed=5), TOKENS)
        await said(session, turns(2), TOKENS)
        await written(kv)
        files = kv.sessions.tiers.blobs.used_bytes()
        own = (await session.state()).disk_bytes
        turn = asyncio.create_task(session.generate_tokens([1, 2], max_tokens=60))
        await busy(session)
        freed = await kv.sessions.delete(session.id)
        assert len((await turn).ids) == 60, "the turn was waited for"
        assert freed > own
        assert kv.sessions.tiers.blobs.used_bytes() == files - own
        with pytest.raises(SessionNotFound, match=session.id):
            await kv.sessions.get(session.id)
        for call in (session.items, session.state, session.suspend, session.resume, session.token_ids):
            with pytest.raises(Closed, match="deleted"):
                await call()
        with pytest.raises(Closed):
            await session.generate_tokens([1], max_tokens=1)
        with pytest.raises(SessionNotFound):
            await kv.sessions.delete(session.id)
        assert [record.id for record in await kv.sessions.list()] == [kept.id]
        await check_session(kv, kept)
        await check_home(kv)
        assert kv.sessions.tiers.device_bytes == (await kept.state()).device_bytes


async def test_a_deletion_of_a_session_that_another_task_just_opened(model: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", model) as kv:
        session = await kv.sessions.create()
        await said(session, turns(1), TOKENS)
    async with opened(tmp_path / "home", model) as kv:

        async def use() -> None:
            with suppress(SessionNotFound, Closed):
                handle = await kv.sessions.get(session.id)
                await handle.generate_tokens([1], max_tokens=1, wait=True)

        results = await asyncio.gather(
            use(), kv.sessions.delete(session.id), kv.sessions.delete(session.id), use(), return_exceptions=True
        )
        assert sorted(type(r).__name__ for r in results) == ["NoneType", "NoneType", "SessionNotFound", "int"]
        assert await kv.sessions.list() == []
        assert (kv.sessions.tiers.device_bytes, kv.sessions.tiers.blobs.used_bytes()) == (0, 0)
        await check_home(kv)


async def test_a_suspend_waits_for_the_turn(model: Path, tmp_path: Path, twin: list[tuple[int, ...]]) -> None:
    async with opened(tmp_path / "home", model) as kv:
        session = await kv.sessions.create()
        turn = asyncio.create_task(session.generate_tokens(turns(1)[0], max_tokens=TOKENS))
        await busy(session)
        report = await session.suspend()
        assert turn.done() or session._core.turns == 0
        assert (await turn).ids == twin[0]
        assert (report.tier, report.tokens) == ("disk", 40 + TOKENS - 1)
        assert (await session.state()).tier == "disk"


async def test_two_handles_are_one_session_and_two_resumes_one_restore(
    model: Path, tmp_path: Path, twin: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path / "home", model) as kv:
        session = await kv.sessions.create()
        await said(session, turns(1), TOKENS)
    async with opened(tmp_path / "home", model) as kv:
        one, two = await asyncio.gather(kv.sessions.get(session.id), kv.sessions.get(session.id))
        assert await one.state() == await two.state()
        reader = kv.sessions.tiers._reader
        restore, restores = reader.restore, []

        async def counted(*args: Any, **kwargs: Any) -> Any:
            restores.append(args)
            return await restore(*args, **kwargs)

        monkeypatch.setattr(reader, "restore", counted)
        reports = await asyncio.gather(one.resume(), two.resume(), one.resume())
        assert len(restores) == 1
        assert [r.source for r in reports] == ["disk", "device", "device"]
        assert len({r.tokens for r in reports}) == 1
        assert (await said(two, turns(4)[1:2], TOKENS))[0].ids == twin[1]
        assert await one.token_ids() == await two.token_ids()
        await check_session(kv, one)


async def test_closing_during_turns_rolls_them_back_and_loses_nothing_committed(
    model: Path, tmp_path: Path, twin: list[tuple[int, ...]]
) -> None:
    kv = await opened(tmp_path / "home", model)
    sessions = [await kv.sessions.create() for _ in range(3)]
    for session in sessions:
        await said(session, turns(1), TOKENS)
    running = [long_turn(session) for session in sessions]
    await asyncio.gather(*(busy(session) for session in sessions))
    waiting = asyncio.create_task(sessions[0].generate_tokens([1], max_tokens=1, wait=True))
    await asyncio.sleep(0.01)
    await kv.close()
    async with asyncio.timeout(5):
        for outcome in await asyncio.gather(*running, waiting, return_exceptions=True):
            assert isinstance(outcome, Closed), outcome
    for call in (lambda: said(sessions[0], [[1]]), kv.sessions.create, lambda: kv.sessions.get(sessions[0].id)):
        with pytest.raises(Closed):
            await call()
    await kv.close()
    async with opened(tmp_path / "home", model) as kv:
        for session in sessions:
            (reply,) = await said(await kv.sessions.get(session.id), turns(4)[1:2], TOKENS)
            assert reply.ids == twin[1]
            assert (reply.restore.source, reply.restore.reason) == ("disk", None)
        await check_home(kv)


# -- time and memory ---------------------------------------------------------------------------------------------------


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_an_idle_session_moves_to_host_memory_then_to_disk_and_comes_back(
    model: Path, tmp_path: Path, twin: list[tuple[int, ...]]
) -> None:
    async with opened(tmp_path / "home", model, idle_seconds=0.2, disk_seconds=0.6) as kv:
        session = await kv.sessions.create()
        seen = []
        for i, tier in enumerate(("host", "disk")):
            (reply,) = await said(session, turns(4)[i : i + 1], TOKENS)
            assert reply.ids == twin[i]
            seen.append(reply.restore.source)

            async def there(tier: str = tier) -> bool:
                return (await session.state()).tier == tier

            await until(there)
            state = await session.state()
            assert state.device_bytes == 0
            assert (state.host_bytes > 0) == (tier == "host")
            await check_session(kv, session)
        (reply,) = await said(session, turns(4)[2:3], TOKENS)
        assert reply.ids == twin[2]
        assert [*seen, reply.restore.source] == ["new", "host", "disk"]
        assert (await kv.sessions.list())[0].id == session.id, "idle expiry demotes, never deletes"


async def test_the_least_recently_used_session_makes_room_and_a_running_one_never(model: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", model, residency="lru", admission_seconds=0.1) as kv:
        tiers = kv.sessions.tiers
        old, recent, new = [await kv.sessions.create() for _ in range(3)]
        for session in (old, recent):
            await said(session, turns(1), TOKENS)
        await old.generate_tokens([1], max_tokens=1)
        await recent.generate_tokens([1], max_tokens=1)
        one = (await old.state()).device_bytes
        tiers.device_budget = 2 * one + one // 2
        await said(new, turns(1), TOKENS)
        assert [(await s.state()).tier for s in (old, recent, new)] == ["host", "device", "device"]
        assert tiers.device_bytes <= tiers.device_budget

        tiers.device_budget = 2**40
        running = long_turn(recent)
        await busy(recent)
        more = 4000  # what taking a turn back may need beside the tokens
        tiers.device_budget = recent._core.reserved + new._core.reserved + more
        with pytest.raises(CapacityExceeded, match="device_budget") as caught:
            await old.generate_tokens(prompt(200), max_tokens=200)
        error = caught.value
        assert error.needed > error.available == new._core.reserved + more
        assert (error.budget, error.retry_after) == (tiers.device_budget, 2.0)
        assert [(await s.state()).tier for s in (old, recent, new)] == ["host", "device", "device"], "all or nothing"
        assert not running.done(), "the test is too short for this machine"
        await old.generate_tokens([5], max_tokens=1)
        assert [(await s.state()).tier for s in (old, recent, new)] == ["device", "device", "host"]
        assert not running.done(), "the test is too short for this machine"
        await cancelled(running)
        tiers.device_budget = 2**40
        for session in (old, recent, new):
            await check_session(kv, session)
        await check_home(kv)
