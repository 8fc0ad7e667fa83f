"""A session out of a file: verified whole, then chunk by chunk into this home, then one transaction.

    read all of it ─▶ does this model read it? ─▶ fits, chunks: files without a row ─▶ one transaction ─▶ a session
      nothing is written yet: a file that was        killed here: the next start moves them aside
      altered leaves no trace                        failed or cancelled here: they are deleted again

KV computed by this very model comes along as it is encoded; its chunks get this home's names, and none that another
session looks for: nobody but the imported session ever reads KV that came from elsewhere. Under another model, or in
another dtype, the ledger alone is taken, and computed by the next turn.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from agentkv.codecs import Codecs, MissingFit
from agentkv.engine.loading import LoadedModel
from agentkv.errors import AgentKVError, ChunkFault, InvalidRequest, SessionNotFound, StorageError
from agentkv.logs import Log, fault
from agentkv.models.calibrations import fit_path, keep_fit
from agentkv.sessions.chains import chained
from agentkv.sessions.core import SessionCore
from agentkv.sessions.db.records import (
    ChunkRecord,
    LedgerConflict,
    Manifest,
    ManifestConflict,
    SessionRecord,
)
from agentkv.sessions.db.whole import WholeSession
from agentkv.sessions.exported import ExportedSession, parse_header
from agentkv.sessions.exporting import covered
from agentkv.sessions.storing import ChunkWriter
from agentkv.sessions.tiers import Tiers
from agentkv.sessions.waiting import outlast
from agentkv.storage.chunkfile import HEAD_LIMIT, MAX_CHUNK_TOKENS, ChunkHeader, EncodedChunk, check, verify
from agentkv.storage.container import Container
from agentkv.storage.faultpoints import fault_point
from agentkv.storage.naming import LedgerChain
from agentkv.storage.rehoming import rehomed
from agentkv.types import ImportReport, KVGeometry, SessionState, Span

__all__ = ["Importer"]

log = Log(__name__)

T = TypeVar("T")

_BATCH, _BATCH_BYTES = 8, 2**26
"""Chunks that are in memory and synced together."""

_WIDEST = 1024
"""Numbers a bundle of a fit may have: twice what ``codecs.compact_fit`` makes."""


class _File:
    """An open file that is what was written, its header, and its ledger."""

    def __init__(self, container: Container, header: ExportedSession, ledger: array[int]) -> None:
        self.container = container
        self.header = header
        self.ledger = ledger
        self.uses: dict[int, list[Span]] = {}
        """By chunk, the segments that are taken from it."""
        for segment in header.segments:
            self.uses.setdefault(segment.chunk, []).append(Span(*segment.span))
        self._chain = LedgerChain()

    def chain(self, position: int) -> str:
        """The ledger's chain hash there; chunks come in ledger order, so that it mostly goes on where it was."""
        if position < self._chain.tokens:
            self._chain = LedgerChain()
        return self._chain.extend(self.ledger[self._chain.tokens : position]).digest()


@dataclass(slots=True)
class _Taken:
    """What an import has put into the home so far. ``reason``: why not all of the KV."""

    chunks: list[ChunkRecord] = field(default_factory=list)
    fits: list[str] = field(default_factory=list)
    reason: str | None = None


class _Unusable(Exception):
    """KV from here on is left out: this home cannot read it, though nothing is wrong with the file."""


