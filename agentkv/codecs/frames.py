"""Arrays of bytes to one payload and back: each through zstd where that pays, stored where it does not.

    payload = n x (flag u8, length u64) | body 0 | … | body n-1

Level 1 with next to no match finder: quantised KV and what describes it have no matches worth their cost, the gain is
all in the entropy coding (and a plane of equal bytes shrinks to nothing).
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence

import numpy as np
import zstandard

from agentkv.codecs.words import Bytes

__all__ = ["compressed", "decompressed", "join_frames", "split_frames"]

_FRAME = struct.Struct("<BQ")
_STORED, _ZSTD = 0, 1
_WORTH = 0.99
"""An array is compressed where it shrinks below this share."""


class _Contexts(threading.local):
    """zstd contexts serve one thread at a time and are expensive to make: one pair a thread."""

    def __init__(self) -> None:
        # Against plain level 1 this encodes exponent bytes 2.6x as fast, decodes them 1.7x as fast and comes out 6 %
        # smaller (2.9 MB plane of bf16 KV).
        tuned = zstandard.ZstdCompressionParameters.from_level(
            1, window_log=17, hash_log=6, min_match=7, strategy=zstandard.STRATEGY_FAST, write_content_size=1
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=tuned)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def compressed(body: Bytes) -> bytes:
    """A zstd frame of contiguous bytes. The same bytes give the same frame."""
    return _contexts.compressor.compress(body.data)


def decompressed(frame: memoryview, size: int, what: str) -> Bytes:
    """The ``size`` bytes of a zstd frame, read-only; ``ValueError`` says what is wrong with ``what`` otherwise."""
    try:
        # The decompressor allocates what the frame claims: compare before it does.
        claimed = zstandard.frame_content_size(frame)
        if claimed != size:
            raise ValueError(f"{what} unpacks to {claimed} bytes where {size} belong")
        plain = _contexts.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"{what} does not unpack: {error}") from None
    if len(plain) != size:
        raise ValueError(f"{what} unpacked to {len(plain)} bytes where {size} belong")
    return np.frombuffer(plain, dtype=np.uint8)


def join_frames(
    arrays: Sequence[Bytes], pack: Callable[[Bytes], bytes | None] | None = None, *, before: bytes = b""
) -> bytes:
    """One payload of ``arrays``, contiguous uint8. The same arrays give the same bytes.

    ``pack``: an array as a zstd frame, or ``None`` to store it; by default where it shrinks at all. ``before``: what
    the payload begins with.
    """
    heads: list[bytes] = []
    bodies: list[bytes | memoryview] = []
    for array in arrays:
        packed = (pack or _where_it_pays)(array)
        heads.append(_FRAME.pack(*((_STORED, array.size) if packed is None else (_ZSTD, len(packed)))))
        bodies.append(array.data if packed is None else packed)
    return b"".join([before, *heads, *bodies])


def _where_it_pays(array: Bytes) -> bytes | None:
    packed = compressed(array)
    return packed if len(packed) < _WORTH * array.size else None


def split_frames(source: memoryview, sizes: Sequence[int]) -> list[Bytes]:
    """The arrays of ``sizes`` bytes that ``source`` was made of, read-only.

    ``ValueError`` unless it holds exactly these. Nothing is allocated beyond ``sizes``, whatever ``source`` claims.
    """
    start = len(sizes) * _FRAME.size
    if len(source) < start:
        raise ValueError(f"a payload with a head of {start} bytes was expected, this one has {len(source)} in all")
    arrays: list[Bytes] = []
    for i, size in enumerate(sizes):
        flag, length = _FRAME.unpack_from(source, i * _FRAME.size)
        if length > len(source) - start:
            raise ValueError(f"frame {i} claims {length} bytes where {len(source) - start} are left")
        arrays.append(_array(source[start : start + length], flag, size, i))
        start += length
    if start != len(source):
        raise ValueError(f"{len(source) - start} bytes follow the last frame")
    return arrays


def _array(body: memoryview, flag: int, size: int, index: int) -> Bytes:
    if flag == _STORED:
        if len(body) != size:
            raise ValueError(f"frame {index} stores {len(body)} bytes where {size} belong")
        return np.frombuffer(body, dtype=np.uint8)
    if flag != _ZSTD:
        raise ValueError(f"frame {index} has an unknown flag, {flag}")
    return decompressed(body, size, f"frame {index}")
