"""Chunk files: up to 256 tokens of KV in one immutable, self-describing, verified file.

    magic 8 | format u32 | header length u32 | blake3 of (the 16 bytes before it and the header) 32
    header   JSON (chunkheader.ChunkHeader), at most 1 MiB
    payload  the parts one after the other; blake3 of each part's encoded bytes is in the header

The chunk's id digests lookup key and header, and the header digests the payload: one id, one content. Reading trusts
nothing: whatever is wrong becomes a ``ChunkFault`` whose reason names it, and the caller recomputes from the ledger.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3
from pydantic import ValidationError

from agentkv.codecs import Codec, Codecs, KVBlock, MissingFit
from agentkv.codecs.words import block_dtype
from agentkv.errors import ChunkFault, InvalidRequest
from agentkv.memory import is_out_of_memory
from agentkv.storage import naming
from agentkv.storage.blobs import Buffer, parts_nbytes
from agentkv.storage.chunkheader import FORMAT, MAX_CHUNK_TOKENS, ChunkHeader, ChunkMeta, GroupEntry, PartEntry
from agentkv.types import KVGeometry, Span

__all__ = [
    "FORMAT",
    "HEAD_LIMIT",
    "MAX_CHUNK_TOKENS",
    "ChunkHeader",
    "ChunkMeta",
    "EncodedChunk",
    "Part",
    "check",
    "decode_part",
    "encode_chunk",
    "pack_chunk",
    "read_header",
    "verify",
]

_MAGIC = b"AGENTKV\x1a"
_PREFIX = struct.Struct("<8sII")
_DIGEST = 32
_HEADER_LIMIT = 2**20
_MOST_VALUES = 2**16
"""In a header: an error keeps a copy of what it is about, and there may be as many errors as fields."""
HEAD_LIMIT = _PREFIX.size + _DIGEST + _HEADER_LIMIT
"""The header lies within the first so many bytes of a file, whatever its size."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """KV of layer group ``group`` over ``span``. Parts of a full-attention group tile the chunk; a sliding group's may
    be any sub-span. ``codec``: its own, where it is not the chunk's."""

    group: int
    span: Span
    block: KVBlock
    codec: Codec | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EncodedChunk:
    """A chunk ready for ``BlobStore.put(id, buffers)``; ``nbytes`` is the file's length."""

    id: str
    nbytes: int
    buffers: tuple[Buffer, ...]
    header: ChunkHeader

    def tobytes(self) -> bytes:
        """The whole file as one buffer, for the host tier: a copy."""
        return b"".join(self.buffers)


def encode_chunk(meta: ChunkMeta, parts: Sequence[Part], codec: Codec) -> EncodedChunk:
    """Encode ``parts``, with ``codec`` where they name none. Deterministic: same input, same id.

    ``ValueError`` where parts and meta do not describe one chunk: shapes, dtype, spans, number of ids.
    """
    payloads: list[bytes] = []
    table: list[PartEntry] = []
    offset = 0
    for part in parts:
        if trouble := _mismatch(meta.geometry, part.group, len(part.span), part.block):
            raise ValueError(f"part {len(table)} is not of this geometry: {trouble}")
        encoder = part.codec or codec
        position = meta.position_base + part.span.start - meta.span.start
        payload = encoder.encode(part.block.of(meta.geometry, part.group, position))
        table.append(
            PartEntry(
                group=part.group,
                codec=encoder.name,
                parameters=dict(encoder.parameters()),
                start=part.span.start,
                stop=part.span.stop,
                offset=offset,
                length=len(payload),
                digest=blake3(payload).hexdigest(),
            )
        )
        payloads.append(payload)
        offset += len(payload)
    header = ChunkHeader.model_validate(
        {
            "format": FORMAT,
            "kv_fingerprint": meta.kv_fingerprint,
            "tenant": meta.tenant,
            "lookup_key": meta.lookup_key,
            "codec": codec.name,
            "ancestors": meta.ancestors,
            "dtype": meta.geometry.dtype,
            "groups": tuple(GroupEntry.of(group) for group in meta.geometry.groups),
            "start": meta.span.start,
            "stop": meta.span.stop,
            "position_base": meta.position_base,
            "chain_start": meta.chain_start,
            "chain": meta.chain,
            "ids": base64.b64encode(meta.ids).decode("ascii"),
            "lineage": meta.lineage,
            "resume_points": meta.resume_points,
            "parts": tuple(table),
        }
    )
    return pack_chunk(header, payloads)


