"""Facts about the database, on real SQLite files (and on PostgreSQL where ``AGENTKV_TEST_POSTGRES`` names one)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
from array import array
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from agentkv.errors import Closed, DatabaseUnavailable, InvalidRequest, SessionNotFound, StorageError, StorageFull
from agentkv.sessions.db import (
    ChunkCondemned,
    ChunkRecord,
    ItemRecord,
    LedgerConflict,
    Manifest,
    ManifestConflict,
    Patience,
    Repository,
    ResumePoint,
    SegmentRecord,
    SessionRecord,
    TurnRecord,
)
from agentkv.sessions.db.engine import async_url
from agentkv.sessions.db.schema import REVISIONS, VERSION_TABLE, Base
from agentkv.types import Span

HURRIED = Patience(attempts=2, pause_seconds=0.01, busy_seconds=0.1)


def a_session(session_id: str = "sess_a", **fields: object) -> SessionRecord:
    blank = SessionRecord(
        id=session_id,
        tenant="default",
        agent_id=None,
        model="smollm2-135m",
        kv_fingerprint="kv0",
        session_fingerprint="s0",
        policy="full",
        idle_codec="exact",
        system="Be brief. ✓",
        tools=[{"type": "function", "function": {"name": "ls"}}],
        template_args={"enable_thinking": False},
        metadata={"user": "ä"},
        pinned=0,
        ledger_length=0,
        kv_length=0,
        turns=0,
        created_at=1000.0,
        updated_at=1000.0,
        state="new",
    )
    return replace(blank, **fields)  # type: ignore[arg-type]


def a_turn(seq: int, start: int, stop: int, **fields: object) -> TurnRecord:
    blank = TurnRecord(
        seq=seq,
        span=Span(start, stop),
        kind="send",
        finish_reason="stop",
        prompt_tokens=stop - start,
        completion_tokens=0,
        cached_tokens=start,
        seed=None,
        restore=None,
        created_at=2000.0 + seq,
    )
    return replace(blank, **fields)  # type: ignore[arg-type]


def an_item(seq: int, turn: int, start: int, stop: int, session: str = "a") -> ItemRecord:
    content = {"role": "user", "content": f"question {seq}"}
    return ItemRecord(f"item_{session}{seq}", seq, turn, "user", "message", content, Span(start, stop), bool(seq % 2))


def a_chunk(name: str, start: int, stop: int, **fields: object) -> ChunkRecord:
    blank = ChunkRecord(name, f"look-{name}", "default", "kv0", Span(start, stop), "exact", 100)
    return replace(blank, **fields)  # type: ignore[arg-type]


def segment(chunk: str, start: int, stop: int) -> SegmentRecord:
    return SegmentRecord(chunk, Span(start, stop))


async def with_ledger(repository: Repository, session_id: str, length: int, **fields: object) -> None:
    record = a_session(session_id, ledger_length=length, kv_length=length, turns=1, **fields)
    await repository.create_session(record, [], range(length), a_turn(0, 0, length, kind="head"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "agentkv.db"


@pytest.fixture(params=["sqlite", "memory", "postgresql"])
async def repository(request: pytest.FixtureRequest, path: Path) -> AsyncIterator[Repository]:
    url = {"sqlite": f"sqlite:///{path}", "memory": "sqlite://"}.get(request.param)
    if url is None:
        url = os.environ.get("AGENTKV_TEST_POSTGRES")
        if url is None:
            pytest.skip("AGENTKV_TEST_POSTGRES is not set")
        await _drop_everything(url)
    async with await Repository.open(url) as opened:
        yield opened


async def _drop_everything(url: str) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(async_url(url))
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.drop_all)
        await connection.execute(text(f"DROP TABLE IF EXISTS {VERSION_TABLE}"))
    await engine.dispose()


async def open_once(path: Path) -> None:
    await (await Repository.open(f"sqlite:///{path}")).close()


@contextlib.contextmanager
def lock_held(path: Path) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


class TestSessions:
    async def test_what_was_created_is_read_back_equal(self, repository: Repository) -> None:
        record = a_session(ledger_length=4, kv_length=4, turns=1, pinned=3, agent_id="agent-1", state="live")
        items = [an_item(0, 0, 0, 3), an_item(1, 0, 3, 4)]
        turn = a_turn(0, 0, 4, kind="head", seed=-7, restore={"source": "new"}, finish_reason=None)
        await repository.create_session(record, items, [5, 0, 2**31 - 1, 1], turn)
        assert await repository.get_session("sess_a") == record
        assert await repository.items("sess_a") == items
        assert await repository.turns("sess_a") == [turn]
        assert await repository.ledger("sess_a") == array("i", [5, 0, 2**31 - 1, 1])

    async def test_nulls_stay_null(self, repository: Repository) -> None:
        record = a_session(system=None, tools=None)
        await repository.create_session(record, [], [], None)
        assert await repository.get_session("sess_a") == record
        assert await repository.last_turn("sess_a") is None
        assert await repository.ledger("sess_a") == array("i")

    async def test_missing_and_foreign_sessions_read_the_same(self, repository: Repository) -> None:
        await repository.create_session(a_session(tenant="other"), [], [], None)
        for session_id in ("sess_a", "sess_missing"):
            with pytest.raises(SessionNotFound):
                await repository.get_session(session_id)
            with pytest.raises(SessionNotFound):
                await repository.update_session(session_id, state="disk")
            with pytest.raises(SessionNotFound):
                await repository.delete_session(session_id)
        for method in (repository.ledger, repository.items, repository.turns, repository.last_turn):
            with pytest.raises(SessionNotFound):
                await method("sess_missing")
        assert (await repository.get_session("sess_a", "other")).tenant == "other"

    async def test_an_id_is_used_once(self, repository: Repository) -> None:
        await repository.create_session(a_session(), [], [], None)
        with pytest.raises(InvalidRequest, match="exists already"):
            await repository.create_session(a_session(), [], [], None)
        assert await repository.count_sessions() == 1

    async def test_a_record_that_contradicts_its_ids_is_refused(self, repository: Repository) -> None:
        with pytest.raises(InvalidRequest, match="claims 3 tokens"):
            await repository.create_session(a_session(ledger_length=3), [], [1, 2], None)
        assert await repository.count_sessions() == 0

    async def test_pages_are_newest_first_and_lose_nothing(self, repository: Repository) -> None:
        for n in range(7):
            agent = "even" if n % 2 == 0 else "odd"
            await repository.create_session(
                a_session(f"sess_{n}", created_at=1000.0 + n // 3, agent_id=agent), [], [], None
            )
        await repository.create_session(a_session("sess_x", tenant="other"), [], [], None)
        seen: list[str] = []
        while page := await repository.list_sessions(limit=3, before=seen[-1] if seen else None):
            seen += [record.id for record in page]
        assert seen == [f"sess_{n}" for n in reversed(range(7))]
        assert [r.id for r in await repository.list_sessions(agent_id="odd")] == ["sess_5", "sess_3", "sess_1"]
        assert await repository.count_sessions("default") == 7
        assert await repository.count_sessions() == 8

    async def test_only_listed_fields_can_be_updated(self, repository: Repository) -> None:
        await repository.create_session(a_session(), [], [], None)
        quiet = await repository.update_session("sess_a", state="live")
        assert (quiet.state, quiet.updated_at) == ("live", 1000.0)
        loud = await repository.update_session("sess_a", metadata={"k": [1]}, agent_id="a1")
        assert (loud.metadata, loud.agent_id) == ({"k": [1]}, "a1")
        assert loud.updated_at > 1000.0
        assert await repository.get_session("sess_a") == loud
        with pytest.raises(InvalidRequest, match="ledger_length"):
            await repository.update_session("sess_a", ledger_length=5)
        with pytest.raises(InvalidRequest, match="restoring"):
            await repository.update_session("sess_a", state="restoring")
        with pytest.raises(InvalidRequest, match="kv_length"):
            await repository.update_session("sess_a", kv_length=1)

    async def test_what_cannot_be_stored_is_the_callers_error(self, repository: Repository) -> None:
        await repository.create_session(a_session(), [], [], None)
        with pytest.raises(InvalidRequest, match="cannot be stored"):
            await repository.update_session("sess_a", metadata={"k": object()})
        with pytest.raises(InvalidRequest, match="cannot be stored"):
            await repository.update_session("sess_a", agent_id="\ud800")
        with pytest.raises(InvalidRequest, match="32-bit"):
            await repository.create_session(a_session("sess_b", ledger_length=1), [], [2**31], None)

    async def test_at_start_up_whatever_had_kv_is_on_disk(self, repository: Repository) -> None:
        for state in ("new", "live", "host", "disk"):
            await repository.create_session(a_session(f"sess_{state}", state=state), [], [], None)
        assert await repository.reset_states() == 2
        states = {record.id: record.state for record in await repository.list_sessions()}
        assert states == {"sess_new": "new", "sess_live": "disk", "sess_host": "disk", "sess_disk": "disk"}


class TestTurns:
    async def test_turns_append_to_the_ledger(self, repository: Repository) -> None:
        await repository.create_session(a_session(), [], [], None)
        for seq in range(3):
            start = 10 * seq
            await repository.commit_turn(
                "sess_a",
                a_turn(seq, start, start + 10),
                [an_item(2 * seq, seq, start, start + 4), an_item(2 * seq + 1, seq, start + 4, start + 10)],
                range(start, start + 10),
                expect_length=start,
                kv_length=start + 9,
                state="live",
            )
        record = await repository.get_session("sess_a")
        assert (record.ledger_length, record.kv_length, record.turns) == (30, 29, 3)
        assert (record.updated_at, record.state, record.pinned) == (2002.0, "live", 0)
        assert await repository.ledger("sess_a") == array("i", range(30))
        for span in (Span(0, 30), Span(9, 11), Span(10, 20), Span(5, 25), Span(7, 7), Span(29, 30)):
            assert await repository.ledger_span("sess_a", span) == array("i", range(*span))
        with pytest.raises(InvalidRequest, match="outside"):
            await repository.ledger_span("sess_a", Span(0, 31))
        assert await repository.last_turn("sess_a") == a_turn(2, 20, 30)
        assert len(await repository.items("sess_a")) == 6

    async def test_the_second_of_two_writers_is_told(self, repository: Repository) -> None:
        await repository.create_session(a_session(), [], [], None)
        outcomes = await asyncio.gather(
            *(
                repository.commit_turn(
                    "sess_a", a_turn(0, 0, n), [an_item(0, 0, 0, n)], [n] * n, expect_length=0, kv_length=n
                )
                for n in (2, 3)
            ),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes].count(LedgerConflict) == 1
        record = await repository.get_session("sess_a")
        assert record.turns == 1
        assert list(await repository.ledger("sess_a")) == [record.ledger_length] * record.ledger_length
        assert len(await repository.items("sess_a")) == 1

    @pytest.mark.parametrize(("seq", "start"), [(1, 5), (1, 3), (2, 4), (0, 4)])
    async def test_a_turn_that_does_not_continue_the_ledger_is_refused(
        self, repository: Repository, seq: int, start: int
    ) -> None:
        await with_ledger(repository, "sess_a", 4)
        with pytest.raises(LedgerConflict, match=f"holds 4 tokens in 1 turns .* expected {start} in {seq}"):
            await repository.commit_turn(
                "sess_a", a_turn(seq, start, start + 2), [], [1, 2], expect_length=start, kv_length=start
            )
        assert await repository.ledger("sess_a") == array("i", range(4))

    async def test_an_item_that_collides_leaves_nothing_behind(self, repository: Repository) -> None:
        await repository.create_session(a_session(), [an_item(0, 0, 0, 0)], [], None)
        with pytest.raises(LedgerConflict):
            await repository.commit_turn(
                "sess_a", a_turn(0, 0, 2), [an_item(0, 0, 0, 2)], [1, 2], expect_length=0, kv_length=2
            )
        assert (await repository.get_session("sess_a")).ledger_length == 0
        assert await repository.ledger("sess_a") == array("i")
        assert await repository.turns("sess_a") == []

    @pytest.mark.parametrize(
        ("turn", "items", "lengths"),
        [
            (a_turn(0, 0, 3), [], {"kv_length": 2}),
            (a_turn(0, 0, 2), [an_item(0, 0, 1, 3)], {"kv_length": 2}),
            (a_turn(0, 0, 2), [], {"kv_length": 3}),
            (a_turn(0, 0, 2), [], {"kv_length": 2, "pinned": 3}),
            (a_turn(0, 0, 2, seed=2**63), [], {"kv_length": 2}),
        ],
    )
    async def test_spans_that_contradict_the_ids_are_refused(
        self, repository: Repository, turn: TurnRecord, items: list[ItemRecord], lengths: dict[str, int]
    ) -> None:
        await repository.create_session(a_session(), [], [], None)
        with pytest.raises(InvalidRequest):
            await repository.commit_turn("sess_a", turn, items, [1, 2], expect_length=0, **lengths)  # type: ignore[arg-type]
        assert await repository.turns("sess_a") == []

    async def test_a_ledger_with_a_hole_is_reported_not_guessed(self, path: Path) -> None:
        async with await Repository.open(f"sqlite:///{path}") as repository:
            await with_ledger(repository, "sess_a", 4)
            for seq in (1, 2):
                await repository.commit_turn(
                    "sess_a", a_turn(seq, 4 * seq, 4 * seq + 4), [], range(4), expect_length=4 * seq, kv_length=4
                )
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
                other.execute("DELETE FROM agentkv_ledger WHERE start = 4")
            for span in (Span(0, 12), Span(0, 8), Span(5, 6), Span(4, 12)):
                with pytest.raises(StorageError):
                    await repository.ledger_span("sess_a", span)
            assert len(await repository.ledger_span("sess_a", Span(8, 12))) == 4


class TestManifest:
    async def test_segments_continue_and_are_read_back(self, repository: Repository) -> None:
        await with_ledger(repository, "sess_a", 20)
        assert await repository.manifest("sess_a") == Manifest()
        await repository.append_segments(
            "sess_a", [a_chunk("c0", 0, 8)], [segment("c0", 0, 8)], [ResumePoint(8, "prefix")]
        )
        await repository.append_segments(
            "sess_a",
            [a_chunk("c1", 8, 16), a_chunk("c2", 16, 20)],
            [segment("c1", 8, 16), segment("c2", 16, 18)],
            [ResumePoint(18, "commit"), ResumePoint(8, "prefix")],
        )
        found = await repository.manifest("sess_a")
        assert found.segments == (segment("c0", 0, 8), segment("c1", 8, 16), segment("c2", 16, 18))
        assert found.resume_points == (ResumePoint(8, "prefix"), ResumePoint(18, "commit"))
        assert found.length == 18
        assert await repository.known_chunk_ids() == {"c0", "c1", "c2"}
        assert await repository.chunk_bytes() == {"kv0": 300}

    @pytest.mark.parametrize(
        ("chunks", "segments", "points"),
        [
            ([a_chunk("c1", 9, 16)], [segment("c1", 9, 16)], []),
            ([a_chunk("c1", 0, 16)], [segment("c1", 7, 16)], []),
            ([a_chunk("c1", 8, 16)], [segment("c1", 8, 8)], []),
            ([a_chunk("c1", 8, 12)], [segment("c1", 8, 13)], []),
            ([a_chunk("c1", 8, 24)], [segment("c1", 8, 21)], []),
            ([], [segment("unknown", 8, 12)], []),
            ([a_chunk("c1", 8, 12, tenant="other")], [segment("c1", 8, 12)], []),
            ([], [], [ResumePoint(9, "commit")]),
        ],
        ids=["gap", "overlap", "empty", "past-chunk", "past-ledger", "unknown", "foreign", "point-past-end"],
    )
    async def test_what_contradicts_the_manifest_is_refused_whole(
        self,
        repository: Repository,
        chunks: list[ChunkRecord],
        segments: list[SegmentRecord],
        points: list[ResumePoint],
    ) -> None:
        await with_ledger(repository, "sess_a", 20)
        await repository.append_segments("sess_a", [a_chunk("c0", 0, 8)], [segment("c0", 0, 8)])
        before = await repository.manifest("sess_a")
        with pytest.raises(ManifestConflict):
            await repository.append_segments("sess_a", chunks, segments, points)
        assert await repository.manifest("sess_a") == before
        assert await repository.known_chunk_ids() == {"c0"}

    async def test_truncation_shortens_and_drops(self, repository: Repository) -> None:
        await with_ledger(repository, "sess_a", 24)
        chunks = [a_chunk(f"c{n}", 8 * n, 8 * n + 8) for n in range(3)]
        await repository.append_segments(
            "sess_a",
            chunks,
            [segment(c.id, *c.span) for c in chunks],
            [ResumePoint(p, "commit") for p in (8, 12, 13, 24)],
        )
        assert await repository.truncate_manifest("sess_a", 12) == ["c2"]
        found = await repository.manifest("sess_a")
        assert found.segments == (segment("c0", 0, 8), segment("c1", 8, 12))
        assert [point.position for point in found.resume_points] == [8, 12]
        await repository.append_segments("sess_a", [], [segment("c1", 12, 16)])
        assert await repository.truncate_manifest("sess_a", 12) == []
        assert sorted(await repository.truncate_manifest("sess_a", 0)) == ["c0", "c1"]
        assert await repository.manifest("sess_a") == Manifest()

    async def test_a_shared_chunk_lives_until_its_last_reference(self, repository: Repository) -> None:
        for session_id in ("sess_a", "sess_b"):
            await with_ledger(repository, session_id, 8)
            await repository.append_segments(session_id, [a_chunk("c0", 0, 8)], [segment("c0", 0, 8)])
        assert await repository.delete_session("sess_a") == []
        assert await repository.claim_garbage() == []
        assert await repository.delete_session("sess_b") == ["c0"]
        assert await repository.known_chunk_ids() == {"c0"}

    async def test_deleting_a_session_takes_everything_of_it(self, repository: Repository) -> None:
        await with_ledger(repository, "sess_a", 8)
        await repository.append_segments(
            "sess_a", [a_chunk("c0", 0, 8)], [segment("c0", 0, 8)], [ResumePoint(8, "commit")]
        )
        assert await repository.delete_session("sess_a") == ["c0"]
        await with_ledger(repository, "sess_a", 3)
        assert await repository.ledger("sess_a") == array("i", range(3))
        assert await repository.manifest("sess_a") == Manifest()
        assert len(await repository.turns("sess_a")) == 1


class TestSweep:
    async def garbage(self, repository: Repository) -> None:
        await with_ledger(repository, "sess_a", 8)
        await repository.append_segments("sess_a", [a_chunk("c0", 0, 8)], [segment("c0", 0, 8)])
        assert await repository.truncate_manifest("sess_a", 0) == ["c0"]

    async def test_a_condemned_chunk_can_be_taken_back_before_it_is_claimed(self, repository: Repository) -> None:
        await self.garbage(repository)
        await repository.append_segments("sess_a", [a_chunk("c0", 0, 8)], [segment("c0", 0, 8)])
        assert await repository.claim_garbage() == []

    async def test_a_claimed_chunk_takes_no_new_reference_until_it_is_forgotten(self, repository: Repository) -> None:
        await self.garbage(repository)
        assert await repository.claim_garbage() == ["c0"]
        for offered in ([a_chunk("c0", 0, 8)], []):
            with pytest.raises(ChunkCondemned):
                await repository.append_segments("sess_a", offered, [segment("c0", 0, 8)])
        await repository.forget_chunks(["c0"])
        assert await repository.known_chunk_ids() == set()
        assert await repository.tombstoned(["c0", "c1"]) == {"c0"}
        with pytest.raises(ManifestConflict):
            await repository.append_segments("sess_a", [], [segment("c0", 0, 8)])
        await repository.append_segments("sess_a", [a_chunk("c0", 0, 8)], [segment("c0", 0, 8)])
        assert await repository.tombstoned(["c0"]) == set()

    async def test_a_claim_that_was_never_finished_is_handed_out_again_after_fresh_ones(
        self, repository: Repository
    ) -> None:
        await self.garbage(repository)
        assert await repository.claim_garbage() == ["c0"]
        await repository.append_segments("sess_a", [a_chunk("c9", 0, 8)], [segment("c9", 0, 8)])
        await repository.truncate_manifest("sess_a", 0)
        assert await repository.claim_garbage(limit=1) == ["c9"]
        assert await repository.claim_garbage() == ["c0", "c9"]

    async def test_only_claimed_chunks_and_orphans_are_forgotten(self, repository: Repository) -> None:
        await self.garbage(repository)
        with pytest.raises(ManifestConflict, match="not claimed"):
            await repository.forget_chunks(["c0", "orphan"])
        assert await repository.tombstoned(["c0", "orphan"]) == set()
        await repository.forget_chunks(["orphan", "orphan"])
        await repository.forget_chunks(["orphan"])
        assert await repository.tombstoned(["orphan"]) == {"orphan"}

    async def test_more_chunks_than_one_statement_has_parameters(self, repository: Repository) -> None:
        await with_ledger(repository, "sess_a", 1200)
        chunks = [a_chunk(f"c{n:04}", n, n + 1) for n in range(1200)]
        await repository.append_segments("sess_a", chunks, [segment(c.id, *c.span) for c in chunks])
        assert len(await repository.delete_session("sess_a")) == 1200
        claimed = await repository.claim_garbage(2000)
        await repository.forget_chunks(claimed)
        assert len(await repository.tombstoned(claimed)) == 1200


def _connections() -> int:
    """Threads but those of asyncio's pool, which stay."""
    return sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())


