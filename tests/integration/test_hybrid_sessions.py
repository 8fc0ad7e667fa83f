"""Sessions of models with recurrent layers: what these carry is not lost, not half-written, not taken for another."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import Hooked, adapted, assert_same, generating, running, snapshot
from families import family
from homes import chat_folder, check_home, check_session, model_folder, opened, prompt, said, turns, written

from agentkv import AgentKV, Session
from agentkv.errors import EngineFailed, Unsupported
from agentkv.kv.contract import LAYOUTS
from agentkv.kv.recurrent import Carried, RecurrentKV
from agentkv.storage.chunkfile import read_header
from agentkv.types import Span

TOKENS = 8
NEXT = prompt(11, 77)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


async def alone(kv: AgentKV, inputs: list[list[int]]) -> list[tuple[int, ...]]:
    """What a session says that hears nothing else."""
    return [reply.ids for reply in await said(await kv.sessions.create(), inputs, TOKENS)]


def blob(kv: AgentKV, name: str) -> Path:
    return kv.settings.blobs_dir / name[:2] / name


def of_state(kv: AgentKV, name: str) -> tuple[int, int]:
    """Where in a chunk's file the state of its recurrent layers is."""
    data = blob(kv, name).read_bytes()
    header = read_header(data, name)
    (group,) = kv.model.adapter.geometry.recurrent
    part = header.parts[header.parts_of(group)[-1]]
    start = len(data) - header.payload_nbytes + part.offset
    return start, start + part.length


# -- side by side ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layouts", [("dynamic", "paged", "offloaded"), pytest.param(tuple(LAYOUTS), marks=pytest.mark.full, id="all")]
)
async def test_in_every_layout_sessions_side_by_side_say_what_each_says_alone(
    tmp_path: Path, models: Path, layouts: tuple[str, ...]
) -> None:
    model, inputs = model_folder(models, "falcon_h1"), [turns(2, tokens=20 + 9 * i, seed=i) for i in range(3)]
    async with opened(tmp_path / "alone", model) as kv:
        expected = [await alone(kv, each) for each in inputs]
    assert len({token for each in expected for ids in each for token in ids}) > 10
    for name in layouts:
        async with opened(tmp_path / name.replace(":", "-"), model, layout=name) as kv:
            there = await asyncio.gather(*(alone(kv, each) for each in inputs))
            assert there == expected, name
            for record in await kv.sessions.list():
                await check_session(kv, await kv.sessions.get(record.id))
            await check_home(kv)


async def test_a_step_that_fails_midway_has_happened_to_nobody() -> None:
    """The third of four sessions runs out of memory once the first two have been through the model: all four are
    computed again, apart, from what they were."""
    adapter, lengths = adapted(family("qwen3_next")), (9, 12, 15, 21)
    expected = []
    for n in lengths:
        async with running(adapter) as (engine, layout):
            result = await engine.submit(generating(layout.open(), prompt(n), 12, piece=7)[0]).finished()
            expected.append(result and result.tokens)
    async with running(adapter) as (engine, layout):
        passes, failed = layout.passes, []

        def failing(step: Any) -> Any:
            for number, one in enumerate(passes(step)):
                if number == 2:
                    failed.append(len(step.slots))
                    raise MemoryError
                yield one

        layout.passes = failing
        jobs = [generating(layout.open(), prompt(n), 12, piece=7)[0] for n in lengths]
        results = [await handle.finished() for handle in [engine.submit(job) for job in jobs]]
        assert [result and result.tokens for result in results] == expected
        assert len(failed) > 10


@pytest.mark.parametrize("name", ["falcon_h1", "lfm2"])
async def test_a_turn_that_fails_or_is_cancelled_leaves_the_state_as_it_was(name: str) -> None:
    adapter = adapted(family(name))
    async with running(adapter) as (engine, layout):
        kv: Any = layout.open()
        await engine.submit(generating(kv, prompt(30), 5, piece=7)[0]).finished()
        kv.settle()
        before, twin = snapshot(kv), kv.fork()

        def fail() -> None:
            raise ZeroDivisionError

        with pytest.raises(EngineFailed):
            await engine.submit(generating(kv, prompt(20, 3), 9, piece=7, sink=Hooked({4: fail}))[0]).finished()
        assert_same(snapshot(kv), before)
        job, _ = generating(kv, prompt(20, 3), 90, piece=7)
        job.generation.sink._at = {4: lambda: setattr(job, "cancelled", True)}  # type: ignore[union-attr]
        assert await engine.submit(job).finished() is None
        assert_same(snapshot(kv), before)
        replies = [await engine.submit(generating(each, NEXT, 9)[0]).finished() for each in (kv, twin)]
        assert replies[0] and replies[1] and replies[0].tokens == replies[1].tokens


