"""Older tokens on their way back into a quantised state: quantised as soon as all layers have a whole group of them.

    chunks     [ written | written | being written … |  not asked for yet … ]
    held       [ quantised        | exact            |                      ]

So a restore holds exactly what is being written and the rest of a group at either end of it, never the whole history;
and whoever writes, in threads of its own, quantises too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from agentkv.codecs import KVBlock
from agentkv.kv.contiguous import cloned
from agentkv.kv.quantized_segments import Segment, packed
from agentkv.types import Placement, Span, union

if TYPE_CHECKING:
    from agentkv.kv.quantized import QuantizedLayout

__all__ = ["Filling", "side_by_side"]


@dataclass(slots=True, eq=False)
class _Handed:
    """Tensors that were asked for; ``written``: they hold ``span`` by now."""

    span: Span
    block: KVBlock
    written: bool = False


class Filling:
    """What of ``placement`` is older than ``frontier``. Used from several threads at once until ``finish``."""

    def __init__(self, layout: QuantizedLayout, placement: Placement, frontier: int) -> None:
        self._layout = layout
        self._placement = placement
        self._frontier = frontier
        self._lock = threading.Lock()
        self._handed: dict[int, list[_Handed]] = {group: [] for group in layout.full}
        self._beyond: list[tuple[int, Span, KVBlock]] = []
        self._done: list[Segment] = []

    @property
    def nbytes(self) -> int:
        """Bytes of what waits and of what is quantised already."""
        with self._lock:
            waiting = sum(one.block.nbytes for some in self._handed.values() for one in some)
            return waiting + sum(s.nbytes for s in self._done) + sum(block.nbytes for _, _, block in self._beyond)

    def target(self, group: int, span: Span) -> KVBlock:
        """Tensors to write KV of ``span`` to; what of it lies at the frontier or behind goes on with ``beyond``."""
        of, layout = self._layout.geometry.groups[group], self._layout
        with torch.inference_mode(False):
            shapes = [(of.kv_heads, len(span), dim) for dim in (of.key_dim, of.value_dim)]
            keys, values = (
                tuple(torch.empty(shape, dtype=layout.dtype, device=layout.device) for _ in of.layers)
                for shape in shapes
            )
            block = KVBlock(keys, values)
            here = min(span.stop, self._frontier) - span.start
            with self._lock:
                self._handed[group].append(_Handed(Span(span.start, span.start + here), block.cut(0, here)))
                if here < len(span):
                    near = Span(self._frontier, span.stop)
                    self._beyond.append((group, near, block.cut(here, len(span))))
        return block

    def written(self, group: int, span: Span) -> None:
        """The tensors that were asked for ``span`` hold it."""
        span = Span(span.start, min(span.stop, self._frontier))
        with self._lock, torch.inference_mode(False):
            for one in self._handed[group]:
                one.written = one.written or one.span == span
            due = [(part, run, self._taken(part)) for part, run in self._whole() if run]
        made = [self._segment(part, run, blocks) for part, run, blocks in due]
        with self._lock:
            self._done += made

    def beyond(self) -> Sequence[tuple[int, Span, KVBlock]]:
        """What was written of the tokens that stay exact: group, span, block."""
        return self._beyond

    def finish(self, length: int) -> tuple[Segment, ...]:
        """All that was asked for before ``length`` is written: its segments."""
        with torch.inference_mode(False):
            for some in self._handed.values():
                for one in some:
                    one.written = True
            for part, run in self._whole(length):
                self._done.append(self._segment(part, run, self._taken(part)))
        self._handed, self._beyond = {}, []
        done, self._done = deque(sorted(self._done, key=lambda segment: segment.span)), []
        with torch.inference_mode(False), torch.no_grad():
            return packed(done)

    def _whole(self, stop: int | None = None) -> Iterator[tuple[Span, int]]:
        """What all layers have, cut as it is to be held."""
        have: tuple[Span, ...] = (Span(0, self._frontier if stop is None else stop),)
        for some in self._handed.values():
            spans = [one.span for one in some if one.written]
            have = tuple(common for a in union(spans) for b in have if len(common := a.intersect(b)))
        for stretch in list(self._placement.runs(sorted(have))):
            yield from list(self._layout.groups(stretch))

    def _taken(self, span: Span) -> list[KVBlock]:
        """``span`` of each full group, out of what waits; what is left of tensors gets smaller ones of its own."""
        blocks = []
        for group, some in self._handed.items():
            found, left = [], []
            for one in sorted(some, key=lambda one: one.span):
                common = one.span.intersect(span)
                if not len(common):
                    left.append(one)
                    continue
                found.append(one.block.cut(common.start - one.span.start, common.stop - one.span.start))
                for rest in (Span(one.span.start, common.start), Span(common.stop, one.span.stop)):
                    if len(rest):
                        cut = one.block.cut(rest.start - one.span.start, rest.stop - one.span.start)
                        left.append(_Handed(rest, cloned(cut), True))
            blocks.append(side_by_side(found))
            self._handed[group] = left
        return blocks

    def _segment(self, span: Span, run: int, blocks: Sequence[KVBlock]) -> Segment:
        return self._layout.segment(span, run, blocks, self._placement.position_of(span.start))


def side_by_side(blocks: Sequence[KVBlock]) -> KVBlock:
    """Blocks of one group, one behind the other; copied where there are several."""
    if len(blocks) == 1:
        return blocks[0]
    keys, values = ([getattr(b, name) for b in blocks] for name in ("keys", "values"))
    return KVBlock(
        tuple(torch.cat(layer, 1) for layer in zip(*keys, strict=True)),
        tuple(torch.cat(layer, 1) for layer in zip(*values, strict=True)),
    )
