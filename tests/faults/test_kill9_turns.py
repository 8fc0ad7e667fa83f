"""``kill -9`` during turns, stores, suspends, restores and deletions: the next start has every committed turn, whole,
nothing else, and goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from homes import check_home, check_session, model_folder, opened, said, turns
from killable import Nursery, Victim

import agentkv

SOURCES = Path(agentkv.__file__).parent
POINTS = {
    # point: the passings at which the process dies
    "turn.before_commit": (1, 2, 4),
    "turn.after_commit": (1, 3),
    "store.encoded": (1, 3),
    "store.before_manifest": (1, 2, 4),
    "store.after_manifest": (1, 4),
    "suspend.begin": (1, 2),
    "suspend.flushed": (1,),
    "suspend.end": (1, 2),
    "restore.before_read": (1, 2),
    "gc.before_delete": (1, 2),
    "gc.before_forget": (1,),
    "blob.before_write": (1,),
    "blob.mid_write": (2,),
    "blob.after_write": (1,),
    "blob.before_rename": (3,),
    "blob.after_rename": (1, 4),
    "blob.after_folder_fsync": (2,),
}
TURNS = 4
TOKENS = 8


@dataclass(frozen=True)
class Prepared:
    """A home at rest with one session of one turn and one to be deleted, and how the first one goes on."""

    home: Path
    model: Path
    session: str
    doomed: str
    base: list[int]
    twin: list[list[int]]
    """The ledger's growth of each later turn, computed without interruption."""


async def prepare(root: Path, model: Path) -> Prepared:
    async with opened(root / "home", model) as kv:
        session, doomed = await kv.sessions.create(), await kv.sessions.create()
        await said(session, turns(1, seed=9), TOKENS)
        await said(doomed, turns(2, seed=8), TOKENS)
        await session.suspend()
        base = await session.token_ids()
    async with opened(root / "twin", model) as kv:
        twin = await kv.sessions.create()
        await said(twin, turns(1, seed=9), TOKENS)
        assert await twin.token_ids() == base
        grown = []
        for ids in turns(TURNS + 2):
            (reply,) = await said(twin, [ids], TOKENS)
            grown.append([*ids, *reply.ids])
    return Prepared(root / "home", model, session.id, doomed.id, base, grown)


@pytest.fixture(scope="module", params=["gemma3", pytest.param("llama", marks=pytest.mark.full)])
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    root = tmp_path_factory.mktemp(request.param)
    return asyncio.run(prepare(root, model_folder(root, request.param)))


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


def start(nursery: Nursery, prepared: Prepared, tmp_path: Path, fault: str = "") -> tuple[Path, Victim]:
    home = tmp_path / "home"
    shutil.copytree(prepared.home, home)
    return home, nursery.start(
        tmp_path / "fifo",
        fault,
        home=str(home),
        model=str(prepared.model),
        session=prepared.session,
        inputs=turns(TURNS),
        max_tokens=TOKENS,
        suspend_after=[1, 2],
        doomed=prepared.doomed,
    )


async def survives(home: Path, prepared: Prepared, reports: list[Any]) -> int:
    """What a start after the kill must find; the number of turns that were committed."""
    assert not [report for report in reports if "error" in report], reports
    told = [report["ids"] for report in reports if "turn" in report]
    async with opened(home, prepared.model) as kv:
        await check_home(kv)
        session = await kv.sessions.get(prepared.session)
        await check_session(kv, session)
        ledger = await session.token_ids()
        committed = next(
            k for k in range(TURNS + 1) if ledger == prepared.base + [t for grown in prepared.twin[:k] for t in grown]
        )
        assert len(told) <= committed <= len(told) + 1
        assert (await session.state()).turns == 1 + committed
        for ids, grown in zip(told, prepared.twin, strict=False):
            assert grown[-len(ids) :] == ids
        for i in range(committed, TURNS + 2):
            reply = await session.generate_tokens(turns(TURNS + 2)[i], max_tokens=TOKENS)
            assert list(reply.ids) == prepared.twin[i][-TOKENS:], f"turn {i} went another way"
            if i == committed:
                assert reply.restore.source == "disk"
                reason = reply.restore.reason
                assert reason is None or reason.startswith("unstored"), reason
                assert reply.usage.cached_tokens >= len(prepared.base) - 1, "more than the last turns' KV was lost"
        left = {record.id for record in await kv.sessions.list()}
        if prepared.doomed in left:
            other = await kv.sessions.get(prepared.doomed)
            assert len(await other.token_ids()) == 2 * TOKENS + 81
            assert not [report for report in reports if "deleted" in report]
        await session.suspend()
        await check_session(kv, session)
        await check_home(kv)
    async with opened(home, prepared.model) as kv:
        session = await kv.sessions.get(prepared.session)
        report = await session.resume()
        assert (report.source, report.reason) == ("disk", None)
        await check_session(kv, session)
    return committed


