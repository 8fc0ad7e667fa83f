"""The header of a chunk file: what a chunk is, and where in the file its parts are. Plain values, strictly checked."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from agentkv.storage.naming import NAME_DIGITS
from agentkv.types import KVGeometry, LayerGroup, Span, StateShape

__all__ = ["FORMAT", "MAX_CHUNK_TOKENS", "ChunkHeader", "ChunkMeta", "GroupEntry", "PartEntry"]

FORMAT = 2
MAX_CHUNK_TOKENS = 256

_Count = Annotated[int, Field(ge=0, lt=2**53)]
_Small = Annotated[int, Field(ge=0, lt=2**20)]
_Name = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{NAME_DIGITS}}}$")]
_Text = Annotated[str, Field(max_length=4096)]
_CodecName = Annotated[str, Field(min_length=1, max_length=64)]


@dataclass(frozen=True, slots=True)
class ChunkMeta:
    """What a writer says of a chunk. ``ids``: the span's token ids as little-endian int32 bytes.

    ``chain_start`` and ``chain`` are the ledger chain hashes at ``span.start`` and ``span.stop``; ``tenant`` is a
    digest of the tenant's salt, never the salt; ``lookup_key`` as ``naming.lookup_key`` makes it.
    ``position_base`` is the position that the token at ``span.start`` was computed with. ``resume_points`` are ledger
    positions in ``(span.start, span.stop]`` at which the sliding parts here suffice to go on. ``ancestors``: the
    codecs, oldest first, that these numbers went through before this one.
    """

    kv_fingerprint: str
    tenant: str
    lookup_key: str
    geometry: KVGeometry
    span: Span
    chain_start: str
    chain: str
    ids: bytes
    position_base: int
    lineage: str = ""
    resume_points: tuple[int, ...] = ()
    ancestors: tuple[str, ...] = ()


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StateEntry(_Strict):
    """One ``types.StateShape``."""

    kind: Literal["conv", "recurrent"]
    number: _Small
    shape: Annotated[tuple[Annotated[int, Field(ge=1, lt=2**31)], ...], Field(max_length=8)]
    dtype: Literal["bfloat16", "float16", "float32", "float64"]


class GroupEntry(_Strict):
    """One ``types.LayerGroup``. ``states`` is left out of the file where there are none."""

    layers: Annotated[tuple[_Small, ...], Field(min_length=1, max_length=4096)]
    window: Annotated[int, Field(ge=1, lt=2**53)] | None
    kv_heads: Annotated[int, Field(ge=1, lt=2**16)]
    key_dim: Annotated[int, Field(ge=1, lt=2**16)]
    value_dim: Annotated[int, Field(ge=1, lt=2**16)]
    states: Annotated[tuple[StateEntry, ...], Field(max_length=64)] = ()

    @classmethod
    def of(cls, group: LayerGroup) -> Self:
        """The entry of a group."""
        fields = ("layers", "window", "kv_heads", "key_dim", "value_dim")
        states = tuple(state._asdict() for state in group.states)
        return cls.model_validate({**{name: getattr(group, name) for name in fields}, "states": states})

    @property
    def group(self) -> LayerGroup:
        """The group."""
        states = tuple(StateShape(s.kind, s.number, s.shape, s.dtype) for s in self.states)
        return LayerGroup(self.layers, self.window, self.kv_heads, self.key_dim, self.value_dim, states)


class PartEntry(_Strict):
    """Encoded bytes ``[offset, offset + length)`` of the payload: ledger ``[start, stop)`` of layer group ``group``.

    ``codec`` encoded them, with ``parameters``; ``digest`` is blake3 of those bytes, as they are stored.
    """

    group: _Small
    codec: _CodecName
    parameters: dict[str, Any]
    start: _Count
    stop: _Count
    offset: _Count
    length: _Count
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @property
    def span(self) -> Span:
        """Ledger positions covered."""
        return Span(self.start, self.stop)


class ChunkHeader(_Strict):
    """A chunk file's JSON header. Valid by construction: spans nest, parts tile the payload, every token has its id.

    ``codec`` is the one that the chunk was written with; single parts of it may be stored losslessly (sinks, sliding
    windows). ``ancestors``: lossy codecs that the numbers had gone through before. Without parts it holds nothing that
    is needed: all layers see a window only, and it lies before those of its resume points.
    """

    format: Literal[2]
    kv_fingerprint: _Text
    tenant: _Text
    lookup_key: _Name
    codec: _CodecName
    ancestors: Annotated[tuple[_CodecName, ...], Field(max_length=64)]
    dtype: Literal["bfloat16", "float16", "float32", "float64"]
    groups: Annotated[tuple[GroupEntry, ...], Field(min_length=1, max_length=256)]
    start: _Count
    stop: _Count
    position_base: _Count
    chain_start: _Name
    chain: _Name
    ids: Annotated[str, Field(max_length=4 * (4 * MAX_CHUNK_TOKENS // 3 + 1))]
    lineage: _Text
    resume_points: Annotated[tuple[_Count, ...], Field(max_length=MAX_CHUNK_TOKENS)]
    parts: Annotated[tuple[PartEntry, ...], Field(max_length=4096)]

    _chunk_id: str = PrivateAttr("")

    @property
    def chunk_id(self) -> str:
        """The id of the file that this header was read from or written for."""
        return self._chunk_id

    def named(self, chunk_id: str) -> Self:
        """Itself, knowing its own chunk id."""
        self._chunk_id = chunk_id
        return self

    @property
    def span(self) -> Span:
        """Ledger positions of the chunk."""
        return Span(self.start, self.stop)

    @property
    def geometry(self) -> KVGeometry:
        """Shapes of the model's KV, as the writer knew them."""
        return KVGeometry(tuple(entry.group for entry in self.groups), self.dtype)

    @property
    def token_ids(self) -> bytes:
        """The span's token ids, little-endian int32."""
        return base64.b64decode(self.ids, validate=True)

    @property
    def payload_nbytes(self) -> int:
        """Bytes of all parts together."""
        return sum(part.length for part in self.parts)

    def parts_of(self, group: int) -> tuple[int, ...]:
        """Indices of the parts of one layer group, in ledger order."""
        return tuple(i for i, part in enumerate(self.parts) if part.group == group)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        span = self.span
        if not 1 <= len(span) <= MAX_CHUNK_TOKENS:
            raise ValueError(f"a chunk has 1 to {MAX_CHUNK_TOKENS} tokens, not [{self.start}, {self.stop})")
        try:
            ids = self.token_ids
        except (binascii.Error, ValueError):
            raise ValueError("the token ids are not base64") from None
        if len(ids) != 4 * len(span):
            raise ValueError(f"{len(ids)} bytes of token ids for {len(span)} tokens")
        if list(self.resume_points) != sorted(set(self.resume_points)):
            raise ValueError("resume points are not in ledger order")
        if self.resume_points and not (self.start < self.resume_points[0] and self.resume_points[-1] <= self.stop):
            raise ValueError("a resume point lies outside the chunk")
        if not self.parts and any(group.window is None for group in self.groups):
            raise ValueError("no parts, where some layers attend to everything")
        offset = 0
        before: dict[int, int] = {}
        for part in self.parts:
            if part.group >= len(self.groups):
                raise ValueError(f"a part of layer group {part.group} of {len(self.groups)}")
            if not part.start < part.stop or part.span.intersect(span) != part.span:
                raise ValueError(f"part [{part.start}, {part.stop}) is not inside [{self.start}, {self.stop})")
            if part.start < before.get(part.group, 0):
                raise ValueError("parts of a group overlap, or are not in ledger order")
            if self.groups[part.group].window is None and part.start != before.get(part.group, self.start):
                raise ValueError("the parts of a full-attention group leave a gap")
            if part.offset != offset:
                raise ValueError(f"a part at {part.offset} where {offset} was due: parts tile the payload")
            offset, before[part.group] = offset + part.length, part.stop
        full = {i for i, group in enumerate(self.groups) if group.window is None}
        if any(before.get(group, self.stop) != self.stop for group in full):
            raise ValueError("the parts of a full-attention group do not cover the chunk")
        if full & before.keys() and full - before.keys():
            raise ValueError("one full-attention group has a part, another has none")
        return self
