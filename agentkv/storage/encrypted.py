"""Encryption at rest around any blob store: what the store holds is sealed, what its user sees is plain.

Content is secret and authentic. Not hidden: names, lengths, times, how many there are. ``size``, ``list`` and what
``put`` returns are plain bytes; ``used_bytes``, budgets and sweeps speak of bytes at rest, 40 more a blob and 16 more
a 256 KiB segment (0.01 % of a chunk of a megabyte).

One small blob, ``agentkv-key-check``, says whether a key is the store's own. It is written before any other and never
shown. Lost or damaged, it is written anew once a blob of the store has opened with the key.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import islice

from blake3 import blake3

from agentkv.errors import ChunkFault, WrongKey
from agentkv.storage.blobs import BlobStore, Parts, Scratch, SweepReport, parts_nbytes
from agentkv.storage.sealing import MAGIC, Sealer, plain_nbytes, sealed_prefix

__all__ = ["KEY_CHECK", "EncryptedBlobs", "check_plain"]

KEY_CHECK = "agentkv-key-check"
_KNOWN = b"agentkv: this store's key opens this blob"
_DIGEST = 32
_WITNESSES = 8
_GIVE_KEY = "set AGENTKV_ENCRYPTION_KEY or AGENTKV_ENCRYPTION_KEY_FILE to the key that it was made with"


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.scratch = Scratch()


class EncryptedBlobs(BlobStore):
    """``inner`` with its content sealed under ``key``, 32 bytes. As thread-safe as ``inner``.

    Opening raises ``WrongKey`` where ``inner`` holds plain blobs, or was made with another key; an empty store is made
    this key's. Reads raise ``ChunkFault`` as ``inner`` does, and with ``checksum``, ``truncated`` or ``format`` for
    what was altered. A read of the first bytes authenticates those; that nothing was cut off, only a whole read says.
    """

    def __init__(self, inner: BlobStore, key: bytes) -> None:
        self.inner = inner
        self.budget_bytes = inner.budget_bytes
        self._sealer = Sealer(key)
        self._per_thread = _PerThread()
        self._open()

    def put_many(self, items: Sequence[tuple[str, Parts]]) -> int:
        """See ``BlobStore``. The sealed copy is whole in memory while it is written."""
        for name, _ in items:
            if name == KEY_CHECK:
                raise ValueError(f"{KEY_CHECK} cannot name a blob of an encrypted store: it holds the key's check")
        self.inner.put_many([(name, self._sealer.seal(name, parts)) for name, parts in items])
        return sum(parts_nbytes(parts) for _, parts in items)

    def get(self, name: str, *, limit: int | None = None) -> memoryview:
        """See ``BlobStore``. With ``limit``, whole segments are read and verified."""
        _check_shown(name)
        if limit is None:
            return self._sealer.unseal(name, self.inner.get(name), whole=True)
        return self._sealer.unseal(name, self.inner.get(name, limit=sealed_prefix(limit)), whole=False)[:limit]

    def read_into(self, name: str, scratch: Scratch) -> memoryview:
        """See ``BlobStore``. The sealed bytes pass through a scratch of this store, one a thread."""
        _check_shown(name)
        sealed = self.inner.read_into(name, self._per_thread.scratch)
        return self._sealer.unseal(name, sealed, whole=True, out=scratch.room(plain_nbytes(len(sealed))))

    def delete(self, name: str) -> bool:
        """See ``BlobStore``."""
        return name != KEY_CHECK and self.inner.delete(name)

    def exists(self, name: str) -> bool:
        """See ``BlobStore``."""
        return name != KEY_CHECK and self.inner.exists(name)

    def size(self, name: str) -> int:
        """See ``BlobStore``. Plain bytes, from the length at rest."""
        _check_shown(name)
        return plain_nbytes(self.inner.size(name))

    def quarantine(self, name: str, reason: str) -> bool:
        """See ``BlobStore``. It stays sealed."""
        return name != KEY_CHECK and self.inner.quarantine(name, reason)

    def sweep(self) -> SweepReport:
        """See ``BlobStore``. Counts of ``inner``: bytes at rest, the key's check among them."""
        return self.inner.sweep()

    def used_bytes(self) -> int:
        """See ``BlobStore``. Bytes at rest, the key's check among them."""
        return self.inner.used_bytes()

    def list(self) -> Iterator[tuple[str, int]]:
        """See ``BlobStore``. Plain bytes."""
        return ((name, plain_nbytes(nbytes)) for name, nbytes in self.inner.list() if name != KEY_CHECK)

    def _open(self) -> None:
        held = _intact_check(self.inner)
        if held is None:
            self._adopt()
            sealed = b"".join(self._sealer.seal(KEY_CHECK, [_KNOWN]))
            self.inner.put(KEY_CHECK, [sealed, blake3(sealed).digest()])
        else:
            try:
                self._sealer.unseal(KEY_CHECK, held, whole=True)
            except ChunkFault:
                raise _other_key() from None

    def _adopt(self) -> None:
        """The store has no check to go by: its blobs say whether it is plain, or another key's. ``WrongKey`` if so."""
        found = False
        for name in _first_names(self.inner):
            found = True
            if self._opens(name):
                return
        if found and _holds_sealed(self.inner):
            raise _other_key()
        if found:
            raise WrongKey(
                "this blob store is not encrypted, and an encryption key was given: open it without the key, or use "
                "the key with an empty store"
            )

    def _opens(self, name: str) -> bool:
        try:
            self._sealer.unseal(name, self.inner.get(name), whole=True)
        except ChunkFault as fault:
            if fault.reason == "unreachable":
                raise
            return False
        return True


def check_plain(inner: BlobStore) -> None:
    """Raise ``WrongKey`` where ``inner`` is encrypted: without the key its blobs would look damaged."""
    if inner.exists(KEY_CHECK) or _holds_sealed(inner):
        raise WrongKey(
            f"this blob store is encrypted, and no key was given: {_GIVE_KEY}; without it, move the store away: "
            "sessions are computed again from their ledgers into an empty one"
        )


def _other_key() -> WrongKey:
    return WrongKey(
        f"this blob store was made with another encryption key: {_GIVE_KEY}; without it, what is stored here cannot be "
        "read, and sessions are computed again from their ledgers into an empty store"
    )


def _intact_check(inner: BlobStore) -> memoryview | None:
    """The key's check as it was written, still sealed; ``None`` where it is missing or damaged."""
    try:
        held = memoryview(inner.get(KEY_CHECK))
    except ChunkFault as fault:
        if fault.reason not in ("missing", "unreadable"):
            raise
        return None
    sealed, digest = held[:-_DIGEST], held[-_DIGEST:]
    return sealed if blake3(sealed).digest() == digest else None


def _first_names(inner: BlobStore) -> Iterator[str]:
    return islice((name for name, _ in inner.list() if name != KEY_CHECK), _WITNESSES)


def _holds_sealed(inner: BlobStore) -> bool:
    return any(_is_sealed(inner, name) for name in _first_names(inner))


def _is_sealed(inner: BlobStore, name: str) -> bool:
    try:
        return bytes(inner.get(name, limit=len(MAGIC))) == MAGIC
    except ChunkFault as fault:
        if fault.reason == "unreachable":
            raise
        return False


def _check_shown(name: str) -> None:
    if name == KEY_CHECK:
        raise ChunkFault(name, "missing", "it is the key's check, no blob")