def test_every_fault_point_is_killed_at() -> None:
    text = "".join(file.read_text() for file in SOURCES.rglob("*.py"))
    imports = {"import.before_commit"}  # killed at in test_moving_faults.py
    assert set(re.findall(r'fault_point\("([^"]+)"\)', text)) == POINTS.keys() | imports


@pytest.mark.full
def test_the_script_that_is_killed_ends_well_by_itself(prepared: Prepared, nursery: Nursery, tmp_path: Path) -> None:
    home, victim = start(nursery, prepared, tmp_path)
    reports = list(victim.reports)
    assert nursery.reap() == 0
    assert reports[-1] == {"closed": True}
    assert sum("suspended" in report for report in reports) == 2
    assert asyncio.run(survives(home, prepared, reports)) == TURNS


@pytest.mark.short(4)
@pytest.mark.parametrize(
    ("point", "passing"),
    [
        pytest.param(point, n, marks=[] if n == passings[0] else pytest.mark.full)
        for point, passings in POINTS.items()
        for n in passings
    ],
)
def test_a_kill_at_a_named_point_loses_no_committed_turn(
    prepared: Prepared, nursery: Nursery, tmp_path: Path, point: str, passing: int
) -> None:
    home, victim = start(nursery, prepared, tmp_path, f"{point}:{passing}")
    reports = list(victim.reports)
    assert nursery.reap() == -signal.SIGKILL, reports
    committed = asyncio.run(survives(home, prepared, reports))
    told = sum("turn" in report for report in reports)
    if point == "turn.before_commit":
        assert committed == told == passing - 1
    if point == "turn.after_commit":
        assert (committed, told) == (passing, passing - 1)
    if point == "gc.before_forget":
        assert committed == told == TURNS


def kill_at_random(nursery: Nursery, prepared: Prepared, tmp_path: Path, number: int, seed: int) -> None:
    draw = random.Random(f"{seed}/{number}")
    after, delay = draw.randrange(1 + TURNS + 2), draw.uniform(0, 0.12)
    print(f"seed {seed}, round {number}: killed {delay:.4f} s after report {after}")
    home, victim = start(nursery, prepared, tmp_path)
    reports: list[Any] = []
    timer = threading.Timer(delay, victim.kill)
    for report in victim.reports:
        reports.append(report)
        if len(reports) == after + 1:
            timer.start()
    if timer.ident is not None:
        timer.join()
    assert nursery.reap() in (-signal.SIGKILL, 0)
    asyncio.run(survives(home, prepared, reports))


@pytest.mark.short(2)
@pytest.mark.parametrize("number", range(6))
def test_a_kill_at_a_random_moment_loses_no_committed_turn(
    prepared: Prepared, nursery: Nursery, tmp_path: Path, number: int, seed: int
) -> None:
    kill_at_random(nursery, prepared, tmp_path, number, seed)


@pytest.mark.full
@pytest.mark.parametrize("number", range(100, 150))
def test_a_hundred_more_kills_at_random_moments(
    prepared: Prepared, nursery: Nursery, tmp_path: Path, number: int, seed: int
) -> None:
    kill_at_random(nursery, prepared, tmp_path, number, seed)
