"""One layer group of one session in contiguous tensors, a slot a token.

    slots      0 .. moved                      .. used           .. capacity
    keys     [ turned to where they are seen  | as computed      | free ]
    masters  [ the same keys, as computed     ]
    values   [ as computed                                       | free ]

Keys before ``moved`` are copies, turned on from their masters whenever evictions change how far; a key is thus rounded
once, however often it moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentkv.codecs import KVBlock
from agentkv.kv.turning import turned_tokens
from agentkv.rope import Rotation, rotate
from agentkv.types import KVGeometry, LayerGroup

__all__ = ["GroupBuffers", "Pieces"]

Pieces = Callable[[int], tuple[list[Tensor], list[Tensor]]]
"""For the group's layer ``i``: keys as computed and values, ``[Hkv, t, D]`` each, one after the other."""


@dataclass(slots=True, eq=False)
class GroupBuffers:
    """See the module's docstring. ``base``: ledger position of slot 0 in a sliding group, 0 in a full one.

    ``shared``: a fork uses the same tensors, or a capture shows what was taken back since: nothing may be written to
    them. ``lent``: captures show slots before this one. ``fixed``: the tensors stay where they are, whatever happens.
    ``torn``: an allocation failed while rows were moved, so that some layers hold the old ones and some the new.
    """

    group: LayerGroup
    rotations: tuple[Rotation | None, ...]
    dtype: torch.dtype
    device: torch.device
    fixed: bool = False
    capacity: int = 0
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    masters: list[Tensor | None] = field(default_factory=list)
    moved: int = 0
    base: int = 0
    shared: bool = False
    lent: int = 0
    torn: bool = False

    @classmethod
    def of(cls, geometry: KVGeometry, index: int, device: torch.device, *, fixed: bool = False) -> GroupBuffers:
        """Empty buffers of one group, without tensors."""
        group = geometry.groups[index]
        rotations = tuple(geometry.rotations[layer] if geometry.rotations else None for layer in group.layers)
        return cls(group, rotations, getattr(torch, geometry.dtype), device, fixed)

    def allocate(self, capacity: int) -> None:
        """New tensors, whose content is undefined."""
        group = self.group
        self.keys = [self._empty(capacity, group.key_dim) for _ in group.layers]
        self.values = [self._empty(capacity, group.value_dim) for _ in group.layers]
        self.masters = [None for _ in group.layers]
        self.capacity, self.moved, self.shared, self.lent = capacity, 0, False, 0

    def _empty(self, capacity: int, dim: int) -> Tensor:
        return torch.empty((self.group.kv_heads, capacity, dim), dtype=self.dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; those shared with a fork count on both sides."""
        tensors = (*self.keys, *self.values, *(m for m in self.masters if m is not None))
        return sum(t.numel() for t in tensors) * self.dtype.itemsize

    def computed(self, layer: int, lo: int, hi: int) -> list[Tensor]:
        """Keys of slots ``[lo, hi)`` as they were computed: views, in order."""
        master, keys = self.masters[layer], self.keys[layer]
        if master is None or lo >= self.moved:
            return [keys[:, lo:hi]]
        if hi <= self.moved:
            return [master[:, lo:hi]]
        return [master[:, lo:], keys[:, self.moved : hi]]

    def block(self, lo: int, hi: int) -> KVBlock:
        """KV of slots ``[lo, hi)`` as computed, none or all of them before ``moved``: views."""
        keys = []
        for layer in range(len(self.keys)):
            (part,) = self.computed(layer, lo, hi)
            keys.append(part)
        return KVBlock(tuple(keys), tuple(v[:, lo:hi] for v in self.values))

    def rows(self, slots: Sequence[tuple[int, int]]) -> Pieces:
        """What the slots hold, for :meth:`seat`."""

        def pieces(layer: int) -> tuple[list[Tensor], list[Tensor]]:
            keys = [part for lo, hi in slots for part in self.computed(layer, lo, hi)]
            return keys, [self.values[layer][:, lo:hi] for lo, hi in slots]

        return pieces

    def seat(self, pieces: Pieces, deltas: Sequence[tuple[int, int]], capacity: int) -> None:
        """Hold exactly ``pieces`` from slot 0 on, ``deltas`` (tokens, delta) saying how far each key is turned.

        In new tensors, one layer at a time to bound the peak, so that views of the old ones stay valid; where the
        tensors are ``fixed``, in the old ones. ``torn`` where an allocation fails.
        """
        self.torn = True
        self._seat(pieces, deltas, capacity)
        self.torn = False

    def grow(self, deltas: Sequence[tuple[int, int]], capacity: int) -> None:
        """Room for ``capacity`` slots behind the same rows. Where an allocation fails, some layers have that room and
        some do not, and all is as good as before."""
        self._seat(self.rows([(0, sum(tokens for tokens, _ in deltas))]), deltas, capacity)

    def _seat(self, pieces: Pieces, deltas: Sequence[tuple[int, int]], capacity: int) -> None:
        total, moved = sum(tokens for tokens, _ in deltas), turned_tokens(deltas)
        turned = _first(deltas, moved)
        for layer in range(len(self.group.layers)):
            key_parts, value_parts = pieces(layer)
            keys = self._filled(key_parts, self.group.key_dim, capacity)
            values = self._filled(value_parts, self.group.value_dim, capacity)
            rotation = self.rotations[layer]
            master = None
            if moved and rotation is not None:
                master = keys[:, :moved].clone()
                keys[:, :moved] = rotate(master, turned, rotation)
            self.masters[layer] = master
            if self.fixed and not self.shared and capacity == self.capacity:
                self.keys[layer][:, :total] = keys[:, :total]
                self.values[layer][:, :total] = values[:, :total]
            else:
                self.keys[layer], self.values[layer] = keys, values
        self.moved, self.capacity, self.shared, self.lent = moved, capacity, False, 0

    def _filled(self, parts: Sequence[Tensor], dim: int, capacity: int) -> Tensor:
        out, at = self._empty(capacity, dim), 0
        for part in parts:
            out[:, at : at + part.shape[1]] = part
            at += part.shape[1]
        return out

    def lend(self, lo: int, hi: int) -> KVBlock:
        """KV of slots ``[lo, hi)`` as computed: in host memory, it stays as it is whatever happens here."""
        block = self.block(lo, hi)
        if self.device.type != "cpu":
            return block  # the caller copies it
        if self.fixed:
            return KVBlock(tuple(t.clone() for t in block.keys), tuple(t.clone() for t in block.values))
        self.lent = max(self.lent, hi)
        return block

    def take_back(self, used: int) -> None:
        """Slots from ``used`` on are free again."""
        self.shared |= used < self.lent

    def expect(self, deltas: Sequence[tuple[int, int]]) -> None:
        """Make the masters that a restored state needs, empty."""
        self.moved = turned_tokens(deltas)
        for layer, rotation in enumerate(self.rotations):
            need = self.moved and rotation is not None
            self.masters[layer] = self._empty(self.moved, self.group.key_dim) if need else None

    def turn(self, deltas: Sequence[tuple[int, int]]) -> None:
        """Fill the keys before ``moved`` from their masters."""
        turned = _first(deltas, self.moved)
        for layer, (master, rotation) in enumerate(zip(self.masters, self.rotations, strict=True)):
            if master is not None and rotation is not None:
                self.keys[layer][:, : self.moved] = rotate(master, turned, rotation)

    def fork(self) -> GroupBuffers:
        """The same tensors from both sides, until one seats its own."""
        self.shared = True
        return GroupBuffers(
            self.group, self.rotations, self.dtype, self.device, self.fixed, self.capacity,
            list(self.keys), list(self.values), list(self.masters), self.moved, self.base, True, self.lent,
        )  # fmt: skip

    def release(self) -> None:
        """Let the tensors go."""
        self.keys, self.values, self.masters = [], [], []
        self.capacity = self.moved = self.base = self.lent = 0
        self.shared = self.torn = False

    def check_integrity(self, used: int) -> None:
        """``AssertionError`` where shapes and counters disagree; ``used`` slots are taken."""
        n, name = len(self.group.layers), self.group.name
        assert not self.torn, name
        assert len(self.keys) == len(self.values) == len(self.masters) == n, (name, len(self.keys), n)
        assert 0 <= self.moved <= used <= self.capacity, (name, self.moved, used, self.capacity)
        for tensors, dim in ((self.keys, self.group.key_dim), (self.values, self.group.value_dim)):
            for t in tensors:
                # More where a growth failed half-way.
                assert t.shape[0] == self.group.kv_heads and t.shape[2] == dim, (name, tuple(t.shape))
                assert t.shape[1] >= self.capacity, (name, tuple(t.shape))
                assert t.dtype == self.dtype, (name, t.dtype)
        for master, rotation in zip(self.masters, self.rotations, strict=True):
            wanted = self.moved if rotation is not None else 0
            assert (0 if master is None else master.shape[1]) == wanted, (name, wanted)


def _first(deltas: Sequence[tuple[int, int]], tokens: int) -> list[tuple[int, int]]:
    taken = []
    for count, delta in deltas:
        if tokens <= 0:
            break
        taken.append((min(count, tokens), delta))
        tokens -= count
    return taken
