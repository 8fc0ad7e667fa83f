"""A session into one file. Blocking, and without a model: what is at rest in a home is enough.

Chunks are read twice: first to see that each is whole and the session's own, then to copy it. So the header that comes
before them never promises what is not there, and no more than one of them is in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from agentkv import __version__
from agentkv.codecs import Codecs
from agentkv.errors import AgentKVError, ChunkFault, InvalidRequest, StorageError
from agentkv.models.calibrations import fit_path
from agentkv.rope import Rotation
from agentkv.sessions.db.records import Manifest, SessionRecord
from agentkv.sessions.db.whole import WholeSession
from agentkv.sessions.exported import ChunkSection, ExportedSession, FitSection
from agentkv.storage.blobs import BlobStore, Buffer
from agentkv.storage.chunkfile import ChunkHeader, EncodedChunk, verify
from agentkv.storage.container import check_header, check_target, section_of, write_container
from agentkv.storage.encrypted import EncryptedBlobs
from agentkv.storage.naming import chain_hash, ids_bytes
from agentkv.storage.rehoming import shortened
from agentkv.types import ExportReport, Span

__all__ = ["Exporter", "check_plain_allowed", "covered"]

_FIT_LIMIT = 2**30
"""Bytes of a fit that is moved with the chunks that name it: it is in memory for a moment."""


def check_plain_allowed(blobs: BlobStore, allow_plain: bool) -> None:
    """``InvalidRequest`` where stored KV is encrypted, and nobody has said that a copy of it need not be."""
    if isinstance(blobs, EncryptedBlobs) and not allow_plain:
        raise InvalidRequest(
            "this home encrypts stored KV, and an exported file is not encrypted: pass allow_plain=True "
            "(--allow-plain) to write it all the same, to a place that is as safe as the key",
            param="allow_plain",
        )


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A chunk of the home that goes into the file; of which, where ``stop`` is a ledger position, the tokens before."""

    section: ChunkSection
    source: str
    stop: int | None


