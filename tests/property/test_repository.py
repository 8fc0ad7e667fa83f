"""The chunk index against a model: references are the segments that name a chunk, nothing claimed comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sqlalchemy import text

from agentkv.sessions.db import (
    ChunkCondemned,
    ChunkRecord,
    Manifest,
    Repository,
    ResumePoint,
    SegmentRecord,
    SessionRecord,
    TurnRecord,
)
from agentkv.types import Span

LENGTH = 64
SESSIONS = st.sampled_from(["sess_a", "sess_b", "sess_c"])


class Chunks(RuleBasedStateMachine):
    """Three sessions with the same ledger share chunks named by their span, eight tokens each."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.repository = self.runner.run(Repository.open("sqlite://"))
        self.segments: dict[str, list[SegmentRecord]] = {}
        self.known: set[str] = set()
        self.deleting: set[str] = set()
        self.dead: set[str] = set()

    def teardown(self) -> None:
        self.runner.run(self.repository.close())
        self.runner.close()

    def references(self) -> Counter[str]:
        return Counter(segment.chunk_id for segments in self.segments.values() for segment in segments)

    def check_condemned(self, before: Counter[str], returned: list[str]) -> None:
        assert set(returned) == before.keys() - self.references().keys()
        assert len(returned) == len(set(returned))

    @rule(session_id=SESSIONS)
    def create(self, session_id: str) -> None:
        if session_id in self.segments:
            return
        turn = TurnRecord(0, Span(0, LENGTH), "head", None, LENGTH, 0, 0, None, None, 1.0)
        record = SessionRecord(
            id=session_id,
            tenant="default",
            agent_id=None,
            model="m",
            kv_fingerprint="kv",
            session_fingerprint="s",
            policy="full",
            idle_codec="exact",
            system=None,
            tools=None,
            template_args={},
            metadata={},
            pinned=0,
            ledger_length=LENGTH,
            kv_length=LENGTH,
            turns=1,
            created_at=1.0,
            updated_at=1.0,
        )
        self.runner.run(self.repository.create_session(record, [], range(LENGTH), turn))
        self.segments[session_id] = []

    @precondition(lambda self: self.segments)
    @rule(session_id=SESSIONS, size=st.integers(1, 8), count=st.integers(1, 3))
    def append(self, session_id: str, size: int, count: int) -> None:
        if session_id not in self.segments:
            return
        mine = self.segments[session_id]
        chunks, added = [], []
        end = mine[-1].span.stop if mine else 0
        for _ in range(count):
            if end >= LENGTH:
                break
            span = Span(end - end % 8, end - end % 8 + 8)
            chunks.append(ChunkRecord(f"c{span.start}", f"k{span.start}", "default", "kv", span, "exact", 10))
            added.append(SegmentRecord(chunks[-1].id, Span(end, min(end + size, span.stop))))
            end = added[-1].span.stop
        work = self.repository.append_segments(session_id, chunks, added, [ResumePoint(end, "commit")])
        if any(chunk.id in self.deleting for chunk in chunks):
            with contextlib.suppress(ChunkCondemned):
                self.runner.run(work)
                raise AssertionError("a chunk that is being deleted took a reference")
            return
        self.runner.run(work)
        mine += added
        self.known |= {chunk.id for chunk in chunks}
        self.dead -= {chunk.id for chunk in chunks}

    @rule(session_id=SESSIONS, position=st.integers(0, LENGTH))
    def truncate(self, session_id: str, position: int) -> None:
        if session_id not in self.segments:
            return
        before = self.references()
        returned = self.runner.run(self.repository.truncate_manifest(session_id, position))
        self.segments[session_id] = [
            SegmentRecord(s.chunk_id, Span(s.span.start, min(s.span.stop, position)))
            for s in self.segments[session_id]
            if s.span.start < position
        ]
        self.check_condemned(before, returned)

    @rule(session_id=SESSIONS)
    def delete(self, session_id: str) -> None:
        if session_id not in self.segments:
            return
        before = self.references()
        returned = self.runner.run(self.repository.delete_session(session_id))
        del self.segments[session_id]
        self.check_condemned(before, returned)

    @rule(limit=st.integers(1, 3))
    def claim(self, limit: int) -> None:
        claimed = self.runner.run(self.repository.claim_garbage(limit))
        unused = self.known - self.references().keys()
        assert set(claimed) <= unused
        assert len(claimed) == min(limit, len(unused))
        self.deleting |= set(claimed)

    @rule()
    def forget(self) -> None:
        self.runner.run(self.repository.forget_chunks(self.deleting))
        self.known -= self.deleting
        self.dead |= self.deleting
        self.deleting = set()

    @invariant()
    def index_matches_the_model(self) -> None:
        async def look() -> None:
            references = self.references()
            async with self.repository._transactions.engine.connect() as connection:
                rows = await connection.execute(text("SELECT id, refs, deleting FROM agentkv_chunks"))
                assert {row.id: (row.refs, bool(row.deleting)) for row in rows} == {
                    chunk_id: (references[chunk_id], chunk_id in self.deleting) for chunk_id in self.known
                }
            every = {f"c{start}" for start in range(0, LENGTH, 8)}
            assert await self.repository.tombstoned(every) == self.dead
            for session_id, segments in self.segments.items():
                found: Manifest = await self.repository.manifest(session_id)
                assert list(found.segments) == segments
                assert all(point.position <= found.length for point in found.resume_points)

        self.runner.run(look())


TestChunks = Chunks.TestCase
TestChunks.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