# -- stored and restored -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flipped", "deleted"])
async def test_a_state_that_is_bad_on_disk_is_computed_from_the_last_good_one(
    tmp_path: Path, models: Path, damage: str
) -> None:
    model, inputs = model_folder(models, "qwen3_next"), turns(3)
    async with opened(tmp_path, model) as kv:
        session = await kv.sessions.create()
        await said(session, inputs, TOKENS)
        expected = (await alone(kv, [*inputs, NEXT]))[-1]
    async with opened(tmp_path, model) as kv:
        manifest = await kv.sessions.repository.manifest(session.id)
        last, path = manifest.segments[-1], blob(kv, manifest.segments[-1].chunk_id)
        if damage == "deleted":
            path.unlink()
        else:
            data, (start, _) = bytearray(path.read_bytes()), of_state(kv, last.chunk_id)
            data[start + 40] ^= 1
            path.write_bytes(data)
        (reply,) = await said(await kv.sessions.get(session.id), [NEXT], TOKENS)
        assert reply.ids == expected
        assert (reply.restore.reason or "").startswith("checksum" if damage == "flipped" else "missing")
        assert reply.usage.cached_tokens == reply.restore.tokens == last.span.start
        assert last.span.start in {point.position for point in manifest.resume_points}
        await written(kv)
    async with opened(tmp_path, model) as kv:
        session = await kv.sessions.get(session.id)
        assert (await session.resume()).reason is None
        await check_session(kv, session)


async def test_in_bf16_a_float32_state_comes_back_bit_for_bit(tmp_path: Path, models: Path) -> None:
    model, inputs = model_folder(models, "qwen3_next"), turns(2)
    async with opened(tmp_path, model, dtype="bfloat16") as kv:
        (group,) = (kv.model.adapter.geometry.groups[i] for i in kv.model.adapter.geometry.recurrent)
        assert {(s.kind, s.dtype) for s in group.states} == {("conv", "bfloat16"), ("recurrent", "float32")}
        session = await kv.sessions.create()
        twin = await kv.sessions.create()
        for each in (session, twin):
            await said(each, inputs, TOKENS)
        before = {key: t.clone() for key, t in session._core.kv.state.items()}  # type: ignore[union-attr]
        await session.suspend("disk")
        assert (await session.resume()).reason is None
        state = session._core.kv.state  # type: ignore[union-attr]
        assert all(torch.equal(state[key].view(torch.uint8), before[key].view(torch.uint8)) for key in before)
        assert state.keys() == before.keys()
        following = [await said(each, [NEXT], TOKENS, logprobs=0) for each in (session, twin)]
        assert following[0][0].logprobs == following[1][0].logprobs


async def test_an_exported_session_goes_on_in_another_home(tmp_path: Path, models: Path) -> None:
    model, inputs = model_folder(models, "falcon_h1"), turns(3)
    async with opened(tmp_path / "a", model) as kv, opened(tmp_path / "b", model) as other:
        session = await kv.sessions.create()
        await said(session, inputs, TOKENS)
        earlier = await session.fork((await session.items())[3].id)
        for number, each in enumerate((session, earlier)):
            await each.export(tmp_path / str(number))
            moved = await other.sessions.import_(tmp_path / str(number))
            assert moved.imported is not None
            assert (moved.imported.kv_tokens, moved.imported.reason) == (each._core.record.kv_length, None)
            replies = [(await said(one, [NEXT], TOKENS))[0] for one in (each, moved)]
            assert replies[0].ids == replies[1].ids
            assert replies[1].usage.cached_tokens == moved.imported.kv_tokens
            await check_session(other, moved)
        await check_home(other)


# -- branches ----------------------------------------------------------------------------------------------------------


@pytest.mark.short(2)
@pytest.mark.parametrize("where", ["live", "disk"])
@pytest.mark.parametrize("name", ["falcon_h1", "lfm2"])
async def test_a_branch_begins_at_the_last_resume_point_and_says_so(
    tmp_path: Path, models: Path, name: str, where: str
) -> None:
    first, second, third = turns(3)
    async with opened(tmp_path, model_folder(models, name)) as kv:
        session = await kv.sessions.create()
        await said(session, [first, second, third], TOKENS)
        items = await session.items()
        if where == "disk":
            await session.suspend("disk")
        # Behind a turn is a resume point; behind a question there is none, and the turn before is the last one.
        behind, within = await session.fork(items[1].id), await session.fork(items[2].id)
        commit = items[1].span.stop - 1
        for fork, inputs in ((behind, [first, NEXT]), (within, [first, [*second, *NEXT]])):
            (reply,) = await said(fork, [NEXT], TOKENS)
            assert reply.ids == (await alone(kv, inputs))[-1]
            assert reply.usage.cached_tokens == commit
            await check_session(kv, fork)
        told = await session.rewind(items[2].id, dry_run=True)
        assert told.recompute_tokens == items[2].span.stop - commit
        assert await session.rewind(items[2].id) == told
        (reply,) = await said(session, [NEXT], TOKENS)
        assert reply.ids == (await alone(kv, [first, [*second, *NEXT]]))[-1]
        assert reply.usage.cached_tokens == commit
        await check_session(kv, session)
        await check_home(kv)


