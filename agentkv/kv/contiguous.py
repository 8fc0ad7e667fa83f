"""Live KV in contiguous tensors ``[Hkv, capacity, D]``, one pair a layer: what ``dynamic`` and ``static`` share."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence

import torch
from blake3 import blake3

from agentkv.codecs import KVBlock
from agentkv.errors import Closed
from agentkv.kv.buffers import GroupBuffers, Pieces, slices
from agentkv.kv.contract import CapturedPart, SequenceKV, Undo
from agentkv.types import KVGeometry, Placement, Span

__all__ = ["ContiguousKV", "cloned", "merged", "to_cpu"]


class ContiguousKV(SequenceKV):
    """Full groups hold the kept spans one after the other; sliding groups the ledger from their ``base`` on."""

    def __init__(self, geometry: KVGeometry, device: torch.device, rebase_at: int, *, fixed: bool = False) -> None:
        self.geometry = geometry
        self._rebase_at = rebase_at
        self._ids: array[int] = array("i")
        self._past: Placement = Placement()
        """As of the last eviction: its ``kept`` are all spans before the one that grows."""
        self._grows = 0
        """Ledger position where the growing span starts."""
        self._undo: Undo | None = None
        self._closed = False
        self._groups = [GroupBuffers.of(geometry, i, device, fixed=fixed) for i in range(len(geometry.groups))]

    @abstractmethod
    def _room(self, buffers: GroupBuffers, used: int, more: int) -> int:
        """Capacity for ``used`` slots of which none may be lost, and ``more``; at least the present one."""

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> Sequence[int]:
        return self._ids

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

    @property
    def nbytes(self) -> int:
        undo = self._undo.nbytes if self._undo is not None else 0
        return undo + sum(buffers.nbytes for buffers in self._groups)

    def buffers(self, group: int) -> GroupBuffers:
        """The tensors of one group, for the layout."""
        return self._groups[group]

    def used(self, buffers: GroupBuffers) -> int:
        """Slots taken in one group."""
        return self.tokens if buffers.group.window is None else self.length - buffers.base

    def _held(self, buffers: GroupBuffers) -> tuple[Span, ...]:
        if buffers.group.window is None:
            return self.placement.kept
        return (Span(buffers.base, self.length),) if buffers.base < self.length else ()

    def _window_start(self, buffers: GroupBuffers, length: int) -> int:
        """First position that a query at ``length`` or later may still see."""
        window = buffers.group.window
        return 0 if window is None else max(self._past.floor, length - window, 0)

    def _deltas(self, placement: Placement, held: Sequence[Span]) -> list[tuple[int, int]]:
        """How far each run of ``held`` is turned, so that all lie one after the other before the next position."""
        seen = placement.next_position - sum(len(span) for span in held)
        deltas = []
        for run in placement.runs(held):
            deltas.append((len(run), seen - placement.position_of(run.start)))
            seen += len(run)
        return deltas

    # -- growing ------------------------------------------------------------------------------------------------------

    def reserve(self, tokens: int) -> None:
        self._check_open()
        for buffers in self._groups:
            used = stays = self.used(buffers)
            if used + tokens <= buffers.capacity and not buffers.shared:
                continue
            if used + tokens > buffers.capacity and buffers.group.window is not None:
                stays = self.length - self._window_start(buffers, self.length)
            self._reseat(buffers, self._room(buffers, stays, tokens), stays)

    def _reseat(self, buffers: GroupBuffers, capacity: int, used: int) -> None:
        """The last ``used`` slots, from slot 0 on."""
        first = self.used(buffers) - used
        rows = buffers.rows([(first, first + used)])
        buffers.base += first
        buffers.seat(rows, self._deltas(self.placement, self._held(buffers)), capacity)

    def advance(self, ids: Sequence[int]) -> None:
        self._check_open()
        self._ids.extend(ids)

    def skip(self, ids: Sequence[int]) -> None:
        self._check_open()
        before, position = self.placement, self.next_position
        self._ids.extend(ids)
        length = self.length
        bases = (*before.bases, (length, length - position))
        lineage = _descend(before.lineage, "skip", length, before.kept)
        self._past = Placement(length, before.kept, bases, lineage, length)
        self._grows = length
        for buffers in self._groups:
            if buffers.group.window is not None:
                buffers.base, buffers.moved = length, 0
                buffers.masters = [None for _ in buffers.group.layers]

    # -- forgetting ---------------------------------------------------------------------------------------------------

    def keep(self, spans: Sequence[Span]) -> None:
        self._check_open()
        before, length = self.placement, self.length
        kept = merged(spans)
        slots = slices(before.kept, kept)  # refuses what is not held
        self._save_evicted(before, kept)
        bases = before.bases
        rebased = before.next_position > self._rebase_at
        if rebased:
            bases = (*bases, (length, length - sum(len(span) for span in kept)))
        self._set(Placement(length, kept, bases, _descend(before.lineage, "keep", length, kept), before.floor))
        for buffers in self._groups:
            if buffers.group.window is None:
                rows = buffers.rows(slots)
            elif rebased:
                rows = buffers.rows([(0, self.used(buffers))])
            else:
                continue
            deltas = self._deltas(self.placement, self._held(buffers))
            buffers.seat(rows, deltas, self._room(buffers, self.used(buffers), 0))

    def _set(self, placement: Placement) -> None:
        """Make ``placement`` the state's own; its ids must be there already."""
        kept, length = placement.kept, placement.length
        if kept and kept[-1].stop == length:
            self._past = Placement(length, kept[:-1], placement.bases, placement.lineage, placement.floor)
            self._grows = kept[-1].start
        else:
            self._past, self._grows = placement, length

    def _save_evicted(self, before: Placement, kept: Sequence[Span]) -> None:
        """Evicted tokens that the open undo record will want back: copied to host memory."""
        undo = self._undo
        if undo is None:
            return
        gone = [span for have in before.kept for span in _without(have, kept)]
        wanted = [span.intersect(old) for span in gone for old in undo.placement.kept]
        for run in before.runs(span for span in wanted if len(span)):
            for part in self._full_parts(run):
                undo.evicted.append(CapturedPart(part.group, part.span, to_cpu(cloned(part.block))))

    def _full_parts(self, run: Span) -> Iterator[CapturedPart]:
        for index, buffers in enumerate(self._groups):
            if buffers.group.window is None:
                ((lo, hi),) = slices(self.placement.kept, (run,))
                yield CapturedPart(index, run, buffers.block(lo, hi))

    def crop(self, length: int) -> None:
        self._check_open()
        placement = self.placement
        if not 0 <= length <= placement.length:
            raise ValueError(f"cannot crop to {length}: {placement.length} tokens are held")
        if length < self._grows or any(length < index for index, _ in placement.bases):
            raise ValueError(f"cannot crop to {length}: what was held there was evicted or moved since")
        for buffers in self._groups:
            if buffers.base > self._window_start(buffers, length):
                raise ValueError(f"cannot crop to {length}: {buffers.group.name} has nothing before {buffers.base}")
        del self._ids[length:]

    # -- undo ---------------------------------------------------------------------------------------------------------

    def undo_record(self) -> Undo:
        self._check_open()
        self._undo = Undo(self.placement, self._window_copies())
        return self._undo

    def settle(self) -> None:
        self._undo = None

    def _window_copies(self) -> tuple[CapturedPart, ...]:
        length, placement = self.length, self.placement
        parts = []
        for index, buffers in enumerate(self._groups):
            window = Span(self._window_start(buffers, length), length)
            if buffers.group.window is not None and len(window):
                for run in placement.runs([window]):
                    block = buffers.block(run.start - buffers.base, run.stop - buffers.base)
                    parts.append(CapturedPart(index, run, cloned(block)))
        return tuple(parts)

    def rollback(self, undo: Undo) -> None:
        self._check_open()
        then, now = undo.placement, self.placement
        if then.length > now.length:
            raise ValueError(f"cannot roll forward: {now.length} tokens are held, the record has {then.length}")
        moved = then.lineage != now.lineage or then.bases != now.bases
        if moved and undo is not self._undo:
            raise ValueError("tokens were evicted since, and this is not the open undo record")
        full = {i: self._pieces_at(i, undo) for i, b in enumerate(self._groups) if moved and b.group.window is None}
        del self._ids[then.length :]
        self._set(then)
        for index, buffers in enumerate(self._groups):
            if index in full:
                deltas = self._deltas(then, self._held(buffers))
                buffers.seat(_of_blocks(full[index]), deltas, self._room(buffers, then.tokens, 0))
            elif buffers.group.window is not None:
                self._restore_window(index, buffers, undo, moved)
        undo.evicted.clear()

    def _pieces_at(self, index: int, undo: Undo) -> list[KVBlock]:
        """What a full group held at the record, in order: from here, and from what was evicted since."""
        buffers, kept = self._groups[index], self.placement.kept
        evicted = [part for part in undo.evicted if part.group == index]
        found: list[tuple[Span, KVBlock]] = []
        for run in self.placement.runs(old.intersect(have) for old in undo.placement.kept for have in kept):
            if len(run):
                ((lo, hi),) = slices(kept, (run,))
                found.append((run, buffers.block(lo, hi)))
        found += [(part.span, part.block) for part in evicted]
        found.sort(key=lambda pair: pair[0])
        held = sum(len(span) for span, _ in found)
        assert held == undo.placement.tokens, (held, undo.placement.tokens)
        return [block for _, block in found]

    def _restore_window(self, index: int, buffers: GroupBuffers, undo: Undo, moved: bool) -> None:
        then = undo.placement
        start = self._window_start(buffers, then.length)
        if not moved and buffers.base <= start:
            return  # never compacted since: the window is still where it was
        buffers.base = min(start, then.length)
        blocks = [part.block for part in undo.windows if part.group == index]
        deltas = self._deltas(then, self._held(buffers))
        buffers.seat(_of_blocks(blocks), deltas, self._room(buffers, self.used(buffers), 0))

    # -- storing and restoring ----------------------------------------------------------------------------------------

    def capture(self, span: Span) -> tuple[CapturedPart, ...]:
        self._check_open()
        if not 0 <= span.start < span.stop <= self.length:
            raise ValueError(f"cannot capture {span}: {self.length} tokens were seen")
        placement = self.placement
        parts = []
        for run in placement.runs(have.intersect(span) for have in placement.kept):
            if len(run):
                for part in self._full_parts(run):
                    block = cloned(part.block) if self._groups[part.group].fixed else part.block
                    parts.append(CapturedPart(part.group, run, to_cpu(block)))
        return tuple(parts)

    def window_snapshot(self) -> tuple[CapturedPart, ...]:
        self._check_open()
        return tuple(CapturedPart(p.group, p.span, to_cpu(p.block)) for p in self._window_copies())

    def visible(self, group: int) -> tuple[Span, ...]:
        buffers, placement = self._groups[group], self.placement
        if buffers.group.window is None:
            return tuple(placement.runs(placement.kept))
        window = Span(self._window_start(buffers, self.length), self.length)
        return tuple(placement.runs([window])) if len(window) else ()

    def read(self, group: int, span: Span) -> KVBlock:
        self._check_open()
        buffers = self._groups[group]
        ((lo, hi),) = slices(self._held(buffers), (span,))
        return buffers.block(lo, hi)

    def place(self, placement: Placement, room: int = 0) -> None:
        self._check_open()
        if self.length:
            raise ValueError("only an empty state can be placed")
        self._ids = array("i", bytes(4 * placement.length))
        self._set(placement)
        for buffers in self._groups:
            buffers.base = self._window_start(buffers, placement.length)
            used = self.used(buffers)
            window = buffers.group.window
            capacity = self._room(buffers, used, room if window is None else min(room, window))
            if capacity > buffers.capacity or buffers.shared:
                buffers.allocate(capacity)
            buffers.expect(self._deltas(placement, self._held(buffers)))

    def target(self, group: int, span: Span) -> KVBlock:
        return self.read(group, span)

    def restored(self, ids: Sequence[int]) -> None:
        self._check_open()
        if len(ids) != self.length:
            if len(ids) > self.length or not self.placement.trivial:
                raise ValueError(f"{len(ids)} ids for a state that was placed at {self.length}")
            self.crop(len(ids))
        self._ids = array("i", ids)
        placement = self.placement
        for buffers in self._groups:
            buffers.turn(self._deltas(placement, self._held(buffers)))

    # -- life ---------------------------------------------------------------------------------------------------------

    def fork(self) -> ContiguousKV:
        self._check_open()
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._ids = array("i", self._ids)
        twin._undo = None
        twin._groups = [buffers.fork() for buffers in self._groups]
        return twin

    def close(self) -> None:
        self._closed = True
        self._ids = array("i")
        self._past, self._grows, self._undo = Placement(), 0, None
        for buffers in self._groups:
            buffers.release()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this KV state was released")

    def check_integrity(self) -> None:
        assert not self._closed, "released"
        placement = self.placement
        stops = [0, *(span.stop for span in placement.kept)]
        for span, stop in zip(placement.kept, stops, strict=False):
            assert stop <= span.start < span.stop <= self.length, placement
        assert self.tokens == placement.tokens and self.next_position == placement.next_position, placement
        assert list(placement.bases) == sorted(placement.bases), placement.bases
        for buffers in self._groups:
            assert buffers.base <= self._window_start(buffers, self.length), (buffers.base, self.length)
            assert buffers.group.window is not None or buffers.base == 0, buffers.base
            buffers.check_integrity(self.used(buffers))
            if any(buffers.rotations):
                total = moved = 0
                for tokens, delta in self._deltas(placement, self._held(buffers)):
                    total += tokens
                    moved = total if delta else moved
                assert moved == buffers.moved, (buffers.group.name, moved, buffers.moved)


