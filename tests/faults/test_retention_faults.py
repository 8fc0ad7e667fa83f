"""Sessions under policies that evict, with chunks that are bad, another model, a disk that refuses, ``kill -9``."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from homes import check_home, check_session, model_folder, opened, prompt, said, turns, written
from killable import Nursery, Victim
from retaining import assert_equal_replies, check_held, check_stored, held_after, positions

from agentkv import AgentKV
from agentkv.schemas.replies import Reply
from agentkv.types import Span

POLICY = "sink:96:8"
NEXT = [prompt(11, 70 + i) for i in range(3)]
TOKENS = 14


# -- bad chunks -------------------------------------------------------------------------------------------------------


def blob(home: Path, name: str) -> Path:
    return home / "blobs" / name[:2] / name


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def missing(path: Path) -> None:
    path.unlink()


DAMAGE: dict[Callable[[Path], None], str] = {flipped: "checksum", truncated: "truncated", missing: "missing"}
PLACES = {"pinned": 0, "window": -2, "last": -1}


@dataclass(frozen=True)
class Prepared:
    """A home at rest with a short session and a long one, what they hold, and how their twins go on."""

    family: str
    model: Path
    home: Path
    sessions: dict[str, str]
    chunks: dict[str, list[tuple[str, Span]]]
    twins: dict[str, list[Reply]]


PASTS = {
    # kv_length at most twice what is held, and far more
    "short": [prompt(28 + i, 1) for i in range(4)],
    "long": [prompt(30 + i, 2) for i in range(12)],
}


async def go_on(kv: AgentKV, session_id: str, i: int) -> Reply:
    session = await kv.sessions.get(session_id)
    return await session.generate_tokens(NEXT[i], max_tokens=TOKENS, logprobs=0)


async def prepare(root: Path, family: str) -> Prepared:
    model, sessions, chunks, twins = model_folder(root, family), {}, {}, {}
    async with opened(root / "home", model) as kv:
        for name, past in PASTS.items():
            session = await kv.sessions.create(policy=POLICY)
            await said(session, past, 4)
            sessions[name] = session.id
            state = await session.state()
            assert state.evicted
            assert (state.kv_tokens * 2 >= session._core.record.kv_length) == (name == "short")
            await session.suspend()
            manifest = await kv.sessions.repository.manifest(session.id)
            chunks[name] = [(s.chunk_id, s.span) for s in manifest.segments]
    async with opened(root / "twin", model) as kv:
        for name, past in PASTS.items():
            twin = await kv.sessions.create(policy=POLICY)
            await said(twin, past, 4)
            twins[name] = [await go_on(kv, twin.id, i) for i in range(len(NEXT))]
    return Prepared(family, model, root / "home", sessions, chunks, twins)


@pytest.fixture(scope="module", params=["llama", "gemma3", pytest.param("gpt_neox", marks=pytest.mark.full)])
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return asyncio.run(prepare(tmp_path_factory.mktemp(request.param), request.param))


@pytest.mark.short(2)
@pytest.mark.parametrize(
    ("place", "damage"),
    [
        *zip(PLACES, DAMAGE, strict=True),
        *(pytest.param(*both, marks=pytest.mark.full) for both in product(PLACES, DAMAGE)),
    ],
)
async def test_a_bad_chunk_is_replayed_or_the_retained_tokens_computed(
    prepared: Prepared, tmp_path: Path, place: str, damage: Callable[[Path], None]
) -> None:
    home = tmp_path / "home"
    shutil.copytree(prepared.home, home)
    for name in PASTS:
        damage(blob(home, prepared.chunks[name][PLACES[place]][0]))
    async with opened(home, prepared.model) as kv:
        replies = {}
        for name, session_id in prepared.sessions.items():
            session = await kv.sessions.get(session_id)
            before = await session.state()
            kv_length, retained = session._core.record.kv_length, before.kv_tokens
            computed = kv.model.engine.computed_tokens
            reply = replies[name] = await go_on(kv, session_id, 0)
            computed = kv.model.engine.computed_tokens - computed
            restore = reply.restore
            assert restore.reason is not None
            assert restore.reason.startswith(f"{DAMAGE[damage]}: "), restore.reason
            new = before.ledger_tokens - kv_length + len(NEXT[0]) + TOKENS - 1
            if name == "short":
                assert restore.recompute == "replay"
                assert_equal_replies(reply, prepared.twins[name][0])
                assert computed == restore.recomputed_tokens + new
                assert restore.recomputed_tokens <= 2 * retained
                items = await session.items()
                there = held_after(POLICY, items, 0, kv_length - restore.recomputed_tokens)
                assert restore.tokens == len(there)
                assert reply.usage.cached_tokens == len(set(there) & set(positions(before.kept)))
                if place == "pinned":
                    assert restore.recomputed_tokens == kv_length
            elif restore.recompute == "retained":
                assert (restore.source, restore.tokens, restore.codec) == ("recompute", 0, None)
                assert restore.recomputed_tokens == retained
                assert computed == retained + new
                assert reply.usage.cached_tokens == 0
            else:  # the state before the last turn is whole
                assert (restore.recompute, place) == ("replay", "last")
                assert_equal_replies(reply, prepared.twins[name][0])
            assert reply.usage.prompt_tokens == prepared.twins[name][0].usage.prompt_tokens
            assert len(reply.ids) == TOKENS
            await check_held(kv, session)
        for session_id in prepared.sessions.values():
            await check_stored(kv, await kv.sessions.get(session_id))
        # What was rebuilt is a state like any other: it rests and wakes exactly.
        first = {name: (await go_on(kv, sid, 1)) for name, sid in prepared.sessions.items()}
        assert all(reply.restore.reason is None for reply in first.values())
        await check_home(kv)
    again = tmp_path / "again"
    shutil.copytree(home, again)
    async with opened(home, prepared.model) as kv:
        cold = {name: await go_on(kv, sid, 2) for name, sid in prepared.sessions.items()}
        for name, reply in cold.items():
            session = await kv.sessions.get(prepared.sessions[name])
            assert (reply.restore.source, reply.restore.reason, reply.restore.recomputed_tokens) == ("disk", None, 0)
            if replies[name].restore.recompute == "replay":
                assert_equal_replies(first[name], prepared.twins[name][1])
                assert_equal_replies(reply, prepared.twins[name][2])
            await check_held(kv, session)
            await check_stored(kv, session)


async def test_a_rebuilt_state_rests_and_wakes_exactly(prepared: Prepared, tmp_path: Path) -> None:
    """Against a twin that was rebuilt alike and never rested."""
    replies: dict[str, list[Reply]] = {}
    for way in ("rests", "stays"):
        home = tmp_path / way
        shutil.copytree(prepared.home, home)
        missing(blob(home, prepared.chunks["long"][0][0]))
        async with opened(home, prepared.model) as kv:
            session = await kv.sessions.get(prepared.sessions["long"])
            replies[way] = []
            for i in range(3):
                replies[way].append(await go_on(kv, session.id, i))
                await check_held(kv, session)
                await check_stored(kv, session)
                if way == "rests":
                    await session.suspend("host" if i else "disk")
                    report = await session.resume()
                    assert (report.reason, report.recomputed_tokens) == (None, 0)
    assert replies["rests"][0].restore.recompute == "retained"
    for one, other in zip(replies["rests"], replies["stays"], strict=True):
        assert_equal_replies(one, other)


async def test_a_lost_state_is_rebuilt_once_however_often_the_turn_is_cancelled(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    shutil.copytree(prepared.home, home)
    for name in PASTS:
        missing(blob(home, prepared.chunks[name][0][0]))
    async with opened(home, prepared.model) as kv:
        for name, session_id in prepared.sessions.items():
            session, engine = await kv.sessions.get(session_id), kv.model.engine
            before = await session.state()
            for after in (1, 60, 150):
                start = engine.computed_tokens
                task = asyncio.create_task(session.generate_tokens(NEXT[0], max_tokens=100_000))
                while engine.computed_tokens - start < after:  # noqa: ASYNC110  it sends no event
                    await asyncio.sleep(0.001)
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled()
                state = await session.state()
                assert (state.kept, state.items) == (before.kept, before.items)
                assert (state.state == "live") == (session._core.kv is not None) == (state.tier == "device")
                assert state.device_bytes == session._core.reserved
                await check_session(kv, session)
            reply = await go_on(kv, session_id, 0)
            assert reply.restore.recompute == "replay" or name == "long"
            if name == "short":
                assert_equal_replies(reply, prepared.twins[name][0])
            assert len(reply.ids) == TOKENS
            await check_held(kv, session)
        for session_id in prepared.sessions.values():
            await check_stored(kv, await kv.sessions.get(session_id))


async def test_another_model_recomputes_and_so_does_the_first_one(prepared: Prepared, tmp_path: Path) -> None:
    home, model = tmp_path / "home", tmp_path / "model"
    other = model_folder(tmp_path, prepared.family, seed=1)
    shutil.copytree(prepared.home, home)
    ways = {}
    for weights in (other, prepared.model):
        if model.exists():
            shutil.rmtree(model)
        shutil.copytree(weights, model)
        async with opened(home, model) as kv:
            for name, session_id in prepared.sessions.items():
                session = await kv.sessions.get(session_id)
                kv_length = session._core.record.kv_length
                reply = await go_on(kv, session_id, 0)
                ways[weights, name] = reply.restore.recompute
                assert reply.restore.reason is not None
                assert reply.restore.reason.startswith("fingerprint")
                assert (reply.restore.source, reply.restore.tokens) == ("recompute", 0)
                assert reply.usage.cached_tokens == 0
                state = await check_held(kv, session)
                assert state.kv_tokens <= 96 < kv_length
                await check_session(kv, session)
                await session.suspend()
                assert (await session.resume()).reason is None
            await check_home(kv)
    assert ways[other, "short"] == "replay"
    assert ways[other, "long"] == "retained"


async def test_a_replay_by_another_model_is_what_it_would_have_said(prepared: Prepared, tmp_path: Path) -> None:
    """Its own twin is given the whole ledger as input."""
    other = model_folder(tmp_path, prepared.family, seed=1)
    home = tmp_path / "home"
    shutil.copytree(prepared.home, home)
    async with opened(home, other) as kv:
        session = await kv.sessions.get(prepared.sessions["short"])
        ledger = await session.token_ids()
        reply = await go_on(kv, session.id, 0)
        twin = await kv.sessions.create(policy=POLICY)
        await twin.append_tokens(ledger)
        assert_equal_replies(reply, await go_on(kv, twin.id, 0))


# -- bad chunks around a change of policy -----------------------------------------------------------------------------


@pytest.mark.short(2)
@pytest.mark.parametrize(("lost", "layout"), [("pinned", "static"), ("last", "dynamic"), ("all", "dynamic")])
async def test_what_was_held_before_the_window_shrank_is_computed_before_it_evicts(
    prepared: Prepared, tmp_path: Path, lost: str, layout: str
) -> None:
    """Nothing was evicted so far: what is lost is computed in full, as it was, and evicted then."""
    replies = []
    for way in ("whole", "lost"):
        async with opened(tmp_path / way, prepared.model, layout=layout) as kv:
            session = await kv.sessions.create(policy="full")
            await said(session, turns(5, tokens=40), 8)
            await session.set_policy("sink:64")
            await session.suspend()
            manifest = await kv.sessions.repository.manifest(session.id)
            names = [s.chunk_id for s in manifest.segments]
            if way == "lost":
                for name in names if lost == "all" else [names[PLACES[lost]]]:
                    kv.sessions.tiers.blobs.delete(name)
            reply = await go_on(kv, session.id, 0)
            replies.append(reply)
            assert reply.restore.recompute == (None if way == "whole" else "replay")
            assert reply.usage.cached_tokens == reply.restore.tokens
            assert (await session.state()).kv_tokens <= 64
            await check_stored(kv, session)
            await session.suspend()
            replies.append(await go_on(kv, session.id, 1))
            assert replies[-1].restore.reason is None
            items = await session.items()
            length = items[10].span.start - 1
            expected = held_after("sink:64", items, 0, session._core.record.kv_length, held=range(length), start=length)
            await check_held(kv, session, expected)
    assert_equal_replies(replies[0], replies[2])
    assert_equal_replies(replies[1], replies[3])


@pytest.mark.short(2)
@pytest.mark.parametrize("layout", ["dynamic", "static"])
async def test_a_policy_changed_on_the_way_is_never_replayed_through_its_successor(
    prepared: Prepared, tmp_path: Path, layout: str
) -> None:
    async with opened(tmp_path / "home", prepared.model, layout=layout) as kv:
        session = await kv.sessions.create(policy="sink:64")
        await said(session, turns(3, tokens=30), 8)
        await session.set_policy("sink:128")
        await said(session, turns(1, tokens=30), 8)
        await session.suspend()
        manifest = await kv.sessions.repository.manifest(session.id)
        kv.sessions.tiers.blobs.delete(manifest.segments[0].chunk_id)
        held = (await session.state()).kept
        kv_tokens = (await session.state()).kv_tokens
        reply = await go_on(kv, session.id, 0)
        assert reply.restore.recompute == "retained"
        assert reply.restore.recomputed_tokens == kv_tokens
        assert set(positions((await session.state()).evicted)) >= set(range(held[0].stop, held[1].start))
        # Only the turns since the change are lost: they went through the policy of now.
        await session.set_policy("sink:120")
        await said(session, turns(1, tokens=30), 8)
        twin_next = await session.state()
        await session.suspend()
        manifest = await kv.sessions.repository.manifest(session.id)
        kv.sessions.tiers.blobs.delete(manifest.segments[-1].chunk_id)
        reply = await go_on(kv, session.id, 1)
        assert reply.restore.recompute == "replay"
        assert set(positions((await session.state()).evicted)) >= set(positions(twin_next.evicted))


async def test_a_ledger_that_was_passed_over_is_not_replayed(prepared: Prepared, tmp_path: Path) -> None:
    """A state rebuilt from its retained tokens is lost again, when it holds so much that a replay were cheap."""
    async with opened(tmp_path / "home", prepared.model) as kv:
        session = await kv.sessions.create(policy="turns:128,keep_last_turns=1")
        blobs, repository = kv.sessions.tiers.blobs, kv.sessions.repository
        await said(session, [prompt(100), prompt(25)], 6)
        for turn, ways in enumerate(("retained", None, None, "retained")):
            record = session._core.record
            cheap = record.kv_length <= 2 * record.held.tokens
            assert cheap == (turn == 3)
            await session.suspend()
            if ways is not None:
                for segment in (await repository.manifest(session.id)).segments:
                    blobs.delete(segment.chunk_id)
            (reply,) = await said(session, [prompt(25)], 6)
            assert reply.restore.recompute == ways
            await check_held(kv, session)


async def test_resume_says_what_is_lost_and_the_next_turn_how_it_was_rebuilt(
    prepared: Prepared, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    shutil.copytree(prepared.home, home)
    for name in PASTS:
        missing(blob(home, prepared.chunks[name][0][0]))
    async with opened(home, prepared.model) as kv:
        for name, way in (("short", "replay"), ("long", "retained")):
            session = await kv.sessions.get(prepared.sessions[name])
            before = await session.state()
            report = await session.resume()
            assert (report.tokens, report.recomputed_tokens) == (0, session._core.record.kv_length)
            assert report.reason is not None
            assert report.reason.startswith("missing: ")
            after = await session.state()
            assert (after.kept, after.items, after.next_position) == (before.kept, before.items, before.next_position)
            assert after.kv_tokens == 0
            reply = await go_on(kv, session.id, 0)
            assert (reply.restore.recompute, reply.restore.reason) == (way, report.reason)
            if way == "replay":
                assert_equal_replies(reply, prepared.twins[name][0])
            await check_held(kv, session)


async def test_a_kill_between_a_smaller_window_and_its_store_leaves_a_state_that_fits(
    prepared: Prepared, tmp_path: Path
) -> None:
    """The only resume point on disk then holds more than the window of now."""
    for layout in ("static", "dynamic"):
        home = tmp_path / layout
        async with opened(home, prepared.model, layout=layout) as kv:
            session = await kv.sessions.create(policy="sink:256")
            twin = await kv.sessions.create(policy="sink:256")
            for one in (session, twin):
                await said(one, turns(4, tokens=50), 8)
            await written(kv)
            for one in (session, twin):
                await one.set_policy("sink:64")
            kv.sessions.tiers.blobs.budget_bytes = 0  # type: ignore[attr-defined]  # as if it had died before the store
            for one in (session, twin):
                await said(one, turns(1, tokens=20, seed=4), 8)
            ahead = await go_on(kv, twin.id, 0)
        async with opened(home, prepared.model, layout=layout) as kv:
            reply = await go_on(kv, session.id, 0)
            assert reply.restore.reason is not None
            assert reply.restore.reason.startswith("unstored")
            assert reply.restore.recompute == "replay"
            assert_equal_replies(reply, ahead)
            session = await kv.sessions.get(session.id)
            assert (await session.state()).kv_tokens <= 64


# -- a disk that refuses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["dynamic", pytest.param("static", marks=pytest.mark.full)])
async def test_what_the_disk_refuses_waits_in_host_memory_with_its_gaps(
    prepared: Prepared, tmp_path: Path, layout: str
) -> None:
    async with opened(tmp_path / "home", prepared.model, layout=layout) as kv:
        session, twin = [await kv.sessions.create(policy="sink:64") for _ in range(2)]
        blobs = kv.sessions.tiers.blobs
        for i in range(9):
            if i in (2, 6):
                await written(kv)
                blobs.budget_bytes = blobs.used_bytes()  # type: ignore[attr-defined]
            if i in (5, 8):
                blobs.budget_bytes = 2**40  # type: ignore[attr-defined]
            ids = prompt(100 if i % 3 == 0 else 15, i)
            mine, other = [await one.generate_tokens(ids, max_tokens=8, logprobs=0) for one in (session, twin)]
            assert_equal_replies(mine, other)
            assert mine.restore.reason is None
            assert mine.usage == other.usage
            refused = i in (2, 3, 4, 6, 7)
            report = await session.suspend()
            assert report.tier == ("host" if refused else "disk")
            await check_held(kv, session)
        await check_home(kv)
        await session.resume()
        await check_stored(kv, session)


# -- kill -9 ----------------------------------------------------------------------------------------------------------

POINTS = {
    "turn.before_commit": (2,),
    "turn.after_commit": (1, 3),
    "store.encoded": (1,),
    "store.before_manifest": (2, 4),
    "store.after_manifest": (1, 3),
    "suspend.begin": (1,),
    "suspend.flushed": (2,),
    "suspend.end": (1,),
    "gc.before_forget": (1, 2),
    "blob.mid_write": (2,),
    "restore.before_read": (2,),
}
TURNS = 4
INPUTS = [prompt(n, 30 + n) for n in (25, 140, 9, 60, 30, 30)]
SPOKEN = 15


@dataclass(frozen=True)
class Killable:
    """A home at rest with a session that has evicted, and the ledger's growth in each later turn of its twin."""

    home: Path
    model: Path
    session: str
    base: list[int]
    twin: list[list[int]]


