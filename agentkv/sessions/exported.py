"""The header of an exported session: all that SQL holds of it, and which bytes follow. Strictly checked plain values.

Sections of the file, in this order: the ledger (token ids, little-endian int32), fits (safetensors files), chunks (as
their home's files). Valid by construction: turns and items tile the ledger, segments lie within what has KV.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from agentkv.schemas.messages import Message, Role
from agentkv.sessions.db.records import (
    ItemKind,
    ItemRecord,
    Manifest,
    ResumePoint,
    SegmentRecord,
    SessionRecord,
    TurnKind,
    TurnRecord,
)
from agentkv.storage.chunkfile import MAX_CHUNK_TOKENS
from agentkv.storage.container import Section
from agentkv.storage.naming import NAME_DIGITS
from agentkv.types import Placement, Span

__all__ = ["ChunkSection", "ExportedSession", "FitSection", "parse_header"]

_MOST_TOKENS = 2**24
_MOST_SPANS = 2**14
_Count = Annotated[int, Field(ge=0, lt=2**53)]
_Tokens = Annotated[int, Field(ge=0, le=_MOST_TOKENS)]
_Pair = Annotated[list[_Tokens], Field(min_length=2, max_length=2)]
_Time = Annotated[float, Field(ge=0, le=253_402_300_799)]
"""Unix seconds, up to the year 9999."""
_Word = Annotated[str, Field(min_length=1, max_length=64)]
_Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-z.]{1,128}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class FitSection(Section):
    """A fit that chunks of the file name, for one codec. Its ``name`` is the digest that they name it by."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    codec: _Word
    name: Annotated[str, Field(pattern=r"^[0-9a-f]{8,128}$")]


