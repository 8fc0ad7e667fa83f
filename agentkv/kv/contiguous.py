"""Live KV in contiguous tensors ``[Hkv, capacity, D]``, one pair a layer: what ``dynamic`` and ``static`` share."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Sequence

import torch

from agentkv.codecs import KVBlock
from agentkv.kv.buffers import GroupBuffers, Pieces
from agentkv.kv.contract import CapturedPart, Undo
from agentkv.kv.placed import PlacedKV, merged, slices
from agentkv.kv.turning import turned_tokens
from agentkv.types import KVGeometry, Placement, Span, without

__all__ = ["ContiguousKV", "cloned", "copied", "to_cpu"]


class ContiguousKV(PlacedKV):
    """Full groups hold the kept spans one after the other; sliding groups the ledger from their ``base`` on."""

    def __init__(self, geometry: KVGeometry, device: torch.device, rebase_at: int, *, fixed: bool = False) -> None:
        super().__init__(geometry, rebase_at)
        self._undo: Undo | None = None
        self._groups = [GroupBuffers.of(geometry, i, device, fixed=fixed) for i in range(len(geometry.groups))]

    @abstractmethod
    def _room(self, buffers: GroupBuffers, used: int, more: int) -> int:
        """Capacity for ``used`` slots of which none may be lost, and ``more``; at least the present one."""

    def _left(self, buffers: GroupBuffers, used: int) -> int:
        """Capacity once evictions have left ``used`` slots, which are moved in any case."""
        return self._room(buffers, used, 0)

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, and of the windows in the open undo record; what was evicted since is in host memory,
        which a CPU's device is too, but only until the turn ends."""
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

    # -- growing ------------------------------------------------------------------------------------------------------

    def reserve(self, tokens: int) -> None:
        self._check_open()
        for buffers in self._groups:
            used = stays = self.used(buffers)
            if used + tokens <= buffers.capacity and not buffers.shared:
                continue
            if used + tokens > buffers.capacity and buffers.group.window is not None:
                stays = self.length - self._window_start(buffers.group, self.length)
            self._reseat(buffers, self._room(buffers, stays, tokens), stays)

    def _reseat(self, buffers: GroupBuffers, capacity: int, used: int) -> None:
        """The last ``used`` slots, from slot 0 on."""
        first = self.used(buffers) - used
        rows = buffers.rows([(first, first + used)])
        buffers.base += first
        deltas = self._deltas(self.placement, self._held(buffers))
        if first:
            buffers.seat(rows, deltas, capacity)
        else:
            buffers.grow(deltas, capacity)

    def skip(self, ids: Sequence[int]) -> None:
        self._check_open()
        self._pass_over(ids)
        for buffers in self._groups:
            if buffers.group.window is not None:
                buffers.base, buffers.moved = self.length, 0
                buffers.masters = [None for _ in buffers.group.layers]

    # -- forgetting ---------------------------------------------------------------------------------------------------

    def keep(self, spans: Sequence[Span]) -> None:
        self._check_open()
        before, kept = self.placement, merged(spans)
        slots = slices(before.kept, kept)  # refuses what is not held
        self._save_evicted(before, kept)
        self._set(self._after_keep(kept))
        rebased = self.placement.bases != before.bases
        for buffers in self._groups:
            if buffers.group.window is None:
                rows = buffers.rows(slots)
            elif rebased:
                rows = buffers.rows([(0, self.used(buffers))])
            else:
                continue
            deltas = self._deltas(self.placement, self._held(buffers))
            buffers.seat(rows, deltas, self._left(buffers, self.used(buffers)))

    def _save_evicted(self, before: Placement, kept: Sequence[Span]) -> None:
        """Evicted tokens that the open undo record will want back: copied to host memory."""
        undo = self._undo
        if undo is None:
            return
        gone = [span for have in before.kept for span in without(have, kept)]
        wanted = [span.intersect(old) for span in gone for old in undo.placement.kept]
        saved = []
        for run in before.runs(span for span in wanted if len(span)):
            ((lo, hi),) = slices(before.kept, (run,))
            for index, buffers in enumerate(self._groups):
                if buffers.group.window is None:
                    block = buffers.block(lo, hi)
                    host = cloned(block) if buffers.device.type == "cpu" else to_cpu(block)
                    saved.append(CapturedPart(index, run, host))
        undo.evicted += saved  # all of them or none

    def crop(self, length: int) -> None:
        self._check_open()
        self._check_crop(length)
        for buffers in self._groups:
            if buffers.base > self._window_start(buffers.group, length):
                raise ValueError(f"cannot crop to {length}: {buffers.group.name} has nothing before {buffers.base}")
        del self._ids[length:]
        self._take_back()

    def _take_back(self) -> None:
        for buffers in self._groups:
            if buffers.group.window is None:
                buffers.take_back(self.tokens)

    # -- undo ---------------------------------------------------------------------------------------------------------

    def undo_record(self) -> Undo:
        self._check_open()
        self._undo = Undo(self.placement, self._window_copies())
        self._marked = (self._past, self._grows)
        return self._undo

    def settle(self) -> None:
        self._undo = None

    def _window_copies(self) -> tuple[CapturedPart, ...]:
        length, placement = self.length, self.placement
        parts = []
        for index, buffers in enumerate(self._groups):
            window = Span(self._window_start(buffers.group, length), length)
            if buffers.group.window is not None and len(window):
                for run in placement.runs([window]):
                    block = buffers.block(run.start - buffers.base, run.stop - buffers.base)
                    parts.append(CapturedPart(index, run, cloned(block)))
        return tuple(parts)

    def rollback(self, undo: Undo) -> None:
        self._check_open()
        then = undo.placement
        moved = self._check_rollback(then)
        if moved and undo is not self._undo:
            raise ValueError("tokens were evicted since, and this is not the open undo record")
        if torn := [buffers.group.name for buffers in self._groups if buffers.torn and buffers.group.window is None]:
            raise MemoryError(f"an allocation failed while rows of {', '.join(torn)} were moved: some are lost")
        full = {i: self._pieces_at(i, undo) for i, b in enumerate(self._groups) if moved and b.group.window is None}
        self._roll_back(then, moved)
        if not moved:
            self._take_back()
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
        start = self._window_start(buffers.group, then.length)
        if not moved and buffers.base <= start and not buffers.torn:
            return  # never compacted since: the window is still where it was
        buffers.base = min(start, then.length)
        blocks = [part.block for part in undo.windows if part.group == index]
        deltas = self._deltas(then, self._held(buffers))
        buffers.seat(_of_blocks(blocks), deltas, self._room(buffers, self.used(buffers), 0))

    # -- storing and restoring ----------------------------------------------------------------------------------------

    def capture(self, span: Span) -> tuple[CapturedPart, ...]:
        self._check_open()
        self._check_capture(span)
        parts = []
        for run in self._held_runs(span):
            ((lo, hi),) = slices(self.placement.kept, (run,))
            for index, buffers in enumerate(self._groups):
                if buffers.group.window is None:
                    parts.append(CapturedPart(index, run, to_cpu(buffers.lend(lo, hi))))
        return tuple(parts)

    def window_snapshot(self) -> tuple[CapturedPart, ...]:
        self._check_open()
        return tuple(CapturedPart(p.group, p.span, to_cpu(p.block)) for p in self._window_copies())

    def read(self, group: int, span: Span) -> KVBlock:
        self._check_open()
        buffers = self._groups[group]
        ((lo, hi),) = slices(self._held(buffers), (span,))
        return buffers.block(lo, hi)

    def place(self, placement: Placement, room: int = 0) -> None:
        self._check_open()
        self._place(placement)
        for buffers in self._groups:
            buffers.base = self._window_start(buffers.group, placement.length)
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
        self._check_restored(ids)
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
        self._forget()
        self._undo = None
        for buffers in self._groups:
            buffers.release()

    def check_integrity(self) -> None:
        self._check_placement()
        placement = self.placement
        for buffers in self._groups:
            assert buffers.base <= self._window_start(buffers.group, self.length), (buffers.base, self.length)
            assert buffers.group.window is not None or buffers.base == 0, buffers.base
            buffers.check_integrity(self.used(buffers))
            if any(buffers.rotations):
                moved = turned_tokens(self._deltas(placement, self._held(buffers)))
                assert moved == buffers.moved, (buffers.group.name, moved, buffers.moved)


def _of_blocks(blocks: Sequence[KVBlock]) -> Pieces:
    return lambda layer: ([b.keys[layer] for b in blocks], [b.values[layer] for b in blocks])


def cloned(block: KVBlock) -> KVBlock:
    """Copies of its tensors."""
    return KVBlock(tuple(t.clone() for t in block.keys), tuple(t.clone() for t in block.values))


def copied(block: KVBlock, into: KVBlock) -> None:
    """Write ``block`` to tensors of the same shapes."""
    for source, target in zip((*block.keys, *block.values), (*into.keys, *into.values), strict=True):
        target.copy_(source)


def to_cpu(block: KVBlock) -> KVBlock:
    """The block in host memory: the same views on a CPU, pinned copies that have arrived on CUDA."""
    if not block.keys or block.keys[0].device.type == "cpu":
        return block
    from agentkv.kv.staging import to_host

    return to_host(block)
