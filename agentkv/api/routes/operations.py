"""What whoever runs the server asks: is it alive, is it well, what has it done."""

from __future__ import annotations

import json
from typing import Literal

from aiohttp import web
from pydantic import BaseModel

import agentkv
from agentkv.api.auth import GUARD
from agentkv.api.calls import Call, Routes
from agentkv.api.openapi import DOCUMENT
from agentkv.api.page import reference_page

__all__ = ["Health", "Part", "Version", "health_of", "routes"]

routes = Routes("Operations")


class Part(BaseModel):
    """One part of the server, and what is wrong with it."""

    ok: bool
    detail: str | None = None


class Health(BaseModel):
    """Well only if every part is."""

    status: Literal["ok", "degraded"]
    parts: dict[str, Part]


class Version(BaseModel):
    """What runs here."""

    version: str
    model: str
    kv_fingerprint: str


@routes.get("/livez", answer=Health, scope="open")
async def live(call: Call) -> Health:
    """Say whether the process answers. It does."""
    return Health(status="ok", parts={"process": Part(ok=True)})


@routes.get("/readyz", answer=Health, scope="open", errors=(503,))
async def ready(call: Call) -> web.Response | Health:
    """Say whether turns can be taken: 503 when the model thread has ended, or the server is stopping."""
    found = health_of(call)
    return _answer({name: part for name, part in found.items() if name in ("model", "server")})


@routes.get("/health", answer=Health, scope="open", errors=(503,))
async def health(call: Call) -> web.Response | Health:
    """Say what is wrong, if anything: 503 when the model thread has ended, or KV cannot be stored.

    Sessions stay usable while KV cannot be stored: what is not stored is computed again after a restart."""
    return _answer(health_of(call))


@routes.get("/metrics", media="text/plain", scope="admin")
async def metrics(call: Call) -> web.Response:
    """Count everything, in Prometheus' text format."""
    return web.Response(body=call.kv.metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


@routes.get("/version", answer=Version, scope="open")
async def version(call: Call) -> Version:
    """Say what runs here."""
    model = call.kv.model
    return Version(version=agentkv.__version__, model=model.name, kv_fingerprint=model.fingerprints.kv)


@routes.get("/openapi.json", answer=dict[str, object], scope="open")
async def openapi_document(call: Call) -> web.Response:
    """Describe all calls, as OpenAPI 3.1."""
    return web.json_response(await _document(call))


@routes.get("/docs", media="text/html", scope="open")
async def docs_page(call: Call) -> web.Response:
    """Show this reference as a page."""
    return web.Response(text=reference_page(await _document(call)), content_type="text/html")


async def _document(call: Call) -> dict[str, object]:
    return call.request.app[DOCUMENT][await call.request.app[GUARD].locked()]


def health_of(call: Call) -> dict[str, Part]:
    """Part by part. Reads no disk."""
    kv = call.kv
    stats = kv.stats()
    parts = {
        "server": Part(ok=not kv.sessions.closed, detail="it is stopping" if kv.sessions.closed else None),
        "model": Part(ok=kv.sessions.engine.alive),
        "disk": Part(ok=stats.storage_error is None, detail=stats.storage_error),
    }
    if not parts["model"].ok:
        parts["model"].detail = "the model thread has ended: restart the server; its log says why"
    return parts


def _answer(parts: dict[str, Part]) -> web.Response | Health:
    found = Health(status="ok" if all(part.ok for part in parts.values()) else "degraded", parts=parts)
    if found.status == "ok":
        return found
    return web.Response(
        text=json.dumps(found.model_dump()), status=503, content_type="application/json", headers={"Retry-After": "5"}
    )
