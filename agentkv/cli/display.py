"""How commands print: numbers with units, one console a stream, JSON as one object."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["age", "error_console", "nbytes", "one_line", "out_console", "print_json", "seconds"]


def out_console() -> Console:
    """Standard output. Piped, it is wide enough that no table cell is cut."""
    return _console(stderr=False)


def error_console() -> Console:
    """Standard error: progress, notes, licences."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, width=None if terminal else 200)


def print_json(value: Any) -> None:
    """One object on one line."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def nbytes(count: int) -> str:
    """``512 B``, ``3.4 MB``."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def seconds(value: float) -> str:
    """``85 ms``, ``4.21 s``."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def age(unix_seconds: float) -> str:
    """How long ago, in the largest unit that fits."""
    passed = max(0.0, time.time() - unix_seconds)
    for limit, unit, size in ((60, "s", 1), (3600, "min", 60), (86_400, "h", 3600)):
        if passed < limit:
            return f"{passed / size:.0f} {unit} ago"
    return f"{passed / 86_400:.0f} d ago"


def one_line(text: str, length: int) -> str:
    """``text`` on one line, cut to ``length`` characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= length else f"{flat[: length - 1]}…"