async def prepare_killable(root: Path, model: Path, policy: str) -> Killable:
    async with opened(root / "home", model) as kv:
        session = await kv.sessions.create(policy=policy)
        await said(session, turns(3, seed=9), SPOKEN)
        assert (await session.state()).evicted
        await session.suspend()
        base = await session.token_ids()
    async with opened(root / "twin", model) as kv:
        twin = await kv.sessions.create(policy=policy)
        await said(twin, turns(3, seed=9), SPOKEN)
        grown = []
        for ids in INPUTS:
            (reply,) = await said(twin, [ids], SPOKEN)
            grown.append([*ids, *reply.ids])
    return Killable(root / "home", model, session.id, base, grown)


@pytest.fixture(
    scope="module",
    params=[("gemma3", "sink:96"), pytest.param(("llama", "turns:80"), marks=pytest.mark.full)],
    ids=lambda param: param[0],
)
def killable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Killable:
    family, policy = request.param
    root = tmp_path_factory.mktemp(family)
    return asyncio.run(prepare_killable(root, model_folder(root, family), policy))


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


def start(nursery: Nursery, killable: Killable, tmp_path: Path, fault: str = "") -> tuple[Path, Victim]:
    home = tmp_path / "home"
    shutil.copytree(killable.home, home)
    return home, nursery.start(
        tmp_path / "fifo",
        fault,
        home=str(home),
        model=str(killable.model),
        session=killable.session,
        inputs=INPUTS[:TURNS],
        max_tokens=SPOKEN,
        suspend_after=[0, 2],
    )