class ChunkSection(Section):
    """A chunk file. ``id``: its name where it comes from."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    id: Annotated[str, Field(pattern=rf"^[0-9a-f]{{{NAME_DIGITS}}}$")]


class _Item(_Strict):
    id: Annotated[str, Field(pattern=r"^item_[0-9a-z]{1,58}$")]
    turn: _Count
    role: Role
    kind: ItemKind
    content: dict[str, Any]
    span: _Pair
    generated: bool


class _Turn(_Strict):
    span: _Pair
    kind: TurnKind
    finish_reason: Annotated[str, Field(max_length=32)] | None
    prompt_tokens: _Count
    completion_tokens: _Count
    cached_tokens: _Count
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None
    restore: dict[str, Any] | None
    created_at: _Time


class _Placement(_Strict):
    length: _Tokens
    kept: Annotated[list[_Pair], Field(max_length=_MOST_SPANS)]
    bases: Annotated[list[_Pair], Field(max_length=_MOST_SPANS)]
    lineage: Annotated[str, Field(max_length=4096)]
    floor: _Tokens

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_order(self.kept, self.length, "kept spans")
        if any(base > index or index > self.length for index, base in self.bases):
            raise ValueError("a position lies before 0 or behind the end")
        if any(a[0] >= b[0] for a, b in pairwise(self.bases)):
            raise ValueError("positions are not in ledger order")
        if self.floor > self.length:
            raise ValueError(f"a floor of {self.floor} in {self.length} tokens")
        return self

    @classmethod
    def of(cls, placement: Placement | None) -> _Placement | None:
        if placement is None or placement.trivial:
            return None
        return cls(
            length=placement.length,
            kept=[_pair(span) for span in placement.kept],
            bases=[list(pair) for pair in placement.bases],
            lineage=placement.lineage,
            floor=placement.floor,
        )

    def placement(self) -> Placement:
        kept = tuple(Span(*span) for span in self.kept)
        return Placement(
            self.length, kept, tuple((index, base) for index, base in self.bases), self.lineage, self.floor
        )


class _Segment(_Strict):
    chunk: _Count
    """Index into ``chunks``."""
    span: _Pair


class _Point(_Strict):
    position: _Tokens
    kind: Annotated[str, Field(min_length=1, max_length=32)]
    placement: _Placement | None


class ExportedSession(_Strict):
    """``id`` and ``model`` say where it comes from; neither is used as a name here. ``clock``: what its template is
    told. ``kv_fingerprint``: of the model that computed its KV."""

    what: Literal["agentkv session"]
    agentkv: Annotated[str, Field(max_length=64)]
    id: Annotated[str, Field(pattern=r"^sess_[0-9a-z]{1,58}$")]
    agent_id: Annotated[str, Field(max_length=255)] | None
    model: Annotated[str, Field(max_length=1024)]
    kv_fingerprint: _Fingerprint
    session_fingerprint: _Fingerprint
    policy: Annotated[str, Field(max_length=4096)]
    idle_codec: _Word
    system: Annotated[str, Field(max_length=2**24)] | None
    tools: list[Any] | None
    template_args: dict[str, Any]
    metadata: dict[str, Any]
    created_at: _Time
    clock: _Time
    pinned: _Tokens
    kv_length: _Tokens
    policy_since: _Tokens
    placement: _Placement | None
    items: list[_Item]
    turns: list[_Turn]
    segments: list[_Segment]
    points: list[_Point]
    ledger: Section
    fits: Annotated[list[FitSection], Field(max_length=64)]
    chunks: list[ChunkSection]

    @property
    def ledger_length(self) -> int:
        """Tokens."""
        return self.ledger.nbytes // 4

    @property
    def sections(self) -> list[Section]:
        """All that follow, in order."""
        return [self.ledger, *self.fits, *self.chunks]

    @classmethod
    def of(
        cls,
        record: SessionRecord,
        items: Iterable[ItemRecord],
        turns: Iterable[TurnRecord],
        *,
        agentkv: str,
        ledger: Section,
        fits: Sequence[FitSection],
        chunks: Sequence[ChunkSection],
        segments: Sequence[tuple[int, Span]],
        points: Iterable[ResumePoint],
    ) -> Self:
        """Of what a home holds; ``segments`` name chunks by their index. ``ValidationError`` where that contradicts
        itself."""
        return cls(
            what="agentkv session",
            agentkv=agentkv,
            id=record.id,
            agent_id=record.agent_id,
            model=record.model,
            kv_fingerprint=record.kv_fingerprint,
            session_fingerprint=record.session_fingerprint,
            policy=record.policy,
            idle_codec=record.idle_codec,
            system=record.system,
            tools=record.tools,
            template_args=record.template_args,
            metadata=record.metadata,
            created_at=record.created_at,
            clock=record.created_at if record.clock is None else record.clock,
            pinned=record.pinned,
            kv_length=record.kv_length,
            policy_since=record.policy_since,
            placement=_Placement.of(record.placement),
            items=[
                _Item(
                    id=item.id,
                    turn=item.turn,
                    role=item.role,  # type: ignore[arg-type]
                    kind=item.kind,
                    content=item.content,
                    span=_pair(item.span),
                    generated=item.generated,
                )
                for item in items
            ],
            turns=[
                _Turn(
                    span=_pair(turn.span),
                    kind=turn.kind,
                    finish_reason=turn.finish_reason,
                    prompt_tokens=turn.prompt_tokens,
                    completion_tokens=turn.completion_tokens,
                    cached_tokens=turn.cached_tokens,
                    seed=turn.seed,
                    restore=turn.restore,
                    created_at=turn.created_at,
                )
                for turn in turns
            ],
            segments=[_Segment(chunk=chunk, span=_pair(span)) for chunk, span in segments],
            points=[
                _Point(position=point.position, kind=point.kind, placement=_Placement.of(point.placement))
                for point in points
            ],
            ledger=ledger,
            fits=list(fits),
            chunks=list(chunks),
        )

    def written(self) -> bytes:
        """As JSON, in which a user's own values may be NaN, and come back so."""
        return json.dumps(self.model_dump(), ensure_ascii=False, separators=(",", ":")).encode()

    def item_records(self, new_ids: Sequence[str] | None = None) -> list[ItemRecord]:
        """Under their own ids, or new ones."""
        return [
            ItemRecord(
                item.id if new_ids is None else new_ids[seq],
                seq,
                item.turn,
                item.role,
                item.kind,
                item.content,
                Span(*item.span),
                item.generated,
            )
            for seq, item in enumerate(self.items)
        ]

    def turn_records(self) -> list[TurnRecord]:
        """In order."""
        return [
            TurnRecord(
                seq,
                Span(*turn.span),
                turn.kind,
                turn.finish_reason,
                turn.prompt_tokens,
                turn.completion_tokens,
                turn.cached_tokens,
                turn.seed,
                turn.restore,
                turn.created_at,
            )
            for seq, turn in enumerate(self.turns)
        ]

    def manifest(self, names: Sequence[str]) -> Manifest:
        """The stored KV where the first chunks are called ``names`` and the others are not to be had."""
        segments = []
        for segment in self.segments:
            if segment.chunk >= len(names):
                break
            segments.append(SegmentRecord(names[segment.chunk], Span(*segment.span)))
        complete = len(segments) == len(self.segments)
        reached = segments[-1].span.stop if segments else 0
        points = tuple(
            ResumePoint(point.position, point.kind, None if point.placement is None else point.placement.placement())
            for point in self.points
            if complete or point.position <= reached
        )
        return Manifest(tuple(segments), points)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        length = self.ledger_length
        if self.ledger.nbytes != 4 * length or length > _MOST_TOKENS:
            raise ValueError(
                f"a ledger of {self.ledger.nbytes:,} bytes; up to {4 * _MOST_TOKENS:,}, 4 a token, are taken"
            )
        for name in ("pinned", "kv_length", "policy_since"):
            if (value := getattr(self, name)) > length:
                raise ValueError(f"{name} is {value:,}, the ledger has {length:,} tokens")
        _check_tiles([turn.span for turn in self.turns], length, "turns")
        _check_tiles([item.span for item in self.items], length, "items")
        for item in self.items:
            self._check_item(item)
        if self.placement is not None and self.placement.length != self.kv_length:
            raise ValueError(f"a placement of {self.placement.length:,} tokens, and KV of {self.kv_length:,}")
        self._check_manifest()
        return self

    def _check_item(self, item: _Item) -> None:
        if item.turn >= len(self.turns):
            raise ValueError(f"{item.id} belongs to turn {item.turn} of {len(self.turns)}")
        start, stop = self.turns[item.turn].span
        if not start <= item.span[0] <= item.span[1] <= stop:
            raise ValueError(f"{item.id} does not lie in its turn")
        try:
            message: dict[str, Any] = Message.from_canonical(item.content).canonical()
        except (TypeError, ValueError):
            raise ValueError(f"the content of {item.id} is no message") from None
        if message != item.content or message["role"] != item.role:
            raise ValueError(f"the content of {item.id} is not the message that it says")

    def _check_manifest(self) -> None:
        _check_order([segment.span for segment in self.segments], self.kv_length, "segments")
        if self.placement is None and self.segments:
            _check_tiles([segment.span for segment in self.segments], self.segments[-1].span[1], "segments")
        at = -1
        for segment in self.segments:
            if segment.chunk > at + 1:
                raise ValueError("chunks are not in the order in which they are first used")
            at = max(at, segment.chunk)
            if segment.span[1] - segment.span[0] > MAX_CHUNK_TOKENS:
                raise ValueError(f"a segment is longer than any chunk, {MAX_CHUNK_TOKENS} tokens")
        if at + 1 != len(self.chunks):
            raise ValueError(f"{len(self.chunks)} chunks, of which {at + 1} are used")
        for names, what in (([c.id for c in self.chunks], "chunk"), ([f.name for f in self.fits], "fit")):
            if len(set(names)) != len(names):
                raise ValueError(f"one {what} is there twice")
        for point in self.points:
            if point.position > self.kv_length:
                raise ValueError(f"a resume point at {point.position:,}, behind the KV of {self.kv_length:,} tokens")
            if point.placement is not None and point.placement.length != point.position:
                raise ValueError(f"a resume point at {point.position:,} holds {point.placement.length:,} tokens")


def parse_header(header: bytes) -> ExportedSession:
    """``ValueError`` says what does not hold together."""
    try:
        # In two steps: each error of a model that parses by itself would keep a copy of all that it was given.
        return ExportedSession.model_validate(from_json(header))
    except ValidationError as error:
        what = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, what["loc"]))
        said = str(what["msg"]).removeprefix("Value error, ")
        raise ValueError(f"{where}: {said}" if where else said) from None
    except RecursionError:
        raise ValueError("the header is nested too deeply") from None


def _pair(span: Span) -> _Pair:
    return [span.start, span.stop]


def _check_tiles(spans: Sequence[_Pair], length: int, what: str) -> None:
    at = 0
    for start, stop in spans:
        if start != at or stop < start:
            raise ValueError(f"{what} do not follow each other: [{start}, {stop}) where {at} was due")
        at = stop
    if at != length:
        raise ValueError(f"{what} end at {at}, not at {length}")


def _check_order(spans: Sequence[_Pair], length: int, what: str) -> None:
    at = 0
    for start, stop in spans:
        if not at <= start < stop <= length:
            raise ValueError(f"{what} are not in order within [0, {length})")
        at = stop
