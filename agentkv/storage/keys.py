"""The key of an encrypted blob store: 32 bytes as text, in the environment or in a file of its owner's."""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from agentkv.errors import InvalidRequest

__all__ = ["KEY_FILE_VARIABLE", "KEY_VARIABLE", "key_from_environment", "load_key"]

KEY_VARIABLE = "AGENTKV_ENCRYPTION_KEY"
KEY_FILE_VARIABLE = "AGENTKV_ENCRYPTION_KEY_FILE"
_KEY_BYTES = 32
_LONGEST_FILE = 4096


def key_from_environment(environ: Mapping[str, str] = os.environ) -> bytes | None:
    """The key that ``AGENTKV_ENCRYPTION_KEY`` holds or ``AGENTKV_ENCRYPTION_KEY_FILE`` names; ``None`` with neither.

    Raises ``InvalidRequest`` for both at once, and as ``load_key`` does.
    """
    text, file = environ.get(KEY_VARIABLE), environ.get(KEY_FILE_VARIABLE)
    if text is not None and file is not None:
        raise InvalidRequest(f"{KEY_VARIABLE} and {KEY_FILE_VARIABLE} are both set; keep one", param="encryption_key")
    if file is not None:
        return load_key(Path(file))
    return None if text is None else load_key(text)


def load_key(source: str | Path) -> bytes:
    """32 bytes from ``source``: the key's text (64 hex digits, or base64), or the path of a file that holds the text.

    Raises ``InvalidRequest``, which never shows what was read: not such a key, no such file, or one that others than
    its owner may read.
    """
    if isinstance(source, Path):
        where = f"the key file {source}"
        text = _read(source)
    else:
        where, text = KEY_VARIABLE, source
    text = text.strip()
    if re.fullmatch(r"[0-9a-fA-F]{64}", text):
        return bytes.fromhex(text)
    try:
        key = base64.b64decode(text.replace("-", "+").replace("_", "/") + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != _KEY_BYTES:
        raise InvalidRequest(
            f"{where} holds no key: expected {_KEY_BYTES} bytes as 64 hex digits or 44 characters of base64, found "
            f"{len(text)} characters; `openssl rand -hex 32` makes one",
            param="encryption_key",
        )
    return key


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InvalidRequest(f"the key file {path} is no regular file", param="encryption_key")
            if mode := stat.S_IMODE(status.st_mode) & 0o077:
                raise InvalidRequest(
                    f"the key file {path} may be used by others than its owner (mode {mode:03o}): chmod 600 {path}",
                    param="encryption_key",
                )
            return file.read(_LONGEST_FILE).decode("ascii", errors="replace")
    except OSError as error:
        raise InvalidRequest(
            f"the key file {path} cannot be read: {error.strerror or error}", param="encryption_key"
        ) from None
