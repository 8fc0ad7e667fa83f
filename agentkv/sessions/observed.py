"""What a home's past says about how it is used: read from SQL, for the advisor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles

from agentkv.sessions.db.records import SessionRecord, TurnRecord
from agentkv.sessions.db.repository import Repository

__all__ = ["Past", "Reuse", "past_of", "recent_reuse"]

_MOST_SESSIONS = 500


class Past:
    """The newest sessions and their turns, summed up."""

    def __init__(
        self, records: Sequence[SessionRecord], turns: Sequence[Sequence[TurnRecord]], tool_share: float = 0.0
    ) -> None:
        spoken = [[t for t in each if t.kind != "head"] for each in turns]
        lengths = sorted(record.ledger_length for record in records)
        self.sessions = len(records)
        self.lengths = (int(median(lengths)), _top(lengths), lengths[-1]) if lengths else (0, 0, 0)
        gaps = [b.created_at - a.created_at for each in spoken for a, b in pairwise(each)]
        self.gap = median(gaps) if gaps else None
        self.together = _together(spoken, max(60.0, self.gap or 0.0))
        self.hit_rate = Reuse.of([turn for each in spoken for turn in each]).rate
        self.tool_share = tool_share
        self.full_share = sum(r.policy == "full" for r in records) / len(records) if records else 0.0


async def past_of(repository: Repository) -> Past:
    """Of at most the 500 newest sessions."""
    records = await repository.list_sessions(None, limit=_MOST_SESSIONS)
    said = await repository.item_tokens()
    tools = said.get("tool_result", 0) / max(1, sum(said.values()))
    return Past(records, [await repository.turns(record.id) for record in records], tools)


@dataclass(frozen=True, slots=True)
class Reuse:
    """What became of the tokens that were known to ``turns`` turns. ``computed_again``: tokens by reason."""

    turns: int
    known_tokens: int
    reused_tokens: int
    computed_again: Mapping[str, int]

    @classmethod
    def of(cls, turns: Iterable[TurnRecord]) -> Reuse:
        """Of turns that found known tokens, but for those that computed them since that was faster: no fault."""
        count = known = reused = 0
        again: Counter[str] = Counter()
        for turn in turns:
            reason = ((turn.restore or {}).get("reason") or "").partition(":")[0]
            if not turn.known_tokens or reason == "cheaper":
                continue
            count, known, reused = count + 1, known + turn.known_tokens, reused + turn.cached_tokens
            if reason:
                again[reason] += turn.known_tokens - turn.cached_tokens
        return cls(count, known, reused, dict(again.most_common()))

    @property
    def rate(self) -> float | None:
        """Of the known tokens, the share that was not computed again; ``None`` where none were known."""
        return self.reused_tokens / self.known_tokens if self.known_tokens else None


async def recent_reuse(repository: Repository, turns: int = 200) -> Reuse:
    """Of so many turns of all sessions, the newest that found something known."""
    return Reuse.of(await repository.later_turns(turns))


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
