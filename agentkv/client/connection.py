"""A server as calls and streams: JSON there and back, and the runtime's errors as they were raised there."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import aiohttp
from pydantic import TypeAdapter

from agentkv import errors
from agentkv.policies.retention import RetentionPolicy, policy_text
from agentkv.schemas.messages import Message

__all__ = ["Connection", "RemoteFailure", "reader"]

_ERRORS: Mapping[str, type[errors.AgentKVError]] = {
    "context_length_exceeded": errors.ContextTooLong,
    "import_refused": errors.ImportRefused,
    "template_error": errors.TemplateError,
    "unsupported": errors.Unsupported,
    "session_not_found": errors.SessionNotFound,
    "not_found": errors.NotFound,
    "session_busy": errors.SessionBusy,
    "rate_limit_exceeded": errors.LimitExceeded,
    "quota_reached": errors.QuotaReached,
    "capacity_exceeded": errors.CapacityExceeded,
    "storage_full": errors.StorageFull,
    "database_unavailable": errors.DatabaseUnavailable,
    "shutting_down": errors.Closed,
}


class RemoteFailure(errors.AgentKVError):
    """The server did not answer, or not as one of this kind does. ``status``: its answer's, ``None`` without one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Connection:
    """HTTP to one server, opened with the first call."""

    def __init__(self, base_url: str, api_key: str | None, timeout: float | None) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.key = api_key or os.environ.get("AGENTKV_API_KEY")
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=10)
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Idempotent."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def call(self, kind: Any, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """Ask, and read the answer as a ``kind``. Raises the runtime's errors, and ``RemoteFailure``."""
        data = None if body is None else json.dumps(body, default=plain).encode()
        given = {name: str(value) for name, value in query.items() if value is not None}
        async with self.request(method, path, data=data, params=given) as response:
            return reader(kind).validate_json(await response.read())

    async def events(self, method: str, path: str, body: Any = None) -> AsyncGenerator[tuple[str, bytes]]:
        """Server-sent events: name and data. An ``error`` is raised."""
        data = None if body is None else json.dumps(body, default=plain).encode()
        async with self.request(method, path, data=data) as response:
            name = ""
            async for line in response.content:
                if line.startswith(b"event: "):
                    name = line[7:].strip().decode()
                elif line.startswith(b"data: "):
                    if name == "error":
                        raise error_of(response.status, line[6:], {})
                    yield name, line[6:]

    @asynccontextmanager
    async def request(
        self, method: str, path: str, *, ok: Sequence[int] = (200, 201, 204), **given: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._http is None:
            headers = {"Content-Type": "application/json"}
            if self.key:
                headers["Authorization"] = f"Bearer {self.key}"
            self._http = aiohttp.ClientSession(headers=headers, timeout=self._timeout, read_bufsize=1 << 20)
        try:
            async with self._http.request(method, self.base_url + path, **given) as response:
                if response.status not in ok:
                    raise error_of(response.status, await response.read(), response.headers)
                yield response
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RemoteFailure(f"{self.base_url} did not answer: {error or type(error).__name__}") from error


@cache
def reader(kind: Any) -> TypeAdapter[Any]:
    """Reads values of a type from JSON; made once."""
    return TypeAdapter(kind)


def plain(value: Any) -> Any:
    if isinstance(value, Message):
        return value.canonical()
    if isinstance(value, RetentionPolicy):
        return policy_text(value)
    if isinstance(value, type):
        raise errors.Unsupported(
            f"sending the class {value.__name__}",
            "over HTTP a schema is JSON: pass response_format={'type': 'json_schema', 'json_schema': {'name': …, "
            f"'schema': {value.__name__}.model_json_schema()}}}} and read the reply's text",
        )
    if callable(dump := getattr(value, "model_dump", None)):
        return dump(exclude_none=True)
    raise errors.InvalidRequest(f"a {type(value).__name__} cannot be sent as JSON")


def error_of(status: int, body: bytes, headers: Mapping[str, str]) -> errors.AgentKVError:
    """The error that the server's runtime raised."""
    try:
        found = json.loads(body)["error"]
        message, code = str(found["message"]), found.get("code")
    except (ValueError, KeyError, TypeError):
        return RemoteFailure(f"the server answered {status}: {body[:200].decode(errors='replace')}", status)
    kind = _ERRORS.get(code or "", errors.InvalidRequest if status == 400 else RemoteFailure)
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(param=found.get("param"), code=code, status=status)
    error.__dict__["retry_after"] = float(headers["Retry-After"]) if "Retry-After" in headers else None
    return error
