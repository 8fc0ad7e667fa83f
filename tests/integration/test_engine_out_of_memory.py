"""A step that runs out of memory: who is dropped, who goes on, and what is left of the one that is dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from driving import Hooked, WatchedLayout, adapted, assert_same, generating, prompt, running, snapshot
from families import family

from agentkv.engine.adapter import ModelAdapter
from agentkv.engine.engine import Engine
from agentkv.engine.job import Job
from agentkv.errors import CapacityExceeded, EngineFailed
from agentkv.kv.buffers import GroupBuffers
from agentkv.kv.contract import SequenceKV, Slot
from agentkv.kv.dynamic import DynamicKV
from agentkv.memory import OutOfDeviceMemory, is_out_of_memory

LENGTHS = (9, 12, 15, 21)


def refused_by_torch() -> None:
    """The CPU's allocator, asked for more than any machine has."""
    torch.empty(2**56, dtype=torch.uint8)


def refused_by_cuda() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def refused_by_python() -> None:
    raise MemoryError


FAILURES = [refused_by_torch, refused_by_cuda, refused_by_python]


@pytest.fixture(scope="module")
def adapter() -> ModelAdapter:
    return adapted(family("gemma3"))


async def alone(adapter: ModelAdapter, ids: list[int], tokens: int, **sampling: object) -> tuple[int, ...]:
    async with running(adapter) as (engine, layout):
        result = await engine.submit(generating(layout.open(), ids, tokens, piece=7, **sampling)[0]).finished()
    assert result is not None
    return result.tokens


async def held(engine: Engine, layout: WatchedLayout, ids: list[int]) -> DynamicKV:
    kv = layout.open()
    assert await engine.submit(generating(kv, ids, 5, piece=7)[0]).finished()
    return kv


@pytest.mark.parametrize("fail", FAILURES)
async def test_a_pass_that_is_too_large_for_all_is_run_for_each(
    adapter: ModelAdapter, fail: Callable[[], None]
) -> None:
    """Every step of more than one session runs out of memory: all get the tokens they would have got, nobody hears."""
    sampling = {"temperature": 0.8, "seed": 5, "logprobs": 1}
    expected = [await alone(adapter, prompt(n), 12, **sampling) for n in LENGTHS]
    async with running(adapter) as (engine, layout):

        def together(slots: Sequence[Slot]) -> None:
            if len(slots) > 1:
                fail()

        layout.before = together
        jobs = [generating(layout.open(), prompt(n), 12, piece=7, **sampling)[0] for n in LENGTHS]
        results = [await handle.finished() for handle in [engine.submit(job) for job in jobs]]
        assert [result.tokens for result in results if result] == expected
        assert all(len(result.logprobs) == 12 for result in results if result)
        assert max(map(len, layout.steps)) == len(LENGTHS), "they met in one step"
        assert engine.computed_tokens == sum(LENGTHS) + 11 * len(LENGTHS), "what failed is not counted"


@pytest.mark.parametrize("fail", FAILURES)
async def test_who_does_not_fit_even_alone_is_dropped_and_is_what_it_was(
    adapter: ModelAdapter, fail: Callable[[], None]
) -> None:
    expected = [await alone(adapter, prompt(n), 12) for n in LENGTHS]
    async with running(adapter) as (engine, layout):
        kv = await held(engine, layout, prompt(30))
        before = snapshot(kv)
        sink = Hooked()

        def too_large(slots: Sequence[Slot]) -> None:
            if any(slot.kv is kv for slot in slots) and kv.length > len(before[0]) + 9:
                fail()

        layout.before = too_large
        victim = engine.submit(generating(kv, prompt(6), 40, sink=sink)[0])
        others = [engine.submit(generating(layout.open(), prompt(n), 12, piece=7)[0]) for n in LENGTHS]
        with pytest.raises(OutOfDeviceMemory) as caught:
            await victim.finished()
        assert isinstance(caught.value, CapacityExceeded)
        assert sink.tokens, "it had begun to generate"
        assert_same(snapshot(kv), before)
        assert [(await handle.finished()).tokens for handle in others] == expected  # type: ignore[union-attr]
        layout.before = lambda slots: None
        again = await engine.submit(generating(kv, prompt(6), 40)[0]).finished()
        assert again is not None and list(again.tokens[: len(sink.tokens)]) == sink.tokens


async def test_what_failed_keeps_nothing_of_the_pass_alive(adapter: ModelAdapter) -> None:
    """A traceback's frames would hold the activations, and trying again would find as little memory."""
    async with running(adapter) as (engine, layout):

        def fail(slots: Sequence[Slot]) -> None:
            activations = torch.zeros(1000)
            assert activations.numel()
            refused_by_torch()

        layout.before = fail
        with pytest.raises(OutOfDeviceMemory) as caught:
            await engine.submit(generating(layout.open(), prompt(9), 3)[0]).finished()
        error: BaseException | None = caught.value
        seen = 0
        while error is not None:
            trace = error.__traceback__
            while trace is not None:
                assert "activations" not in trace.tb_frame.f_locals
                trace, seen = trace.tb_next, seen + 1
            error = error.__cause__ or error.__context__
        assert seen, "the waiter's own frames are there"
        assert "can't allocate memory" in str(caught.value)


