"""Sessions that leave another, or what they had said: what SQL must say of them, and what they are known by since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from retaining import positions
from soaking.oracle import Violation

from agentkv.sessions.db.records import ItemRecord, TurnRecord
from managing.reference import Known
from managing.rows import SessionRow, rows_of

if TYPE_CHECKING:
    from managing.world import World

__all__ = ["fork", "rewind"]


async def fork(world: World, pick: int, turns: int) -> None:
    """A session more, which begins as another did without its last ``turns``, counted around."""
    known = world.sessions[pick % len(world.sessions)]
    cut = _Cut.of(known, turns)
    if cut is None:
        return
    handle = await known.handle.fork(turns=cut.turns)
    await world.at_rest()
    child = Known(
        handle.id,
        known.plan,
        handle,
        known.policy,
        known.pinned,
        known.ledger[: cut.position],
        cut.kept,
        script=cut.script,
        held=list(known.held),
        since=known.since,
        approximate=known.approximate,
        short=True,
    )
    with rows_of(world.home) as rows:
        child.items = rows.items(child.id)
        _note_loss(child, rows.sessions()[child.id])
        _check_items(child, known.items[: len(child.items)], [item for item in known.items if item.turn < cut.seq])
        child.check_unchanged(rows)
    world.sessions.append(child)
    world.count("created")
    world.stage.done["forked"] += 1


async def rewind(world: World, pick: int, turns: int) -> None:
    """The last ``turns`` of a session, counted around, were never said."""
    known = world.sessions[pick % len(world.sessions)]
    cut = _Cut.of(known, turns)
    if cut is None or not cut.turns:
        return
    foretold = await known.handle.rewind(turns=cut.turns, dry_run=True)
    with rows_of(world.home) as rows:
        known.check_unchanged(rows)
    report = await known.handle.rewind(turns=cut.turns)
    await world.at_rest()
    dropped = len(known.ledger) - cut.position
    if replace(report, recompute_seconds=None) != replace(foretold, recompute_seconds=None) or report.tokens != dropped:
        raise Violation(f"{known.id} lost {report}, was to lose {foretold}, {dropped} tokens")
    known.ledger, known.turns, known.script = known.ledger[: cut.position], cut.kept, cut.script
    known.items = [item for item in known.items if item.turn < cut.seq]
    known.short, known.rebuilt, known.heard = True, None, 0
    await world.forget(known)
    with rows_of(world.home) as rows:
        _note_loss(known, rows.sessions()[known.id])
        known.check_unchanged(rows)
    world.stage.done["rewound"] += 1


class _Cut:
    """Behind so many turns: those kept, and the script up to there."""

    def __init__(self, known: Known, turns: int) -> None:
        self.turns = turns
        self.kept: list[TurnRecord] = known.turns[: len(known.turns) - turns]
        self.seq = len(self.kept)
        self.position = self.kept[-1].span.stop if self.kept else 0
        later = next((i for i, e in enumerate(known.script) if isinstance(e, TurnRecord) and e.seq >= self.seq), None)
        self.script = known.script[:later]

    @classmethod
    def of(cls, known: Known, turns: int) -> _Cut | None:
        """``None`` where the session was under another policy there: what it held by then is not known any more."""
        spoken = len(known.turns) - bool(known.pinned)
        cut = cls(known, turns % (spoken + 1))
        return cut if cut.position > known.since or not known.since else None


def _note_loss(known: Known, row: SessionRow) -> None:
    """Where nothing that it held under its policy is left, the next turn computes all anew, under that policy."""
    if row.kv_length < known.since:
        known.held, known.since, known.approximate = list(positions(row.held.kept)), row.kv_length, True


def _check_items(child: Known, found: Sequence[ItemRecord], expected: Sequence[ItemRecord]) -> None:
    mine = [replace(item, id="") for item in child.items]
    if len(found) != len(expected) or mine != [replace(item, id="") for item in expected]:
        raise Violation(f"{child.id} begins with {child.items}, and should with {expected}")