class Importer:
    """Takes sessions into one runtime's home, for one tenant."""

    def __init__(self, model: LoadedModel, tiers: Tiers, home: Path, tenant: str) -> None:
        self._model = model
        self._tiers = tiers
        self._writer: ChunkWriter = tiers.writer
        self._repository = tiers.repository
        self._home = home
        self._tenant = tenant

    async def take(
        self,
        path: Path,
        *,
        keep_id: bool,
        go_on: Callable[[], None],
        check_core: Callable[[SessionCore], None],
    ) -> tuple[SessionCore, ImportReport]:
        """``check_core`` raises where this runtime cannot go on with the session, and may block; ``go_on`` as in
        ``write_container``. Raises ``ImportRefused``, ``InvalidRequest``, ``StorageFull``, ``StorageError`` and
        ``DatabaseUnavailable``; nothing is then left in the home.
        """
        file = await self._in_worker(_opened, path, go_on)
        try:
            core = SessionCore(self._record(file.header, keep_id), SessionState.NEW)
            core.state = SessionState(core.record.state)
            await asyncio.to_thread(check_core, core)
            await self._check(core, file, keep_id)
            return core, await self._take(core, file, keep_id, go_on)
        finally:
            file.container.close()

    def _record(self, header: ExportedSession, keep_id: bool) -> SessionRecord:
        return SessionRecord(
            id=header.id if keep_id else f"sess_{secrets.token_hex(16)}",
            tenant=self._tenant,
            agent_id=header.agent_id,
            model=self._model.name,  # never the file's: it may be a path
            kv_fingerprint=header.kv_fingerprint,
            session_fingerprint=header.session_fingerprint,
            policy=header.policy,
            idle_codec=header.idle_codec,
            system=header.system,
            tools=header.tools,
            template_args=header.template_args,
            metadata={**header.metadata, "imported_from": header.id},
            pinned=header.pinned,
            ledger_length=header.ledger_length,
            kv_length=header.kv_length,
            turns=len(header.turns),
            created_at=header.created_at,
            updated_at=time.time(),
            state="disk" if header.kv_length else "new",
            placement=None if header.placement is None else header.placement.placement(),
            policy_since=header.policy_since,
            clock=header.clock,
        )

    async def _check(self, core: SessionCore, file: _File, keep_id: bool) -> None:
        ids, known = np.frombuffer(file.ledger, dtype=np.int32), self._model.adapter.vocab_size
        if len(ids) and not (ids.min() >= 0 and ids.max() < known):
            raise InvalidRequest(
                f"{file.container.path} holds token ids from {ids.min()} to {ids.max()}, and the vocabulary of "
                f"{self._model.name!r} has {known:,}: open the runtime with the model that it is from",
                param="path",
            )
        if keep_id:
            try:
                await self._repository.get_session(core.id, core.record.tenant)
            except SessionNotFound:
                # One that was deleted may have left chunks that are called as these will be.
                await self._writer.try_collecting(core.id)
            else:
                raise InvalidRequest(f"session {core.id} exists here already: import it with a new id", param="keep_id")

    async def _take(self, core: SessionCore, file: _File, keep_id: bool, go_on: Callable[[], None]) -> ImportReport:
        header, record = file.header, core.record
        taken, manifest = _Taken(), Manifest()
        try:
            if header.kv_fingerprint == self._writer.kv_fingerprint:
                await self._take_kv(core, file, taken, go_on)
                manifest = header.manifest([chunk.id for chunk in taken.chunks])
            elif header.kv_length:
                taken.reason = (
                    f"fingerprint: its KV is of another model, or in another dtype ({header.kv_fingerprint}, here "
                    f"{self._writer.kv_fingerprint})"
                )
            whole = self._whole(record, file, manifest, keep_id)
            go_on()
            fault_point("import.before_commit")
            try:
                async with self._within(taken):
                    await self._repository.import_session(whole, taken.chunks)
            except (ManifestConflict, LedgerConflict) as error:
                raise file.container.refused("format", str(error)) from error
        except BaseException:
            try:
                await outlast(self._abandon(taken))
            except (AgentKVError, OSError) as error:
                log.error("import_not_undone", session=record.id, **fault(error))
            raise
        return self._report(core, header, manifest, taken)

    @staticmethod
    def _whole(record: SessionRecord, file: _File, manifest: Manifest, keep_id: bool) -> WholeSession:
        header = file.header
        new_ids = None if keep_id else [f"item_{secrets.token_hex(12)}" for _ in header.items]
        items = chained(record, header.item_records(new_ids))
        return WholeSession(record, file.ledger, items, header.turn_records(), manifest)

    def _report(self, core: SessionCore, header: ExportedSession, manifest: Manifest, taken: _Taken) -> ImportReport:
        record, reached = core.record, manifest.length
        if core.evicts or self._model.forgets:
            reached = max((point.position for point in manifest.resume_points), default=0)
        if taken.reason is None and reached < record.kv_length:
            taken.reason = f"unstored: the file has no KV of the last {record.kv_length - reached:,} tokens"
        return ImportReport(
            session_id=record.id,
            imported_from=header.id,
            tokens=record.ledger_length,
            kv_tokens=covered(record, reached),
            chunks=len(taken.chunks),
            nbytes=sum(chunk.nbytes for chunk in taken.chunks),
            reason=taken.reason,
        )

    # -- stored KV ----------------------------------------------------------------------------------------------------

    async def _take_kv(self, core: SessionCore, file: _File, taken: _Taken, go_on: Callable[[], None]) -> None:
        header = file.header
        for number in range(len(header.fits)):
            go_on()
            await self._in_worker(self._take_fit, file, number, taken)
        names: set[str] = set()
        at = 0
        while at < len(header.chunks) and taken.reason is None:
            go_on()
            batch = await self._in_worker(self._batch, core, file, at, taken)
            at += len(batch)
            for chunk in batch:
                if chunk.id in names:
                    raise file.container.refused("format", f"chunk {chunk.id} is there twice")
                names.add(chunk.id)
            if batch:
                # Known before they are written: whatever of them is there is deleted where this fails.
                taken.chunks += [_row(core.record, chunk) for chunk in batch]
                async with self._within(taken):
                    await self._writer.put(batch)

    def _within(self, taken: _Taken) -> AbstractAsyncContextManager[None]:
        """``QuotaReached`` where the tenant may not have all that was taken so far."""
        return self._writer.quotas.room(self._tenant, {chunk.id: chunk.nbytes for chunk in taken.chunks})

    def _take_fit(self, file: _File, number: int, taken: _Taken) -> None:
        """A fit that cannot be used leaves its chunks unreadable, and they say so."""
        section = file.header.fits[number]
        if section.nbytes > _fit_limit(self._writer.geometry):
            return
        content = file.container.content(1 + number)
        try:
            fit, new = keep_fit(self._home, self._writer.kv_fingerprint, section.name, content)
        except StorageError:
            raise
        except Exception:  # a codec may come from a third party, and what it is given from anyone
            return
        if new:
            taken.fits.append(section.name)
        self._writer.codecs.adopt(fit)

    def _batch(self, core: SessionCore, file: _File, first: int, taken: _Taken) -> list[EncodedChunk]:
        """Some chunks from ``first`` on, under their new names; ``taken`` says why where there are no more."""
        header, limit = file.header, _chunk_limit(self._writer.geometry)
        batch: list[EncodedChunk] = []
        for number in range(first, min(first + _BATCH, len(header.chunks))):
            section = header.chunks[number]
            if section.nbytes > limit:
                raise file.container.refused("format", f"a chunk of {section.nbytes:,} bytes; the limit is {limit:,}")
            if batch and sum(chunk.nbytes for chunk in batch) + section.nbytes > _BATCH_BYTES:
                break
            content = file.container.content(1 + len(header.fits) + number)
            try:
                found = self._verified(file, number, content)
            except _Unusable as error:
                taken.reason = str(error)
                break
            key = self._writer.imported_key(found, core.record)
            batch.append(rehomed(content, found, tenant=self._writer.salts.digest(self._tenant), lookup_key=key))
        return batch

    def _verified(self, file: _File, number: int, content: bytes) -> ChunkHeader:
        """The chunk is whole, this model's, the ledger's, and readable here. ``_Unusable``, ``ImportRefused``."""
        name = file.header.chunks[number].id
        try:
            found = verify(content, name)
            if found.stop > len(file.ledger):
                raise ChunkFault(name, "tokens", f"it reaches {found.stop}, the ledger {len(file.ledger)}")
            chain_start, chain = file.chain(found.start), file.chain(found.stop)
            for within in file.uses[number]:
                check(
                    found,
                    kv_fingerprint=self._writer.kv_fingerprint,
                    geometry=self._writer.geometry,
                    within=within,
                    ids=file.ledger[found.start : found.stop],
                    chain_start=chain_start,
                    chain=chain,
                )
        except ChunkFault as error:
            if error.reason == "version":
                raise _Unusable(f"version: chunk {name}: {error.detail}") from None
            reason = error.reason if error.reason in ("truncated", "checksum") else "format"
            raise file.container.refused(reason, str(error)) from error
        _check_readable(self._writer.codecs, found, name)
        return found

    async def _abandon(self, taken: _Taken) -> None:
        """The home is as it was. What is not deleted now is moved aside at the next start."""
        known = await self._repository.known_chunk_ids() if taken.chunks else set()

        def delete() -> None:
            for chunk in taken.chunks:
                if chunk.id not in known:
                    self._tiers.blobs.delete(chunk.id)
            for digest in taken.fits:
                fit_path(self._home, self._writer.kv_fingerprint, digest).unlink(missing_ok=True)

        await self._in_worker(delete)

    async def _in_worker(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer.executor, work, *arguments)


