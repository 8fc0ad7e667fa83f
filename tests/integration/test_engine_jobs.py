"""Jobs that are cancelled, fail, or outlive the engine: the KV is rolled back exactly, and the others never notice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
import torch
from driving import PATIENCE, Gate, Hooked, adapted, assert_same, generating, prompt, running, snapshot
from families import VOCAB, family

from agentkv.engine.adapter import ModelAdapter
from agentkv.engine.engine import Engine, JobHandle
from agentkv.engine.job import Job
from agentkv.errors import CapacityExceeded, Closed, EngineFailed, InvalidRequest
from agentkv.kv.contract import Slot
from agentkv.kv.dynamic import DynamicKV, DynamicLayout


@pytest.fixture(scope="module")
def adapter() -> ModelAdapter:
    """A hybrid of sliding and full attention: a rollback has both to restore."""
    return adapted(family("gemma3"))


async def alone(adapter: ModelAdapter, ids: list[int], tokens: int) -> tuple[int, ...]:
    async with running(adapter) as (engine, layout):
        result = await engine.submit(generating(layout.open(), ids, tokens, piece=7)[0]).finished()
    assert result is not None
    return result.tokens


async def held(engine: Engine, layout: DynamicLayout, ids: list[int]) -> DynamicKV:
    """A session that has had a turn."""
    kv = layout.open()
    assert await engine.submit(generating(kv, ids, 5, piece=7)[0]).finished()
    return kv


async def test_cancelled_in_mid_prefill_the_state_is_as_before_and_others_go_on(adapter: ModelAdapter) -> None:
    expected = await alone(adapter, prompt(9), 30)
    async with running(adapter, joint_rows=8) as (engine, layout):
        kv = await held(engine, layout, prompt(30))
        before = snapshot(kv)
        gate = Gate()
        other, _ = generating(layout.open(), prompt(9), 30, piece=7, sink=Hooked({12: gate}))
        victim, _ = generating(kv, prompt(180), 5, piece=4)
        handles = [engine.submit(other), engine.submit(victim)]
        await gate.reached()
        assert len(before[0]) < kv.length < len(before[0]) + 180, "in mid-prefill"
        assert kv.buffers(0).base > 0
        handles[1].cancel()
        gate.open()
        assert await handles[1].finished() is None
        assert_same(snapshot(kv), before)
        result = await handles[0].finished()
        assert result is not None and result.tokens == expected
        again = await engine.submit(generating(kv, prompt(20), 3)[0]).finished()
        assert again is not None and len(again.tokens) == 3


async def test_cancelled_in_mid_decode_after_the_window_moved_the_state_is_as_before(adapter: ModelAdapter) -> None:
    expected = await alone(adapter, prompt(9), 110)
    async with running(adapter) as (engine, layout):
        kv = await held(engine, layout, prompt(30))
        before, base = snapshot(kv), kv.buffers(0).base
        gate = Gate()
        victim, _ = generating(kv, prompt(5), 500, sink=Hooked({100: gate}))
        other, _ = generating(layout.open(), prompt(9), 110, piece=7)
        handle, beside = engine.submit(victim), engine.submit(other)
        await gate.reached()
        assert kv.buffers(0).base > max(base, 34), "the window before the turn was compacted away"
        handle.cancel()
        gate.open()
        assert await handle.finished() is None
        assert_same(snapshot(kv), before)
        result = await beside.finished()
        assert result is not None and result.tokens == expected


async def test_a_rolled_back_turn_taken_again_gives_what_it_would_have_given(adapter: ModelAdapter) -> None:
    async with running(adapter) as (engine, layout):
        kv = await held(engine, layout, prompt(30))
        twin = kv.fork()
        gate = Gate()
        victim = engine.submit(generating(kv, prompt(5), 500, sink=Hooked({100: gate}))[0])
        await gate.reached()
        victim.cancel()
        gate.open()
        await victim.finished()
        results = [await engine.submit(generating(each, prompt(40), 9, piece=7)[0]).finished() for each in (kv, twin)]
    assert results[0] is not None and results[1] is not None
    assert results[0].tokens == results[1].tokens
    assert_same(snapshot(kv), snapshot(twin))


async def test_cancelled_before_it_was_taken_up_nothing_happened(adapter: ModelAdapter) -> None:
    async with running(adapter) as (engine, layout):
        gate = Gate()
        first = engine.submit(generating(layout.open(), prompt(9), 4, sink=Hooked({1: gate}))[0])
        await gate.reached()
        kv = layout.open()
        waiting = engine.submit(generating(kv, prompt(20), 4)[0])
        waiting.cancel()
        gate.open()
        assert await waiting.finished() is None
        assert kv.length == 0
        assert await first.finished() is not None
        waiting.cancel()
        first.cancel()


async def test_a_stopping_sink_ends_the_generation_with_its_token(adapter: ModelAdapter) -> None:
    expected = await alone(adapter, prompt(9), 10)
    async with running(adapter) as (engine, layout):
        sink = Hooked(stop_after=4)
        job, _ = generating(layout.open(), prompt(9), 10, piece=7, sink=sink, logprobs=2)
        result = await engine.submit(job).finished()
    assert result is not None
    assert (result.finish_reason, result.tokens, tuple(sink.tokens)) == ("stop", expected[:4], expected[:4])
    assert len(result.logprobs) == 4
    assert all(each.top[0][0] == token for each, token in zip(result.logprobs, result.tokens, strict=True))
    assert list(job.kv.ids) == prompt(9) + list(expected[:3]), "the last token has no KV yet"
    assert result.first_token_seconds is not None and result.first_token_seconds >= result.prefill_seconds > 0


async def test_a_job_without_generation_only_computes(adapter: ModelAdapter) -> None:
    async with running(adapter) as (engine, layout):
        job = Job(layout.open(), prompt(20), 7, (14,))
        result = await engine.submit(job).finished()
    assert result is not None
    assert (result.tokens, result.finish_reason, result.first_token_seconds) == ((), None, None)
    assert list(job.kv.ids) == prompt(20)
    assert [part.span for part in result.windows[14]] == [(5, 14)]
    assert (engine.steps, engine.computed_tokens) == (3, 20)


@pytest.mark.parametrize("wrong", [-1, VOCAB])
async def test_ids_outside_the_vocabulary_fail_their_own_job_only(adapter: ModelAdapter, wrong: int) -> None:
    async with running(adapter) as (engine, layout):
        kv = layout.open()
        handles: list[JobHandle] = [
            engine.submit(generating(layout.open(), prompt(9), 4)[0]),
            engine.submit(generating(kv, [3, wrong], 4)[0]),
        ]
        with pytest.raises(InvalidRequest, match=f"token id {wrong} is outside"):
            await handles[1].finished()
        assert await handles[0].finished() is not None
        assert kv.length == 0


class Unlucky(DynamicKV):
    """Has no undo record to give."""

    def undo_record(self) -> object:
        raise MemoryError("no room for the record")


async def test_a_job_that_cannot_begin_fails_alone(adapter: ModelAdapter) -> None:
    async with running(adapter) as (engine, layout):
        bad = Unlucky(adapter.geometry, layout.device, 0)
        handles = [engine.submit(generating(kv, prompt(9), 4)[0]) for kv in (layout.open(), bad, layout.open())]
        with pytest.raises(CapacityExceeded, match="no room for the record"):
            await handles[1].finished()
        assert await handles[0].finished() is not None
        assert await handles[2].finished() is not None


@pytest.mark.parametrize(
    ("error", "seen"), [(RuntimeError("boom"), EngineFailed), (MemoryError(), CapacityExceeded), (Closed("x"), Closed)]
)
async def test_a_failed_step_rolls_its_batch_back_and_leaves_the_others(
    adapter: ModelAdapter, error: Exception, seen: type[Exception]
) -> None:
    expected = await alone(adapter, prompt(9), 6)
    async with running(adapter, joint_rows=8) as (engine, layout):
        kv = await held(engine, layout, prompt(30))
        before = snapshot(kv)
        spared, _ = generating(layout.open(), prompt(9), 6, piece=7)
        victim, _ = generating(kv, prompt(90), 5, piece=8)
        others: list[JobHandle] = []

        def fail_once(slots: Sequence[Slot]) -> None:
            if kv.length > 70:
                layout.before = lambda slots: None
                others.append(loop_call(lambda: engine.submit(spared)))
                raise error

        loop = asyncio.get_running_loop()

        def loop_call(call: object) -> JobHandle:
            async def run() -> JobHandle:
                return call()  # type: ignore[operator]

            return asyncio.run_coroutine_threadsafe(run(), loop).result(PATIENCE)

        layout.before = fail_once
        with pytest.raises(seen) as caught:
            await engine.submit(victim).finished()
        if seen is not Closed:
            assert caught.value.__cause__ is error
        assert_same(snapshot(kv), before)
        result = await others[0].finished()
        assert result is not None and result.tokens == expected
        assert engine.alive


async def test_a_sink_that_raises_fails_its_own_job_only(adapter: ModelAdapter) -> None:
    expected = await alone(adapter, prompt(9), 8)

    def broken() -> None:
        raise ValueError("no reader")

    async with running(adapter) as (engine, layout):
        kv = layout.open()
        bad = engine.submit(generating(kv, prompt(12), 8, sink=Hooked({3: broken}))[0])
        good = engine.submit(generating(layout.open(), prompt(9), 8, piece=7)[0])
        with pytest.raises(EngineFailed, match="ValueError: no reader; the turn was rolled back"):
            await bad.finished()
        assert kv.length == 0
        result = await good.finished()
        assert result is not None and result.tokens == expected


async def test_stopping_cancels_what_runs_and_refuses_what_comes(adapter: ModelAdapter) -> None:
    async with running(adapter, joint_rows=8) as (engine, layout):
        gate = Gate()
        states = [layout.open(), layout.open()]
        handles = [
            engine.submit(generating(states[1], prompt(200), 5, piece=3)[0]),
            engine.submit(generating(states[0], prompt(9), 10_000, sink=Hooked({5: gate}))[0]),
        ]
        await gate.reached()
        late = engine.submit(generating(layout.open(), prompt(9), 3)[0])
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        gate.open()
        await stopping
        assert [await handle.finished() for handle in handles] == [None, None]
        assert [kv.length for kv in states] == [0, 0]
        with pytest.raises(Closed, match="the engine stopped"):
            await late.finished()
        assert not engine.alive
        with pytest.raises(Closed, match="the engine is stopped"):
            engine.submit(generating(layout.open(), prompt(9), 3)[0])
        await engine.stop()


async def test_after_its_thread_died_the_engine_says_so(adapter: ModelAdapter) -> None:
    class Death(BaseException):
        pass

    def die(slots: Sequence[Slot]) -> None:
        raise Death

    async with running(adapter) as (engine, layout):
        layout.before = die
        with pytest.raises(EngineFailed, match="the model thread died"):
            await engine.submit(generating(layout.open(), prompt(9), 3)[0]).finished()
        await asyncio.to_thread(engine._thread.join, PATIENCE)
        assert not engine.alive
        with pytest.raises(EngineFailed, match="restart the process"):
            engine.submit(generating(layout.open(), prompt(9), 3)[0])


async def test_a_cancelled_waiter_does_not_cancel_the_job(adapter: ModelAdapter) -> None:
    expected = await alone(adapter, prompt(9), 6)
    async with running(adapter) as (engine, layout):
        gate = Gate()
        handle = engine.submit(generating(layout.open(), prompt(9), 6, piece=7, sink=Hooked({2: gate}))[0])
        waiter = asyncio.create_task(handle.finished())
        await gate.reached()
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        gate.open()
        result = await handle.finished()
        assert result is not None and result.tokens == expected


async def test_two_event_loops_share_one_engine(adapter: ModelAdapter) -> None:
    lengths = range(5, 13)
    expected = {n: await alone(adapter, prompt(n), 8) for n in lengths}
    found: dict[int, tuple[int, ...]] = {}
    async with running(adapter) as (engine, layout):

        async def serve(mine: Sequence[int]) -> None:
            handles = {n: engine.submit(generating(layout.open(), prompt(n), 8, piece=7)[0]) for n in mine}
            for n, handle in handles.items():
                result = await handle.finished()
                assert result is not None
                found[n] = result.tokens

        threads = [threading.Thread(target=asyncio.run, args=(serve(lengths[i::2]),)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join, PATIENCE)
    assert found == expected


async def test_a_loop_that_closed_early_does_not_hurt_the_engine(adapter: ModelAdapter) -> None:
    async with running(adapter) as (engine, layout):
        gate = Gate()

        async def leave() -> None:
            engine.submit(generating(layout.open(), prompt(9), 3, sink=Hooked({2: gate}))[0])
            await gate.reached()

        await asyncio.to_thread(asyncio.run, leave())
        gate.open()
        result = await engine.submit(generating(layout.open(), prompt(9), 3)[0]).finished()
        assert result is not None and engine.alive


async def test_live_tensors_are_ordinary_ones(adapter: ModelAdapter) -> None:
    """Inference tensors could not be written to outside the model thread, which restores and rollbacks do."""
    async with running(adapter) as (engine, layout):
        kv = await held(engine, layout, prompt(30))
        snapshots = kv.window_snapshot()
    for index in range(len(adapter.geometry.groups)):
        assert not any(torch.is_inference(t) for t in kv.buffers(index).keys)
    assert not any(torch.is_inference(t) for part in snapshots for t in part.block.keys)