class Exporter:
    """Writes sessions of one home into files."""

    def __init__(
        self,
        blobs: BlobStore,
        home: Path,
        *,
        codecs: Codecs | None = None,
        rotations: tuple[Rotation | None, ...] | None = None,
        held: Mapping[str, bytes] | None = None,
    ) -> None:
        """``codecs`` and ``rotations``: the model's, where one is loaded. ``held``: chunks that no disk has taken."""
        self._blobs = blobs
        self._home = home
        self._codecs = codecs or Codecs()
        self._rotations = rotations
        self._held = held or {}

    def write(self, whole: WholeSession, path: Path, *, replace: bool, go_on: Callable[[], None]) -> ExportReport:
        """Write the session; nothing is left behind where that fails. ``go_on`` raises to end it.

        KV that cannot be used is left out, and the report says why. Raises as ``write_container``; ``InvalidRequest``
        for a session that is too long.
        """
        check_target(path, replace=replace)
        ledger = ids_bytes(whole.ledger)
        chosen, fits, manifest, reason = self._chosen(whole, go_on)
        header = self._header(whole, ledger, chosen, fits, manifest)
        text = header.written()
        if trouble := check_header(text):
            raise InvalidRequest(f"session {whole.record.id} is too long to be exported: {trouble}", param="path")

        def contents() -> Iterator[Buffer]:
            yield ledger
            for fit in fits:
                yield fit_path(self._home, whole.record.kv_fingerprint, fit.name).read_bytes()
            for chunk in chosen:
                yield self._bytes(chunk.source, chunk.stop, whole.ledger)

        nbytes = write_container(path, text, header.sections, contents(), replace=replace, go_on=go_on)
        return ExportReport(
            session_id=whole.record.id,
            path=path,
            nbytes=nbytes,
            tokens=len(whole.ledger),
            kv_tokens=covered(whole.record, manifest.length),
            chunks=len(chosen),
            reason=reason,
        )

    def _chosen(
        self, whole: WholeSession, go_on: Callable[[], None]
    ) -> tuple[list[_Chosen], list[FitSection], Manifest, str | None]:
        """Chunks in the order in which the manifest first uses them, their fits, and the manifest as far as they reach.

        The first that cannot be used ends it, and its reason is the last value.
        """
        manifest = whole.manifest
        ends: dict[str, int] = {}
        for segment in manifest.segments:
            ends[segment.chunk_id] = max(segment.span.stop, ends.get(segment.chunk_id, 0))
        chosen: dict[str, _Chosen] = {}
        fits: dict[str, FitSection] = {}
        for number, segment in enumerate(manifest.segments):
            name = segment.chunk_id
            if name in chosen:
                continue
            go_on()
            try:
                chosen[name] = self._choose(name, ends[name], whole, fits)
            except (ChunkFault, StorageError, InvalidRequest) as error:
                reached = manifest.segments[number - 1].span.stop if number else 0
                usable = Manifest(
                    manifest.segments[:number], tuple(p for p in manifest.resume_points if p.position <= reached)
                )
                return list(chosen.values()), list(fits.values()), usable, _words(error)
        reason = None
        if (missing := whole.record.kv_length - manifest.length) > 0:
            reason = f"unstored: {missing:,} tokens had not reached the disk"
        return list(chosen.values()), list(fits.values()), manifest, reason

    def _choose(self, name: str, end: int, whole: WholeSession, fits: dict[str, FitSection]) -> _Chosen:
        """``end``: up to where the session uses the chunk. Adds the fits that it names. ``ChunkFault`` if it is bad."""
        content = self._read(name)
        header = verify(content, name)
        own = ids_bytes(whole.ledger[header.start : header.stop])
        stop = None
        if header.token_ids != own:  # it is shared with a session that went another way, or this one has gone back
            stop = end
            encoded = self._shortened(content, header, end, whole.ledger)
            content, header = encoded.tobytes(), encoded.header
            if header.token_ids != own[: 4 * len(header.span)]:
                raise ChunkFault(name, "tokens", "its token ids are not the ledger's")
        for part in header.parts:
            digest = part.parameters.get("fit")
            if isinstance(digest, str) and digest not in fits:
                self._add_fit(part.codec, digest, whole.record, fits)
        return _Chosen(ChunkSection(id=header.chunk_id, **section_of(content).model_dump()), name, stop)

    def _add_fit(self, codec: str, digest: str, record: SessionRecord, fits: dict[str, FitSection]) -> None:
        """A fit that is not here is left out: the other home may have it."""
        try:
            path = fit_path(self._home, record.kv_fingerprint, digest)
            if path.stat().st_size <= _FIT_LIMIT:
                section = section_of(path.read_bytes())
                fits[digest] = FitSection(codec=codec, name=digest, **section.model_dump())
        except (OSError, ValueError):
            return

    def _read(self, name: str) -> Buffer:
        return self._held[name] if name in self._held else self._blobs.get(name)

    def _bytes(self, name: str, stop: int | None, ledger: array[int]) -> Buffer:
        content = self._read(name)
        if stop is None:
            return content
        return self._shortened(content, verify(content, name), stop, ledger).tobytes()

    def _shortened(self, content: Buffer, header: ChunkHeader, stop: int, ledger: array[int]) -> EncodedChunk:
        return shortened(content, header, stop, chain_hash(ledger[:stop]), self._codecs, self._rotations)

    @staticmethod
    def _header(
        whole: WholeSession,
        ledger: bytes,
        chosen: list[_Chosen],
        fits: list[FitSection],
        manifest: Manifest,
    ) -> ExportedSession:
        numbers = {chunk.source: number for number, chunk in enumerate(chosen)}
        try:
            return ExportedSession.of(
                whole.record,
                whole.items,
                whole.turns,
                agentkv=__version__,
                ledger=section_of(ledger),
                fits=fits,
                chunks=[chunk.section for chunk in chosen],
                segments=[(numbers[segment.chunk_id], segment.span) for segment in manifest.segments],
                points=manifest.resume_points,
            )
        except ValidationError as error:
            what = error.errors(include_url=False, include_input=False)[0]
            raise StorageError(
                f"session {whole.record.id} is not exported, since what the database holds of it contradicts itself: "
                f"{'.'.join(map(str, what['loc']))} {what['msg']}"
            ) from error


def covered(record: SessionRecord, position: int) -> int:
    """Tokens that the session held at its last commit and that lie before ``position``."""
    return sum(len(span.intersect(Span(0, position))) for span in record.held.kept)


def _words(error: AgentKVError) -> str:
    if isinstance(error, ChunkFault):
        return f"{error.reason}: chunk {error.chunk_id}: {error.detail}"
    return f"unreadable: {error}"