def _opened(path: Path, go_on: Callable[[], None]) -> _File:
    """Every byte of it is what was written, and its header holds together."""
    container = Container(path)
    try:
        try:
            header = parse_header(container.header)
        except ValueError as error:
            raise container.refused("format", str(error)) from error
        container.check(header.sections, go_on)
        ledger = array("i")
        ledger.frombytes(np.frombuffer(container.content(0), dtype="<i4").astype(np.int32).tobytes())
        return _File(container, header, ledger)
    except BaseException:
        container.close()
        raise


def _check_readable(codecs: Codecs, header: ChunkHeader, name: str) -> None:
    for part in header.parts:
        try:
            codecs.decoder(part.codec, part.parameters)
        except MissingFit as error:
            raise _Unusable(f"fit: chunk {name}: {error}") from None
        except InvalidRequest as error:
            raise _Unusable(f"version: chunk {name}: {error}") from None


def _row(record: SessionRecord, chunk: EncodedChunk) -> ChunkRecord:
    header = chunk.header
    return ChunkRecord(
        chunk.id, header.lookup_key, record.tenant, header.kv_fingerprint, header.span, header.codec, chunk.nbytes
    )


def _chunk_limit(geometry: KVGeometry) -> int:
    """Bytes of a chunk file: no codec needs twice the numbers' own."""
    values = sum(group.values_per_token for group in geometry.groups)
    return HEAD_LIMIT + 2**20 + 2 * geometry.itemsize * values * MAX_CHUNK_TOKENS


def _fit_limit(geometry: KVGeometry) -> int:
    """Bytes of a fit: a square matrix of bfloat16 for each bundle of heads, their keys and values side by side."""
    widths = [(g.kv_heads * (g.key_dim + g.value_dim), g.key_dim + g.value_dim, len(g.layers)) for g in geometry.groups]
    return 2**20 + sum(2 * layers * width * max(_WIDEST, head) for width, head, layers in widths)
