"""What one token stands for, by itself: log-probabilities are told token by token."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from agentkv.engine.encode import backend_of

__all__ = ["TokenBytes", "token_bytes"]

_BYTE = re.compile("<0x([0-9A-F]{2})>")


class TokenBytes:
    """The bytes of single tokens. A token may be part of a character, so that these need not be valid UTF-8.

    Byte-level tokenizers write each byte as a character of an alphabet of their own; SentencePiece writes spaces as
    ``▁`` and a byte that is no piece as ``<0x0A>``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = backend_of(tokenizer)
        decoder = json.dumps(json.loads(self._backend.to_str()).get("decoder"))
        self._bytes = _alphabet() if '"ByteLevel"' in decoder else None
        self._added = {index: token.content for index, token in self._backend.get_added_tokens_decoder().items()}

    def of(self, token: int) -> bytes:
        """Empty for an id that is no token."""
        piece = self._backend.id_to_token(token) or ""
        if self._bytes is None and (byte := _BYTE.fullmatch(piece)) is not None:
            return bytes.fromhex(byte[1])
        if token in self._added:
            return self._added[token].encode()
        if self._bytes is not None:
            return bytes(self._bytes[c] for c in piece if c in self._bytes)
        return piece.replace("▁", " ").encode()


@lru_cache(maxsize=4)
def token_bytes(tokenizer: Any) -> TokenBytes:
    """Made once a tokenizer. Blocking the first time."""
    return TokenBytes(tokenizer)


def _alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes are themselves, the others follow from U+0100 on."""
    themselves = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in themselves]
    return {chr(byte): byte for byte in themselves} | {chr(256 + n): byte for n, byte in enumerate(others)}