async def survives(home: Path, killable: Killable, reports: list[Any]) -> int:
    """What a start after the kill must find; the number of turns that were committed."""
    assert not [report for report in reports if "error" in report], reports
    told = [report["ids"] for report in reports if "turn" in report]
    async with opened(home, killable.model) as kv:
        await check_home(kv)
        session = await kv.sessions.get(killable.session)
        await check_held(kv, session)
        ledger = await session.token_ids()
        committed = next(
            k for k in range(TURNS + 1) if ledger == killable.base + [t for grown in killable.twin[:k] for t in grown]
        )
        assert len(told) <= committed <= len(told) + 1
        for ids, grown in zip(told, killable.twin, strict=False):
            assert grown[-len(ids) :] == ids
        for i in range(committed, len(INPUTS)):
            reply = await session.generate_tokens(INPUTS[i], max_tokens=SPOKEN)
            assert list(reply.ids) == killable.twin[i][-SPOKEN:], f"turn {i} went another way"
            if i == committed:
                assert reply.restore.source == "disk"
                reason = reply.restore.reason
                assert reason is None or reason.startswith("unstored"), reason
                assert reply.restore.recompute == (None if reason is None else "replay")
            await check_held(kv, session)
        await check_stored(kv, session)
        await session.suspend()
    async with opened(home, killable.model) as kv:
        session = await kv.sessions.get(killable.session)
        report = await session.resume()
        assert (report.source, report.reason) == ("disk", None)
        await check_held(kv, session)
        await check_stored(kv, session)
    return committed


