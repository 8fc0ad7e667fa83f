"""The ``quantized`` layouts: older tokens as 8 or 4 bits on the device, sinks and recent ones as they were computed.

    ledger   [ 16 sinks | quantised, in groups of 64 … … … … … … … | 128 to 191 recent tokens ]
               segments, which never change and forks share          a state of the inner layout

``quantized:int8`` is over ``dynamic``, ``quantized:int8:paged`` over ``paged``, ``quantized:int8:static`` over
``static``; the same for ``int4``. A group is quantised once, when it is 128 tokens behind the end: keys per channel,
values per token (KIVI, arXiv 2402.02750), keys as they were before RoPE (KVQuant, arXiv 2401.18079), so that evictions
and rebases cost nothing: a key is turned to wherever it is wanted. Layers with a sliding window stay exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from agentkv.codecs import KVBlock
from agentkv.errors import InvalidRequest
from agentkv.kv.contiguous import cloned
from agentkv.kv.contract import LAYOUTS, Evictions, Layout, SequenceKV
from agentkv.kv.dynamic import DynamicLayout
from agentkv.kv.foretelling import new_tokens
from agentkv.kv.paged import PagedLayout
from agentkv.kv.placed import PlacedKV
from agentkv.kv.quantized_grids import Format
from agentkv.kv.quantized_segments import Segment, quantised
from agentkv.kv.quantized_state import QuantizedKV
from agentkv.kv.quantized_step import QuantizedStepping
from agentkv.kv.static import StaticLayout
from agentkv.rope import Rotation
from agentkv.types import KVGeometry, Span

__all__ = ["QuantizedKV", "QuantizedLayout"]


class QuantizedLayout(QuantizedStepping):
    """See the module's docstring. ``inner`` makes the layout that holds what is exact."""

    sink_tokens: int = 16
    """The first tokens of a ledger stay exact: every later query attends them."""
    recent_tokens: int = 128
    """At least so many of the last tokens held stay exact."""

    def __init__(
        self,
        geometry: KVGeometry,
        device: torch.device,
        inner: Callable[[KVGeometry, torch.device], Layout[Any]] = DynamicLayout,
    ) -> None:
        super().__init__(geometry, device)
        self.inner = inner(geometry, device)
        if not hasattr(self.inner, "gather") or not isinstance(self.inner.open(), PlacedKV):
            raise InvalidRequest(
                f"layout {self.inner.name!r} cannot be quantised: older tokens are taken out of a layout on the "
                "device, with gather() and states that are PlacedKV. Quantise 'dynamic', 'static' or 'paged'",
                param="layout",
            )
        self.closed: deque[SequenceKV] = deque()

    def sweep(self) -> None:
        """Close what undo records held that are gone."""
        while self.closed:
            self.closed.popleft().close()

    def groups(self, span: Span) -> Iterator[tuple[Span, int]]:
        """``span``, at consecutive positions: spans, and how many tokens share a grid of keys; 0: it is held exactly.

        Only whole groups are quantised. What evictions left of one may have been quantised with the rest of it before
        it was stored and restored: a grid of its own would be off by another half a step.
        """
        size, sinks = self.format.group_tokens, self.sink_tokens
        at = span.start
        while at < span.stop:
            group = Span(max(at // size * size, sinks), (at // size + 1) * size)
            if at < sinks:
                stop, run = min(sinks, span.stop), 0
            elif at > group.start or group.stop > span.stop:
                stop, run = min(group.stop, span.stop), 0
            elif len(group) < size:
                stop, run = group.stop, len(group)
            else:
                block = self.format.segment_tokens
                stop, run = min(span.stop // size * size, (at // block + 1) * block), size
            yield Span(at, stop), run
            at = stop

    def opened(self, tokens: int) -> PlacedKV:
        """An empty inner state that will hold so many tokens at first."""
        kv = self.inner.open(tokens)
        assert isinstance(kv, PlacedKV)
        return kv

    def segment(self, span: Span, run: int, blocks: Sequence[KVBlock], position: int) -> Segment:
        """``blocks``, one a full group, of ``span`` as they were computed from ``position`` on, as ``groups`` says."""

        def angles(rotation: Rotation) -> tuple[Tensor, Tensor]:
            return self.angles(rotation, position, len(span))

        with torch.inference_mode(False), torch.no_grad():
            if not run:
                return Segment(span, tuple(cloned(block) for block in blocks))
            return quantised(span, blocks, run, self.format, self.geometry, angles)

    def open(self, tokens: int = 0, limit: int | None = None) -> QuantizedKV:
        self.sweep()
        return QuantizedKV(self, min(tokens, self.recent_tokens + self.format.group_tokens))

    def scratch_nbytes(self, tokens: int) -> int:
        """Bytes of the scratch that a session with so many tokens needs, though all share one."""
        a_token = max((g.kv_heads * (g.key_dim + g.value_dim) for g in self._full_groups()), default=0)
        narrow = 0 if self.wide == self.dtype else self.dtype.itemsize
        return min(tokens, self.format.segment_tokens) * a_token * (self.wide.itemsize + narrow)

    def _full_groups(self) -> Iterator[Any]:
        return (self.geometry.groups[index] for index in self.full)

    def quantised_nbytes(self, tokens: int) -> int:
        """Bytes of so many quantised tokens, in whole groups."""
        total, size = 0, self.dtype.itemsize
        grid = size * 2 if not self.format.turns_back(self.dtype) else 2 + (2 if size == 2 else 4)
        for g in self._full_groups():
            a_row = self.format.width(g.key_dim) + self.format.width(g.value_dim) + 2 * size
            rows = len(g.layers) * g.kv_heads
            total += rows * (tokens * a_row + -(-tokens // self.format.group_tokens) * g.key_dim * grid)
        return total

    def _exact_nbytes(self, tokens: int) -> int:
        return tokens * self.geometry.itemsize * int(sum(g.values_per_token for g in self._full_groups()))

    def _parted(self, tokens: int, evictions: Evictions) -> int:
        """Most older tokens that lie in parts of groups: at the ends of sinks and window, before a turn and in it, and
        wherever positions count anew; anywhere, where what stays is scattered."""
        if evictions.scattered:
            return min(tokens, evictions.new + self.format.group_tokens)
        anew = 1 + evictions.new // max(1, self.rebase_at - tokens) if evictions.rebases else 0
        return min(tokens, (4 + anew) * self.format.group_tokens)

    def bytes_needed(
        self, kv: SequenceKV | None, tokens: int, limit: int | None = None, evictions: Evictions | None = None
    ) -> int:
        """The exact tokens twice, now and at their most: an undo record is a fork."""
        live = kv if isinstance(kv, QuantizedKV) else None
        grid = self.format.group_tokens
        aged = self.recent_tokens + grid
        piece = min(self.piece_tokens, new_tokens(kv, tokens, evictions))
        exact = min(tokens, aged + piece)
        # Its sliding windows are whole, however few tokens its full groups hold exactly.
        widest = max(group.window or 0 for group in self.geometry.groups)
        rebases = evictions is not None and evictions.rebases
        turns = Evictions(max(exact, widest + piece), 0 if evictions is None else exact, rebases=rebases)
        if live is None:
            peak = exact if tokens <= aged else self.inner.grown(exact)  # from what aging leaves
            total = self.inner.bytes_needed(None, peak, None, turns)
            total += self.inner.bytes_needed(None, min(tokens, aged), None, Evictions(max(aged, widest)))
        else:
            most = min(live.inner.tokens + piece, exact)
            grown = self.inner.bytes_needed(live.inner, most, None, turns)
            total = max(grown, self.inner.bytes_needed(None, self.inner.grown(exact), None, turns)) + live.inner.nbytes
        quantised = tokens if tokens >= self.recent_tokens else 0
        if quantised:
            total += self._exact_nbytes(self.sink_tokens) + self.scratch_nbytes(tokens)
            # The last segment is joined with what follows, and the record keeps the old one.
            quantised += min(tokens, self.format.segment_tokens)
        total += self.quantised_nbytes(quantised)
        if evictions is not None:
            # What the record keeps of before, and tokens that stay exact: evictions leave parts of groups.
            held = self.quantised_nbytes(tokens) if live is None else sum(s.nbytes for s in live.segments)
            total += held + self._exact_nbytes(self._parted(tokens, evictions))
        return total if kv is None else max(total, kv.nbytes)


def _register(bits: int, inner: type[Layout[Any]], suffix: str) -> None:
    name = f"quantized:int{bits}{suffix}"

    def init(self: QuantizedLayout, geometry: KVGeometry, device: torch.device, over: Any = inner) -> None:
        QuantizedLayout.__init__(self, geometry, device, over)

    fields = {"name": name, "lossy": f"quantized:int{bits}", "format": Format(bits), "__init__": init,
              "__doc__": f"Older tokens as {bits} bits, the rest as in ``{inner.name}``."}  # fmt: skip
    LAYOUTS.register(name)(type(f"QuantizedInt{bits}{inner.__name__}", (QuantizedLayout,), fields))


for _bits in (8, 4):
    for _inner, _suffix in ((DynamicLayout, ""), (StaticLayout, ":static"), (PagedLayout, ":paged")):
        _register(_bits, _inner, _suffix)