def pack_chunk(header: ChunkHeader, payload: Sequence[Buffer]) -> EncodedChunk:
    """The file of a header and its parts, as they are encoded already: they are not looked at."""
    text = json.dumps(
        header.model_dump(exclude_defaults=True), sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode()
    if len(text) > _HEADER_LIMIT or _values(text) > _MOST_VALUES:
        raise ValueError(
            f"a chunk header of {len(text):,} bytes and up to {_values(text):,} values is over the limits of "
            f"{_HEADER_LIMIT:,} and {_MOST_VALUES:,}"
        )
    prefix = _PREFIX.pack(_MAGIC, FORMAT, len(text))
    digest = blake3(prefix + text).digest()
    buffers = (prefix + digest + text, *payload)
    header = header.named(naming.chunk_id(header.lookup_key, digest))
    return EncodedChunk(header.chunk_id, parts_nbytes(buffers), buffers, header)


def read_header(buf: Buffer, chunk_id: str, *, nbytes: int | None = None) -> ChunkHeader:
    """Header of the chunk file in ``buf``, verified against itself, the file's length and the id it was asked for by.

    ``buf`` may be only the file's beginning (``HEAD_LIMIT`` bytes always do) if ``nbytes`` says how long the file is.
    The payload is not looked at. Raises ``ChunkFault``: ``truncated``, ``version`` (another format), ``format`` or
    ``checksum``.
    """
    view, nbytes = memoryview(buf).cast("B"), len(buf) if nbytes is None else nbytes
    text, digest = _header_text(view, chunk_id)
    if (values := _values(text)) > _MOST_VALUES:
        raise ChunkFault(chunk_id, "format", f"a header of up to {values:,} values; the limit is {_MOST_VALUES:,}")
    try:
        header = ChunkHeader.model_validate_json(text)
    except (ValidationError, RecursionError) as error:
        raise ChunkFault(chunk_id, "format", f"the header does not hold together: {_first(error)}") from None
    if (found := naming.chunk_id(header.lookup_key, digest)) != chunk_id:
        raise ChunkFault(chunk_id, "checksum", f"the file holds chunk {found}")
    expected = _PREFIX.size + _DIGEST + len(text) + header.payload_nbytes
    if nbytes != expected:
        reason = "truncated" if nbytes < expected else "format"
        raise ChunkFault(chunk_id, reason, f"{nbytes:,} bytes where the header makes it {expected:,}")
    return header.named(chunk_id)


def decode_part(buf: Buffer, header: ChunkHeader, part_index: int, out: KVBlock, codecs: Codecs) -> None:
    """Verify part ``part_index`` of the whole file ``buf``, then decode it into ``out``, which it mutates.

    ``out``: tensors of the part's shape and the chunk's dtype, strided views of live buffers allowed; lossy codecs need
    to know its layers, rotations and position. After a fault they may be half-filled. Thread-safe, and the heavy work
    releases the GIL: decode chunks in parallel. Raises ``ChunkFault``: ``geometry``, ``truncated``, ``checksum``,
    ``version`` (unknown codec), ``fit`` (calibration data of that codec is not here) or ``decode``. Want of memory
    is no fault of the file's: it is raised as it is.
    """
    name = header.chunk_id
    if not 0 <= part_index < len(header.parts):
        raise ChunkFault(name, "geometry", f"part {part_index} of {len(header.parts)}")
    part = header.parts[part_index]
    if trouble := _mismatch(header.geometry, part.group, len(part.span), out):
        raise ChunkFault(name, "geometry", trouble)
    body = _body(memoryview(buf).cast("B"), header, part_index)
    try:
        codec = codecs.decoder(part.codec, part.parameters)
    except InvalidRequest as error:
        raise ChunkFault(name, "version", str(error)) from None
    except MissingFit as error:
        raise ChunkFault(name, "fit", str(error)) from None
    try:
        codec.decode(body, out, part.parameters)
    except Exception as error:  # a codec may come from a third party: a fault here costs a recompute, never a turn
        if is_out_of_memory(error):
            raise
        raise ChunkFault(name, "decode", f"{part.codec}: {error}") from error


def verify(buf: Buffer, chunk_id: str) -> ChunkHeader:
    """Header of the whole file ``buf``, every byte of which is what was written. Decodes nothing.

    Raises ``ChunkFault`` as ``read_header`` and ``decode_part`` do.
    """
    header = read_header(buf, chunk_id)
    for index in range(len(header.parts)):
        _body(memoryview(buf).cast("B"), header, index)
    return header


def check(
    header: ChunkHeader,
    *,
    kv_fingerprint: str,
    geometry: KVGeometry,
    within: Span,
    ids: naming.Ids,
    chain_start: str | None = None,
    chain: str | None = None,
    tenant: str | None = None,
    lineage: str | None = None,
    lookup_key: str | None = None,
) -> None:
    """Raise ``ChunkFault`` unless the chunk is the KV that the caller is about to use it for.

    ``within``: what is wanted of it. ``ids`` are the ledger's from the chunk's start on: all of its span, or fewer
    where a fork or rewind shortened the segment. ``chain`` (at its stop) is compared only for a whole chunk: a
    shortened one is tied to its ledger by ``chain_start`` and the ids. ``None`` leaves a field uncompared.
    Reasons: ``fingerprint`` (weights, tenant, lineage, lookup key), ``geometry``, ``tokens``.
    """
    name = header.chunk_id
    if header.kv_fingerprint != kv_fingerprint:
        raise ChunkFault(name, "fingerprint", f"KV of {header.kv_fingerprint}, the model is {kv_fingerprint}")
    named = {"tenant": tenant, "lineage": lineage, "lookup_key": lookup_key}
    for what, expected in named.items():
        if expected is not None and getattr(header, what) != expected:
            raise ChunkFault(name, "fingerprint", f"{what} {getattr(header, what)!r}, expected {expected!r}")
    if header.geometry != geometry:
        raise ChunkFault(name, "geometry", f"written for {header.geometry}, the model has {geometry}")
    if header.span.intersect(within) != within:
        raise ChunkFault(name, "tokens", f"covers {tuple(header.span)}, not {tuple(within)}")
    wanted, stored = naming.ids_bytes(ids), header.token_ids
    if not wanted or stored[: len(wanted)] != wanted:
        raise ChunkFault(name, "tokens", f"its token ids are not the ledger's ({len(wanted) // 4} compared)")
    if chain_start is not None and header.chain_start != chain_start:
        raise ChunkFault(name, "tokens", f"another ledger before position {header.start}")
    if chain is not None and len(wanted) == len(stored) and header.chain != chain:
        raise ChunkFault(name, "tokens", f"another ledger up to position {header.stop}")


def _body(view: memoryview, header: ChunkHeader, part_index: int) -> memoryview:
    """The encoded bytes of one part, verified."""
    name, part = header.chunk_id, header.parts[part_index]
    stop = len(view) - header.payload_nbytes + part.offset + part.length
    body = view[max(0, stop - part.length) : max(0, stop)]
    if len(body) != part.length:
        raise ChunkFault(name, "truncated", f"part {part_index} has {len(body):,} of {part.length:,} bytes")
    if blake3(body).hexdigest() != part.digest:
        raise ChunkFault(name, "checksum", f"part {part_index} ({part.length:,} bytes) is not what was written")
    return body


def _header_text(view: memoryview, name: str) -> tuple[bytes, bytes]:
    """Header JSON and its digest, which matches."""
    if len(view) < _PREFIX.size + _DIGEST:
        raise ChunkFault(name, "truncated", f"{len(view)} bytes are less than any header")
    magic, version, length = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise ChunkFault(name, "format", "not a chunk file")
    if version != FORMAT:
        raise ChunkFault(name, "version", f"format {version}, this version reads {FORMAT}")
    if length > _HEADER_LIMIT:
        raise ChunkFault(name, "format", f"a header of {length:,} bytes; the limit is {_HEADER_LIMIT:,}")
    start = _PREFIX.size + _DIGEST
    text = bytes(view[start : start + length])
    if len(text) != length:
        raise ChunkFault(name, "truncated", f"{len(text):,} of {length:,} header bytes")
    digest = bytes(view[_PREFIX.size : start])
    if blake3(bytes(view[: _PREFIX.size]) + text).digest() != digest:
        raise ChunkFault(name, "checksum", "the header is not what was written")
    return text, digest


def _values(text: bytes) -> int:
    """At least as many as there are in a text of JSON."""
    return sum(map(text.count, (b",", b"[", b"{")))


def _mismatch(geometry: KVGeometry, group: int, tokens: int, block: KVBlock) -> str | None:
    """What keeps ``block`` from being ``tokens`` tokens of one layer group, or ``None``."""
    if not 0 <= group < len(geometry.groups):
        return f"layer group {group} of {len(geometry.groups)}"
    shape = geometry.groups[group]
    for what, tensors, dim in (("keys", block.keys, shape.key_dim), ("values", block.values, shape.value_dim)):
        if len(tensors) != len(shape.layers):
            return f"{what} of {len(tensors)} layers, the group has {len(shape.layers)}"
        wanted = (shape.kv_heads, tokens, dim)
        if wrong := {tuple(t.shape) for t in tensors} - {wanted}:
            return f"{what} of shape {wrong.pop()}, expected {wanted}"
    try:
        dtype = block_dtype(block)
    except ValueError as error:
        return str(error)
    return None if dtype == geometry.dtype else f"numbers in {dtype}, expected {geometry.dtype}"


def _first(error: ValidationError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    what = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, what['loc']))}: {what['msg']}" if what["loc"] else str(what["msg"])
