"""The ``dynamic`` layout: contiguous tensors a layer, grown geometrically, no copy a token.

Full groups, one buffer a layer::

    keys[layer]  [Hkv, capacity, D]      positions [0, length) used, [length, capacity) free

Sliding groups keep ``[base, length)`` with ``length − base ≥ min(length, window)``; when the buffer is full, its last
``window`` tokens move to the front, which costs less than one copied token a token::

    [ old … old | last `window` tokens ]  →  [ last `window` tokens | free … free ]
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentkv.codecs import KVBlock
from agentkv.errors import Closed
from agentkv.kv.attention import Reach, attend
from agentkv.kv.contract import (
    LAYOUTS,
    AttentionTraits,
    Capture,
    CapturedPart,
    Layout,
    SequenceKV,
    Slot,
    Undo,
)
from agentkv.types import KVGeometry, LayerGroup, Span

__all__ = ["DynamicKV", "DynamicLayout"]

_STEP = 64
"""Capacities are multiples of this many tokens."""
_GROWTH = 1.5


def _rounded(tokens: int) -> int:
    return -(-tokens // _STEP) * _STEP


def _grown(capacity: int, needed: int) -> int:
    """The next capacity that holds ``needed`` tokens: geometric, so that growth is amortised."""
    return capacity if needed <= capacity else _rounded(max(needed, int(capacity * _GROWTH)))


def _opening(group: LayerGroup, tokens: int) -> int:
    """Capacity of a new state that is to hold ``tokens``: sliding groups need twice their window at most."""
    return _rounded(tokens if group.window is None else 2 * min(tokens, group.window))


@dataclass(slots=True)
class _GroupBuffers:
    """One layer group's tensors: ``[Hkv, capacity, D]`` a layer. ``base`` is the ledger position of slot 0."""

    group: LayerGroup
    keys: list[Tensor]
    values: list[Tensor]
    base: int = 0
    capacity: int = 0
    shared: bool = False

    def block(self, start: int, stop: int) -> KVBlock:
        """Views of ledger positions ``[start, stop)``."""
        lo, hi = start - self.base, stop - self.base
        return KVBlock(tuple(k[:, lo:hi] for k in self.keys), tuple(v[:, lo:hi] for v in self.values))

    def window_start(self, length: int) -> int:
        """First position that a query at ``length`` or later may still see."""
        return 0 if self.group.window is None else max(0, length - self.group.window)


