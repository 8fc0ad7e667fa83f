"""Which ledger tokens a live state holds, and where: the half of ``SequenceKV`` that no tensor takes part in."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise

from blake3 import blake3

from agentkv.errors import Closed
from agentkv.kv.contract import SequenceKV
from agentkv.kv.turning import deltas_of
from agentkv.types import KVGeometry, LayerGroup, Placement, Span

__all__ = ["PlacedKV", "lineage_after", "merged", "slices"]


class PlacedKV(SequenceKV):
    """Ids and placement of a state; a layout adds the tensors."""

    def __init__(self, geometry: KVGeometry, rebase_at: int) -> None:
        self.geometry = geometry
        self._rebase_at = rebase_at
        self._ids: array[int] = array("i")
        self._past: Placement = Placement()
        """As of the last eviction: its ``kept`` are all spans before the one that grows."""
        self._grows = 0
        """Ledger position where the growing span starts."""
        self._marked = (self._past, self._grows)
        """The two when the open undo record was made."""
        self._closed = False

    @property
    def length(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> Sequence[int]:
        return self._ids

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def placement(self) -> Placement:
        past, length = self._past, self.length
        kept = past.kept if length == self._grows else (*past.kept, Span(self._grows, length))
        return Placement(length, kept, past.bases, past.lineage, past.floor)

    @property
    def tokens(self) -> int:
        return self._past.tokens + self.length - self._grows

    @property
    def next_position(self) -> int:
        return self.length - (self._past.bases[-1][1] if self._past.bases else 0)

    def advance(self, ids: Sequence[int]) -> None:
        self._check_open()
        self._ids.extend(ids)

    def visible(self, group: int) -> tuple[Span, ...]:
        placement = self.placement
        if self.geometry.groups[group].window is None:
            return tuple(placement.runs(placement.kept))
        window = Span(self._window_start(self.geometry.groups[group], self.length), self.length)
        return tuple(placement.runs([window])) if len(window) else ()

    def _window_start(self, group: LayerGroup, length: int) -> int:
        """First position that a query at ``length`` or later may still see."""
        return 0 if group.window is None else max(self._past.floor, length - group.window, 0)

    def _deltas(self, placement: Placement, held: Sequence[Span]) -> list[tuple[int, int]]:
        """How far each run of ``held`` is turned."""
        return deltas_of(placement, held)

    # -- changes ------------------------------------------------------------------------------------------------------

    def _set(self, placement: Placement) -> None:
        """Make ``placement`` the state's own; its ids must be there already."""
        kept, length = placement.kept, placement.length
        if kept and kept[-1].stop == length:
            self._past = Placement(length, kept[:-1], placement.bases, placement.lineage, placement.floor)
            self._grows = kept[-1].start
        else:
            self._past, self._grows = placement, length

    def _check_rollback(self, then: Placement) -> bool:
        """Whether anything was evicted or moved since."""
        if then.length > self.length:
            raise ValueError(f"cannot roll forward: {self.length} tokens are held, the record has {then.length}")
        return then.lineage != self._past.lineage or then.bases != self._past.bases

    def _roll_back(self, then: Placement, moved: bool) -> None:
        """``rollback``, as far as ids and placement go."""
        del self._ids[then.length :]
        if moved:
            self._past, self._grows = self._marked

    def _after_keep(self, kept: tuple[Span, ...]) -> Placement:
        """The placement once only ``kept`` is held: positions count anew where they have grown too large."""
        before, length = self.placement, self.length
        bases = before.bases
        if before.next_position > self._rebase_at:
            bases = _based(bases, length, sum(len(span) for span in kept))
        return Placement(length, kept, bases, lineage_after(before.lineage, "keep", length, kept), before.floor)

    def _pass_over(self, ids: Sequence[int]) -> None:
        """``skip``, as far as ids and placement go."""
        before, position = self.placement, self.next_position
        self._ids.extend(ids)
        length = self.length
        bases = _based(before.bases, length, position)
        lineage = lineage_after(before.lineage, "skip", length, before.kept)
        self._set(Placement(length, before.kept, bases, lineage, length))

    def _check_crop(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop to {length}: {self.length} tokens are held")
        if self._past.lineage and length < self._past.length:
            raise ValueError(f"cannot crop to {length}: what was held there was evicted or moved since")

    def _check_capture(self, span: Span) -> None:
        if not 0 <= span.start < span.stop <= self.length:
            raise ValueError(f"cannot capture {span}: {self.length} tokens were seen")

    def _held_runs(self, span: Span) -> Iterator[Span]:
        """What full groups hold of ``span``, in runs."""
        placement = self.placement
        return (run for run in placement.runs(have.intersect(span) for have in placement.kept) if len(run))

    def _place(self, placement: Placement) -> None:
        """``place``, as far as ids and placement go."""
        if self.length:
            raise ValueError("only an empty state can be placed")
        self._ids = array("i", bytes(4 * placement.length))
        self._set(placement)

    def _check_restored(self, ids: Sequence[int]) -> None:
        if len(ids) > self.length or (len(ids) < self.length and not self.placement.trivial):
            raise ValueError(f"{len(ids)} ids for a state that was placed at {self.length}: call place with its length")

    def _forget(self) -> None:
        """``close``, as far as ids and placement go."""
        self._closed = True
        self._ids = array("i")
        self._past, self._grows = Placement(), 0

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this KV state was released")

    def _check_placement(self) -> None:
        assert not self._closed, "released"
        placement = self.placement
        stops = [0, *(span.stop for span in placement.kept)]
        for span, stop in zip(placement.kept, stops, strict=False):
            assert stop <= span.start < span.stop <= self.length, placement
        assert self.tokens == placement.tokens and self.next_position == placement.next_position, placement
        assert all(a < b for (a, _), (b, _) in pairwise(placement.bases)), placement.bases


def _based(bases: Sequence[tuple[int, int]], length: int, position: int) -> tuple[tuple[int, int], ...]:
    """From ledger index ``length`` on, tokens are computed at ``position`` and on."""
    before = tuple(entry for entry in bases if entry[0] < length)
    base = length - position
    return before if base == (before[-1][1] if before else 0) else (*before, (length, base))


def merged(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The same positions in as few spans as possible. ``ValueError`` where they are not in order, or overlap."""
    found: list[Span] = []
    for span in spans:
        if not len(span):
            continue
        if found and span.start < found[-1].stop:
            raise ValueError(f"spans are not in order: {list(spans)}")
        if found and span.start == found[-1].stop:
            found[-1] = Span(found[-1].start, span.stop)
        else:
            found.append(Span(*span))
    return tuple(found)


def slices(held: Sequence[Span], spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Slots of ``spans``; ``held``: ledger positions in slot order. ``ValueError`` for what is not held."""
    found = []
    for span in spans:
        slot = 0
        for have in held:
            if have.start <= span.start and span.stop <= have.stop:
                lo = slot + span.start - have.start
                found.append((lo, lo + len(span)))
                break
            slot += len(have)
        else:
            raise ValueError(f"{span} is not held: {list(held)}")
    return found


def lineage_after(lineage: str, event: str, length: int, kept: Sequence[Span]) -> str:
    """The lineage after a ``keep`` or ``skip`` at ledger position ``length``: the same in every layout."""
    text = f"{lineage}|{event}|{length}|{[tuple(span) for span in kept]}"
    return blake3(text.encode(), derive_key_context="agentkv 2026 retention lineage").hexdigest()[:40]
