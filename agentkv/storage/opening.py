"""The blob store that a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from agentkv.errors import InvalidRequest
from agentkv.registry import Registry
from agentkv.storage.blobs import BlobStore
from agentkv.storage.encrypted import EncryptedBlobs, check_plain
from agentkv.storage.local import LocalBlobs
from agentkv.storage.memory import MemoryBlobs

__all__ = ["BLOBS", "open_blobs"]

BLOBS: Registry[Callable[[str, int], BlobStore]] = Registry("blobs")
"""Stores of other kinds, by the scheme of their URL: called with the URL and the budget in bytes. Entry point group
``agentkv.blobs``."""


def open_blobs(
    *,
    url: str | None,
    root: Path,
    budget_bytes: int = 2**62,
    margin_bytes: int = 0,
    key: bytes | None = None,
) -> BlobStore:
    """Open and sweep a store. Blocks: call it from a worker.

    ``url``: ``None`` is the folder ``root``, ``file:///…`` another folder, ``memory:`` this process's memory, a scheme
    that is registered a store of that kind, anything else an object store. ``margin_bytes`` (free space that is never
    used) holds for folders only. ``key``: 32 bytes of an encrypted store. Raises ``StorageError``, ``StorageFull``,
    ``WrongKey``, ``InvalidRequest`` (a URL of no kind) and ``Unsupported`` (an extra is not installed).
    """
    inner = _open(url, root, budget_bytes, margin_bytes)
    if key is not None:
        return EncryptedBlobs(inner, key)
    check_plain(inner)
    return inner


def _open(url: str | None, root: Path, budget_bytes: int, margin_bytes: int) -> BlobStore:
    if url is None:
        return LocalBlobs(root, budget_bytes=budget_bytes, margin_bytes=margin_bytes)
    if url.startswith("memory:"):
        return MemoryBlobs(budget_bytes)
    if url.startswith("file:"):
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise InvalidRequest(f"{url!r} names no folder of this machine; write file:///path", param="blobs_url")
        return LocalBlobs(unquote(parts.path), budget_bytes=budget_bytes, margin_bytes=margin_bytes)
    if (scheme := url.partition(":")[0]) in BLOBS:
        return BLOBS.get(scheme)(url, budget_bytes)
    from agentkv.storage.remote import RemoteBlobs

    return RemoteBlobs(url, budget_bytes=budget_bytes)
