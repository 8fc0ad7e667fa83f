"""A blob store in a dict: for runtimes without a disk tier, and for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from agentkv.errors import ChunkFault, StorageFull
from agentkv.storage.blobs import (
    BlobStore,
    Parts,
    SweepReport,
    check_name,
    parts_nbytes,
    quarantine_room,
)

__all__ = ["MemoryBlobs"]


class MemoryBlobs(BlobStore):
    """As ``LocalBlobs``, gone with the process. ``budget_bytes`` bounds blobs and quarantine together."""

    def __init__(self, budget_bytes: int = 2**62) -> None:
        self.budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._blobs: dict[str, bytes] = {}
        self._quarantine: dict[str, bytes] = {}
        self._used = 0

    def put_many(self, items: Sequence[tuple[str, Parts]]) -> int:
        """See ``BlobStore``."""
        names = [check_name(name) for name, _ in items]
        if len(set(names)) != len(names):
            raise ValueError("one name twice in a group put")
        nbytes = sum(parts_nbytes(parts) for _, parts in items)
        with self._lock:
            grows = nbytes - sum(len(self._blobs.get(name, b"")) for name in names)
            self._drop_quarantine(self.budget_bytes - grows)
            if self._used + grows > self.budget_bytes:
                raise StorageFull(
                    f"{nbytes:,} more bytes do not fit: {self._used:,} of a budget of {self.budget_bytes:,} are used"
                )
            self._blobs.update((name, b"".join(parts)) for name, parts in items)
            self._used += grows
        return nbytes

    def get(self, name: str, *, limit: int | None = None) -> bytes:
        """See ``BlobStore``."""
        try:
            return self._blobs[name][:limit]
        except KeyError:
            raise ChunkFault(name, "missing", "no such blob in memory") from None

    def delete(self, name: str) -> bool:
        """See ``BlobStore``."""
        with self._lock:
            gone = self._blobs.pop(name, None)
            self._used -= len(gone or b"")
        return gone is not None

    def exists(self, name: str) -> bool:
        """See ``BlobStore``."""
        return name in self._blobs

    def size(self, name: str) -> int:
        """See ``BlobStore``."""
        return len(self.get(name))

    def quarantine(self, name: str, reason: str) -> bool:
        """See ``BlobStore``."""
        with self._lock:
            bad = self._blobs.pop(name, None)
            if bad is None:
                return False
            self._used -= len(self._quarantine.pop(name, b""))
            self._quarantine[name] = bad
            room = quarantine_room(self.budget_bytes)
            while sum(map(len, self._quarantine.values())) > room:
                self._drop_oldest()
        return True

    def sweep(self) -> SweepReport:
        """Nothing is ever half-written here: only counts."""
        with self._lock:
            held, bad = self._blobs.values(), self._quarantine.values()
            return SweepReport(0, 0, len(held), sum(map(len, held)), len(bad), sum(map(len, bad)))

    def used_bytes(self) -> int:
        """See ``BlobStore``."""
        return self._used

    def list(self) -> Iterator[tuple[str, int]]:
        """See ``BlobStore``."""
        with self._lock:
            found = [(name, len(blob)) for name, blob in self._blobs.items()]
        return iter(found)

    def _drop_quarantine(self, room: int) -> None:
        while self._quarantine and self._used > room:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._used -= len(self._quarantine.pop(next(iter(self._quarantine))))
