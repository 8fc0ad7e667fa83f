"""Errors as HTTP tells them: a status, OpenAI's envelope, and when to come again."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ValidationError

from agentkv import errors
from agentkv.logs import Log, fault

__all__ = [
    "BodyTimeout",
    "Encoded",
    "ErrorAnswer",
    "ErrorDetail",
    "Forbidden",
    "NotJSON",
    "Overloaded",
    "Refusal",
    "Unauthorized",
    "envelope",
    "error_answers",
    "invalid",
]

log = Log(__name__)


class ErrorDetail(BaseModel):
    """What happened and what to do; ``param``: the field that is at fault; ``code``: for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every answer whose status is 400 or above."""

    error: ErrorDetail


class Refusal(errors.AgentKVError):
    """A request that does not get as far as the runtime."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class NotJSON(Refusal):
    """The body cannot be read."""

    code = "invalid_json"

    def __init__(self, why: str) -> None:
        super().__init__(f"this call takes a JSON object as its body: {why}")


class BodyTimeout(Refusal):
    """The body did not arrive."""

    status, code = 408, "body_timeout"

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the request's body did not arrive within {seconds:g} s")


class Encoded(Refusal):
    """The body is compressed."""

    status, code = 415, "unsupported_content_encoding"

    def __init__(self, encoding: str) -> None:
        super().__init__(f"Content-Encoding: {encoding[:40]}: bodies are read as they are; send it without")


class Unauthorized(Refusal):
    """No key, or one that is not known."""

    status, type, code = 401, "authentication_error", "invalid_api_key"


class Forbidden(Refusal):
    """A known caller that may not do this."""

    status, type, code = 403, "permission_error", "forbidden"


class Overloaded(Refusal):
    """As many requests as the server takes at once are in progress."""

    status, type, code = 503, "server_error", "overloaded"

    def __init__(self, most: int) -> None:
        super().__init__(f"{most:,} requests are in progress, as many as this server takes at once; come again soon")


_KINDS: tuple[tuple[type[BaseException], int, str, str], ...] = (
    (errors.ContextTooLong, 400, "invalid_request_error", "context_length_exceeded"),
    (errors.ImportRefused, 400, "invalid_request_error", "import_refused"),
    (errors.TemplateError, 400, "invalid_request_error", "template_error"),
    (errors.Unsupported, 400, "invalid_request_error", "unsupported"),
    (errors.InvalidRequest, 400, "invalid_request_error", "invalid_request"),
    (errors.SessionNotFound, 404, "invalid_request_error", "session_not_found"),
    (errors.SessionDeleted, 404, "invalid_request_error", "session_not_found"),
    (errors.NotFound, 404, "invalid_request_error", "not_found"),
    (errors.SessionBusy, 409, "conflict_error", "session_busy"),
    (errors.LimitExceeded, 429, "rate_limit_error", "rate_limit_exceeded"),
    (errors.QuotaReached, 429, "rate_limit_error", "quota_reached"),
    (errors.CapacityExceeded, 503, "server_error", "capacity_exceeded"),
    (errors.StorageFull, 503, "server_error", "storage_full"),
    (errors.DatabaseUnavailable, 503, "server_error", "database_unavailable"),
    (errors.Closed, 503, "server_error", "shutting_down"),
)
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 415: "unsupported_media_type"}


def invalid(error: ValidationError) -> errors.InvalidRequest:
    """The first thing that is wrong with a body, as this package says it."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return errors.InvalidRequest(f"this call takes JSON: {first['msg']}")
    if isinstance(cause := first.get("ctx", {}).get("error"), errors.InvalidRequest):
        return cause
    where = ""
    for part in first["loc"]:
        where += f"[{part}]" if isinstance(part, int) else f".{part}" if where else str(part)
    if first["type"] == "extra_forbidden":
        return errors.Unsupported(f"field {where!r}", "leave it out", param=where)
    shown = repr(first["input"])
    shown = shown if len(shown) <= 100 else f"{shown[:97]}..."
    return errors.InvalidRequest(
        f"{where}: {first['msg']}, got {shown}" if where else first["msg"], param=where or None
    )


def envelope(error: BaseException) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers of the answer. What nobody foresaw is 500, with no word of what was inside."""
    headers: dict[str, str] = {}
    message, param = str(error), getattr(error, "param", None)
    if isinstance(error, Refusal):
        status, kind, code = error.status, error.type, error.code
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
    elif isinstance(error, web.HTTPException):
        status, kind = error.status, "invalid_request_error"
        code = _HTTP_CODES.get(status, "http_error")
        message = _http_message(error)
        if "Allow" in error.headers:
            headers["Allow"] = error.headers["Allow"]
    else:
        found = next((line for line in _KINDS if isinstance(error, line[0])), None)
        if found is None:
            known = isinstance(error, errors.AgentKVError)
            status, kind, code = 500, "server_error", "internal_error"
            message = message if known else "the server failed; its log says how"
        else:
            _, status, kind, code = found
    wait = getattr(error, "retry_after", None)
    if status in (409, 429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(1.0 if wait is None else wait)))
    return (
        status,
        ErrorAnswer(error=ErrorDetail(message=message, type=kind, param=param, code=code)).model_dump(),
        headers,
    )


def _http_message(error: web.HTTPException) -> str:
    if error.status == 404:
        return "there is nothing at this path; /docs lists what there is"
    if error.status == 405:
        return f"this path does not take {getattr(error, 'method', 'this method')}: {error.headers.get('Allow', '')}"
    return error.text or error.reason


@web.middleware
async def error_answers(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every error becomes an answer in the envelope."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        caught: BaseException = error
    except Exception as error:
        caught = error
    status, body, headers = envelope(caught)
    if status >= 500:
        log.error("request_failed", method=request.method, route=_canonical(request), status=status, **fault(caught))
    return web.Response(
        text=json.dumps(body, ensure_ascii=False), status=status, content_type="application/json", headers=headers
    )


def _canonical(request: web.Request) -> str | None:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else None
