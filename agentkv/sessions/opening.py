"""The blob store of a home, as its settings say."""

from __future__ import annotations

import os
from pathlib import Path

from blake3 import blake3

from agentkv.errors import InvalidRequest
from agentkv.settings import Settings
from agentkv.storage.blobs import BlobStore
from agentkv.storage.keys import load_key
from agentkv.storage.opening import open_blobs

__all__ = ["bytes_of", "open_store"]


def open_store(settings: Settings, secret: bytes) -> BlobStore:
    """Open and sweep it. Blocking. ``secret``: the home's.

    Under a URL each home has a folder of its own, named by a digest of its secret: homes that share a bucket never see
    each other's files. A share as a budget speaks of the home's file system; of a remote store it says nothing.
    Raises ``StorageFull``, ``StorageError``, ``WrongKey``, ``InvalidRequest``, ``Unsupported`` (a missing extra).
    """
    stat = os.statvfs(settings.home)
    disk = stat.f_frsize * stat.f_blocks
    url, unbounded = settings.blobs_url, False
    if url is not None and not url.startswith("memory:"):
        own = blake3(secret, derive_key_context="agentkv 2026 folder of a home").hexdigest()[:20]
        url, unbounded = f"{url.rstrip('/')}/{own}", not url.startswith("file:")
    share = isinstance(settings.disk_budget, str)
    return open_blobs(
        url=url,
        root=settings.blobs_dir,
        budget_bytes=2**62 if unbounded and share else bytes_of(settings.disk_budget, disk),
        margin_bytes=bytes_of(settings.disk_margin, disk),
        key=_key(settings),
    )


def bytes_of(amount: int | str, total: int) -> int:
    """A number of bytes, or a share of ``total``."""
    return amount if isinstance(amount, int) else int(total * float(amount.rstrip("%")) / 100)


def _key(settings: Settings) -> bytes | None:
    text, file = settings.encryption_key, settings.encryption_key_file
    if text is not None and file is not None:
        raise InvalidRequest("encryption_key and encryption_key_file are both set; keep one", param="encryption_key")
    if file is not None:
        return load_key(Path(file).expanduser())
    return None if text is None else load_key(text.get_secret_value())