def _without(span: Span, holes: Sequence[Span]) -> Iterator[Span]:
    """What of ``span`` lies in none of ``holes``, which are in order."""
    at = span.start
    for hole in holes:
        common = span.intersect(hole)
        if len(common):
            if common.start > at:
                yield Span(at, common.start)
            at = common.stop
    if at < span.stop:
        yield Span(at, span.stop)


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


def _of_blocks(blocks: Sequence[KVBlock]) -> Pieces:
    return lambda layer: ([b.keys[layer] for b in blocks], [b.values[layer] for b in blocks])


def _descend(lineage: str, event: str, length: int, kept: Sequence[Span]) -> str:
    """The lineage after an eviction at ledger position ``length``."""
    text = f"{lineage}|{event}|{length}|{[tuple(span) for span in kept]}"
    return blake3(text.encode(), derive_key_context="agentkv 2026 retention lineage").hexdigest()[:40]


def cloned(block: KVBlock) -> KVBlock:
    """Copies of its tensors."""
    return KVBlock(tuple(t.clone() for t in block.keys), tuple(t.clone() for t in block.values))


def to_cpu(block: KVBlock) -> KVBlock:
    """The block in host memory: the same views on a CPU, pinned copies that have arrived on CUDA."""
    if not block.keys or block.keys[0].device.type == "cpu":
        return block
    from agentkv.kv.staging import to_host

    return to_host(block)
