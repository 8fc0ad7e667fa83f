"""What stored KV is called: ledger chain hashes, tenant salts, lookup keys, chunk ids (DESIGN §8, Names).

Every name is blake3 over length-prefixed fields in a domain of its own, cut to 160 bits: 40 hexadecimal digits.
A lookup key says which ledger, model and tenant a chunk belongs to, whatever its codec; a chunk id adds the content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from blake3 import blake3

__all__ = [
    "NAME_DIGITS",
    "Ids",
    "LedgerChain",
    "TenantSalts",
    "chain_hash",
    "chunk_id",
    "ids_bytes",
    "imported_quality",
    "lookup_key",
    "tenant_salt",
]

NAME_DIGITS = 40

Ids = bytes | bytearray | memoryview | Sequence[int] | np.ndarray[Any, np.dtype[Any]]
"""Token ids: integers, an array, or their bytes as little-endian int32."""

_CHAIN = "agentkv 2025 ledger chain"
_SALT = "agentkv 2025 tenant salt"
_LOOKUP = "agentkv 2025 lookup key"
_CHUNK = "agentkv 2025 chunk id"


def ids_bytes(ids: Ids) -> bytes:
    """Token ids as little-endian int32 bytes. ``ValueError`` for what does not fit, or a torn last id."""
    if isinstance(ids, (bytes, bytearray)) or (isinstance(ids, memoryview) and ids.itemsize == 1):
        if len(ids) % 4:
            raise ValueError(f"{len(ids)} bytes are not a whole number of int32 ids")
        return bytes(ids)
    array = np.asarray(ids)
    if array.size == 0:
        return b""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"token ids are one row of integers, not {array.ndim} dimensions of {array.dtype}")
    if int(array.min()) < -(2**31) or int(array.max()) >= 2**31:
        raise ValueError(f"token ids must fit int32, these reach {int(array.min())} … {int(array.max())}")
    return array.astype("<i4").tobytes()


class LedgerChain:
    """Chain hash of a growing ledger: ``extend`` in pieces, ``digest`` at any stop. Not thread-safe; ``copy`` forks."""

    def __init__(self) -> None:
        self._hash = blake3(derive_key_context=_CHAIN)
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """How many ids went in: the ``stop`` that ``digest`` speaks of."""
        return self._tokens

    def extend(self, ids: Ids) -> LedgerChain:
        """Append ids. Mutates, and returns itself so that ``chain.extend(ids).digest()`` reads well."""
        data = ids_bytes(ids)
        self._hash.update(data)
        self._tokens += len(data) // 4
        return self

    def digest(self) -> str:
        """Chain hash of ``ledger[0:tokens]``; extending may go on afterwards."""
        return self._hash.hexdigest()[:NAME_DIGITS]

    def copy(self) -> LedgerChain:
        """An independent chain with the same ids in it."""
        twin = LedgerChain()
        twin._hash, twin._tokens = self._hash.copy(), self._tokens
        return twin


def chain_hash(ids: Ids) -> str:
    """Chain hash of a whole ledger ``[0, stop)``: equal exactly where every id and the length are."""
    return LedgerChain().extend(ids).digest()


def tenant_salt(home_secret: bytes, tenant: str) -> bytes:
    """32 secret bytes of one tenant in one home. Its digest, not the salt, goes into files."""
    if not home_secret:
        raise ValueError("the home secret is empty")
    return _hash(_SALT, home_secret, tenant).digest()


class TenantSalts:
    """The salts of a home's tenants, each derived once. May be used from any thread."""

    def __init__(self, home_secret: bytes) -> None:
        self._secret = home_secret
        self._known: dict[str, tuple[bytes, str]] = {}

    def salt(self, tenant: str) -> bytes:
        """See ``tenant_salt``."""
        return self._of(tenant)[0]

    def digest(self, tenant: str) -> str:
        """What files bear of it, as ``ChunkHeader.tenant``."""
        return self._of(tenant)[1]

    def _of(self, tenant: str) -> tuple[bytes, str]:
        if (found := self._known.get(tenant)) is None:
            salt = tenant_salt(self._secret, tenant)
            found = self._known[tenant] = salt, blake3(salt).hexdigest()[:NAME_DIGITS]
        return found


def lookup_key(
    salt: bytes, kv_fingerprint: str, *, start: int, stop: int, chain: str, lineage: str = "", quality: str = ""
) -> str:
    """Name of the KV of ledger positions ``[start, stop)``, however its bytes are encoded.

    ``chain`` is the chain hash at ``stop``; ``lineage`` says which evictions the tokens have seen, ``quality`` which
    lossy layout or codec the session is under; ``""`` for none.
    """
    fields = (str(start), str(stop), chain, lineage, quality)
    return _hash(_LOOKUP, salt, kv_fingerprint, *fields).hexdigest()[:NAME_DIGITS]


def imported_quality(session_id: str) -> str:
    """The ``quality`` of KV that came with a session from another home. Nobody vouches for it: it is that session's."""
    return f"imported:{session_id}"


def chunk_id(key: str, payload_digest: bytes) -> str:
    """Name of one chunk: its lookup key and what it holds."""
    return _hash(_CHUNK, key, payload_digest).hexdigest()[:NAME_DIGITS]


def _hash(domain: str, *fields: str | bytes) -> blake3:
    state = blake3(derive_key_context=domain)
    for value in fields:
        raw = value.encode() if isinstance(value, str) else value
        state.update(len(raw).to_bytes(8, "little"))
        state.update(raw)
    return state
