"""Chunks that leave a home, or come into another: what their headers say of the home changes, their payload does not.

A chunk may hold more ledger than a session has: one that was forked from another, or has gone back, uses the beginning
of the last chunk they share. The rest belongs to someone else's conversation, or to what was given up, and stays here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from agentkv.codecs import CODECS, Codecs, KVBlock
from agentkv.errors import ChunkFault
from agentkv.storage.blobs import Buffer
from agentkv.storage.chunkfile import (
    ChunkHeader,
    ChunkMeta,
    EncodedChunk,
    Part,
    decode_part,
    encode_chunk,
    pack_chunk,
)
from agentkv.types import KVGeometry, Span

if TYPE_CHECKING:
    from agentkv.rope import Rotation

__all__ = ["rehomed", "shortened"]


def rehomed(buf: Buffer, header: ChunkHeader, *, tenant: str, lookup_key: str) -> EncodedChunk:
    """The verified chunk file ``buf`` as the home of ``tenant`` (a digest, as in ``ChunkMeta``) names it.

    The payload stays as it is encoded: it is a view of ``buf``.
    """
    view = memoryview(buf).cast("B")
    payload = view[len(view) - header.payload_nbytes :]
    return pack_chunk(header.model_copy(update={"tenant": tenant, "lookup_key": lookup_key}), [payload])


def shortened(
    buf: Buffer,
    header: ChunkHeader,
    stop: int,
    chain: str,
    codecs: Codecs,
    rotations: tuple[Rotation | None, ...] | None,
) -> EncodedChunk:
    """The first tokens, up to ledger position ``stop``, of the verified chunk file ``buf``.

    Its numbers are stored losslessly: what a lossy codec had made of them stays, and the chunk still counts as that
    codec's, so that none is ever applied again. ``chain``: the ledger's chain hash at ``stop``. ``rotations``: the
    model's, as in ``KVGeometry``; ``None`` where the model is not at hand, which lossy codecs need. Raises
    ``ChunkFault`` as ``decode_part`` does.
    """
    span, lossless = Span(header.start, stop), codecs.encoder("exact")
    lossy = [part.codec for part in header.parts if part.codec not in set(CODECS) or not CODECS.get(part.codec).exact]
    if lossy and rotations is None:
        raise ChunkFault(header.chunk_id, "geometry", f"keys encoded by {lossy[0]!r} are read only with their model")
    geometry = replace(header.geometry, rotations=rotations or ())
    parts = []
    for index, part in enumerate(header.parts):
        kept = part.span.intersect(span)
        if len(kept):
            block = _room(geometry, part.group, len(part.span))
            position = header.position_base + part.start - header.start
            decode_part(buf, header, index, block.of(geometry, part.group, position), codecs)
            block = block.cut(kept.start - part.start, kept.stop - part.start)
            parts.append(Part(part.group, kept, block, lossless))
    ids = header.token_ids[: 4 * len(span)]
    meta = ChunkMeta(
        kv_fingerprint=header.kv_fingerprint,
        tenant=header.tenant,
        lookup_key=header.lookup_key,
        geometry=geometry,
        span=span,
        chain_start=header.chain_start,
        chain=chain,
        ids=ids,
        position_base=header.position_base,
        lineage=header.lineage,
        resume_points=tuple(point for point in header.resume_points if point <= stop),
        ancestors=(*header.ancestors, *dict.fromkeys(lossy)),
    )
    return encode_chunk(meta, parts, CODECS.get(header.codec))


def _room(geometry: KVGeometry, group: int, tokens: int) -> KVBlock:
    import torch

    shape, dtype = geometry.groups[group], getattr(torch, geometry.dtype)

    def empty(dim: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty((shape.kv_heads, tokens, dim), dtype=dtype) for _ in shape.layers)

    return KVBlock(empty(shape.key_dim), empty(shape.value_dim))
