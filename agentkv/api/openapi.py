"""The OpenAPI 3.1 document, made from the table of routes and the types that they read and write."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import agentkv
from agentkv.api.calls import Route, adapter
from agentkv.api.errors import ErrorAnswer
from agentkv.api.headers import ANSWER, REQUEST

__all__ = ["DOCUMENT", "document"]

DOCUMENT: web.AppKey[dict[bool, dict[str, Any]]] = web.AppKey("openapi", dict)
"""By whether there are keys."""
_REF = "#/components/schemas/{model}"
_MEANINGS = {
    400: "The request cannot be served as it is.",
    401: "No key, or one that is not known.",
    403: "This key may not do that.",
    404: "There is no such thing for this key.",
    408: "The body did not arrive in time.",
    409: "Another turn is running on this session.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "This key's limit is reached.",
    500: "The server failed.",
    503: "No memory for this turn, no storage, or the server is stopping.",
}
_TOLD = {401: ("WWW-Authenticate",), **dict.fromkeys((409, 429, 503), ("Retry-After",))}
"""Headers that errors have."""
_PARAMETER = re.compile(r"\{(\w+)\}")


def document(routes: Iterable[Route], *, keys: bool) -> dict[str, Any]:
    """A JSON-able OpenAPI document of ``routes``. ``keys``: whether the server has any, so that calls need one."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas, keys)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "agentkv",
            "version": agentkv.__version__,
            "description": "Durable KV state for LLM agent conversations: sessions, and OpenAI's endpoints over them.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "`agentkv keys create`"}},
        },
    }


def _operation(route: Route, schemas: dict[str, Any], keys: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.operation,
        "summary": route.summary,
        "tags": [route.tag],
        "parameters": [*_path_parameters(route), *_query_parameters(route, schemas), *_header_parameters(route)],
        "responses": _responses(route, schemas),
        "security": [{"key": []}] if keys and route.scope != "open" else [],
    }
    if route.description:
        operation["description"] = route.description
    if route.body is not None:
        binary = route.body_media != "application/json"
        schema = {} if binary else _schema(route.body, schemas, "validation")
        operation["requestBody"] = {
            "required": not route.body_optional,
            "content": {route.body_media: {"schema": schema}},
        }
    return operation


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(route.path)
    ]


def _query_parameters(route: Route, schemas: dict[str, Any]) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    whole = route.query.model_json_schema(ref_template=_REF)
    schemas.update(whole.pop("$defs", {}))
    required = whole.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _without_null(schema)}
        for name, schema in whole.get("properties", {}).items()
    ]


def _header_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "header", "required": header.always, "schema": header.schema}
        | {"description": header.description}
        for name, header in ((name, REQUEST[name]) for name in route.reads)
    ]


def _answer_headers(names: Iterable[str]) -> dict[str, Any]:
    """What an answer's ``headers`` say, where it has any."""
    told = {
        name: {"description": header.description, "required": header.always, "schema": header.schema}
        for name, header in ((name, ANSWER[name]) for name in names)
    }
    return {"headers": told} if told else {}


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A query string has no null: what may be left out is no null either."""
    kinds = [kind for kind in schema.get("anyOf", []) if kind.get("type") != "null"]
    if "anyOf" in schema and len(kinds) == 1:
        rest = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
        return {**kinds[0], **rest}
    return schema


def _responses(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.answer is not None:
        content["application/json"] = {"schema": _schema(route.answer, schemas, "serialization")}
    elif route.media != "application/json":
        content[route.media] = {"schema": {"type": "string"} if route.media.startswith("text/") else {}}
    if route.events is not None:
        content["text/event-stream"] = {"schema": _event(route, schemas)}
    status = route.status if content else 204
    done: dict[str, Any] = {"description": "Done.", **_answer_headers(route.tells)}
    if content:
        done["content"] = content
    statuses = {400, 500, *route.errors}
    statuses |= set() if route.scope == "open" else {401, 403, 429}
    statuses |= {408, 413, 415} if route.body is not None else set()
    if route.scope != "open":
        statuses.add(503)
    found = {str(status): done}
    for number in sorted(statuses):
        found[str(number)] = _error(number, schemas) if not _is_health(route, number) else _unwell(route, schemas)
    return found


def _event(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    """One event of a stream: its name, where it has one, and its data, which is JSON."""
    kinds = [_schema(kind, schemas, "serialization") for kind in (route.events, ErrorAnswer)]
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": kinds},
    }
    if route.last is not None:
        data = {"anyOf": [{"const": route.last}, data]}
    return {
        "description": "Each event of the stream.",
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": data},
        "required": ["data"],
    }


def _is_health(route: Route, status: int) -> bool:
    return status == 503 and route.scope == "open"


def _unwell(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": "It is not.",
        **_answer_headers(["Retry-After"]),
        "content": {"application/json": {"schema": _schema(route.answer, schemas, "serialization")}},
    }


def _error(status: int, schemas: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "description": _MEANINGS[status],
        "content": {"application/json": {"schema": _schema(ErrorAnswer, schemas, "serialization")}},
    }
    return answer | _answer_headers(_TOLD.get(status, ()))


def _schema(type_: Any, schemas: dict[str, Any], mode: Any) -> dict[str, Any]:
    """A reference where the type has a name; what it needs is added to ``schemas``."""
    if isinstance(type_, type) and issubclass(type_, BaseModel):
        _, definitions = models_json_schema([(type_, mode)], ref_template=_REF)
        schemas.update(definitions.get("$defs", {}))
        return {"$ref": _REF.format(model=type_.__name__)}
    whole: dict[str, Any] = adapter(type_).json_schema(ref_template=_REF, mode=mode)
    schemas.update(whole.pop("$defs", {}))
    title = whole.get("title")
    if title and isinstance(type_, type) and type_.__name__ == title:
        schemas[title] = whole
        return {"$ref": _REF.format(model=title)}
    return whole
