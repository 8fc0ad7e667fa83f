"""Named places at which a test kills this process, to prove what the next start finds.

``AGENTKV_FAULT=name`` or ``name:n`` in the environment arms one point: its n-th passing (from 1) is the process's last
instruction. Unset, a point costs one comparison.
"""

from __future__ import annotations

import os
import signal
import threading

__all__ = ["fault_point"]


def _parse(armed: str) -> tuple[str | None, int]:
    name, _, count = armed.partition(":")
    if count and (not count.isdecimal() or int(count) < 1):
        raise ValueError(f"AGENTKV_FAULT={armed!r}: expected `name` or `name:n` with n from 1")
    return name or None, int(count or 1)


_name, _left = _parse(os.environ.get("AGENTKV_FAULT", ""))
_lock = threading.Lock()


def fault_point(name: str) -> None:
    """Die by SIGKILL here if the environment armed this point and it has been passed often enough."""
    global _left
    if name != _name:
        return
    with _lock:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
