"""What a home's past says about how it is used: read from SQL, for the advisor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median, quantiles

from agentkv.sessions.db.records import SessionRecord, TurnRecord
from agentkv.sessions.db.repository import Repository

__all__ = ["Past", "past_of"]

_MOST_SESSIONS = 500


class Past:
    """The newest sessions and their turns, summed up."""

    def __init__(self, records: Sequence[SessionRecord], turns: Sequence[Sequence[TurnRecord]]) -> None:
        spoken = [[t for t in each if t.kind != "head"] for each in turns]
        lengths = sorted(record.ledger_length for record in records)
        self.sessions = len(records)
        self.lengths = (int(median(lengths)), _top(lengths), lengths[-1]) if lengths else (0, 0, 0)
        gaps = [b.created_at - a.created_at for each in spoken for a, b in pairwise(each)]
        self.gap = median(gaps) if gaps else None
        self.together = _together(spoken, max(60.0, self.gap or 0.0))
        # Under a policy that evicts, what is known is not the whole ledger.
        later = [t for r, each in zip(records, spoken, strict=True) if r.policy == "full" for t in each[1:]]
        known, reused = sum(t.span.start for t in later), sum(t.cached_tokens for t in later)
        self.hit_rate = min(1.0, reused / known) if known else None
        self.full_share = sum(r.policy == "full" for r in records) / len(records) if records else 0.0


async def past_of(repository: Repository) -> Past:
    """Of at most the 500 newest sessions."""
    records = await repository.list_sessions(limit=_MOST_SESSIONS)
    return Past(records, [await repository.turns(record.id) for record in records])


def _top(lengths: Sequence[int]) -> int:
    """The 95th percentile."""
    return int(quantiles(lengths, n=20, method="inclusive")[-1]) if len(lengths) > 1 else lengths[-1]


def _together(turns: Sequence[Sequence[TurnRecord]], within: float) -> int:
    """The most sessions that had a turn within so many seconds of one another."""
    events = sorted((turn.created_at, index) for index, each in enumerate(turns) for turn in each)
    most, first = 0, 0
    inside: dict[int, int] = {}
    for at, index in events:
        inside[index] = inside.get(index, 0) + 1
        while events[first][0] < at - within:
            gone = events[first][1]
            inside[gone] -= 1
            if not inside[gone]:
                del inside[gone]
            first += 1
        most = max(most, len(inside))
    return most
