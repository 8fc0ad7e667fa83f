"""One blob sealed: AES-256-GCM in segments, so that a blob's beginning can be verified without the rest.

    magic 8 | salt 32 | segments of 256 KiB (the last one shorter), each followed by its tag 16

STREAM (Hoang, Reyhanitabar, Rogaway, Vizár, "Online Authenticated-Encryption and its Nonce-Reuse Misuse-Resistance",
2015) with a key a blob, as in Tink's AES-GCM-HKDF streaming: HKDF-SHA256 of the store's key, a random salt and the
blob's name gives key and nonce prefix; a nonce is prefix 7 | segment number u32 big-endian | 1 for the last segment.
Cutting, reordering, swapping and renaming all fail authentication, and no nonce is ever used twice under one key.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from agentkv.errors import ChunkFault, Unsupported
from agentkv.storage.blobs import Buffer, Parts, parts_nbytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["HEADER", "MAGIC", "SEGMENT", "Sealer", "plain_nbytes", "sealed_nbytes", "sealed_prefix"]

MAGIC = b"AKVSEAL\x01"
SEGMENT = 2**18
"""Plain bytes of a segment; part of the format."""

_SALT = 32
_TAG = 16
HEADER = len(MAGIC) + _SALT


def sealed_nbytes(nbytes: int) -> int:
    """Bytes at rest of ``nbytes``: 40 more, and 16 a segment."""
    return HEADER + nbytes + _TAG * max(1, -(-nbytes // SEGMENT))


def plain_nbytes(sealed: int) -> int:
    """Content of a blob of ``sealed`` bytes at rest; 0 for one too short to have any."""
    body = sealed - HEADER
    return max(0, body - _TAG * max(1, -(-body // (SEGMENT + _TAG))))


def sealed_prefix(limit: int) -> int:
    """Bytes at rest that hold the first ``limit`` bytes, and one more: it says whether the last segment is the last."""
    return HEADER + max(1, -(-limit // SEGMENT)) * (SEGMENT + _TAG) + 1


class Sealer:
    """Seals and opens blobs with one store's ``key`` of 32 bytes. Thread-safe."""

    def __init__(self, key: bytes) -> None:
        if len(key) != 32:
            raise ValueError(f"an encryption key has 32 bytes, got {len(key)}")
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("cryptography"):
                raise
            raise Unsupported(
                "encryption at rest", "it needs cryptography: pip install 'agentkv[encryption]'", param="encryption_key"
            ) from None
        self._cipher = AESGCM
        self._key = key

    def __repr__(self) -> str:
        return "Sealer(…)"

    def seal(self, name: str, parts: Parts) -> list[Buffer]:
        """``parts`` as blob ``name`` rests, in pieces: about ``sealed_nbytes`` of fresh memory."""
        head = MAGIC + secrets.token_bytes(_SALT)
        cipher, prefix = self._derive(name, head)
        sealed: list[Buffer] = [head]
        left = parts_nbytes(parts)
        for number, plain in enumerate(_segments(parts)):
            left -= len(plain)
            out = bytearray(len(plain) + _TAG)
            cipher.encrypt_into(_nonce(prefix, number, left == 0), plain, head, out)
            sealed.append(out)
        return sealed

    def unseal(self, name: str, sealed: Buffer, *, whole: bool, out: memoryview | None = None) -> memoryview:
        """Content of ``sealed``: all of a blob at rest, or where not ``whole`` its first ``sealed_prefix`` bytes.

        Written to ``out`` where given (at least ``plain_nbytes`` long), else to fresh memory. Whatever is returned is
        authentic. Raises ``ChunkFault``: ``format`` (not sealed), ``truncated``, ``checksum`` (altered, moved, cut at a
        segment, or another key).
        """
        view = memoryview(sealed).cast("B")
        if view[: len(MAGIC)] != MAGIC[: len(view)]:
            raise ChunkFault(name, "format", "it is not an encrypted blob of this version")
        if len(view) < HEADER + _TAG:
            raise ChunkFault(name, "truncated", f"{len(view):,} bytes are too few for an encrypted blob")
        head, body = bytes(view[:HEADER]), view[HEADER:]
        if not whole:  # the byte beyond the last segment wanted belongs to the next one
            whole = len(body) % (SEGMENT + _TAG) != 1
            body = body if whole else body[:-1]
        count = -(-len(body) // (SEGMENT + _TAG))
        if (last := len(body) - (count - 1) * (SEGMENT + _TAG)) < _TAG:
            raise ChunkFault(name, "truncated", f"its last segment has {last} bytes of a tag of {_TAG}")
        cipher, prefix = self._derive(name, head)
        nbytes = plain_nbytes(HEADER + len(body))
        plain = memoryview(bytearray(nbytes)) if out is None else out[:nbytes]
        for number in range(count):
            piece = body[number * (SEGMENT + _TAG) : (number + 1) * (SEGMENT + _TAG)]
            target = plain[number * SEGMENT : number * SEGMENT + len(piece) - _TAG]
            try:
                cipher.decrypt_into(_nonce(prefix, number, whole and number == count - 1), piece, head, target)
            except Exception as error:  # InvalidTag, a class of the optional library
                if type(error).__name__ != "InvalidTag":
                    raise
                raise ChunkFault(name, "checksum", f"segment {number} of {count} is not what was written") from None
        return plain

    def _derive(self, name: str, head: bytes) -> tuple[AESGCM, bytes]:
        """Cipher and 7-byte nonce prefix of one blob."""
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        info = b"agentkv blob\0" + name.encode()
        derived = HKDF(SHA256(), length=39, salt=head[len(MAGIC) :], info=info).derive(self._key)
        return self._cipher(derived[:32]), derived[32:]


def _nonce(prefix: bytes, number: int, last: bool) -> bytes:
    return prefix + number.to_bytes(4, "big") + (b"\1" if last else b"\0")


def _segments(parts: Parts) -> list[Buffer]:
    """``parts`` cut anew into segments: views where one lies inside a part, copies where it spans several."""
    segments: list[Buffer] = []
    held: list[memoryview] = []
    room = SEGMENT
    for part in parts:
        view = memoryview(part).cast("B")
        while view:
            held.append(view[:room])
            view, room = view[room:], room - min(room, len(view))
            if room == 0:
                segments.append(held[0] if len(held) == 1 else b"".join(held))
                held, room = [], SEGMENT
    if held or not segments:
        segments.append(b"".join(held))
    return segments
