"""The ``static`` layout: contiguous tensors, reserved to their maximum when the session opens.

Addresses never change while the session is live, which is what captured graphs and pinned transfers need. Evictions and
window compactions move rows inside the tensors; what is captured for storing is copied.
"""

from __future__ import annotations

import torch

from agentkv.errors import CapacityExceeded
from agentkv.kv.buffers import GroupBuffers
from agentkv.kv.contiguous import ContiguousKV
from agentkv.kv.contract import LAYOUTS, Evictions, Layout, SequenceKV
from agentkv.kv.foretelling import contiguous_nbytes, most_in_window, new_tokens
from agentkv.kv.stepping import ContiguousLayout
from agentkv.types import KVGeometry, LayerGroup

__all__ = ["StaticKV", "StaticLayout"]


def _capacity(group: LayerGroup, tokens: int, limit: int | None) -> int:
    """Slots of one group: what the session may ever hold; sliding groups twice their window at most."""
    most = max(tokens, limit or 0)
    return most if group.window is None else min(most, 2 * group.window)


class StaticKV(ContiguousKV):
    """See the module's docstring."""

    def __init__(
        self,
        geometry: KVGeometry,
        device: torch.device,
        tokens: int = 0,
        limit: int | None = None,
        rebase_at: int = Layout.rebase_at,
    ) -> None:
        super().__init__(geometry, device, rebase_at, fixed=True)
        for buffers in self._groups:
            buffers.allocate(_capacity(buffers.group, tokens, limit))

    def _room(self, buffers: GroupBuffers, used: int, more: int) -> int:
        window = buffers.group.window
        if window is not None and used + more > buffers.capacity:
            # A prefill piece beside a whole window: the one case in which a sliding group outgrows its reservation.
            return used + more
        if used + more > buffers.capacity:
            a_slot = self.geometry.itemsize * buffers.group.values_per_token
            raise CapacityExceeded(
                f"this session was opened for {buffers.capacity:,} tokens and now needs {used + more:,}: choose a "
                "retention policy with a window, or layout='dynamic', which grows",
                needed=(used + more) * a_slot,
                available=buffers.capacity * a_slot,
                budget=buffers.capacity * a_slot,
            )
        return buffers.capacity


@LAYOUTS.register("static")
class StaticLayout(ContiguousLayout):
    """Contiguous live KV at fixed addresses; see the module's docstring."""

    name = "static"
    reserves = True

    def open(self, tokens: int = 0, limit: int | None = None) -> StaticKV:
        return StaticKV(self.geometry, self.device, tokens, limit, self.rebase_at)

    def bytes_needed(
        self, kv: SequenceKV | None, tokens: int, limit: int | None = None, evictions: Evictions | None = None
    ) -> int:
        live = kv if isinstance(kv, StaticKV) else None
        new, capacities = new_tokens(kv, tokens, evictions), []
        for index, group in enumerate(self.geometry.groups):
            held = _capacity(group, tokens, limit) if live is None else live.buffers(index).capacity
            most = held if group.window is None else most_in_window(group, tokens, evictions, new, self.piece_tokens)
            capacities.append(max(held, most))
        return contiguous_nbytes(self.geometry, kv, tokens, evictions, capacities)
