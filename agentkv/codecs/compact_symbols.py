"""Rows of small integers to bytes: rows that spread alike side by side, then zstd as an entropy coder.

A row is what one channel (or one component of a basis) quantised to over the tokens of a chunk. zstd fits one Huffman
table to each 128 KB it is given, so sorting rows by their spread gives every table symbols of one distribution: 3 %
smaller than tensors in their own order, and faster, because nothing ever matches and the matcher can be next to none.

    bytes = length u32 | classes, one u8 a row, zstd | rows in order of class, zstd
"""

from __future__ import annotations

import struct
import threading
from typing import Any

import numpy as np
import zstandard

from agentkv.codecs.words import Bytes

__all__ = ["SymbolCoder", "Symbols"]

Symbols = np.ndarray[Any, np.dtype[np.int8]]

_LENGTH = struct.Struct("<I")
_CLASSES_AN_OCTAVE = 2


class _Contexts(threading.local):
    """zstd contexts serve one thread at a time and are expensive to make: one pair a thread."""

    def __init__(self) -> None:
        tuned = zstandard.ZstdCompressionParameters.from_level(
            1, window_log=17, hash_log=6, min_match=7, strategy=zstandard.STRATEGY_FAST, write_content_size=1
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=tuned)
        self.decompressor = zstandard.ZstdDecompressor()


class SymbolCoder:
    """Stateless and thread-safe."""

    def __init__(self) -> None:
        self._contexts = _Contexts()

    def pack(self, rows: Symbols) -> bytes:
        """``rows [R, T]`` int8, R and T at least 1. The same rows give the same bytes."""
        classes = _classes(rows)
        order = np.argsort(classes, kind="stable")
        compress = self._contexts.compressor.compress
        map_ = compress(classes.data)
        return b"".join([_LENGTH.pack(len(map_)), map_, compress(rows[order].data)])

    def unpack(self, packed: memoryview, rows: int, tokens: int) -> Symbols:
        """``[rows, tokens]`` int8. ``ValueError`` where ``packed`` is not of so many; allocates twice their size."""
        if len(packed) < _LENGTH.size or _LENGTH.unpack_from(packed)[0] > len(packed) - _LENGTH.size:
            raise ValueError(f"symbols of {rows} rows do not fit in {len(packed)} bytes")
        split = _LENGTH.size + _LENGTH.unpack_from(packed)[0]
        classes = self._plain(packed[_LENGTH.size : split], rows)
        order = np.argsort(classes, kind="stable")
        symbols = np.empty((rows, tokens), dtype=np.int8)
        symbols[order] = self._plain(packed[split:], rows * tokens).view(np.int8).reshape(rows, tokens)
        return symbols

    def _plain(self, frame: memoryview, size: int) -> Bytes:
        try:
            # The decompressor allocates what the frame claims: compare before it does.
            claimed = zstandard.frame_content_size(frame)
            if claimed != size:
                raise ValueError(f"symbols that unpack to {claimed} bytes where {size} are due")
            plain = self._contexts.decompressor.decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ValueError(f"symbols do not unpack: {error}") from None
        if len(plain) != size:
            raise ValueError(f"symbols unpacked to {len(plain)} bytes where {size} are due")
        return np.frombuffer(plain, dtype=np.uint8)


def _classes(rows: Symbols) -> Bytes:
    """``[R]`` uint8: the logarithm of each row's mean magnitude, 0 for a row of zeros."""
    total = np.abs(rows.astype(np.int16)).sum(1, dtype=np.int64)
    mean = total / rows.shape[1]
    logs = np.log2(np.maximum(mean, 2.0**-10)) + 10
    return np.where(total == 0, 0, 1 + np.floor(_CLASSES_AN_OCTAVE * logs)).astype(np.uint8)
