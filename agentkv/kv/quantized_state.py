"""One session's quantised KV: older tokens in segments, the rest in a state of the inner layout.

ledger   [ 16 sinks | quantised, in groups of 64 … … … … | what evictions cut off a group | recent tokens ]
           segments before ``frontier``, which never change and forks share                 ``inner``
"""

from __future__ import annotations

import weakref
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentkv.codecs import KVBlock
from agentkv.errors import CapacityExceeded
from agentkv.kv.contiguous import copied, to_cpu
from agentkv.kv.contract import CapturedPart, SequenceKV, Undo
from agentkv.kv.placed import PlacedKV, merged, slices
from agentkv.kv.quantized_filling import Filling, side_by_side
from agentkv.kv.quantized_grids import amplitude
from agentkv.kv.quantized_segments import Codes, Segment, cut, grown
from agentkv.kv.quantized_step import Piece, chunks
from agentkv.types import Placement, Span

if TYPE_CHECKING:
    from agentkv.kv.quantized import QuantizedLayout

__all__ = ["QuantizedKV", "QuantizedUndo"]


class QuantizedUndo(Undo):
    """Holds a fork of the exact tokens of its time, and the segments themselves, which never change."""

    __slots__ = ("__weakref__", "frontier", "inner", "segments")

    def __init__(self, kv: QuantizedKV, closed: deque[SequenceKV]) -> None:
        super().__init__(kv.placement, ())
        self.inner, self.segments, self.frontier = _forked(kv.inner), kv.segments, kv.frontier
        # Garbage collection comes from anywhere, and closing may take a lock: the layout does it later.
        weakref.finalize(self, closed.append, self.inner).atexit = False

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes


