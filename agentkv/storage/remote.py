"""Blobs in an object store: S3 and what speaks like it, Google, Azure; reached through ``obstore``.

    URL/ab12…                              a blob, under its own name
    URL/quarantine/TIME-NAME.REASON

What is there is listed once, at open, and known from then on: sizes and absence cost no request. So one process owns
the URL at a time, as one owns a folder. The index takes about 250 bytes of memory a blob.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from agentkv.errors import ChunkFault, StorageError, StorageFull
from agentkv.storage.blobs import (
    BlobStore,
    Buffer,
    Parts,
    SweepReport,
    check_name,
    is_name,
    parts_nbytes,
    quarantine_room,
)
from agentkv.storage.endpoint import Endpoint, Trouble

__all__ = ["RemoteBlobs"]

_QUARANTINE = "quarantine/"
_QUARANTINE_FILES = 64
_UPLOADS = 8
_STRIPES = 64


@dataclass(slots=True)
class _Upload:
    """One blob on its way, counted: ``sent`` once a request may have left, ``landed`` once it was answered."""

    name: str
    nbytes: int
    sent: bool = False
    landed: bool = False
    replaces: bool = False


class RemoteBlobs(BlobStore):
    """A ``BlobStore`` under ``url``: ``s3://bucket/prefix``, ``gs://…``, ``az://…``.

    ``memory:///`` and ``file:///…`` work too, for tests: neither is durable. Credentials, region and endpoint come from
    the environment (``AWS_…``, ``AZURE_…``, ``GOOGLE_…``) or ``config``, obstore's own keys. ``budget_bytes`` bounds
    every byte under the URL. Opening raises ``StorageError`` where the URL cannot be listed.

    Beyond the contract, a read raises ``ChunkFault`` with reason ``unreachable`` where the store does not answer or
    refuses: the blob may be well, and must not be moved aside. ``timeout_seconds`` bounds the store's silence,
    ``put_timeout_seconds`` an upload.
    """

    def __init__(
        self,
        url: str,
        *,
        budget_bytes: int = 2**62,
        config: Mapping[str, Any] | None = None,
        timeout_seconds: float = 5.0,
        put_timeout_seconds: float = 30.0,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._turns = [threading.Lock() for _ in range(_STRIPES)]
        self._index: dict[str, int] = {}
        self._refused: dict[str, int] = {}
        self._strays: dict[str, int] = {}
        self._quarantined: list[tuple[str, int]] = []
        self._used = 0
        try:
            self._endpoint = Endpoint(
                url, config=config, timeout_seconds=timeout_seconds, put_timeout_seconds=put_timeout_seconds
            )
            for key, nbytes in self._endpoint.list():
                self._used += nbytes
                if is_name(key):
                    self._index[key] = nbytes
                elif key.startswith(_QUARANTINE):
                    self._quarantined.append((key, nbytes))
        except Trouble as trouble:
            raise StorageError(f"the blob store {url} cannot be opened: {trouble.words}") from None
        self._quarantined.sort()
        self.url = self._endpoint.name

    def put_many(self, items: Sequence[tuple[str, Parts]]) -> int:
        """See ``BlobStore``. Up to eight uploads at a time, one request each."""
        uploads = [_Upload(check_name(name), parts_nbytes(parts)) for name, parts in items]
        if len({upload.name for upload in uploads}) != len(uploads):
            raise ValueError("one name twice in a group put")
        nbytes = sum(upload.nbytes for upload in uploads)
        self._reserve(nbytes)
        halt = threading.Event()
        try:
            if len(uploads) == 1:
                self._upload(uploads[0], items[0][1], halt)
            elif uploads:
                with ThreadPoolExecutor(min(_UPLOADS, len(uploads)), thread_name_prefix="agentkv-upload") as pool:
                    sent = pool.map(self._upload, uploads, [parts for _, parts in items], [halt] * len(uploads))
                    try:
                        list(sent)
                    except BaseException:
                        halt.set()
                        raise
        except BaseException as error:
            self._abandon(uploads)
            if isinstance(error, Trouble):
                raise self._write_error(error, f"{nbytes:,} bytes cannot be written to") from None
            raise
        if self._strays:  # the store answers again
            self.sweep()
        return nbytes

    def get(self, name: str, *, limit: int | None = None) -> Buffer:
        """See ``BlobStore``."""
        nbytes = self.size(name)
        wanted = nbytes if limit is None else min(limit, nbytes)
        if wanted == 0:
            return b""  # a range of nothing is an error to S3
        try:
            return self._endpoint.get(name, None if limit is None else wanted)[: None if limit is None else wanted]
        except Trouble as trouble:
            if trouble.kind == "absent" and not self._still_there(name):
                raise self._missing(name) from None
            raise ChunkFault(name, "unreachable", f"{self.url}: {trouble.words}") from None

    def delete(self, name: str) -> bool:
        """See ``BlobStore``."""
        with self._turn(check_name(name)):
            with self._lock:
                known = name in self._index or name in self._refused
                if not known and name not in self._strays:
                    return False
            try:
                self._endpoint.delete(name)
            except Trouble as trouble:
                if trouble.kind != "absent":
                    raise self._write_error(trouble, f"blob {name} cannot be deleted from") from None
                known = False
            self._forget(name)
        return known

    def exists(self, name: str) -> bool:
        """See ``BlobStore``. No request."""
        return name in self._index

    def size(self, name: str) -> int:
        """See ``BlobStore``. No request."""
        nbytes = self._index.get(name)
        if nbytes is None:
            raise self._missing(name)
        return nbytes

    def quarantine(self, name: str, reason: str) -> bool:
        """See ``BlobStore``. Where the store will not have it moved it stays, and is refused by this process."""
        label = re.sub(r"[^a-z]", "_", reason.lower())[:32]
        aside = f"{_QUARANTINE}{time.time_ns():020d}-{check_name(name)}.{label}"
        with self._turn(name):
            nbytes = self._index.get(name)
            if nbytes is None:
                return False
            kept = nbytes <= quarantine_room(self.budget_bytes)
            try:
                if kept:
                    self._endpoint.copy(name, aside)
                    with self._lock:
                        self._quarantined.append((aside, nbytes))
                        self._used += nbytes
                self._endpoint.delete(name)
            except Trouble as trouble:
                if trouble.kind == "absent":
                    self._forget(name)
                    return False
                with self._lock:
                    self._refused[name] = self._index.pop(name)
            else:
                self._forget(name)
        while self._crowded() and self._drop_oldest():
            pass
        return True

    def sweep(self) -> SweepReport:
        """See ``BlobStore``. A store shows no half-sent object; what goes is blobs of failed puts that could not be
        taken back at once."""
        temporaries = temporary_bytes = 0
        for name in list(self._strays):
            with self._turn(name):
                if name not in self._strays:  # put anew meanwhile
                    continue
                try:
                    self._endpoint.delete(name)
                except Trouble as trouble:
                    if trouble.kind != "absent":
                        continue
                with self._lock:
                    nbytes = self._strays.pop(name)
                    self._used -= nbytes
                temporaries, temporary_bytes = temporaries + 1, temporary_bytes + nbytes
        with self._lock:
            held = [*self._index.values(), *self._refused.values()]
            aside = [nbytes for _, nbytes in self._quarantined]
        return SweepReport(temporaries, temporary_bytes, len(held), sum(held), len(aside), sum(aside))

    def used_bytes(self) -> int:
        """See ``BlobStore``. Listed once at open, kept up to date since."""
        return self._used

    def list(self) -> Iterator[tuple[str, int]]:
        """See ``BlobStore``. No request."""
        with self._lock:
            found = list(self._index.items())
        return iter(found)

    def _turn(self, name: str) -> threading.Lock:
        """Held from a request that changes ``name`` until the index says so: both see changes in one order."""
        return self._turns[hash(name) % _STRIPES]

    def _missing(self, name: str) -> ChunkFault:
        return ChunkFault(name, "missing", f"no such blob under {self.url}")

    def _write_error(self, trouble: Trouble, what: str) -> StorageError:
        kind = StorageFull if trouble.kind in ("refused", "full") else StorageError
        return kind(f"{what} {self.url}: {trouble.words}")

    def _forget(self, name: str) -> None:
        with self._lock:
            self._used -= self._index.pop(name, 0) + self._refused.pop(name, 0) + self._strays.pop(name, 0)

    def _still_there(self, name: str) -> bool:
        """Whether a blob that a read did not find is there after all, replaced meanwhile; forgotten where it is not."""
        with self._turn(name):
            try:
                if self._endpoint.there(name):
                    return True
            except Trouble:
                return True
            self._forget(name)
            return False

    def _reserve(self, nbytes: int) -> None:
        """Count ``nbytes`` before the first of them leaves; ``StorageFull`` where the budget forbids it."""
        while True:
            with self._lock:
                if self._used + nbytes <= self.budget_bytes:
                    self._used += nbytes
                    return
            if not self._drop_oldest():
                raise StorageFull(
                    f"{nbytes:,} more bytes do not fit: {self._used:,} of a budget of {self.budget_bytes:,} bytes are "
                    f"used under {self.url}; delete sessions or raise disk_budget"
                )

    def _upload(self, upload: _Upload, parts: Parts, halt: threading.Event) -> None:
        with self._turn(upload.name):
            if halt.is_set():
                return
            upload.replaces = upload.name in self._index
            upload.sent = True
            try:
                self._endpoint.put(upload.name, parts)
            except BaseException:
                halt.set()
                raise
            upload.landed = True
            self._forget(upload.name)
            with self._lock:
                self._index[upload.name] = upload.nbytes

    def _abandon(self, uploads: Sequence[_Upload]) -> None:
        """Undo a group put. An upload without an answer may have landed: it is deleted too, and stays counted where it
        cannot be. A blob that replaced one stays, whole."""
        for upload in uploads:
            if not upload.sent:
                with self._lock:
                    self._used -= upload.nbytes
            elif upload.replaces:
                if not upload.landed:
                    with self._lock:  # the old bytes or the new ones are there: the larger number is counted
                        before = self._index.get(upload.name, 0)
                        self._used -= min(before, upload.nbytes)
                        self._index[upload.name] = max(before, upload.nbytes)
            else:
                self._take_back(upload)

    def _take_back(self, upload: _Upload) -> None:
        with self._turn(upload.name):
            held = self._index.get(upload.name)
            if not upload.landed and held is not None:  # another put of this name succeeded meanwhile
                with self._lock:
                    self._used -= upload.nbytes
                return
            counted = (held or 0) if upload.landed else upload.nbytes
            try:
                self._endpoint.delete(upload.name)
                gone = True
            except Trouble as trouble:
                gone = trouble.kind == "absent"
            with self._lock:
                self._index.pop(upload.name, None)
                counted += self._refused.pop(upload.name, 0) + self._strays.pop(upload.name, 0)
                if gone:
                    self._used -= counted
                else:
                    self._strays[upload.name] = counted

    def _crowded(self) -> bool:
        with self._lock:
            held = sum(nbytes for _, nbytes in self._quarantined)
            return len(self._quarantined) > _QUARANTINE_FILES or held > quarantine_room(self.budget_bytes)

    def _drop_oldest(self) -> bool:
        """Delete the oldest quarantined object; ``False`` where there is none, or it will not go."""
        with self._lock:
            if not self._quarantined:
                return False
            oldest = self._quarantined.pop(0)
        try:
            self._endpoint.delete(oldest[0])
        except Trouble as trouble:
            if trouble.kind != "absent":
                with self._lock:
                    self._quarantined.insert(0, oldest)
                return False
        with self._lock:
            self._used -= oldest[1]
        return True
