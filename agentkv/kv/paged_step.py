"""One packed step over paged live KV: which rows of which slabs are written and gathered, and how keys are turned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentkv.kv.attention import Reach, attend
from agentkv.kv.contract import AttentionTraits, Layout, Slot
from agentkv.kv.paged_pool import Rows
from agentkv.kv.stepping import joined
from agentkv.rope import Rotation, angles, turn
from agentkv.types import KVGeometry, Span

if TYPE_CHECKING:
    from agentkv.kv.paged import PagedKV

__all__ = ["PagedPlan", "PagedStepping"]

Turns = dict[Rotation, tuple[Tensor, Tensor]]
"""Cosines and sines ``[moved, 1, pairs]`` of the first ``moved`` keys."""


@dataclass(frozen=True, slots=True)
class _GroupPlan:
    """One session in one layer group: ``writes`` take its new rows in order, ``reads`` are what its queries attend."""

    writes: list[Rows]
    reads: list[Rows]
    moved: int
    turns: Turns
    reach: Reach


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """One session's share of a step: rows ``[start, start + tokens)``."""

    start: int
    tokens: int
    groups: tuple[_GroupPlan, ...]


class PagedStepping(Layout[list[PagedPlan]]):
    """What the ``paged`` layout does in a step.

    Attention gathers a session's rows as ``[L, Hkv, D]``: the strides, and so the bits, are the same wherever the pages
    lie.
    """

    def __init__(self, geometry: KVGeometry, device: torch.device) -> None:
        super().__init__(geometry, device)
        self._dtype: torch.dtype = getattr(torch, geometry.dtype)
        self._where = {
            layer: (index, position)
            for index, group in enumerate(geometry.groups)
            for position, layer in enumerate(group.layers)
        }
        self._rotations: list[set[Rotation]] = [
            {r for layer in group.layers if geometry.rotations and (r := geometry.rotations[layer]) is not None}
            for group in geometry.groups
        ]

    def plan(self, slots: Sequence[Slot]) -> list[PagedPlan]:
        return [self._plan_slot(slot) for slot in slots]

    def _plan_slot(self, slot: Slot) -> PagedPlan:
        kv: PagedKV = slot.kv  # type: ignore[assignment]  # this layout opened it
        tokens, groups = slot.tokens, []
        for index, group in enumerate(self.geometry.groups):
            table, held = kv.table(index), kv.held(index)
            past = table.tokens
            new = table.upcoming(tokens)
            # Tokens [first, past + tokens) are visible to at least one of the queries, which go behind past.
            first = 0 if group.window is None else max(0, past - group.window + 1)
            if first:
                held = (Span(table.base + first, table.base + past),)
            moved, turns = self._turns(index, kv.deltas(held))
            reach = Reach(tokens, past - first, group.window, self._dtype, self.device)
            reads = table.rows([*table.cut(first, past), *new])
            groups.append(_GroupPlan(table.rows(new), reads, moved, turns, reach))
        return PagedPlan(slot.start, tokens, tuple(groups))

    def _turns(self, index: int, deltas: list[tuple[int, int]]) -> tuple[int, Turns]:
        """How many of the first keys are turned, and how far."""
        while deltas and not deltas[-1][1]:
            deltas.pop()
        if not deltas:
            return 0, {}
        turns: Turns = {}
        for rotation in self._rotations[index]:
            cos, sin = angles(deltas, rotation, self._dtype)
            turns[rotation] = (cos[:, None].to(self.device), sin[:, None].to(self.device))
        return sum(tokens for tokens, _ in deltas), turns

    def write(self, layer: int, keys: Tensor, values: Tensor, meta: list[PagedPlan]) -> None:
        group, position = self._where[layer]
        into, new = [], []
        for slot in meta:
            at = slot.start
            for slab, row, n in slot.groups[group].writes:
                into.append(slab.keys[position].narrow(0, row, n))
                into.append(slab.values[position].narrow(0, row, n))
                new.append(keys.narrow(1, at, n).transpose(0, 1))
                new.append(values.narrow(1, at, n).transpose(0, 1))
                at += n
        torch._foreach_copy_(into, new)

    def attend(self, layer: int, queries: Tensor, meta: list[PagedPlan], traits: AttentionTraits) -> Tensor:
        group, position = self._where[layer]
        rotation = self.geometry.rotations[layer] if self.geometry.rotations else None
        outputs = []
        for slot in meta:
            plan = slot.groups[group]
            k = _gathered([slab.keys[position].narrow(0, row, n) for slab, row, n in plan.reads])
            v = _gathered([slab.values[position].narrow(0, row, n) for slab, row, n in plan.reads])
            if plan.moved and rotation is not None:
                if len(plan.reads) == 1:
                    k = k.clone()  # it is the page itself
                turn(k[: plan.moved], *plan.turns[rotation], rotation.interleaved)
            q = queries.narrow(1, slot.start, slot.tokens)
            outputs.append(attend(q, k.transpose(0, 1), v.transpose(0, 1), plan.reach, traits))
        return joined(outputs, queries.shape[1])

    def gather(self, layer: int, slot: PagedPlan, keys: Tensor, values: Tensor) -> None:
        """Copy what the slot's queries see of older tokens, turned, into ``[Hkv, past, D]`` tensors."""
        group, position = self._where[layer]
        plan = slot.groups[group]
        past, at = plan.reach.past, 0
        for slab, row, n in plan.reads:
            n = min(n, past - at)
            if n:
                keys[:, at : at + n] = slab.keys[position].narrow(0, row, n).transpose(0, 1)
                values[:, at : at + n] = slab.values[position].narrow(0, row, n).transpose(0, 1)
            at += n
        rotation = self.geometry.rotations[layer] if self.geometry.rotations else None
        if plan.moved and rotation is not None:
            turn(keys[:, : plan.moved].transpose(0, 1), *plan.turns[rotation], rotation.interleaved)


def _gathered(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