@pytest.mark.full
def test_the_script_that_is_killed_ends_well_by_itself(killable: Killable, nursery: Nursery, tmp_path: Path) -> None:
    home, victim = start(nursery, killable, tmp_path)
    reports = list(victim.reports)
    assert nursery.reap() == 0
    assert reports[-1] == {"closed": True}
    assert asyncio.run(survives(home, killable, reports)) == TURNS


@pytest.mark.short(3)
@pytest.mark.parametrize(
    ("point", "passing"),
    [
        pytest.param(point, n, marks=[] if n == passings[0] else pytest.mark.full)
        for point, passings in POINTS.items()
        for n in passings
    ],
)
def test_a_kill_at_a_named_point_loses_no_committed_turn(
    killable: Killable, nursery: Nursery, tmp_path: Path, point: str, passing: int
) -> None:
    home, victim = start(nursery, killable, tmp_path, f"{point}:{passing}")
    reports = list(victim.reports)
    assert nursery.reap() == -signal.SIGKILL, reports
    committed = asyncio.run(survives(home, killable, reports))
    told = sum("turn" in report for report in reports)
    if point == "turn.before_commit":
        assert committed == told == passing - 1
    if point == "turn.after_commit":
        assert (committed, told) == (passing, passing - 1)


def kill_at_random(nursery: Nursery, killable: Killable, tmp_path: Path, number: int, seed: int) -> None:
    draw = random.Random(f"{seed}/{number}/retention")
    after, delay = draw.randrange(1 + TURNS + 2), draw.uniform(0, 0.15)
    print(f"seed {seed}, round {number}: killed {delay:.4f} s after report {after}")
    home, victim = start(nursery, killable, tmp_path)
    reports: list[Any] = []
    timer = threading.Timer(delay, victim.kill)
    for report in victim.reports:
        reports.append(report)
        if len(reports) == after + 1:
            timer.start()
    if timer.ident is not None:
        timer.join()
    assert nursery.reap() in (-signal.SIGKILL, 0)
    asyncio.run(survives(home, killable, reports))


@pytest.mark.short(1)
@pytest.mark.parametrize("number", range(3))
def test_a_kill_at_a_random_moment_loses_no_committed_turn(
    killable: Killable, nursery: Nursery, tmp_path: Path, number: int, seed: int
) -> None:
    kill_at_random(nursery, killable, tmp_path, number, seed)


@pytest.mark.full
@pytest.mark.parametrize("number", range(100, 130))
def test_sixty_more_kills_at_random_moments(
    killable: Killable, nursery: Nursery, tmp_path: Path, number: int, seed: int
) -> None:
    kill_at_random(nursery, killable, tmp_path, number, seed)
