"""A device that runs out of memory in a turn: idle sessions give way, the turn is taken again, nothing shows of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import chat_folder, check_home, check_session, model_folder, opened, prompt, said, turns, written

from agentkv import AgentKV
from agentkv.engine.adapter import ModelAdapter
from agentkv.engine.repeating import OnceSink
from agentkv.errors import CapacityExceeded, EngineFailed
from agentkv.kv.buffers import GroupBuffers
from agentkv.kv.contiguous import ContiguousKV
from agentkv.memory import OutOfDeviceMemory
from agentkv.schemas.replies import Done, TextDelta
from agentkv.sessions.session import Session
from agentkv.storage import chunkfile

TOKENS = 8
PATIENCE = 60.0
HEAD = "0123456789 " * 12
"""A system prompt that is long enough to be computed for others."""


def refused() -> None:
    """torch's own allocator, asked for more than any machine has."""
    torch.empty(2**56, dtype=torch.uint8)


class Short:
    """A device with too little memory for some passes: ``when`` says which, and is asked before each."""

    def __init__(self) -> None:
        self.when: Callable[[Sequence[int]], bool] = lambda ids: False
        self.refusals = 0

    def times(self, count: int, when: Callable[[Sequence[int]], bool] = lambda ids: True) -> None:
        """For the next ``count`` passes that ``when`` is true of."""
        last = self.refusals + count
        self.when = lambda ids: self.refusals < last and when(ids)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Short:
    """The model's own forward fails, in the middle of it, where torch would."""
    device, real = Short(), ModelAdapter._forward

    def forward(self: ModelAdapter, ids: Sequence[int], *args: Any) -> Any:
        if device.when(ids):
            device.refusals += 1
            refused()
        return real(self, ids, *args)

    monkeypatch.setattr(ModelAdapter, "_forward", forward)
    return device


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models"), "gemma3")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def twin(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """What an undisturbed session says to ``turns(4)``."""

    async def talk() -> list[tuple[int, ...]]:
        async with opened(tmp_path_factory.mktemp("twin"), model) as kv:
            return [reply.ids for reply in await said(await kv.sessions.create(), turns(4), TOKENS)]

    return asyncio.run(talk())


def prefilling(ids: Sequence[int]) -> bool:
    return len(ids) > 2


def decoding(ids: Sequence[int]) -> bool:
    return len(ids) <= 2


async def talked(kv: AgentKV, count: int = 1) -> Session:
    session = await kv.sessions.create()
    await said(session, turns(count), TOKENS)
    await written(kv)
    return session


async def tier(session: Session) -> str | None:
    return (await session.state()).tier


# -- once --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [prefilling, decoding])
@pytest.mark.parametrize("layout", ["dynamic", "paged", pytest.param("quantized:int8", marks=pytest.mark.full)])
async def test_a_turn_that_runs_out_of_memory_once_is_answered_and_idle_sessions_have_made_room(
    model: Path,
    tmp_path: Path,
    short: Short,
    twin: list[tuple[int, ...]],
    when: Callable[[Sequence[int]], bool],
    layout: str,
) -> None:
    async with opened(tmp_path / "home", model, layout=layout) as kv:
        session = await talked(kv)
        idle, pinned = await talked(kv), await talked(kv)
        assert (await pinned.pin(60)).outcome == "accepted"
        short.times(1, when)
        (reply,) = await said(session, turns(2)[1:], TOKENS)
        assert short.refusals == 1
        if layout != "quantized:int8":
            assert reply.ids == twin[1]
        assert (reply.restore.source, reply.restore.reason) == ("device", None)
        assert reply.usage.completion_tokens == TOKENS
        assert [await tier(each) for each in (session, idle, pinned)] == ["device", "disk", "device"]
        for each in (session, idle, pinned):
            await check_session(kv, each)
        await check_home(kv)
        (reply,) = await said(session, turns(3)[2:], TOKENS)
        if layout != "quantized:int8":
            assert reply.ids == twin[2]
    async with opened(tmp_path / "home", model, layout=layout) as kv:
        again = await kv.sessions.get(session.id)
        (reply,) = await said(again, turns(4)[3:], TOKENS)
        assert reply.restore.source == "disk"
        if layout != "quantized:int8":
            assert reply.ids == twin[3]


async def test_the_reply_says_where_its_kv_came_from_though_it_was_taken_twice(
    model: Path, tmp_path: Path, short: Short, twin: list[tuple[int, ...]]
) -> None:
    async with opened(tmp_path / "home", model) as kv:
        session = await talked(kv)
        await session.suspend()
        short.times(1)
        (reply,) = await said(session, turns(2)[1:], TOKENS)
        assert (reply.ids, reply.restore.source) == (twin[1], "disk")
        assert reply.usage.cached_tokens == reply.restore.tokens > 0
        assert dict(kv.stats().restores) == {"disk:whole": 1}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}])
async def test_a_stream_goes_on_where_it_was_and_repeats_nothing(
    chat: Path, tmp_path: Path, short: Short, sampling: dict[str, Any]
) -> None:
    async with opened(tmp_path / "home", chat) as kv:
        session, twin = (
            await kv.sessions.create(system="You are terse."),
            await kv.sessions.create(system="You are terse."),
        )
        decoded = 0

        def late(ids: Sequence[int]) -> bool:
            nonlocal decoded
            decoded += decoding(ids)
            return decoding(ids) and decoded > 25

        short.times(1, late)
        deltas, done = [], None
        async for event in session.stream("How is Paris?", max_tokens=40, ignore_eos=True, logprobs=0, **sampling):
            if isinstance(event, TextDelta):
                deltas.append(event.text)
            elif isinstance(event, Done):
                done = event.reply
        assert done is not None and short.refusals == 1
        assert "".join(deltas) == done.text
        assert len(done.ids) == 40
        expected = await twin.send(
            "How is Paris?",
            max_tokens=40,
            ignore_eos=True,
            logprobs=0,
            **({**sampling, "seed": done.seed} if sampling else {}),
        )
        assert (done.ids, done.text) == (expected.ids, expected.text)
        assert done.logprobs is not None and len(done.logprobs) == 40
        assert done.ttft_seconds < done.seconds / 2, "its first token was out before memory ran out"


async def test_an_output_that_follows_a_schema_still_does(chat: Path, tmp_path: Path, short: Short) -> None:
    point = {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 100, "maximum": 999}},
        "required": ["x"],
    }
    async with opened(tmp_path / "home", chat) as kv:
        session, twin = await kv.sessions.create(), await kv.sessions.create()
        whole = await twin.send("Where?", schema=point, max_tokens=200)
        cut = await session.send("Where?", schema=point, max_tokens=2)
        passes = 0

        def third(ids: Sequence[int]) -> bool:
            nonlocal passes
            passes += 1
            return passes == 3

        short.times(1, third)
        rest = await session.continue_(schema=point, max_tokens=200)
        assert short.refusals == 1
        assert (*cut.ids, *rest.ids) == whole.ids
        assert rest.parsed == whole.parsed is not None


async def test_a_head_that_others_wait_for_is_computed_in_spite_of_it(chat: Path, tmp_path: Path, short: Short) -> None:
    async with opened(tmp_path / "twin", chat) as kv:
        expected = await (await kv.sessions.create(system=HEAD)).send("Hi", max_tokens=6)
    async with opened(tmp_path / "home", chat) as kv:
        made = [await kv.sessions.create(system=HEAD) for _ in range(3)]
        assert made[0]._core.record.pinned > 100
        for refusals in (1, 2):
            short.times(refusals, prefilling)
            if refusals == 2:
                with pytest.raises(CapacityExceeded, match="again"):
                    await made[0].send("Hi", max_tokens=6)
                assert made[0]._core.record.kv_length == 0
        short.times(1, prefilling)
        replies = await asyncio.gather(*(session.send("Hi", max_tokens=6) for session in made))
        assert {reply.ids for reply in replies} == {expected.ids}
        for session in made:
            await check_session(kv, session)
        await check_home(kv)


async def test_a_head_that_was_computed_before_memory_ran_out_is_computed_once(
    chat: Path, tmp_path: Path, short: Short
) -> None:
    async with opened(tmp_path / "twin", chat) as kv:
        expected = await (await kv.sessions.create(system=HEAD)).send("Hi", max_tokens=6)
    async with opened(tmp_path / "home", chat) as kv:
        session = await kv.sessions.create(system=HEAD)
        short.times(1, lambda ids: session._core.record.kv_length > 0)
        reply = await session.send("Hi", max_tokens=6)
        assert (short.refusals, reply.ids, reply.restore.source) == (1, expected.ids, "new")
        assert kv.stats().computed_tokens == len(await session.token_ids()) - 1, "nothing of the head again"
        await check_session(kv, session)
        await check_home(kv)


# -- twice -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [prefilling, decoding])
async def test_a_second_failure_is_told_with_numbers_and_the_turn_never_was(
    model: Path, tmp_path: Path, short: Short, twin: list[tuple[int, ...]], when: Callable[[Sequence[int]], bool]
) -> None:
    async with opened(tmp_path / "home", model) as kv:
        events: list[tuple[str, str | None]] = []

        async def watch() -> None:
            events.extend([(event.kind, event.session_id) async for event in kv.events()])

        session, idle = await talked(kv), await talked(kv)
        watcher = asyncio.create_task(watch())
        await asyncio.sleep(0)
        before, ledger = await session.state(), await session.token_ids()
        short.times(2, when)
        with pytest.raises(CapacityExceeded, match=r"again after 1 idle sessions had given [\d,]+ bytes") as caught:
            await said(session, turns(2)[1:], TOKENS)
        error = caught.value
        assert type(error) is CapacityExceeded
        assert error.retry_after and error.needed > 0 and error.available > 0
        assert error.budget == kv.sessions.tiers.device_budget
        assert isinstance(error.__cause__, OutOfDeviceMemory)
        assert await tier(idle) == "disk"
        after = await session.state()
        assert await session.token_ids() == ledger
        assert (after.turns, after.kept, after.kv_tokens) == (before.turns, before.kept, before.kv_tokens)
        await check_session(kv, session)
        assert session._core.reserved == session._core.kv.nbytes  # type: ignore[union-attr]
        (reply,) = await said(session, turns(2)[1:], TOKENS)
        assert (reply.ids, reply.restore.source) == (twin[1], "device")
        await check_home(kv)
    await watcher
    assert ("refused", session.id) in events


async def test_a_neighbour_in_the_same_steps_hears_nothing_of_it(model: Path, tmp_path: Path, short: Short) -> None:
    """One session's tokens never fit, whatever runs beside it; the other one's do."""
    mark = 77
    feeds = [prompt(20, 1), prompt(20, 2)]
    async with opened(tmp_path / "twin", model) as kv:
        expected = (await (await kv.sessions.create()).generate_tokens(feeds[1], max_tokens=60, ignore_eos=True)).ids
    async with opened(tmp_path / "home", model) as kv:
        greedy, well = [await kv.sessions.create() for _ in range(2)]
        running = asyncio.create_task(well.generate_tokens(feeds[1], max_tokens=60, ignore_eos=True))
        await asyncio.sleep(0)
        short.when = lambda ids: mark in ids and len(ids) > 2
        failing = asyncio.create_task(greedy.generate_tokens([mark, *feeds[0]], max_tokens=8))
        with pytest.raises(CapacityExceeded):
            await failing
        assert (await running).ids == expected
        assert short.refusals >= 2
        for session in (greedy, well):
            await check_session(kv, session)


# -- other places ------------------------------------------------------------------------------------------------------


async def test_a_state_that_could_not_be_rolled_back_comes_back_from_disk_in_the_same_turn(
    model: Path, tmp_path: Path, short: Short, twin: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path / "home", model) as kv:
        session = await talked(kv)
        real, failures = ContiguousKV.rollback, [2]

        def rollback(self: ContiguousKV, undo: Any) -> None:
            if failures[0]:
                failures[0] -= 1
                refused()
            real(self, undo)

        monkeypatch.setattr(ContiguousKV, "rollback", rollback)
        short.times(1, decoding)
        (reply,) = await said(session, turns(2)[1:], TOKENS)
        assert (reply.ids, reply.restore.source, reply.restore.reason) == (twin[1], "disk", None)
        await check_session(kv, session)
        assert failures == [1]

        def boom(slots: object) -> object:
            raise RuntimeError("boom")

        with monkeypatch.context() as patch:
            patch.setattr(kv.model.layout, "plan", boom)
            with pytest.raises(EngineFailed, match="boom"):
                await said(session, turns(3)[2:], TOKENS)
        assert (await tier(session), session._core.kv, session._core.reserved) == ("disk", None, 0)
        (reply,) = await said(session, turns(3)[2:], TOKENS)
        assert (reply.ids, reply.restore.source, reply.restore.reason) == (twin[2], "disk", None)
        await check_session(kv, session)
        await check_home(kv)


@pytest.mark.parametrize("turns_lost", [1, 2])
async def test_a_restore_that_runs_out_of_memory_is_tried_again_and_no_file_is_suspected(
    model: Path, tmp_path: Path, twin: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, turns_lost: int
) -> None:
    async with opened(tmp_path / "home", model) as kv:
        session, idle = await talked(kv), await talked(kv)
        await session.suspend()
        decode, left = chunkfile.decode_part, [turns_lost]

        def decode_part(*args: Any) -> None:
            if left[0]:
                left[0] -= 1
                refused()
            decode(*args)

        monkeypatch.setattr("agentkv.sessions.restoring.decode_part", decode_part)
        if turns_lost == 2:
            with pytest.raises(CapacityExceeded, match="again"):
                await said(session, turns(2)[1:], TOKENS)
            assert (await tier(session), session._core.reserved) == ("disk", 0)
        (reply,) = await said(session, turns(2)[1:], TOKENS)
        assert (reply.ids, reply.restore.source, reply.restore.reason) == (twin[1], "disk", None)
        assert await tier(idle) == "disk"
        assert not list((kv.settings.blobs_dir / "quarantine").glob("*"))
        await session.suspend()
        left[0] = 1
        assert (await session.resume()).source == "disk"
        left[0] = 1
        await session.suspend()
        assert (await session.prefetch()).outcome == "rejected", "a hint is no reason to drive others away"
        await check_session(kv, session)


async def test_a_codec_that_has_no_memory_is_no_bad_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentkv.codecs.exact import Exact

    async with opened(tmp_path / "home", model) as kv:
        session = await talked(kv)
        await session.suspend()
        with monkeypatch.context() as patch:
            patch.setattr(Exact, "decode", lambda *args: refused())
            with pytest.raises(CapacityExceeded, match="again"):
                await session.resume()
        report = await session.resume()
        assert (report.source, report.reason) == ("disk", None)


async def test_a_device_that_cannot_even_hold_the_state_says_so(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path / "home", model) as kv:
        session, fresh = await talked(kv), await kv.sessions.create()
        await session.suspend()
        with monkeypatch.context() as patch:
            patch.setattr(GroupBuffers, "_empty", lambda *args: refused())
            for each in (session, fresh):
                with pytest.raises(CapacityExceeded, match="again"):
                    await said(each, turns(1), TOKENS)
        for each in (session, fresh):
            await said(each, turns(1), TOKENS)
            await check_session(kv, each)


async def test_cancelled_while_others_make_room_the_turn_never_was(
    model: Path, tmp_path: Path, short: Short, twin: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path / "home", model) as kv:
        session, idle = await talked(kv), await talked(kv)
        moving = asyncio.Event()
        tiers, suspend = kv.sessions.tiers, kv.sessions.tiers.suspend

        async def slow(*args: Any) -> Any:
            moving.set()
            await asyncio.sleep(0.2)
            return await suspend(*args)

        monkeypatch.setattr(tiers, "suspend", slow)
        short.times(1)
        turn = asyncio.create_task(said(session, turns(2)[1:], TOKENS))
        await moving.wait()
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        monkeypatch.undo()
        (reply,) = await said(session, turns(2)[1:], TOKENS)
        assert reply.ids == twin[1]
        for each in (session, idle):
            await check_session(kv, each)


async def test_pages_are_nobody_elses_while_a_restore_that_was_given_up_still_writes_to_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path / "home", model, layout="paged") as kv:
        session = await talked(kv)
        await session.suspend()
        pools = kv.model.layout.pools  # type: ignore[attr-defined]
        decode, begun, go_on = chunkfile.decode_part, threading.Event(), threading.Event()

        def decode_part(*args: Any) -> None:
            begun.set()
            assert go_on.wait(PATIENCE)
            decode(*args)

        monkeypatch.setattr("agentkv.sessions.restoring.decode_part", decode_part)
        turn = asyncio.create_task(said(session, turns(2)[1:], TOKENS))
        assert await asyncio.to_thread(begun.wait, PATIENCE)
        taken = [pool.nbytes // pool.page_nbytes - pool.free for pool in pools]
        assert all(taken)
        turn.cancel()
        await asyncio.sleep(0.1)
        assert [pool.nbytes // pool.page_nbytes - pool.free for pool in pools] == taken, "a worker still writes to them"
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await turn
        assert [pool.nbytes // pool.page_nbytes - pool.free for pool in pools] == [0, 0]
        report = await session.resume()
        assert (report.source, report.reason) == ("disk", None)
        await check_session(kv, session)


# -- what was given out ------------------------------------------------------------------------------------------------


class Heard(OnceSink):
    def __init__(self) -> None:
        from driving import Hooked

        self.inner = Hooked(stop_after=4)
        super().__init__(self.inner)


@pytest.fixture
def heard() -> Iterator[Heard]:
    yield Heard()


def test_a_generation_that_begins_anew_hands_on_what_was_not_handed_on(heard: Heard) -> None:
    assert [heard.push(token, None) for token in (5, 6)] == ["go on", "go on"]
    heard.again()
    assert [heard.push(token, None) for token in (5,)] == ["go on"]
    heard.again()
    assert [heard.push(token, None) for token in (5, 6, 7, 8)] == ["go on", "go on", "go on", "stop"]
    assert heard.inner.tokens == [5, 6, 7, 8]


def test_one_that_comes_out_differently_is_given_up(heard: Heard) -> None:
    heard.push(5, None)
    heard.push(6, None)
    heard.again()
    heard.push(5, None)
    with pytest.raises(OutOfDeviceMemory, match="differs at token 2 of the 2 that were given out"):
        heard.push(9, None)
    assert heard.inner.tokens == [5, 6]
