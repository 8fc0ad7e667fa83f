"""Responses in SQL, and sessions that are said anew there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentkv.errors import ResponseNotFound
from agentkv.sessions.db.records import ItemRecord, LedgerConflict, ResponseRecord, SessionRecord, TurnRecord
from agentkv.sessions.db.repository import Repository
from agentkv.types import Span

EMPTY = SessionRecord(
    "sess_a",
    "default",
    None,
    "m",
    "k",
    "s",
    "full",
    "exact",
    None,
    None,
    {},
    {},
    0,
    0,
    0,
    0,
    created_at=1.0,
    updated_at=1.0,
)
SAID = ItemRecord("item_1", 0, 0, "user", "message", {"role": "user", "content": "x"}, Span(0, 3), False)


def turn(seq: int, start: int, stop: int) -> TurnRecord:
    return TurnRecord(seq, Span(start, stop), "append", None, stop - start, 0, 0, None, None, 2.0)


async def test_a_session_gets_another_head_and_its_items_keep_their_ids(tmp_path: Path) -> None:
    async with await Repository.open(f"sqlite:///{tmp_path}/x.db") as repository:
        await repository.create_session(EMPTY, [], [], None)
        await repository.commit_turn("sess_a", turn(0, 0, 3), [SAID], [1, 2, 3], expect_length=0, kv_length=2)
        before = await repository.get_session("sess_a")
        after = replace(
            before, system="S", instructions="S", pinned=2, ledger_length=5, turns=2, kv_length=0, updated_at=9.0
        )
        items = [
            replace(SAID, id="item_0", role="system", span=Span(0, 2)),
            replace(SAID, seq=1, turn=1, span=Span(2, 5)),
        ]
        turns = [turn(0, 0, 2), turn(1, 2, 5)]
        assert await repository.rewrite_session(after, items, [9, 8, 1, 2, 3], turns, 3) == []
        assert await repository.get_session("sess_a") == after
        assert await repository.items("sess_a") == items
        assert await repository.turns("sess_a") == turns
        assert list(await repository.ledger("sess_a")) == [9, 8, 1, 2, 3]
        with pytest.raises(LedgerConflict):
            await repository.rewrite_session(before, [SAID], [1, 2, 3], [turn(0, 0, 3)], 3)
        assert await repository.get_session("sess_a") == after


async def test_a_response_goes_with_its_session_and_is_another_tenants_to_nobody(tmp_path: Path) -> None:
    async with await Repository.open(f"sqlite:///{tmp_path}/x.db") as repository:
        await repository.create_session(EMPTY, [], [], None)
        made = ResponseRecord("resp_1", "default", "sess_a", "item_1", "S", {"id": "resp_1"}, 3.0)
        assert await repository.add_response(made)
        assert await repository.get_response("resp_1") == made
        for work in (repository.get_response, repository.delete_response):
            with pytest.raises(ResponseNotFound):
                await work("resp_1", "another")
        assert not await repository.add_response(replace(made, id="resp_2", session_id="sess_gone"))
        alone = replace(made, id="resp_3", session_id=None, item_id=None)
        assert await repository.add_response(alone)
        await repository.delete_session("sess_a")
        with pytest.raises(ResponseNotFound):
            await repository.get_response("resp_1")
        assert await repository.get_response("resp_3") == alone
        await repository.delete_response("resp_3")
        with pytest.raises(ResponseNotFound):
            await repository.get_response("resp_3")
