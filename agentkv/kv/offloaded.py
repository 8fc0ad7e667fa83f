"""The ``offloaded`` layout: another layout in host memory, of which two layers at a time are on the device.

While a layer computes, the next one's keys and values are fetched. Everything else, evictions included, is the inner
layout's. ``offloaded`` is over ``dynamic``, ``offloaded:paged`` over ``paged``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from agentkv.codecs import KVBlock
from agentkv.errors import InvalidRequest
from agentkv.kv.attention import attend
from agentkv.kv.contract import LAYOUTS, AttentionTraits, Evictions, Layout, SequenceKV, Slot
from agentkv.kv.dynamic import DynamicLayout
from agentkv.kv.foretelling import new_tokens
from agentkv.kv.offloaded_staging import Prefetcher
from agentkv.kv.paged import PagedLayout
from agentkv.kv.shares import Gathers, Share
from agentkv.kv.stepping import joined
from agentkv.kv.wrapped import WrappedKV
from agentkv.types import KVGeometry, LayerGroup, Span

__all__ = ["OffloadedKV", "OffloadedLayout", "OffloadedPagedLayout"]

HOST = torch.device("cpu")


Staged = list[tuple[Tensor, Tensor]]
"""A slot's keys and values ``[Hkv, L, D]`` in a staging buffer, older tokens first."""


@dataclass(slots=True)
class OffloadedPlan:
    """``inner``: the inner layout's plan. ``staged``: the layer that was written and is to be attended."""

    inner: list[Share]
    staged: dict[int, Staged] = field(default_factory=dict)


