"""One packed step over contiguous live KV: where each session's new tokens go, and what they attend to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentkv.kv.attention import Reach, attend
from agentkv.kv.buffers import GroupBuffers
from agentkv.kv.contiguous import ContiguousKV
from agentkv.kv.contract import AttentionTraits, Layout, Slot
from agentkv.types import KVGeometry

__all__ = ["ContiguousLayout", "SlotPlan", "joined"]


@dataclass(frozen=True, slots=True)
class _GroupPlan:
    """One session in one layer group: slots ``[free, …)`` are written, ``[first, first + count)`` attended."""

    buffers: GroupBuffers
    free: int
    first: int
    count: int
    reach: Reach


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """One session's share of a step: rows ``[start, start + tokens)``."""

    start: int
    tokens: int
    groups: tuple[_GroupPlan, ...]


class ContiguousLayout(Layout[list[SlotPlan]]):
    """What ``dynamic`` and ``static`` do alike in a step."""

    def __init__(self, geometry: KVGeometry, device: torch.device) -> None:
        super().__init__(geometry, device)
        self._dtype: torch.dtype = getattr(torch, geometry.dtype)
        self._where = {
            layer: (index, position)
            for index, group in enumerate(geometry.groups)
            for position, layer in enumerate(group.layers)
        }

    def plan(self, slots: Sequence[Slot]) -> list[SlotPlan]:
        return [self._plan_slot(slot) for slot in slots]

    def _plan_slot(self, slot: Slot) -> SlotPlan:
        kv = slot.kv
        assert isinstance(kv, ContiguousKV)
        tokens = slot.tokens
        groups = []
        for index, group in enumerate(self.geometry.groups):
            buffers = kv.buffers(index)
            past = kv.used(buffers)
            # Slots [first, past + tokens) are visible to at least one of the queries, which go behind past.
            first = 0 if group.window is None else max(0, past - group.window + 1)
            reach = Reach(tokens, past - first, group.window, self._dtype, self.device)
            groups.append(_GroupPlan(buffers, past, first, past + tokens - first, reach))
        return SlotPlan(slot.start, tokens, tuple(groups))

    def write(self, layer: int, keys: Tensor, values: Tensor, meta: list[SlotPlan]) -> None:
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

    def attend(self, layer: int, queries: Tensor, meta: list[SlotPlan], traits: AttentionTraits) -> Tensor:
        group, position = self._where[layer]
        outputs = []
        for slot in meta:
            plan = slot.groups[group]
            k = plan.buffers.keys[position].narrow(1, plan.first, plan.count)
            v = plan.buffers.values[position].narrow(1, plan.first, plan.count)
            q = queries.narrow(1, slot.start, slot.tokens)
            outputs.append(attend(q, k, v, plan.reach, traits))
        return joined(outputs, queries.shape[1])

    def gather(self, layer: int, slot: SlotPlan, keys: Tensor, values: Tensor) -> None:
        """Copy what the slot's queries see of older tokens, turned, into ``[Hkv, past, D]`` tensors."""
        group, position = self._where[layer]
        plan = slot.groups[group]
        past = plan.count - slot.tokens
        keys.copy_(plan.buffers.keys[position].narrow(1, plan.first, past))
        values.copy_(plan.buffers.values[position].narrow(1, plan.first, past))


def joined(outputs: list[Tensor], rows: int) -> Tensor:
    """The slots' outputs ``[T, Hq, Dv]`` as one for all ``rows`` of the batch."""
    padding = rows - sum(out.shape[0] for out in outputs)
    if padding:
        # Their output is discarded, but must be finite.
        outputs = [*outputs, outputs[0].new_zeros((padding, *outputs[0].shape[1:]))]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
