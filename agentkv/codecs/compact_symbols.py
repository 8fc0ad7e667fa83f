"""Rows of small integers to bytes and back: rows alike side by side, small symbols several to a byte, then zstd.

A row is what one channel (or one component of a basis) was quantised to over the tokens of a chunk. zstd is used for
its Huffman coder: it makes one table for each 128 KB, so rows are sorted by their spread and every table sees one
distribution. A Huffman code spends a whole bit on a symbol at least, which rows of hardly anything but zeros do not
have; five of {-1, 0, 1} share a byte, or three of {-2 … 2}, or two of {-7 … 7}, and are coded together. Nothing ever
matches, so the match finder is next to none.

    bytes = 5 x length u32 | classes, zstd | a frame of rows for each packing
    class = 32 * packing + spread, one u8 a row, as differences from row to row
    row   = [w] bytes, w = ceil(T / k) for k symbols a byte: byte j has symbols j, j + w, j + 2w …, the first on top

Rows of nothing but zeros are in no frame.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from agentkv.codecs.frames import compressed, decompressed
from agentkv.codecs.words import Bytes

__all__ = ["Filled", "SymbolCoder", "Symbols"]

Symbols = np.ndarray[Any, np.dtype[np.int8]]
Filled = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class _Packing:
    """``each`` symbols a byte, all within ``[-largest, largest]``."""

    largest: int
    each: int

    @property
    def base(self) -> int:
        """How many symbols there are."""
        return 2 * self.largest + 1

    def width(self, tokens: int) -> int:
        """Bytes a row."""
        return -(-tokens // self.each)

    def pack(self, rows: Symbols) -> Bytes:
        """``rows [R, T]`` -> ``[R, width]``."""
        if self.each == 1:
            return rows.view(np.uint8)
        width = self.width(rows.shape[1])
        digits = np.full((len(rows), self.each * width), self.largest, dtype=np.uint8)
        np.add(rows, np.int8(self.largest), out=digits[:, : rows.shape[1]].view(np.int8))
        packed = digits[:, :width].copy()
        for i in range(1, self.each):
            packed *= np.uint8(self.base)
            packed += digits[:, i * width : (i + 1) * width]
        return packed

    def unpack(self, packed: Bytes, tokens: int) -> Symbols:
        """The way back; ``packed`` may hold anything."""
        if self.each == 1:
            return packed.view(np.int8)
        width = packed.shape[1]
        digits = np.empty((len(packed), self.each * width), dtype=np.uint8)
        for i in range(self.each - 1, 0, -1):
            higher = packed // np.uint8(self.base)
            np.subtract(packed, higher * np.uint8(self.base), out=digits[:, i * width : (i + 1) * width])
            packed = higher
        digits[:, :width] = packed
        digits -= np.uint8(self.largest)
        return digits[:, :tokens].view(np.int8)


_PACKINGS = (_Packing(1, 5), _Packing(2, 3), _Packing(7, 2), _Packing(127, 1))
_LENGTHS = struct.Struct(f"<{1 + len(_PACKINGS)}I")
_SPREADS = 32


class SymbolCoder:
    """Stateless and thread-safe."""

    def pack(self, rows: Symbols) -> bytes:
        """``rows [R, T]``, R and T at least 1. The same rows give the same bytes."""
        classes = _classes(rows)
        frames = [np.diff(classes, prepend=np.uint8(0))]
        frames += [p.pack(rows[here]) for p, here in zip(_PACKINGS, _places(classes), strict=True)]
        packed = [compressed(np.ascontiguousarray(frame)) for frame in frames]
        return b"".join([_LENGTHS.pack(*map(len, packed)), *packed])

    def unpack(self, packed: memoryview, rows: int, tokens: int) -> tuple[Symbols, Filled]:
        """``[rows, tokens]``, and ``[rows]``, which of them are not all zeros.

        ``ValueError`` where ``packed`` is not of so many; allocates some three times as much.
        """
        if len(packed) < _LENGTHS.size:
            raise ValueError(f"symbols of {rows} rows do not fit in {len(packed)} bytes")
        lengths = _LENGTHS.unpack_from(packed)
        if sum(lengths) != len(packed) - _LENGTHS.size:
            raise ValueError(f"symbols of {sum(lengths)} bytes in {len(packed) - _LENGTHS.size}")
        ends = np.cumsum([_LENGTHS.size, *lengths]).tolist()
        first, *frames = [packed[start:stop] for start, stop in pairwise(ends)]
        classes = np.cumsum(decompressed(first, rows, "the classes of symbols"), dtype=np.uint8)
        symbols = np.zeros((rows, tokens), dtype=np.int8)
        for packing, here, frame in zip(_PACKINGS, _places(classes), frames, strict=True):
            width = packing.width(tokens)
            plain = decompressed(frame, len(here) * width, "a frame of symbols").reshape(len(here), width)
            symbols[here] = packing.unpack(plain, tokens)
        return symbols, classes >= _SPREADS


def _classes(rows: Symbols) -> Bytes:
    """``[R]`` uint8: 0 for a row of zeros; else the packing's number from 1 and the logarithm of the mean magnitude."""
    magnitudes = np.abs(rows)
    largest, total = magnitudes.max(1), magnitudes.sum(1, dtype=np.int64)
    packing = np.searchsorted([p.largest for p in _PACKINGS], largest)
    spread = np.log2(np.maximum(total / rows.shape[1], 2.0**-8)) + 8
    return np.where(total == 0, 0, _SPREADS * (packing + 1) + np.floor(2 * spread)).astype(np.uint8)


def _places(classes: Bytes) -> list[np.ndarray[Any, np.dtype[np.intp]]]:
    """The rows of each packing, in order of their class."""
    order = np.argsort(classes, kind="stable")
    bounds = np.searchsorted(classes[order], [_SPREADS * (i + 1) for i in range(len(_PACKINGS) + 1)])
    return [order[start:stop] for start, stop in pairwise(bounds)]
