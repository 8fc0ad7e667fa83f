"""Logs: one line an event, a name and its fields, and never what was said.

    restored session=sess_0f3a source=disk tokens=812 seconds=0.0131 codec=exact
    fallback session=sess_0f3a reason=missing detail="missing: chunk 7c21: no such file" tokens=256

They go through the standard library's logging, to loggers named as the modules are, under ``agentkv``. A record's
message is the line; its attributes ``event`` and ``fields`` hold the same for handlers of another kind. Importing this
package configures nothing: programs do, and ours do it with :func:`configure_logging`.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from agentkv.errors import AgentKVError, EngineFailed, InvalidRequest

__all__ = ["JsonFormatter", "Log", "LogFormat", "TextFormatter", "configure_logging", "fault"]

LogFormat = Literal["text", "json"]
Plain = str | int | float | bool | None

_ROOT = "agentkv"
_RESERVED = frozenset({"time", "level", "logger", "event"})
_BARE = re.compile(r"[A-Za-z_/][\w./:@%+-]*", re.ASCII)
_WORDS = frozenset({"null", "true", "false"})
_FRAMES = 8


class Log:
    """``log = Log(__name__)``, then ``log.warning("kv_not_written", session=core.id, **fault(error))``.

    A field is a number, a word or a sentence about the product's own doing; one that is ``None`` is left out. Texts and
    token ids of conversations are no fields, nor is what an error says that may quote them: see :func:`fault`.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, /, **fields: Any) -> None:
        """For whoever looks for a fault."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: Any) -> None:
        """The course of things."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        """A fault that cost something and was dealt with."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: Any) -> None:
        """A fault that a person has to look at."""
        self._write(logging.ERROR, event, fields)

    def at(self, level: int, event: str, /, **fields: Any) -> None:
        """At one of logging's levels."""
        self._write(level, event, fields)

    def _write(self, level: int, event: str, fields: Mapping[str, Any]) -> None:
        if taken := _RESERVED & fields.keys():
            raise ValueError(f"fields of event {event!r} may not be called {', '.join(sorted(taken))}")
        if not self._logger.isEnabledFor(level):
            return
        plain = {name: _plain(value) for name, value in fields.items() if value is not None}
        line = _line(event, plain)
        self._logger.log(level, line, extra={"event": event, "fields": plain}, stacklevel=3)


def fault(error: BaseException) -> dict[str, str]:
    """Fields that tell of ``error``: its type, and its words where they are surely this package's own.

    The words of others may quote a prompt (a template's, a policy's, a driver's, a tokenizer's): of those it is told
    where they were raised, innermost first.
    """
    said = {"error": type(error).__name__}
    if isinstance(error, OSError) or (
        isinstance(error, AgentKVError) and not isinstance(error, InvalidRequest | EngineFailed)
    ):
        return said | {"detail": str(error)}
    places = _places(error.__traceback__)
    return said | {"at": " < ".join(places)} if places else said


def _places(trace: TracebackType | None) -> list[str]:
    places: list[str] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{'/'.join(Path(code.co_filename).parts[-2:])}:{trace.tb_lineno}:{code.co_name}")
        trace = trace.tb_next
    return places[: -_FRAMES - 1 : -1]


# -- formats -----------------------------------------------------------------------------------------------------------


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.000Z warning agentkv.events fallback session=sess_0f3a …``"""

    def format(self, record: logging.LogRecord) -> str:
        event, fields = _told(record)
        return f"{_time(record)} {record.levelname.lower()} {record.name} {_line(event, fields)}"


class JsonFormatter(logging.Formatter):
    """An object a line: ``time``, ``level``, ``logger``, ``event``, and the fields beside them. ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        event, fields = _told(record)
        head = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name, "event": event}
        return json.dumps({**head, **fields} | head, default=str)


def _told(record: logging.LogRecord) -> tuple[str, Mapping[str, Any]]:
    """Event and fields. A plug-in may log under our name in its own way: that is the event ``message``."""
    event, fields = getattr(record, "event", None), getattr(record, "fields", None)
    if isinstance(event, str) and isinstance(fields, Mapping):
        return event, fields
    error = record.exc_info[1] if record.exc_info else None
    return "message", {"message": record.getMessage()} | ({} if error is None else fault(error))


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _line(event: str, fields: Mapping[str, Any]) -> str:
    return " ".join([_written(event), *(f"{name}={_written(_plain(value))}" for name, value in fields.items())])


def _plain(value: Any) -> Plain:
    """As JSON has it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    return str(value)


def _written(value: Plain) -> str:
    """A word as it is, anything else as JSON: whatever it holds, it ends neither its line nor itself too early."""
    if not isinstance(value, str):
        return json.dumps(value)
    if _BARE.fullmatch(value) and value not in _WORDS:
        return value
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else json.dumps(c)[1:-1] for c in value) + '"'


# -- for programs ------------------------------------------------------------------------------------------------------


class _ToStandardError(logging.Handler):
    """To whatever standard error is at that time."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


_handler = _ToStandardError()


def configure_logging(log_format: LogFormat, level: int | None = None) -> None:
    """This package's events to standard error, in that format, from ``level`` on (``None``: as before).

    For programs, not for libraries. Other packages' loggers are left alone: what a database driver says at its lowest
    level quotes every prompt.
    """
    _handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logger = logging.getLogger(_ROOT)
    logger.addHandler(_handler)  # once: a handler is not added a second time
    if level is not None:
        logger.setLevel(level)
