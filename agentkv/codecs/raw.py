"""The ``raw`` codec: bytes as they are, keys of every layer, then values of every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from agentkv.codecs.contract import CODECS, Codec, KVBlock
from agentkv.codecs.words import as_bytes

__all__ = ["Raw"]


class Raw(Codec):
    """1x, exact. The payload is ``K_0 … K_n V_0 … V_n``, each ``[Hkv, T, D]`` in C order, little-endian."""

    name = "raw"
    exact = True

    def encode(self, block: KVBlock) -> bytes:
        """One copy of the block's bytes."""
        return b"".join(np.ascontiguousarray(as_bytes(t)).data for t in (*block.keys, *block.values))

    def decode(self, payload: bytes | memoryview, out: KVBlock, parameters: Mapping[str, Any]) -> None:
        """Copy the bytes into ``out``; ``ValueError`` unless the payload has exactly its size."""
        source = np.frombuffer(payload, dtype=np.uint8)
        if source.size != out.nbytes:
            raise ValueError(f"a raw payload of {source.size} bytes cannot fill a block of {out.nbytes}")
        start = 0
        for tensor in (*out.keys, *out.values):
            view = as_bytes(tensor)
            np.copyto(view, source[start : start + view.size].reshape(view.shape))
            start += view.size


CODECS.register("raw")(Raw())
