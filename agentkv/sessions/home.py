"""The home folder: owner-only, one process at a time, with a secret of its own."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
from pathlib import Path

from agentkv.errors import HomeLocked, StorageFull

__all__ = ["Home"]


class Home:
    """A locked home folder. Blocking: open and close it off the event loop.

    ``secret``: 32 bytes made once, from which tenants' salts derive. Raises ``HomeLocked`` with the owner's pid and
    host while another process has it; the lock goes with the process, however it dies.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)
            self._descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            reason = error.strerror
            raise StorageFull(f"the home {path} cannot be opened: {reason}; choose another with --home") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = _owner(path / "lock")
            os.close(self._descriptor)
            raise HomeLocked(str(path), pid=owner[0], host=owner[1]) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        self.secret = self._secret()

    def _secret(self) -> bytes:
        file = self.path / "secret"
        try:
            found = file.read_bytes()
            if len(found) == 32:
                return found
        except FileNotFoundError:
            pass
        made = secrets.token_bytes(32)
        temporary = self.path / ".secret.tmp"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            out.write(made)
            out.flush()
            os.fsync(out.fileno())
        temporary.rename(file)
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return made

    def close(self) -> None:
        """Give the folder back. Idempotent."""
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1


def _owner(lock: Path) -> tuple[int | None, str | None]:
    try:
        owner = json.loads(lock.read_text())
        return int(owner["pid"]), str(owner["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, None
