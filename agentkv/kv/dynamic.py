"""The ``dynamic`` layout: contiguous tensors a layer, grown geometrically, no copy a token.

Full groups, one buffer a layer; what is kept lies one after the other, whatever was evicted between::

    keys[layer]  [Hkv, capacity, D]      slots [0, tokens) used, [tokens, capacity) free

Sliding groups keep ``[base, length)`` with ``length − base ≥ min(length, window)``; when the buffer is full, its last
``window`` tokens move to the front, which costs less than one copied token a token::

    [ old … old | last `window` tokens ]  →  [ last `window` tokens | free … free ]
"""

from __future__ import annotations

import torch

from agentkv.kv.buffers import GroupBuffers
from agentkv.kv.contiguous import ContiguousKV
from agentkv.kv.contract import LAYOUTS, Evictions, Layout, SequenceKV
from agentkv.kv.foretelling import contiguous_nbytes, most_in_window, new_tokens
from agentkv.kv.stepping import ContiguousLayout
from agentkv.types import KVGeometry, LayerGroup

__all__ = ["DynamicKV", "DynamicLayout"]

_STEP = 64
"""Capacities are multiples of this many tokens."""
_GROWTH = 1.5


def _rounded(tokens: int) -> int:
    return -(-tokens // _STEP) * _STEP


def _grown(capacity: int, needed: int, limit: int | None = None) -> int:
    """The next capacity that holds ``needed`` tokens: geometric, so that growth is amortised.

    One of a fixed row of capacities, so that many small growths lead to where one large one does.
    """
    if needed <= capacity:
        return capacity
    if not capacity:
        return _rounded(needed)
    grown = _STEP
    while grown < needed:
        grown = _rounded(int(grown * _GROWTH))
    # A limit that was left behind is the past's: the session's policy has changed.
    return grown if limit is None or needed > limit else min(grown, _rounded(limit))


def _opening(group: LayerGroup, tokens: int) -> int:
    """Capacity of a new state that is to hold ``tokens``: sliding groups need twice their window at most."""
    return _rounded(tokens if group.window is None else 2 * min(tokens, group.window))


def _room(group: LayerGroup, capacity: int, needed: int, limit: int | None) -> int:
    """Slots of one group for ``needed`` of them; more for more."""
    if group.window is None:
        return _grown(capacity, needed, limit)
    # Twice the window, so that compaction happens once a window at most.
    most = max(_rounded(2 * group.window), _rounded(needed))
    return max(capacity, min(_grown(capacity, 2 * needed), most), _rounded(needed))


class DynamicKV(ContiguousKV):
    """See the module's docstring."""

    def __init__(
        self,
        geometry: KVGeometry,
        device: torch.device,
        tokens: int = 0,
        limit: int | None = None,
        rebase_at: int = Layout.rebase_at,
    ) -> None:
        super().__init__(geometry, device, rebase_at)
        self.limit = limit
        for buffers in self._groups:
            buffers.allocate(_opening(buffers.group, tokens))

    def _room(self, buffers: GroupBuffers, used: int, more: int) -> int:
        return _room(buffers.group, buffers.capacity, used + more, self.limit)

    def _left(self, buffers: GroupBuffers, used: int) -> int:
        """Where the state may hold less than it did, what it will not need is given back."""
        if buffers.group.window is None and self.limit is not None and used <= self.limit:
            return min(buffers.capacity, _rounded(self.limit))
        return buffers.capacity


@LAYOUTS.register("dynamic")
class DynamicLayout(ContiguousLayout):
    """Contiguous live KV; see the module's docstring. The default."""

    name = "dynamic"

    def open(self, tokens: int = 0, limit: int | None = None) -> DynamicKV:
        return DynamicKV(self.geometry, self.device, tokens, limit, self.rebase_at)

    def grown(self, tokens: int) -> int:
        return _grown(_STEP, tokens)

    def bytes_needed(
        self, kv: SequenceKV | None, tokens: int, limit: int | None = None, evictions: Evictions | None = None
    ) -> int:
        live = kv if isinstance(kv, DynamicKV) else None
        new, capacities = new_tokens(kv, tokens, evictions), []
        for index, group in enumerate(self.geometry.groups):
            held = _opening(group, tokens) if live is None else live.buffers(index).capacity
            most = tokens if group.window is None else most_in_window(group, tokens, evictions, new, self.piece_tokens)
            capacities.append(_room(group, held, most, limit if live is None else live.limit))
        return contiguous_nbytes(self.geometry, kv, tokens, evictions, capacities)