class DynamicKV(SequenceKV):
    """See the module's docstring."""

    def __init__(self, geometry: KVGeometry, device: torch.device, tokens: int) -> None:
        self.geometry = geometry
        self._device = device
        self._dtype: torch.dtype = getattr(torch, geometry.dtype)
        self._ids: array[int] = array("i")
        self._closed = False
        self._groups = [_GroupBuffers(group, [], []) for group in geometry.groups]
        for buffers in self._groups:
            group = buffers.group
            buffers.capacity = _opening(group, tokens)
            for tensors, dim in ((buffers.keys, group.key_dim), (buffers.values, group.value_dim)):
                tensors.extend(self._empty(group, buffers.capacity, dim) for _ in group.layers)

    def _empty(self, group: LayerGroup, capacity: int, dim: int) -> Tensor:
        return torch.empty((group.kv_heads, capacity, dim), dtype=self._dtype, device=self._device)

    @property
    def length(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> Sequence[int]:
        return self._ids

    @property
    def nbytes(self) -> int:
        return self.geometry.itemsize * sum(b.capacity * b.group.values_per_token for b in self._groups)

    def buffers(self, group: int) -> _GroupBuffers:
        """The tensors of one group, for the layout."""
        return self._groups[group]

    def reserve(self, tokens: int) -> None:
        self._check_open()
        length = self.length
        for buffers in self._groups:
            base, capacity = buffers.base, buffers.capacity
            if length + tokens - base > capacity:
                base = buffers.window_start(length)
                needed = length + tokens - base
                if buffers.group.window is None:
                    capacity = _grown(capacity, needed)
                else:
                    # Twice the window, so that compaction happens once a window at most.
                    most = max(_rounded(2 * buffers.group.window), _rounded(needed))
                    capacity = max(capacity, min(_grown(capacity, 2 * needed), most), _rounded(needed))
            elif not buffers.shared:
                continue
            self._move(buffers, base, capacity)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this KV state was released")

    def _move(self, buffers: _GroupBuffers, base: int, capacity: int) -> None:
        """Re-seat the group at ``base`` in buffers of ``capacity``, one layer at a time to bound the peak."""
        lo, hi = base - buffers.base, self.length - buffers.base
        for tensors in (buffers.keys, buffers.values):
            for i, old in enumerate(tensors):
                new = self._empty(buffers.group, capacity, old.shape[2])
                new[:, : hi - lo] = old[:, lo:hi]
                tensors[i] = new
        buffers.base, buffers.capacity, buffers.shared = base, capacity, False

    def advance(self, ids: Sequence[int]) -> None:
        self._check_open()
        self._ids.extend(ids)

    def undo_record(self) -> Undo:
        self._check_open()
        return Undo(self.length, self._window_copies())

    def _window_copies(self) -> tuple[CapturedPart, ...]:
        length = self.length
        parts = []
        for index, buffers in enumerate(self._groups):
            start = buffers.window_start(length)
            if buffers.group.window is not None and start < length:
                parts.append(CapturedPart(index, Span(start, length), _cloned(buffers.block(start, length))))
        return tuple(parts)

    def rollback(self, undo: Undo) -> None:
        self._check_open()
        if undo.length > self.length:
            raise ValueError(f"cannot roll forward: {self.length} tokens are held, the record has {undo.length}")
        del self._ids[undo.length :]
        for part in undo.windows:
            buffers = self._groups[part.group]
            if buffers.base <= part.span.start:
                continue  # never compacted since: the window is still where it was
            if buffers.shared:
                self._move_empty(buffers, buffers.capacity)
            buffers.base = part.span.start
            _copy(part.block, buffers.block(*part.span))
        if not self._ids:
            for buffers in self._groups:
                buffers.base = 0

    def window_snapshot(self) -> tuple[CapturedPart, ...]:
        self._check_open()
        return tuple(CapturedPart(p.group, p.span, _on_cpu(p.block)) for p in self._window_copies())

    def capture(self, span: Span, resume_points: Sequence[int]) -> Capture:
        self._check_open()
        if not 0 <= span.start < span.stop <= self.length:
            raise ValueError(f"cannot capture {span}: {self.length} tokens are held")
        parts: list[CapturedPart] = []
        for index, buffers in enumerate(self._groups):
            if buffers.group.window is None:
                parts.append(CapturedPart(index, span, _on_cpu(buffers.block(*span))))
                continue
            for point in resume_points:
                wanted = span.intersect(Span(buffers.window_start(point), point))
                if len(wanted):
                    if wanted.start < buffers.base:
                        raise ValueError(f"the window before {point} is gone: {wanted} wanted, {buffers.base} held")
                    parts.append(CapturedPart(index, wanted, _on_cpu(_cloned(buffers.block(*wanted)))))
        return Capture(span, tuple(self._ids[span.start : span.stop]), tuple(parts), tuple(resume_points))

    def place(self, length: int, room: int = 0) -> None:
        self._check_open()
        if self.length:
            raise ValueError("only an empty state can be placed")
        for buffers in self._groups:
            buffers.base = buffers.window_start(length)
            held = length - buffers.base
            capacity = held + room if buffers.group.window is None else held + min(room, buffers.group.window)
            if capacity > buffers.capacity or buffers.shared:
                self._move_empty(buffers, max(buffers.capacity, _rounded(capacity)))

    def target(self, group: int, span: Span) -> KVBlock:
        self._check_open()
        buffers = self._groups[group]
        if buffers.shared:
            raise ValueError(f"group {group} shares its tensors with a fork: call place() first")
        if span.start < buffers.base or span.stop - buffers.base > buffers.capacity:
            raise ValueError(f"no room for {span} in group {group}: call place() first")
        return buffers.block(*span)

    def _move_empty(self, buffers: _GroupBuffers, capacity: int) -> None:
        for tensors in (buffers.keys, buffers.values):
            for i, old in enumerate(tensors):
                tensors[i] = self._empty(buffers.group, capacity, old.shape[2])
        buffers.capacity, buffers.shared = capacity, False

    def restored(self, ids: Sequence[int]) -> None:
        self._check_open()
        for buffers in self._groups:
            if buffers.base > buffers.window_start(len(ids)) or len(ids) - buffers.base > buffers.capacity:
                raise ValueError(f"{len(ids)} tokens were not placed here: call place({len(ids)}) first")
        self._ids = array("i", ids)

    def fork(self) -> DynamicKV:
        self._check_open()
        twin = DynamicKV.__new__(DynamicKV)
        twin.geometry, twin._device, twin._dtype = self.geometry, self._device, self._dtype
        twin._ids, twin._closed = array("i", self._ids), self._closed
        twin._groups = []
        for b in self._groups:
            b.shared = True
            twin._groups.append(_GroupBuffers(b.group, list(b.keys), list(b.values), b.base, b.capacity, True))
        return twin

    def close(self) -> None:
        self._closed = True
        self._ids = array("i")
        for buffers in self._groups:
            buffers.keys, buffers.values, buffers.base, buffers.capacity, buffers.shared = [], [], 0, 0, False

    def check_integrity(self) -> None:
        assert not self._closed, "released"
        for b in self._groups:
            n = len(b.group.layers)
            assert len(b.keys) == len(b.values) == n, (b.group.name, len(b.keys), n)
            assert b.base <= b.window_start(self.length), (b.group.name, b.base, self.length)
            assert b.group.window is not None or b.base == 0, (b.group.name, b.base)
            assert self.length - b.base <= b.capacity, (b.group.name, self.length, b.base, b.capacity)
            for tensors, dim in ((b.keys, b.group.key_dim), (b.values, b.group.value_dim)):
                for t in tensors:
                    assert tuple(t.shape) == (b.group.kv_heads, b.capacity, dim), (b.group.name, tuple(t.shape))
                    assert t.dtype == self._dtype, (b.group.name, t.dtype)


def _cloned(block: KVBlock) -> KVBlock:
    return KVBlock(tuple(t.clone() for t in block.keys), tuple(t.clone() for t in block.values))


def _copy(source: KVBlock, into: KVBlock) -> None:
    for a, b in zip((*source.keys, *source.values), (*into.keys, *into.values), strict=True):
        b.copy_(a)


def _on_cpu(block: KVBlock) -> KVBlock:
    """The block in host memory: the same views on a CPU, pinned copies that have arrived on CUDA."""
    if not block.keys or block.keys[0].device.type == "cpu":
        return block
    from agentkv.kv.staging import to_host

    return to_host(block)


@dataclass(frozen=True, slots=True)
class _GroupPlan:
    """One session in one layer group: slots ``[free, …)`` are written, ``[first, first + count)`` attended."""

    buffers: _GroupBuffers
    free: int
    first: int
    count: int
    reach: Reach


@dataclass(frozen=True, slots=True)
class _SlotPlan:
    """One session's share of a step: rows ``[start, start + tokens)``."""

    start: int
    tokens: int
    groups: tuple[_GroupPlan, ...]


@LAYOUTS.register("dynamic")
class DynamicLayout(Layout[list[_SlotPlan]]):
    """Contiguous live KV; see the module's docstring. Default on CPU."""

    name = "dynamic"

    def __init__(self, geometry: KVGeometry, device: torch.device) -> None:
        super().__init__(geometry, device)
        self._dtype: torch.dtype = getattr(torch, geometry.dtype)
        self._where = {
            layer: (index, position)
            for index, group in enumerate(geometry.groups)
            for position, layer in enumerate(group.layers)
        }

    def open(self, tokens: int = 0) -> DynamicKV:
        return DynamicKV(self.geometry, self.device, tokens)

    def bytes_needed(self, kv: SequenceKV | None, tokens: int) -> int:
        total = 0
        for index, group in enumerate(self.geometry.groups):
            held = kv.buffers(index).capacity if isinstance(kv, DynamicKV) else 0
            capacity = _grown(held, tokens) if group.window is None else max(held, _opening(group, tokens))
            total += capacity * group.values_per_token
        return total * self.geometry.itemsize

    def plan(self, slots: Sequence[Slot]) -> list[_SlotPlan]:
        return [self._plan_slot(slot) for slot in slots]

    def _plan_slot(self, slot: Slot) -> _SlotPlan:
        kv = slot.kv
        assert isinstance(kv, DynamicKV)
        past, tokens = kv.length, slot.tokens
        groups = []
        for index, group in enumerate(self.geometry.groups):
            buffers = kv.buffers(index)
            # Keys [first, past + tokens) are visible to at least one of the queries [past, past + tokens).
            first = 0 if group.window is None else max(0, past - group.window + 1)
            reach = Reach(tokens, past - first, group.window, self._dtype, self.device)
            groups.append(_GroupPlan(buffers, past - buffers.base, first - buffers.base, past + tokens - first, reach))
        return _SlotPlan(slot.start, tokens, tuple(groups))

    def write(self, layer: int, keys: Tensor, values: Tensor, meta: list[_SlotPlan]) -> None:
        # One fused copy for all sessions: a step makes thousands of these calls, each cheaper than its dispatch.
        group, position = self._where[layer]
        into, new = [], []
        for slot in meta:
            plan = slot.groups[group]
            into.append(plan.buffers.keys[position].narrow(1, plan.free, slot.tokens))
            into.append(plan.buffers.values[position].narrow(1, plan.free, slot.tokens))
            new.append(keys.narrow(1, slot.start, slot.tokens))
            new.append(values.narrow(1, slot.start, slot.tokens))
        torch._foreach_copy_(into, new)

    def attend(self, layer: int, queries: Tensor, meta: list[_SlotPlan], traits: AttentionTraits) -> Tensor:
        group, position = self._where[layer]
        outputs = []
        for slot in meta:
            plan = slot.groups[group]
            k = plan.buffers.keys[position].narrow(1, plan.first, plan.count)
            v = plan.buffers.values[position].narrow(1, plan.first, plan.count)
            q = queries.narrow(1, slot.start, slot.tokens)
            outputs.append(attend(q, k, v, plan.reach, traits))
        padding = queries.shape[1] - meta[-1].start - meta[-1].tokens
        if padding:
            # Their output is discarded, but must be finite.
            outputs.append(outputs[0].new_zeros((padding, *outputs[0].shape[1:])))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