class QuantizedKV(PlacedKV):
    """``segments`` are what is held before ledger position ``frontier``; ``inner`` holds the rest."""

    def __init__(self, layout: QuantizedLayout, tokens: int) -> None:
        super().__init__(layout.geometry, layout.rebase_at)
        self._layout = layout
        self.inner = layout.opened(tokens)
        self.segments: tuple[Segment, ...] = ()
        self.frontier = 0
        self._undo: QuantizedUndo | None = None
        self._older: list[list[Piece]] | None = None
        self._filling: Filling | None = None

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Inner state, segments (those shared with a fork count on both sides), the open record, and the scratch."""
        segments = {id(s): s for s in self.segments}
        undo = 0
        if self._undo is not None:
            segments |= {id(s): s for s in self._undo.segments}
            undo = self._undo.nbytes
        total = self.inner.nbytes + undo + sum(s.nbytes for s in segments.values())
        if self._filling is not None:
            total += self._filling.nbytes
        return total + (self._layout.scratch_nbytes(self.tokens) if self.segments else 0)

    @property
    def lossy(self) -> tuple[Span, ...]:
        return merged([segment.span for segment in self.segments if segment.lossy])

    def older(self) -> list[list[Piece]]:
        """What a step expands of the segments, where its queries see them. The same until what is held changes."""
        if self._older is None:
            placement = self.placement
            seen, pieces = placement.next_position - placement.tokens, []
            for segment in self.segments:
                pieces.append(self._piece(segment, seen, placement))
                seen += len(segment.span)
            self._older = list(chunks(pieces, self._layout.format.segment_tokens))
        return self._older

    def _piece(self, segment: Segment, seen: int, placement: Placement) -> Piece:
        deltas, at = [], seen
        if not segment.turned_back:
            for run in placement.runs([segment.span]):
                deltas.append((len(run), at - placement.position_of(run.start)))
                at += len(run)
        turned = any(delta for _, delta in deltas)
        return Piece(segment, 0, len(segment.span), seen, tuple(deltas) if turned else ())

    def bound(self, group: int, span: Span) -> KVBlock:
        """How far each number that ``read`` gives may be from what was computed: float64, zero where it is exact.

        Half a step, where it was turned back before also half of that at which its grid settled; of a turned pair the
        root of both squared; and what the dtype and float32 round off.
        """
        read, eps = self.read(group, span), torch.finfo(self._layout.dtype).eps
        arithmetic = 16 * torch.finfo(torch.float32).eps
        found = KVBlock(_zeros(read.keys), _zeros(read.values))
        if group not in self._layout.full:
            return found
        for segment in self.segments:
            common = segment.span.intersect(span)
            part = segment.parts[self._layout.full.index(group)]
            if len(common) and isinstance(part, Codes):
                here = slice(common.start - span.start, common.stop - span.start)
                there = slice(common.start - segment.span.start, common.stop - segment.span.start)
                for at, layer in enumerate(self.geometry.groups[group].layers):
                    key_step, value_step = (step[:, there].double() for step in part.steps(at))
                    keys, values = read.keys[at][:, here].double(), read.values[at][:, here].double()
                    if part.turned_back:
                        rotation = self.geometry.rotations[layer] if self.geometry.rotations else None
                        off = amplitude(key_step, rotation) + 2 * eps * amplitude(keys, rotation)
                    else:
                        off = key_step / 2 + eps / 2 * keys.abs()
                    found.keys[at][:, here] = off + arithmetic * keys.abs().amax()
                    off = value_step / 2 + eps / 2 * values.abs()
                    found.values[at][:, here] = off + arithmetic * values.abs().amax()
        return found

    # -- growing ------------------------------------------------------------------------------------------------------

    def reserve(self, tokens: int) -> None:
        self._check_open()
        try:
            self.inner.reserve(tokens)
        except CapacityExceeded:  # a layout that takes all its memory when it opens took what was foreseen
            self._reseat(self.placement, tokens)
            self.inner.reserve(tokens)

    def advance(self, ids: Sequence[int]) -> None:
        super().advance(ids)
        self.inner.advance(ids)
        self._age()

    def skip(self, ids: Sequence[int]) -> None:
        self._check_open()
        self._pass_over(ids)
        self.inner.skip(ids)
        self._older = None

    def _age(self) -> None:
        """Quantise the groups that have come far enough behind the end."""
        if self.length - self._layout.recent_tokens <= self.frontier:
            return
        placement, edge = self.placement, self._edge()
        if edge <= self.frontier:
            return
        segments = self.segments
        with torch.inference_mode(False), torch.no_grad():
            due = Span(self.frontier, edge)
            for stretch in placement.runs(common for kept in placement.kept if len(common := kept.intersect(due))):
                for span, run in self._layout.groups(stretch):
                    blocks = [self.inner.read(index, span) for index in self._layout.full]
                    position = placement.position_of(span.start)
                    segments = grown(segments, self._layout.segment(span, run, blocks, position))
            self.segments, self.frontier = segments, edge
            self._reseat(placement, self._layout.format.group_tokens)

    def _edge(self) -> int:
        """Ledger position of the group in which the first of the recent tokens lies."""
        left, group = self._layout.recent_tokens, self._layout.format.group_tokens
        for span in reversed(self.placement.kept):
            if len(span) >= left:
                return (span.stop - left) // group * group
            left -= len(span)
        return 0

    def _near(self, placement: Placement) -> Placement:
        """What the inner state holds of it."""
        kept = tuple(Span(max(s.start, self.frontier), s.stop) for s in placement.kept if s.stop > self.frontier)
        return Placement(placement.length, kept, placement.bases, "", placement.floor)

    def _reseat(self, placement: Placement, room: int) -> None:
        """A new inner state for ``placement``, filled from the old one; ``ValueError`` where that lacks a window."""
        near = self._near(placement)
        blocks = []
        for index, group in enumerate(self.geometry.groups):
            spans = near.kept
            if group.window is not None:
                spans = (Span(min(near.length, self._window_start(group, near.length)), near.length),)
            blocks += [(index, run, self.inner.read(index, run)) for run in near.runs(spans) if len(run)]
        with torch.inference_mode(False), torch.no_grad():
            inner = self._layout.opened(near.tokens + room)
            inner.place(near, room)
            for index, run, block in blocks:
                copied(block, inner.target(index, run))
            inner.restored(self._ids[: near.length])
        self.inner.close()
        self.inner, self._older = inner, None

    # -- forgetting ---------------------------------------------------------------------------------------------------

    def keep(self, spans: Sequence[Span]) -> None:
        self._check_open()
        before, kept = self.placement, merged(spans)
        slices(before.kept, kept)  # refuses what is not held
        after = self._after_keep(kept)
        near = self._near(after)
        if (near.kept, near.bases) != (self._near(before).kept, before.bases):
            self._reseat(after, self._layout.format.group_tokens)
        self._set(after)
        self._cut(kept)

    def _cut(self, kept: Iterable[Span]) -> None:
        spans = list(kept)
        with torch.inference_mode(False), torch.no_grad():
            self.segments = tuple(part for s in self.segments for span in spans for part in cut(s, span))
        self._older = None

    def crop(self, length: int) -> None:
        self._check_open()
        self._check_crop(length)
        if length >= self.frontier:
            self.inner.crop(length)
            del self._ids[length:]
        else:
            placement = self.placement
            kept = tuple(run for s in placement.kept if len(run := s.intersect(Span(0, length))))
            try:
                self._reseat(Placement(length, kept, placement.bases, "", placement.floor), 0)
            except ValueError as error:
                raise ValueError(f"cannot crop to {length}: {error}") from None
            del self._ids[length:]
            self.frontier = length
            self._cut(kept)
        self._older = None

    # -- undo ---------------------------------------------------------------------------------------------------------

    def undo_record(self) -> Undo:
        self._check_open()
        self._layout.sweep()
        self._undo = QuantizedUndo(self, self._layout.closed)
        self._marked = (self._past, self._grows)
        return self._undo

    def settle(self) -> None:
        self._undo = None

    def rollback(self, undo: Undo) -> None:
        self._check_open()
        then = undo.placement
        moved = self._check_rollback(then)
        if moved and undo is not self._undo:
            raise ValueError("tokens were evicted since, and this is not the open undo record")
        assert isinstance(undo, QuantizedUndo)
        self._roll_back(then, moved)
        self.inner.close()
        self.inner = _forked(undo.inner)
        self.segments, self.frontier, self._older = undo.segments, undo.frontier, None

    # -- storing and restoring ----------------------------------------------------------------------------------------

    def capture(self, span: Span) -> tuple[CapturedPart, ...]:
        self._check_open()
        self._check_capture(span)
        parts: list[CapturedPart] = []
        for run in self._held_runs(span):
            if run.start >= self.frontier:
                parts += self.inner.capture(run)
            else:
                parts += [CapturedPart(index, run, to_cpu(self.read(index, run))) for index in self._layout.full]
        return tuple(parts)

    def window_snapshot(self) -> tuple[CapturedPart, ...]:
        self._check_open()
        return self.inner.window_snapshot()

    def read(self, group: int, span: Span) -> KVBlock:
        self._check_open()
        if group not in self._layout.full or span.start >= self.frontier:
            return self.inner.read(group, span)
        slices(self.placement.kept, (span,))  # refuses what is not held
        blocks = [
            self._expanded(group, s, s.span.intersect(span)) for s in self.segments if len(s.span.intersect(span))
        ]
        if span.stop > self.frontier:
            blocks.append(self.inner.read(group, Span(self.frontier, span.stop)))
        return side_by_side(blocks)

    def _expanded(self, group: int, segment: Segment, span: Span) -> KVBlock:
        """``span`` of a segment, in one run of positions, where it was computed."""
        lo, hi, run = span.start - segment.span.start, span.stop - segment.span.start, segment.run
        first, last = lo // run * run, -(-hi // run) * run
        position = self.placement.position_of(span.start) - (lo - first)
        layout, shape = self._layout, self.geometry.groups[group]
        keys, values = [], []
        with torch.inference_mode(False), torch.no_grad():
            piece = Piece(segment, first, last, position)
            for layer in shape.layers:
                pair = [
                    torch.empty((shape.kv_heads, last - first, dim), dtype=layout.wide, device=layout.device)
                    for dim in (shape.key_dim, shape.value_dim)
                ]
                layout.expand(layer, [piece], pair[0], pair[1])
                keys.append(pair[0][:, lo - first : hi - first].to(layout.dtype))
                values.append(pair[1][:, lo - first : hi - first].to(layout.dtype))
        return KVBlock(tuple(keys), tuple(values))

    def place(self, placement: Placement, room: int = 0) -> None:
        """Room for what will be exact: ``room`` takes none ahead beyond that."""
        self._check_open()
        self._place(placement)
        self.frontier = self._edge()
        near = self._near(placement)
        room = min(room, max(0, self._layout.recent_tokens + self._layout.format.group_tokens - near.tokens))
        self.inner.close()
        with torch.inference_mode(False):
            self.inner = self._layout.opened(near.tokens + room)
            self.inner.place(near, room)
        self._filling = Filling(self._layout, placement, self.frontier)

    def target(self, group: int, span: Span) -> KVBlock:
        self._check_open()
        if group not in self._layout.full or span.start >= self.frontier:
            return self.inner.target(group, span)
        slices(self.placement.kept, (span,))  # refuses what was not placed
        assert self._filling is not None
        return self._filling.target(group, span)

    def filled(self, group: int, span: Span) -> None:
        if self._filling is not None and group in self._layout.full and span.start < self.frontier:
            self._filling.written(group, span)

    def restored(self, ids: Sequence[int]) -> None:
        self._check_open()
        self._check_restored(ids)
        length = self.length
        if self._filling is not None:
            for group, span, block in self._filling.beyond():
                copied(block, self.inner.target(group, span))
            self.segments = self._filling.finish(min(len(ids), self.frontier))
        self._ids = array("i", [*ids, *[0] * (length - len(ids))])
        self.inner.restored(self._ids)
        self._filling = self._older = None
        if len(ids) < length:
            self.crop(len(ids))

    # -- life ---------------------------------------------------------------------------------------------------------

    def fork(self) -> QuantizedKV:
        self._check_open()
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._ids = array("i", self._ids)
        twin._undo = None
        twin._filling = None
        twin.inner = _forked(self.inner)
        return twin

    def close(self) -> None:
        self._forget()
        self._undo = self._filling = None
        self.inner.close()
        self.segments, self.frontier, self._older = (), 0, None
        self._layout.sweep()

    def check_integrity(self) -> None:
        self._check_placement()
        self.inner.check_integrity()
        placement, near = self.placement, self.inner.placement
        wanted = self._near(placement)
        assert (near.length, near.kept, near.floor) == (wanted.length, wanted.kept, wanted.floor), (near, wanted)
        assert self.inner.next_position == self.next_position, (self.inner.next_position, self.next_position)
        assert self.inner.ids == self._ids
        before = [run for s in placement.kept if len(run := s.intersect(Span(0, self.frontier)))]
        assert list(merged([s.span for s in self.segments])) == before, (self.segments, before)
        for segment in self.segments:
            segment.check_integrity(self._layout.format)


def _zeros(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(t, dtype=torch.float64) for t in tensors)


def _forked(inner: PlacedKV) -> PlacedKV:
    twin = inner.fork()
    assert isinstance(twin, PlacedKV)
    return twin
