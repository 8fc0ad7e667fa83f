"""Older tokens of a session in segments that never change: exact ones (sinks), and quantised ones in groups of 64.

    ledger      0       16          64          128                      1,024      1,088
    segments    [ exact | 1 group of 48 | 16 groups of 64 … … … … … … … … | 1 group ]

A segment holds consecutive ledger tokens of all full-attention groups of layers. What evictions, crops and merges
change is which segments a state has; forks and undo records share them. Keys are held at an origin: position 0 where
they were turned back, else where they were computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from agentkv.codecs import KVBlock
from agentkv.kv.quantized_grids import (
    Format,
    amplitude,
    ends_codes,
    ends_numbers,
    ends_step,
    pack,
    settled_codes,
    settled_grid,
    settled_numbers,
    settled_step,
    unpack,
)
from agentkv.rope import Rotation, turn
from agentkv.types import KVGeometry, Span

__all__ = ["Angles", "Codes", "Segment", "cut", "grown", "packed", "quantised"]

Angles = Callable[[Rotation], tuple[Tensor, Tensor]]
"""Cosines and sines ``[T or 1, pairs]`` by which tokens are turned, float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """One full-attention group of layers. ``run``: tokens that share a grid of keys; ``turned_back``: which grid it is.

    ``keys [layers, Hkv, T, width]`` uint8; its grids ``[layers, Hkv, T / run, Dk]``: step index and zero, or the ends.
    ``values [layers, Hkv, T, width]`` uint8; the ends of each token ``[layers, Hkv, T, 1]``.
    """

    fmt: Format
    run: int
    turned_back: bool
    keys: Tensor
    key_grid: tuple[Tensor, Tensor]
    values: Tensor
    value_ends: tuple[Tensor, Tensor]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return (self.keys, *self.key_grid, self.values, *self.value_ends)

    def expand_keys(self, layer: int, lo: int, hi: int, out: Tensor) -> None:
        """Keys of tokens ``[lo, hi)``, whole runs, at their origin: ``out [Hkv, t, Dk]``, float32 or wider."""
        unpack(self.keys[layer, :, lo:hi], out)
        runs = _runs(out, self.run)
        a, b = (t[layer, :, lo // self.run : hi // self.run] for t in self.key_grid)
        if self.turned_back:
            settled_numbers(runs, a, b, self.fmt)
        else:
            ends_numbers(runs, a[:, :, None], b[:, :, None], self.fmt)

    def expand_values(self, layer: int, lo: int, hi: int, out: Tensor) -> None:
        """The same of the values."""
        unpack(self.values[layer, :, lo:hi], out)
        a, b = (t[layer, :, lo:hi] for t in self.value_ends)
        ends_numbers(out, a, b, self.fmt)

    def steps(self, layer: int) -> tuple[Tensor, Tensor]:
        """How far apart the levels of each number are: ``[Hkv, T, Dk]`` and ``[Hkv, T, 1]``."""
        a, b = (t[layer] for t in self.key_grid)
        step = settled_step(a, self.fmt) if self.turned_back else ends_step(a, b, self.fmt)
        lo, hi = (t[layer] for t in self.value_ends)
        return step.repeat_interleave(self.run, 1), ends_step(lo, hi, self.fmt)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """``parts``: codes, or tensors as they were computed, one entry a full-attention group."""

    span: Span
    parts: tuple[Codes, ...] | tuple[KVBlock, ...]

    @property
    def lossy(self) -> bool:
        """Whether its tokens are quantised."""
        return isinstance(self.parts[0], Codes)

    @property
    def run(self) -> int:
        """Tokens from one cut that needs no new grid to the next."""
        part = self.parts[0]
        return part.run if isinstance(part, Codes) else 1

    @property
    def turned_back(self) -> bool:
        """Whether keys are held at position 0."""
        part = self.parts[0]
        return isinstance(part, Codes) and part.turned_back

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        total = 0
        for part in self.parts:
            tensors = part.tensors if isinstance(part, Codes) else (*part.keys, *part.values)
            total += sum(t.numel() * t.element_size() for t in tensors)
        return total

    def check_integrity(self, fmt: Format) -> None:
        """``AssertionError`` where span and tensors disagree."""
        tokens = len(self.span)
        assert tokens and tokens % self.run == 0 and tokens <= fmt.segment_tokens, (self.span, self.run)
        for part in self.parts:
            if isinstance(part, Codes):
                assert {t.shape[2] for t in (part.keys, part.values, *part.value_ends)} == {tokens}, self.span
                assert {t.shape[2] for t in part.key_grid} == {tokens // self.run}, self.span
            else:
                assert {t.shape[1] for t in (*part.keys, *part.values)} == {tokens}, self.span

    def expand(self, group: int, layer: int, lo: int, hi: int, keys: Tensor, values: Tensor) -> None:
        """Tokens ``[lo, hi)`` of it, whole runs, at their origin; ``group``: index among the full ones."""
        part = self.parts[group]
        if isinstance(part, Codes):
            part.expand_keys(layer, lo, hi, keys)
            part.expand_values(layer, lo, hi, values)
        else:
            keys.copy_(part.keys[layer][:, lo:hi])
            values.copy_(part.values[layer][:, lo:hi])


def quantised(
    span: Span, blocks: Sequence[KVBlock], run: int, fmt: Format, geometry: KVGeometry, angles: Angles
) -> Segment:
    """``blocks``, one a full-attention group, as a segment; as an exact one where a number is not finite.

    ``run`` divides the tokens. ``angles``: of the positions at which the keys were computed.
    """
    groups = [group for group in geometry.groups if group.window is None]
    parts, finite = [], torch.ones((), dtype=torch.bool, device=blocks[0].keys[0].device)
    for group, block in zip(groups, blocks, strict=True):
        rotations = [geometry.rotations[layer] if geometry.rotations else None for layer in group.layers]
        codes = _empty_codes(block, run, fmt)
        for layer, rotation in enumerate(rotations):
            _quantise_keys(codes, layer, block.keys[layer], rotation, angles)
            _quantise_values(codes, layer, block.values[layer])
            for numbers in (block.keys[layer], block.values[layer]):
                finite &= (numbers.abs().amax() < torch.finfo(numbers.dtype).max / 4).all()
        parts.append(codes)
    if bool(finite):
        return Segment(span, tuple(parts))
    return Segment(span, tuple(KVBlock(tuple(k.clone() for k in b.keys), tuple(v.clone() for v in b.values))
                               for b in blocks))  # fmt: skip


def _empty_codes(block: KVBlock, run: int, fmt: Format) -> Codes:
    key, value = block.keys[0], block.values[0]
    layers, (heads, tokens, key_dim), value_dim = len(block.keys), key.shape, value.shape[2]
    back = fmt.turns_back(key.dtype)

    def empty(tokens: int, dim: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((layers, heads, tokens, dim), dtype=dtype, device=key.device)

    whole = torch.int16 if key.dtype.itemsize == 2 else torch.int32
    grid = (torch.int16, whole) if back else (key.dtype, key.dtype)
    return Codes(
        fmt,
        run,
        back,
        empty(tokens, fmt.width(key_dim), torch.uint8),
        (empty(tokens // run, key_dim, grid[0]), empty(tokens // run, key_dim, grid[1])),
        empty(tokens, fmt.width(value_dim), torch.uint8),
        (empty(tokens, 1, value.dtype), empty(tokens, 1, value.dtype)),
    )


def _runs(tokens: Tensor, run: int) -> Tensor:
    """``[Hkv, T, D]`` as ``[Hkv, T / run, run, D]``: a view."""
    return tokens.view(tokens.shape[0], tokens.shape[1] // run, run, tokens.shape[2])


def _quantise_keys(codes: Codes, layer: int, keys: Tensor, rotation: Rotation | None, angles: Angles) -> None:
    wide = torch.promote_types(keys.dtype, torch.float32)
    a, b = codes.key_grid
    if not codes.turned_back:
        runs = _runs(keys, codes.run)
        a[layer], b[layer] = runs.amin(2), runs.amax(2)
        found = ends_codes(runs.to(wide), a[layer][:, :, None], b[layer][:, :, None], codes.fmt)
        pack(found.flatten(1, 2), codes.keys[layer])
        return
    # Twice: what the first grid makes of the keys, rounded to their dtype as whoever reads them gets them, is what is
    # quantised. The few grids that this moves would else move when the state is restored.
    for again in (True, False):
        pre = keys.to(wide, copy=True)
        if rotation is not None:
            cos, sin = angles(rotation)
            turn(pre, cos, -sin, rotation.interleaved)
        runs = _runs(pre, codes.run)
        index, zero = settled_grid(runs, amplitude(runs, rotation).amax(-2), keys.dtype, codes.fmt)
        a[layer], b[layer] = index, zero
        pack(settled_codes(runs, index, zero, codes.fmt).flatten(1, 2), codes.keys[layer])
        if again:
            codes.expand_keys(layer, 0, keys.shape[1], pre)
            if rotation is not None:
                turn(pre, cos, sin, rotation.interleaved)
            keys = pre.to(keys.dtype)


def _quantise_values(codes: Codes, layer: int, values: Tensor) -> None:
    lo, hi = values.amin(2, keepdim=True), values.amax(2, keepdim=True)
    codes.value_ends[0][layer], codes.value_ends[1][layer] = lo, hi
    wide = torch.promote_types(values.dtype, torch.float32)
    pack(ends_codes(values.to(wide), lo, hi, codes.fmt), codes.values[layer])


# -- cutting and joining -----------------------------------------------------------------------------------------------


def cut(segment: Segment, span: Span) -> Iterator[Segment]:
    """What of ``segment`` lies in ``span``, as segments of their own: none shares memory with it unless it is whole."""
    span = segment.span.intersect(span)
    if span == segment.span:
        yield segment
    if span == segment.span or not len(span):
        return
    lo, hi, run = span.start - segment.span.start, span.stop - segment.span.start, segment.run
    # Whole runs stay together; what is left of a run at either end keeps the run's grid.
    inner_lo, inner_hi = -(-lo // run) * run, hi // run * run
    bounds = (lo, inner_lo, inner_hi, hi) if inner_lo <= inner_hi else (lo, hi)
    for a, b in pairwise(bounds):
        if a < b:
            parts = [_part(part, a, b, run) for part in segment.parts]
            yield Segment(Span(segment.span.start + a, segment.span.start + b), tuple(parts))  # type: ignore[arg-type]


def _part(part: Codes | KVBlock, lo: int, hi: int, run: int) -> Codes | KVBlock:
    if not isinstance(part, Codes):
        return KVBlock(tuple(k[:, lo:hi].clone() for k in part.keys), tuple(v[:, lo:hi].clone() for v in part.values))
    first, last = lo // run, -(-hi // run)
    tokens = [part.keys, part.values, *part.value_ends]
    keys, values, low, high = (t[:, :, lo:hi].clone() for t in tokens)
    a, b = (t[:, :, first:last].clone() for t in part.key_grid)
    return Codes(part.fmt, min(run, hi - lo), part.turned_back, keys, (a, b), values, (low, high))


def grown(segments: Sequence[Segment], new: Segment) -> tuple[Segment, ...]:
    """``segments`` and ``new`` behind them. Neighbours of like size become one, so that few are left: each token is
    copied no more often than the logarithm of a segment's length."""
    held = [*segments, new]
    while len(held) > 1 and len(held[-2].span) <= len(held[-1].span) and _joins(held[-2], held[-1]):
        b, a = held.pop(), held.pop()
        held.append(_joined(a, b))
    return tuple(held)


def packed(segments: deque[Segment]) -> tuple[Segment, ...]:
    """``segments``, taken out one after the other, in as few as possible: what both hold at a time is one of them."""
    held: list[Segment] = []
    while segments:
        new = segments.popleft()
        held.append(_joined(held.pop(), new) if held and _joins(held[-1], new) else new)
    return tuple(held)


def _joins(a: Segment, b: Segment) -> bool:
    part = a.parts[0]
    if not (isinstance(part, Codes) and b.lossy and a.span.stop == b.span.start):
        return False
    size = part.fmt.segment_tokens
    return a.run == b.run == part.fmt.group_tokens and a.span.start // size == b.span.start // size


def _joined(a: Segment, b: Segment) -> Segment:
    parts = [_both(x, y) for x, y in zip(a.parts, b.parts, strict=True)]  # type: ignore[arg-type]
    return Segment(Span(a.span.start, b.span.stop), tuple(parts))


def _both(a: Codes, b: Codes) -> Codes:
    def both(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], 2)

    return Codes(
        a.fmt,
        a.run,
        a.turned_back,
        both(a.keys, b.keys),
        (both(a.key_grid[0], b.key_grid[0]), both(a.key_grid[1], b.key_grid[1])),
        both(a.values, b.values),
        (both(a.value_ends[0], b.value_ends[0]), both(a.value_ends[1], b.value_ends[1])),
    )
