"""The ``exact`` codec: numbers split into byte planes, the planes that compress through zstd. Lossless.

Sign and exponent of KV numbers take few values, mantissas nearly all: as a plane of their own the high bytes shrink
to about 36 % (entropy coding, hardly any matches) while the low bytes of bf16 do not shrink at all and are stored.

    payload = version u8 | dtype u8 | itemsize x (flag u8, length u64) | plane 0 (low bytes) | … | plane itemsize-1
    plane i = byte i of every number: K_0 … K_n V_0 … V_n, each [Hkv, T, D] in C order

A plane spans all layers: one zstd frame of megabytes, and per tensor only the numpy calls that interleave the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from agentkv.codecs.contract import CODECS, Codec, KVBlock
from agentkv.codecs.frames import compressed, join_frames, split_frames
from agentkv.codecs.words import Bytes, Words, as_words, block_dtype

__all__ = ["Exact"]

_VERSION = 1
_HEAD = struct.Struct("<BB")
_DTYPES = {"bfloat16": (1, 2), "float16": (2, 2), "float32": (3, 4), "float64": (4, 8)}
"""torch dtype name -> (code in the payload, bytes a number)."""

_WORTH = 0.97
"""A plane is compressed where it shrinks below this share: decoding a stored plane is free."""
_PROBE_SLICES, _PROBE_BYTES = 4, 16 * 1024
_SLAB_BYTES = 384 * 1024


class Exact(Codec):
    """About 1.45x on bf16 KV, bit for bit, NaN payloads included."""

    name = "exact"
    exact = True

    def encode(self, block: KVBlock) -> bytes:
        """Split, compress what compresses, join. ``ValueError`` for a dtype that is not one of the four floats."""
        name = block_dtype(block)
        if name not in _DTYPES:
            raise ValueError(f"exact encodes {', '.join(_DTYPES)}, not {name}")
        code, itemsize = _DTYPES[name]
        planes = _split(block, itemsize)
        return join_frames(list(planes), _compress, before=_HEAD.pack(_VERSION, code))

    def decode(self, payload: bytes | memoryview, out: KVBlock, parameters: Mapping[str, Any]) -> None:
        """Fill ``out``. Memory beyond the payload is one byte a number and compressed plane, whatever it claims."""
        name = block_dtype(out)
        if name not in _DTYPES:
            raise ValueError(f"exact decodes {', '.join(_DTYPES)}, not {name}")
        code, itemsize = _DTYPES[name]
        numbers = out.nbytes // itemsize
        source = memoryview(payload).cast("B")
        if len(source) < _HEAD.size:
            raise ValueError(f"an exact payload has a head of {_HEAD.size} bytes, this one has {len(source)} in all")
        version, stored_code = _HEAD.unpack_from(source)
        if (version, stored_code) != (_VERSION, code):
            raise ValueError(
                f"payload version {version}, dtype code {stored_code}; expected {_VERSION} and {code} for {name}"
            )
        _interleave(split_frames(source[_HEAD.size :], [numbers] * itemsize), out)


def _compress(plane: Bytes) -> bytes | None:
    """The plane as a zstd frame, or ``None`` where that is not worth it: judged on a sample before the whole."""
    if plane.size > 2 * _PROBE_SLICES * _PROBE_BYTES:
        step = (plane.size - _PROBE_BYTES) // (_PROBE_SLICES - 1)
        sample = np.concatenate([plane[i * step : i * step + _PROBE_BYTES] for i in range(_PROBE_SLICES)])
        if len(compressed(sample)) > _WORTH * sample.size:
            return None
    packed = compressed(plane)
    return packed if len(packed) < _WORTH * plane.size else None


def _split(block: KVBlock, itemsize: int) -> Words:
    """Byte planes ``[itemsize, numbers]`` uint8 of all tensors, low bytes first."""
    planes = np.empty((itemsize, block.nbytes // itemsize), dtype=np.uint8)
    start = 0
    for tensor in (*block.keys, *block.values):
        words = as_words(tensor)
        into = planes[:, start : start + words.size].reshape(itemsize, *words.shape)
        for i in range(itemsize):
            # Converting to uint8 keeps the low byte; a strided byte view is 2.6x as slow.
            np.copyto(into[i], words if i == 0 else words >> (8 * i), casting="unsafe")
        start += words.size
    return planes


def _interleave(planes: list[Bytes], out: KVBlock) -> None:
    """Write ``planes`` (low bytes first, each ``[numbers]``) into the tensors of ``out``, strided or not.

    A few layers at a time are put together in a buffer that stays in the core's cache, then copied out: 15 to 20 %
    faster than working on the destination, which is cold.
    """
    *lower, top = planes
    start = 0
    for slab in _slabs(out):
        size = sum(words.size for words in slab)
        here = slice(start, start + size)
        numbers: Words = np.left_shift(top[here], 8, dtype=slab[0].dtype)
        np.bitwise_or(numbers, lower[-1][here], out=numbers)
        for plane in reversed(lower[:-1]):
            np.left_shift(numbers, 8, out=numbers)
            np.bitwise_or(numbers, plane[here], out=numbers)
        done = 0
        for words in slab:
            np.copyto(words, numbers[done : done + words.size].reshape(words.shape))
            done += words.size
        start += size


def _slabs(block: KVBlock) -> Iterator[list[Words]]:
    """The tensors of ``block`` as words, in order, in groups of about ``_SLAB_BYTES``."""
    slab: list[Words] = []
    for tensor in (*block.keys, *block.values):
        slab.append(as_words(tensor))
        if sum(words.nbytes for words in slab) >= _SLAB_BYTES:
            yield slab
            slab = []
    if slab:
        yield slab


CODECS.register("exact")(Exact())