class TestFaults:
    async def test_a_lock_that_passes_is_waited_for(self, path: Path) -> None:
        async with await Repository.open(f"sqlite:///{path}", patience=HURRIED) as repository:
            with lock_held(path):
                waiting = asyncio.create_task(repository.create_session(a_session(), [], [], None))
                await asyncio.sleep(0.12)  # the first attempt has given up by now
            await waiting
            assert await repository.count_sessions() == 1

    async def test_a_lock_that_stays_ends_in_a_clear_error(self, path: Path) -> None:
        async with await Repository.open(f"sqlite:///{path}", patience=HURRIED) as repository:
            with lock_held(path):
                with pytest.raises(DatabaseUnavailable, match=r"over 2 attempts \(database is locked\)"):
                    await repository.create_session(a_session(), [], [], None)
                assert await repository.count_sessions() == 0  # readers are not disturbed
            await repository.create_session(a_session(), [], [], None)
            assert repository._transactions.engine.pool.checkedout() == 0  # type: ignore[attr-defined]

    async def test_a_cancelled_commit_is_whole_or_absent_and_returns_its_connection(self, path: Path) -> None:
        async with await Repository.open(f"sqlite:///{path}") as repository:
            await repository.create_session(a_session(), [], [], None)
            length = seq = committed = 0
            for delay in [n * 0.0004 for n in range(30)]:
                commit = asyncio.create_task(
                    repository.commit_turn(
                        "sess_a",
                        a_turn(seq, length, length + 5),
                        [an_item(seq, seq, length, length + 5)],
                        [seq] * 5,
                        expect_length=length,
                        kv_length=length + 5,
                    )
                )
                await asyncio.sleep(delay)
                commit.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await commit
                # Whatever happened has happened: nothing runs on once the call has returned.
                assert repository._transactions.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
                record = await repository.get_session("sess_a")
                assert record.ledger_length in (length, length + 5)
                assert record.turns == len(await repository.turns("sess_a")) == len(await repository.items("sess_a"))
                assert len(await repository.ledger("sess_a")) == record.ledger_length
                committed += record.turns - seq
                length, seq = record.ledger_length, record.turns
            assert committed > 0

    async def test_a_loop_that_shuts_down_mid_commit_leaves_no_half_turn(self, path: Path) -> None:
        def shut_down(delay: float) -> None:
            async def main() -> None:
                repository = await Repository.open(f"sqlite:///{path}")
                with contextlib.suppress(LedgerConflict, InvalidRequest):
                    await repository.create_session(a_session(), [], [], None)
                record = await repository.get_session("sess_a")
                n, at = record.turns, record.ledger_length
                commit = repository.commit_turn(
                    "sess_a", a_turn(n, at, at + 1), [an_item(n, n, at, at + 1)], [7], expect_length=at, kv_length=at
                )
                task = asyncio.create_task(commit)
                await asyncio.sleep(delay)
                for running in repository._transactions._running:
                    running.cancel()  # what asyncio.run does to every task
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                await repository.close()

            asyncio.run(main())

        for delay in (0.0, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004):
            await asyncio.to_thread(shut_down, delay)
            # A connection closed with a live cursor would keep the write lock until it is collected.
            with contextlib.closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
        async with await Repository.open(f"sqlite:///{path}") as repository:
            record = await repository.get_session("sess_a")
            assert record.turns == record.ledger_length == len(await repository.items("sess_a"))
            assert len(await repository.ledger("sess_a")) == record.ledger_length

    async def test_an_open_that_is_cancelled_leaves_no_thread_behind(self, path: Path) -> None:
        await open_once(path)
        before = _connections()
        for delay in [n * 0.0004 for n in range(15)]:
            opening = asyncio.create_task(Repository.open(f"sqlite:///{path}"))
            await asyncio.sleep(delay)
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await opening).close()
        del opening
        gc.collect()  # an unclosed connection warns here, and warnings are errors
        for _ in range(100):
            if _connections() <= before:
                break
            await asyncio.sleep(0.02)
        assert _connections() <= before

    async def test_a_waiting_call_that_is_cancelled_does_not_write_later(self, path: Path) -> None:
        patience = replace(HURRIED, attempts=50)
        async with await Repository.open(f"sqlite:///{path}", patience=patience) as repository:
            with lock_held(path), pytest.raises(TimeoutError):
                await asyncio.wait_for(repository.create_session(a_session(), [], [], None), 0.15)
            await asyncio.sleep(0.2)
            assert await repository.count_sessions() == 0

    async def test_many_writers_at_once_all_get_through(self, path: Path) -> None:
        async with await Repository.open(f"sqlite:///{path}", patience=HURRIED) as repository:
            await asyncio.gather(
                *(repository.create_session(a_session(f"sess_{n}"), [], [], None) for n in range(40)),
                *(repository.list_sessions() for _ in range(40)),
            )
            assert await repository.count_sessions() == 40

    async def test_a_full_disk_is_named_and_nothing_is_written(self, path: Path) -> None:
        async with await Repository.open(f"sqlite:///{path}") as repository:
            await repository.create_session(a_session(), [], [], None)
            engine = repository._transactions.engine
            async with engine.connect() as connection:  # the only connection so far, and the one reused next
                await connection.execute(text("PRAGMA max_page_count = 1"))
            with pytest.raises(StorageFull, match="full"):
                await repository.commit_turn(
                    "sess_a", a_turn(0, 0, 50_000), [], range(50_000), expect_length=0, kv_length=0
                )
            assert await repository.ledger("sess_a") == array("i")

    async def test_a_closed_repository_says_so(self, path: Path) -> None:
        repository = await Repository.open(f"sqlite:///{path}")
        pending = asyncio.create_task(repository.create_session(a_session(), [], [], None))
        await asyncio.sleep(0)
        await repository.close()
        await repository.close()
        await pending
        with pytest.raises(Closed):
            await repository.ping()
        assert not path.with_name("agentkv.db-wal").exists()

    async def test_an_unreachable_server_is_a_clear_error_without_the_password(self) -> None:
        pytest.importorskip("asyncpg")
        with pytest.raises(DatabaseUnavailable) as caught:
            await Repository.open("postgresql://me:hunter2@127.0.0.1:1/x", patience=HURRIED)
        assert "hunter2" not in str(caught.value)

    def test_kill_9_leaves_whole_turns_only(self, path: Path) -> None:
        script = textwrap.dedent(
            """
            import asyncio, sys
            from agentkv.sessions.db import ItemRecord, Repository
            from agentkv.types import Span
            sys.path.insert(0, sys.argv[2])
            from test_db import a_session, a_turn, an_item

            async def main():
                repository = await Repository.open(sys.argv[1])
                if not await repository.count_sessions():
                    await repository.create_session(a_session(), [], [], None)
                record = await repository.get_session("sess_a")
                seq, at = record.turns, record.ledger_length
                while True:
                    n = 1 + seq * 37 % 400
                    items = [an_item(2 * seq, seq, at, at), an_item(2 * seq + 1, seq, at, at + n)]
                    await repository.commit_turn(
                        "sess_a", a_turn(seq, at, at + n), items, [seq] * n, expect_length=at, kv_length=at)
                    seq, at = seq + 1, at + n
                    print(seq, flush=True)

            asyncio.run(main())
            """
        )
        rng = random.Random(0)
        for _ in range(4):
            command = [sys.executable, "-c", script, f"sqlite:///{path}", str(Path(__file__).parent)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout is not None
                said = [child.stdout.readline() for _ in range(rng.randrange(3, 30))]
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(rng.random() * 0.01)
                child.send_signal(signal.SIGKILL)
                said += child.stdout.readlines()
            acknowledged = int([line for line in said if line.endswith("\n")][-1])
            asyncio.run(self.check_whole_turns(path, acknowledged))

    async def check_whole_turns(self, path: Path, acknowledged: int) -> None:
        async with await Repository.open(f"sqlite:///{path}") as repository:
            record = await repository.get_session("sess_a")
            turns, items = await repository.turns("sess_a"), await repository.items("sess_a")
            ledger = await repository.ledger("sess_a")
        assert record.turns in (acknowledged, acknowledged + 1)
        assert len(turns) == record.turns
        assert [item.turn for item in items] == [n // 2 for n in range(2 * record.turns)]
        assert len(ledger) == record.ledger_length
        for turn in turns:
            assert set(ledger[turn.span.start : turn.span.stop]) == {turn.seq}
        assert sum(len(turn.span) for turn in turns) == len(ledger)


class TestFiles:
    async def test_only_the_owner_can_read(self, path: Path) -> None:
        previous = os.umask(0)
        try:
            async with await Repository.open(f"sqlite:///{path}") as repository:
                await repository.create_session(a_session(), [], [], None)
                files = sorted(path.parent.iterdir())
                assert [file.name for file in files] == ["agentkv.db", "agentkv.db-shm", "agentkv.db-wal"]
                assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
                assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        finally:
            os.umask(previous)

    def test_an_open_file_from_elsewhere_is_made_private(self, path: Path) -> None:
        path.parent.mkdir()
        path.touch(0o644)
        asyncio.run(open_once(path))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    async def test_every_connection_is_durable(self, path: Path) -> None:
        async with await Repository.open(f"sqlite:///{path}") as repository:
            engine = repository._transactions.engine
            async with engine.connect() as one, engine.connect() as two:
                for connection in (one, two):
                    found = {
                        name: (await connection.execute(text(f"PRAGMA {name}"))).scalar_one()
                        for name in ("journal_mode", "synchronous", "busy_timeout", "foreign_keys")
                    }
                    assert found == {"journal_mode": "wal", "synchronous": 2, "busy_timeout": 5000, "foreign_keys": 1}

    async def test_a_folder_that_cannot_be_made_is_a_clear_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(StorageFull, match="cannot be created"):
            await Repository.open(f"sqlite:///{tmp_path / 'file' / 'agentkv.db'}")

    def test_a_file_that_is_no_database_is_a_clear_error(self, path: Path) -> None:
        path.parent.mkdir()
        path.write_bytes(b"not a database, certainly not " * 100)
        with pytest.raises(DatabaseUnavailable, match="not a database"):
            asyncio.run(open_once(path))


class TestUrls:
    @pytest.mark.parametrize("url", ["sqlite:///x.db", "sqlite+pysqlite:///x.db", "sqlite+aiosqlite:///x.db"])
    def test_sqlite_urls_get_the_async_driver(self, url: str) -> None:
        assert str(async_url(url)) == "sqlite+aiosqlite:///x.db"

    @pytest.mark.parametrize("url", ["postgresql://u@h/d", "postgres://u@h/d", "postgresql+psycopg2://u@h/d"])
    def test_postgres_urls_take_the_driver_that_is_installed(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for installed in ("asyncpg", "psycopg"):
            monkeypatch.setattr(
                "agentkv.sessions.db.engine.find_spec", lambda name, only=installed: name == only or None
            )
            assert str(async_url(url)) == f"postgresql+{installed}://u@h/d"
        monkeypatch.setattr("agentkv.sessions.db.engine.find_spec", lambda _name: None)
        with pytest.raises(InvalidRequest, match="asyncpg or psycopg, which is not installed"):
            async_url(url)

    def test_a_named_async_driver_is_not_replaced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agentkv.sessions.db.engine.find_spec", lambda name: name == "asyncpg" or None)
        with pytest.raises(InvalidRequest, match="driver psycopg, which is not installed"):
            async_url("postgresql+psycopg://u@h/d")

    @pytest.mark.parametrize("url", ["", "nonsense", "oracle://u@h/d"])
    def test_other_urls_are_refused(self, url: str) -> None:
        with pytest.raises(InvalidRequest):
            async_url(url)


class TestMigrations:
    async def test_a_new_database_is_migrated_and_opens_again(self, path: Path) -> None:
        for _ in range(2):
            async with await Repository.open(f"sqlite:///{path}") as repository:
                await repository.ping()
                assert await repository.version() == REVISIONS[-1]
                assert await repository.reset_states() == 0

    def test_an_up_to_date_database_opens_without_alembic(self, path: Path) -> None:
        asyncio.run(open_once(path))
        script = (
            "import asyncio, sys\n"
            "from agentkv.sessions.db import Repository\n"
            "async def main(): await (await Repository.open(sys.argv[1])).close()\n"
            "asyncio.run(main())\n"
            "assert 'alembic' not in sys.modules and 'torch' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", script, f"sqlite:///{path}"], check=True)

    async def test_two_processes_may_create_it_at_once(self, path: Path) -> None:
        opened = await asyncio.gather(*(Repository.open(f"sqlite:///{path}") for _ in range(4)))
        for repository in opened:
            assert await repository.version() == REVISIONS[-1]
            await repository.close()

    async def test_a_database_of_a_newer_version_is_refused_and_left_alone(self, path: Path) -> None:
        await open_once(path)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
        with pytest.raises(InvalidRequest, match="newer version"):
            await Repository.open(f"sqlite:///{path}")
        with contextlib.closing(sqlite3.connect(path)) as other:
            assert other.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchall() == [("9999",)]

    async def test_migrations_make_exactly_the_declared_tables(self, repository: Repository) -> None:
        from alembic.autogenerate import compare_metadata
        from alembic.migration import MigrationContext

        def differences(connection: object) -> list[object]:
            context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})  # type: ignore[arg-type]
            return list(compare_metadata(context, Base.metadata))

        async with repository._transactions.engine.connect() as connection:
            assert await connection.run_sync(differences) == []

    def test_every_known_revision_has_its_file_and_the_last_is_the_head(self) -> None:
        from alembic.config import Config
        from alembic.script import ScriptDirectory

        config = Config()
        config.set_main_option("script_location", "agentkv.sessions.db:migrations")
        scripts = ScriptDirectory.from_config(config)
        assert [script.revision for script in scripts.walk_revisions()] == list(reversed(REVISIONS))
        assert scripts.get_current_head() == REVISIONS[-1]
