"""What a blob store is: immutable named bytes, durable once ``put`` returns. Methods block: call them from workers.

StorageFull   a write that the disk, its permissions or a budget does not allow; nothing is left behind
ChunkFault    a read of what is not there (``missing``) or cannot be read (``unreadable``)
StorageError  any other trouble with the disk, with the system's own words
"""

from __future__ import annotations

import errno
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentkv.errors import StorageError, StorageFull

__all__ = [
    "BlobStore",
    "Buffer",
    "Parts",
    "Scratch",
    "SweepReport",
    "check_name",
    "is_name",
    "parts_nbytes",
    "quarantine_room",
    "write_error",
]

Buffer = bytes | bytearray | memoryview
Parts = Sequence[Buffer]
"""One blob's content in pieces: written one after the other, never joined in memory."""

_NAME = re.compile(r"[0-9a-z][0-9a-z_-]{1,127}")
_REFUSED = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG})


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep found: ``temporaries`` (``temporary_bytes``) removed, ``blobs`` (``blob_bytes``) kept,
    ``quarantined`` files (``quarantine_bytes``) still held."""

    temporaries: int
    temporary_bytes: int
    blobs: int
    blob_bytes: int
    quarantined: int
    quarantine_bytes: int


class Scratch:
    """Memory that a reader of many blobs reads each of them into. One thread's own."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def room(self, nbytes: int) -> memoryview:
        """``nbytes`` writable bytes; what was given out before loses its content."""
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)  # not resized: an old view may still be held
        return memoryview(self._buffer)[:nbytes]


class BlobStore(ABC):
    """Names to bytes. Thread-safe. A name is 2 to 128 of ``0-9 a-z _ -``; its content never changes once put."""

    budget_bytes: int
    """Most bytes that ``used_bytes`` may reach."""

    def put(self, name: str, parts: Parts) -> int:
        """Store one blob, durable on return; replaces one of the same name at once or not at all. Returns its bytes.

        Raises ``StorageFull`` or ``StorageError``; the store is then as it was before.
        """
        return self.put_many([(name, parts)])

    @abstractmethod
    def put_many(self, items: Sequence[tuple[str, Parts]]) -> int:
        """Store several blobs, all durable on return, for fewer syncs than one by one. Returns their bytes.

        Raises as ``put`` does, and then none of the new names exists. A name given twice is a ``ValueError``.
        """

    @abstractmethod
    def get(self, name: str, *, limit: int | None = None) -> Buffer:
        """The blob's bytes (the first ``limit`` of them): the caller's own, valid as long as it keeps them.

        Raises ``ChunkFault`` with reason ``missing`` or ``unreadable``.
        """

    def read_into(self, name: str, scratch: Scratch) -> memoryview:
        """The blob's bytes inside ``scratch``; valid until the caller uses ``scratch`` again.

        For readers of many blobs: fresh memory for each costs as much as the copy. Raises as ``get`` does.
        """
        return memoryview(self.get(name))

    @abstractmethod
    def delete(self, name: str) -> bool:
        """Remove a blob; ``False`` where there was none. Raises ``StorageError``. Not durable: an index must know."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether ``get`` would find it."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes of one blob; ``ChunkFault`` as for ``get``."""

    @abstractmethod
    def quarantine(self, name: str, reason: str) -> bool:
        """Move a bad blob aside, never to be served again; ``False`` where there was none.

        Quarantine counts against the budget, is bounded (oldest dropped first) and makes room for new blobs.
        """

    @abstractmethod
    def sweep(self) -> SweepReport:
        """Remove what interrupted writes left behind. Never touches a blob, or a write under way in this process."""

    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes of everything stored: blobs, writes under way, temporaries, quarantine."""

    @abstractmethod
    def list(self) -> Iterator[tuple[str, int]]:
        """(name, bytes) of every blob, in no order. What is put or deleted meanwhile may or may not appear."""


def is_name(name: str) -> bool:
    """Whether a blob may be called so."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    """``name``, or ``ValueError``: nothing else ever becomes part of a path."""
    if not is_name(name):
        raise ValueError(f"{name!r} cannot name a blob: 2 to 128 of 0-9 a-z _ -, not starting with _ or -")
    return name


def parts_nbytes(parts: Parts) -> int:
    """Bytes of all parts together."""
    return sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)


def quarantine_room(budget_bytes: int) -> int:
    """Bytes that quarantined blobs may hold: a sixteenth of the budget. Evidence, not an archive."""
    return budget_bytes // 16


def write_error(error: OSError, what: str) -> StorageError:
    """The error of the tree for an ``OSError`` while writing ``what``."""
    code = errno.errorcode.get(error.errno or 0, "?")
    if error.errno in _REFUSED:
        return StorageFull(f"{what}: {error.strerror} ({code}); free space, or check the folder's mount and owner")
    return StorageError(f"{what}: {error.strerror or error} ({code})")