class Narrow(DynamicKV):
    """The real state; from the moment it is told, growing fails after some tensors, with torch's own error."""

    left: int | None = None

    def reserve(self, tokens: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if self.left is not None:
                real = GroupBuffers._empty

                def empty(buffers: GroupBuffers, capacity: int, dim: int) -> Any:
                    assert self.left is not None
                    self.left -= 1
                    if self.left < 0:
                        refused_by_torch()
                    return real(buffers, capacity, dim)

                patch.setattr(GroupBuffers, "_empty", empty)
            super().reserve(tokens)


@pytest.mark.parametrize("left", [0, 1, 5, 9])
async def test_a_growth_that_fails_drops_its_own_job_alone(adapter: ModelAdapter, left: int) -> None:
    expected = await alone(adapter, prompt(9), 90)
    async with running(adapter) as (engine, layout):
        kv = Narrow(adapter.geometry, layout.device, 0)
        assert await engine.submit(generating(kv, prompt(30), 5, piece=7)[0]).finished()
        before, twin = snapshot(kv), kv.fork()
        beside = engine.submit(generating(layout.open(), prompt(9), 90, piece=7)[0])
        kv.left = left
        with pytest.raises(OutOfDeviceMemory, match="can't allocate memory"):
            await engine.submit(generating(kv, prompt(5), 100)[0]).finished()
        kv.left = None
        assert_same(snapshot(kv), before)
        result = await beside.finished()
        assert result is not None and result.tokens == expected
        results = [await engine.submit(generating(each, prompt(70), 9, piece=7)[0]).finished() for each in (kv, twin)]
        assert results[0] is not None and results[1] is not None
        assert results[0].tokens == results[1].tokens
        assert_same(snapshot(kv), snapshot(twin))


class Lost(DynamicKV):
    """Cannot go back."""

    def rollback(self, undo: Any) -> None:
        refused_by_torch()


async def test_a_state_that_cannot_be_rolled_back_is_closed_and_the_engine_lives(adapter: ModelAdapter) -> None:
    async with running(adapter) as (engine, layout):
        kv: SequenceKV = Lost(adapter.geometry, layout.device, 0)

        def fail(slots: Sequence[Slot]) -> None:
            layout.before = lambda slots: None
            raise RuntimeError("boom")

        layout.before = fail
        with pytest.raises(EngineFailed, match="boom"):
            await engine.submit(generating(kv, prompt(9), 3)[0]).finished()
        assert (kv.closed, kv.nbytes) == (True, 0)
        assert await engine.submit(generating(layout.open(), prompt(9), 3)[0]).finished() is not None
        other: SequenceKV = Lost(adapter.geometry, layout.device, 0)
        handle = engine.submit(generating(other, prompt(200), 3, piece=3)[0])
        handle.cancel()
        await handle.finished()
        assert engine.alive


async def test_a_token_that_cannot_be_chosen_or_stored_is_its_own_jobs_trouble(adapter: ModelAdapter) -> None:
    expected = await alone(adapter, prompt(9), 12)
    async with running(adapter) as (engine, layout):
        first, recorder = generating(layout.open(), prompt(12), 12, piece=7)
        second, _ = generating(layout.open(), prompt(15), 12, piece=7)
        beside = engine.submit(generating(layout.open(), prompt(9), 12, piece=7)[0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recorder, "sample", lambda logits, history: refused_by_torch())
            patch.setattr(second.kv, "advance", lambda ids: refused_by_python(), raising=True)
            handles = [engine.submit(job) for job in (first, second)]
            for handle in handles:
                with pytest.raises(OutOfDeviceMemory):
                    await handle.finished()
        assert (first.kv.length, second.kv.length) == (0, 0)
        result = await beside.finished()
        assert result is not None and result.tokens == expected


async def test_a_job_that_only_computes_fails_and_is_rolled_back_too(adapter: ModelAdapter) -> None:
    async with running(adapter) as (engine, layout):
        kv = layout.open()

        def fail(slots: Sequence[Slot]) -> None:
            if kv.length:
                refused_by_torch()

        layout.before = fail
        with pytest.raises(OutOfDeviceMemory):
            await engine.submit(Job(kv, prompt(20), 7, (14,))).finished()
        assert kv.length == 0


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("boom"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: not enough memory: …"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (OutOfDeviceMemory("x", needed=0, available=0, budget=0), True),
        (CapacityExceeded("opened for 64 tokens", needed=0, available=0, budget=0), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
        (OSError(12, "Cannot allocate memory"), False),
    ],
)
def test_which_errors_say_that_memory_is_out(error: Exception, is_it: bool) -> None:
    assert is_out_of_memory(error) is is_it


def test_what_the_real_allocator_says_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        refused_by_torch()
    assert is_out_of_memory(caught.value)