@LAYOUTS.register("offloaded")
class OffloadedLayout(Layout[OffloadedPlan]):
    """See the module's docstring. ``inner`` makes the layout that holds the KV; it is given the CPU for its device."""

    name = "offloaded"
    inner: Layout[Any]

    def __init__(
        self,
        geometry: KVGeometry,
        device: torch.device,
        inner: Callable[[KVGeometry, torch.device], Layout[Any]] = DynamicLayout,
    ) -> None:
        super().__init__(geometry, device)
        self.inner = inner(geometry, HOST)
        if not hasattr(self.inner, "gather"):
            raise InvalidRequest(f"layout {self.inner.name!r} cannot be offloaded: it has no gather()", param="layout")
        self.reserves = self.inner.reserves
        self._gathers = cast(Gathers, self.inner)
        self._groups = {layer: i for i, group in enumerate(geometry.groups) for layer in group.layers}
        self._layers = sorted(self._groups)
        self._dtype: torch.dtype = getattr(torch, geometry.dtype)
        self._prefetcher = Prefetcher(self._dtype, device)

    @property
    def rebase_at(self) -> int:
        """The inner layout's."""
        return self.inner.rebase_at

    @rebase_at.setter
    def rebase_at(self, position: int) -> None:
        self.inner.rebase_at = position

    @property
    def staging_nbytes(self) -> int:
        """Bytes of the staging buffers as they are now."""
        return self._prefetcher.nbytes

    def open(self, tokens: int = 0, limit: int | None = None) -> OffloadedKV:
        return OffloadedKV(self, self.inner.open(tokens, limit))

    def bytes_needed(
        self, kv: SequenceKV | None, tokens: int, limit: int | None = None, evictions: Evictions | None = None
    ) -> int:
        """On the device: the session's share of the staging buffers. In host memory: ``host_bytes_needed``."""
        g, new = self.geometry, new_tokens(kv, tokens, evictions)

        def a_layer(group: LayerGroup) -> int:
            seen = tokens if group.window is None else min(tokens, group.window + min(self.piece_tokens, new))
            return group.values_per_token // len(group.layers) * seen

        return 2 * g.itemsize * max(a_layer(group) for group in g.groups)

    def host_bytes_needed(self, kv: SequenceKV | None, tokens: int, limit: int | None = None) -> int:
        """Bytes of host memory that ``kv`` (or a new state) will have reserved once it holds ``tokens`` tokens."""
        return self.inner.bytes_needed(kv.inner if isinstance(kv, OffloadedKV) else None, tokens, limit)

    # -- a step -------------------------------------------------------------------------------------------------------

    def plan(self, slots: Sequence[Slot]) -> OffloadedPlan:
        unwrapped = [Slot(cast(OffloadedKV, slot.kv).inner, slot.start, slot.stop) for slot in slots]
        plan = OffloadedPlan(self.inner.plan(unwrapped))
        for share in plan.inner:
            for group in share.groups:
                group.reach.device = self.device  # masks are made on first use, which is there
        most = max(self._numbers(index, plan.inner) for index in range(len(self.geometry.groups)))
        self._prefetcher.start(self._layers, most, lambda layer, flat: self._fill(layer, flat, plan.inner))
        return plan

    def _numbers(self, index: int, shares: Sequence[Share]) -> int:
        group = self.geometry.groups[index]
        tokens = sum(share.groups[index].reach.past + share.tokens for share in shares)
        return group.values_per_token // len(group.layers) * tokens

    def _cut(self, layer: int, flat: Tensor, shares: Sequence[Share]) -> Staged:
        """The layer's part of a staging buffer, slot by slot."""
        index = self._groups[layer]
        group, at, staged = self.geometry.groups[index], 0, []
        for share in shares:
            tokens = share.groups[index].reach.past + share.tokens
            pair = []
            for dim in (group.key_dim, group.value_dim):
                n = group.kv_heads * tokens * dim
                pair.append(flat[at : at + n].view(group.kv_heads, tokens, dim))
                at += n
            staged.append((pair[0], pair[1]))
        return staged

    def _fill(self, layer: int, flat: Tensor, shares: Sequence[Share]) -> int:
        """On the fetching thread: the older tokens of all slots."""
        index = self._groups[layer]
        for share, (keys, values) in zip(shares, self._cut(layer, flat, shares), strict=True):
            past = share.groups[index].reach.past
            if past:
                self._gathers.gather(layer, share, keys[:, :past], values[:, :past])
        return self._numbers(index, shares)

    def write(self, layer: int, keys: Tensor, values: Tensor, meta: OffloadedPlan) -> None:
        self.inner.write(layer, keys.to(HOST), values.to(HOST), meta.inner)
        staged = self._cut(layer, self._prefetcher.take(layer), meta.inner)
        for share, (k, v) in zip(meta.inner, staged, strict=True):
            k[:, k.shape[1] - share.tokens :] = keys.narrow(1, share.start, share.tokens)
            v[:, v.shape[1] - share.tokens :] = values.narrow(1, share.start, share.tokens)
        meta.staged[layer] = staged

    def attend(self, layer: int, queries: Tensor, meta: OffloadedPlan, traits: AttentionTraits) -> Tensor:
        index, outputs = self._groups[layer], []
        for share, (k, v) in zip(meta.inner, meta.staged.pop(layer), strict=True):
            q = queries.narrow(1, share.start, share.tokens)
            outputs.append(attend(q, k, v, share.groups[index].reach, traits))
        self._prefetcher.give_back(layer)
        return joined(outputs, queries.shape[1])


class OffloadedKV(WrappedKV):
    """A state of the inner layout, in host memory. ``read`` gives copies on the device, ``target`` host tensors."""

    def __init__(self, layout: OffloadedLayout, inner: SequenceKV) -> None:
        super().__init__(layout.geometry, inner)
        self._layout = layout

    @property
    def nbytes(self) -> int:
        """On the device: its share of the staging buffers."""
        return self._layout.bytes_needed(self, self.tokens)

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory reserved."""
        return self.inner.nbytes

    def read(self, group: int, span: Span) -> KVBlock:
        block, device = self.inner.read(group, span), self._layout.device
        return KVBlock(tuple(k.to(device) for k in block.keys), tuple(v.to(device) for v in block.values))

    def fork(self) -> OffloadedKV:
        return OffloadedKV(self._layout, self.inner.fork())


@LAYOUTS.register("offloaded:paged")
class OffloadedPagedLayout(OffloadedLayout):
    """``paged`` in host memory."""

    name = "offloaded:paged"

    def __init__(
        self,
        geometry: KVGeometry,
        device: torch.device,
        inner: Callable[[KVGeometry, torch.device], Layout[Any]] = PagedLayout,
    ) -> None:
        super().__init__(geometry, device, inner)
