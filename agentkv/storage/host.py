"""The host tier: encoded chunks in RAM, inside a byte budget, each byte counted."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["HostTier"]


@dataclass(slots=True)
class _Entry:
    payload: bytes
    references: int
    pins: int = 0


class HostTier:
    """Chunks by id. Thread-safe; no method blocks on anything but a plain lock.

    A *reference* is a session that wants the chunk here: ``put`` takes one, ``release`` gives it back, and the chunk
    goes with the last. A *pin* is a read under way: a pinned chunk stays, and stays counted, until ``unpin``. Nothing
    is evicted by itself: ``put`` answers ``False``, and the caller demotes sessions, oldest first by ``lru``.
    """

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"a budget cannot be negative, got {budget_bytes}")
        self.budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._used = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all chunks held, pinned ones included."""
        return self._used

    @property
    def free_bytes(self) -> int:
        """Bytes that still fit."""
        return max(0, self.budget_bytes - self._used)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, chunk_id: object) -> bool:
        return chunk_id in self._entries

    def put(self, chunk_id: str, payload: bytes | bytearray | memoryview) -> bool:
        """Hold a chunk, or take one more reference to it; ``False``, and nothing changed, where it does not fit.

        ``bytes`` are kept as they are, anything else is copied: a slice would keep its whole parent alive, uncounted.
        """
        nbytes = payload.nbytes if isinstance(payload, memoryview) else len(payload)
        with self._lock:
            if (held := self._entries.get(chunk_id)) is not None:
                held.references += 1
                self._entries.move_to_end(chunk_id)
                return True
            if self._used + nbytes > self.budget_bytes:
                return False
            self._entries[chunk_id] = _Entry(bytes(payload), references=1)
            self._used += nbytes
            return True

    def get(self, chunk_id: str) -> bytes | None:
        """The chunk, now the most recently used; ``None`` where it is not held. Pin it to keep it counted meanwhile."""
        with self._lock:
            if (entry := self._entries.get(chunk_id)) is None:
                return None
            self._entries.move_to_end(chunk_id)
            return entry.payload

    def pin(self, chunk_id: str) -> bytes | None:
        """The chunk, held until ``unpin``; ``None``, and no pin, where it is not held. Pins nest."""
        with self._lock:
            if (entry := self._entries.get(chunk_id)) is None:
                return None
            entry.pins += 1
            self._entries.move_to_end(chunk_id)
            return entry.payload

    def unpin(self, chunk_id: str) -> None:
        """End one ``pin``. Drops the chunk if its last reference went meanwhile."""
        with self._lock:
            if (entry := self._entries.get(chunk_id)) is None:
                return  # gone with `clear`: a pinned chunk leaves no other way
            if entry.pins == 0:
                raise ValueError(f"chunk {chunk_id} is not pinned")
            entry.pins -= 1
            self._drop_if_free(chunk_id, entry)

    @contextmanager
    def pinned(self, chunk_id: str) -> Iterator[bytes | None]:
        """``pin`` for the length of a ``with`` block."""
        payload = self.pin(chunk_id)
        try:
            yield payload
        finally:
            if payload is not None:
                self.unpin(chunk_id)

    def release(self, chunk_id: str) -> int:
        """Give one reference back. Bytes freed: the chunk's with its last reference, 0 while it is pinned or gone."""
        with self._lock:
            if (entry := self._entries.get(chunk_id)) is None:
                return 0
            entry.references = max(0, entry.references - 1)
            return self._drop_if_free(chunk_id, entry)

    def discard(self, chunk_id: str) -> int:
        """Drop a chunk whatever its references: it is on disk, or of no use. Bytes freed: 0 if pinned (it goes with
        its last pin) or not held."""
        with self._lock:
            if (entry := self._entries.get(chunk_id)) is None:
                return 0
            entry.references = 0
            return self._drop_if_free(chunk_id, entry)

    def lru(self) -> list[tuple[str, int]]:
        """(chunk id, bytes) of all that is not pinned, least recently used first: a snapshot."""
        with self._lock:
            return [(name, len(entry.payload)) for name, entry in self._entries.items() if not entry.pins]

    def clear(self) -> None:
        """Drop everything, pins included: the runtime is closing."""
        with self._lock:
            self._entries.clear()
            self._used = 0

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the count is not the sum, or a free chunk is still held."""
        with self._lock:
            total = sum(len(entry.payload) for entry in self._entries.values())
            if total != self._used or not 0 <= self._used <= self.budget_bytes:
                raise AssertionError(f"{self._used} bytes counted, {total} held, budget {self.budget_bytes}")
            if free := [name for name, entry in self._entries.items() if not (entry.references or entry.pins)]:
                raise AssertionError(f"held without reference or pin: {free}")

    def _drop_if_free(self, chunk_id: str, entry: _Entry) -> int:
        if entry.references or entry.pins:
            return 0
        del self._entries[chunk_id]
        self._used -= len(entry.payload)
        return len(entry.payload)