async def test_answers_made_again_sampled_and_searched_are_those_of_a_session_of_their_own(
    tmp_path: Path, models: Path
) -> None:
    async def new(kv: AgentKV) -> Session:
        session = await kv.sessions.create(system="You are a helpful assistant.")
        await session.send("How is the weather?", max_tokens=TOKENS)
        return session

    drawn: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 1.5}
    async with opened(tmp_path, chat_folder(models, "qwen3_next")) as kv:
        session = await new(kv)
        await session.send("Paris?", max_tokens=TOKENS)
        again = await session.regenerate(**drawn, seed=7)
        twin = await new(kv)
        samples = await twin.sample("Paris?", n=3, **drawn, seed=7)
        assert again.ids == samples[0].reply.ids  # type: ignore[union-attr]
        assert len({sample.reply.ids for sample in samples if sample.reply}) == 3
        found = await twin.send("Paris?", max_tokens=TOKENS, beams=3)
        other = await (await new(kv)).send("Paris?", max_tokens=TOKENS, beams=3)
        assert found.ids == other.ids
        after = [await one.send("How?", max_tokens=TOKENS) for one in (session, samples[0].session)]
        assert after[0].ids == after[1].ids
        seen = await session.verify()
        assert (dict(seen.faults), seen.deviation and seen.deviation.largest < 1e-4) == ({}, True)
        for each in (session, twin):
            await check_session(kv, each)
        await check_home(kv)


# -- what cannot be ----------------------------------------------------------------------------------------------------


async def test_every_policy_that_evicts_is_refused_by_name(tmp_path: Path, models: Path) -> None:
    model = model_folder(models, "lfm2")
    async with opened(tmp_path, model) as kv:
        session = await kv.sessions.create()
        await said(session, turns(1), TOKENS)
        for policy in ("sink:64", "turns:64", "sliding:64", "adaptive"):
            for attempt in (kv.sessions.create(policy=policy), session.set_policy(policy)):
                with pytest.raises(Unsupported, match=rf"{policy.split(':')[0]}.*lfm2.*recurrent layers.*use 'full'"):
                    await attempt
        assert (await session.state()).policy == "full"
    async with opened(tmp_path / "other", model, default_policy="adaptive") as kv:
        with pytest.raises(Unsupported, match="recurrent layers"):
            await kv.sessions.create()


async def test_there_is_no_way_back_within_a_state() -> None:
    adapter = adapted(family("falcon_h1"))
    async with running(adapter) as (engine, layout):
        kv: Any = layout.open()
        await engine.submit(generating(kv, prompt(30), 5, piece=7)[0]).finished()
        assert isinstance(kv, RecurrentKV)
        assert kv.nbytes <= layout.bytes_needed(kv, kv.length)
        state_nbytes = sum(t.nbytes for t in kv.state.values())
        assert state_nbytes == layout.state_nbytes > 0
        assert kv.nbytes == kv.inner.nbytes + state_nbytes, "the record is of the empty state"
        record = kv.undo_record()
        assert record.nbytes == state_nbytes
        before = snapshot(kv)
        with pytest.raises(ValueError, match=r"cannot crop to 20: .* state at 34 only"):
            kv.crop(20)
        with pytest.raises(Unsupported, match="evicting"):
            kv.keep([Span(4, 34)])
        with pytest.raises(Unsupported, match="passing over"):
            kv.skip([1])
        kv.crop(34)
        twin = kv.fork()
        await engine.submit(generating(twin, NEXT, 3)[0]).finished()
        assert_same(snapshot(kv), before)
        with pytest.raises(RuntimeError, match="no step"):
            kv.advance([1])
        with pytest.raises(RuntimeError, match="carries conv 0 as None"):
            kv.stepped(1, Carried({}).outcome)
        twin.crop(0)
        assert not twin.state and not twin.visible(layout.geometry.recurrent[0])
        twin.check_integrity()
        with pytest.raises(ValueError, match="layout_for"):
            type(layout.inner)(adapter.geometry, torch.device("cpu"))
