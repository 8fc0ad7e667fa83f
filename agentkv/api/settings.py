"""Settings of the server, beside those of the runtime: typed, with a default that works and a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from agentkv.settings import Bytes, Layered

__all__ = ["ServerSettings", "server_settings"]


class ServerSettings(Layered):
    """How the server listens and what it bears. Every field is also ``AGENTKV_SERVER_<NAME>`` and a key of the TOML
    file's table ``[server]``."""

    model_config = SettingsConfigDict(env_prefix="AGENTKV_SERVER_", extra="forbid", frozen=True, validate_default=True)
    table: ClassVar[str] = "server"

    host: str = Field("127.0.0.1", description="Address to listen on. Anything but loopback needs a key.")
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 takes a free one.")
    max_body: Bytes = Field(32 * 2**20, description="Largest body of a request, imports aside.")
    max_import: Bytes = Field(64 * 2**30, description="Largest file that can be imported.")
    body_seconds: float = Field(60.0, gt=0, description="Longest wait for a request's body.")
    grace_seconds: float = Field(
        2.0,
        ge=0,
        description="A stream that has not begun by then is answered with heartbeats; until then an error has a status "
        "of its own.",
    )
    heartbeat_seconds: float = Field(10.0, gt=0, description="Between the comments that keep a silent stream open.")
    send_seconds: float = Field(120.0, gt=0, description="A client that takes nothing for so long is disconnected.")
    shutdown_seconds: float = Field(30.0, ge=0, description="How long running turns may finish when the server stops.")
    max_streams: int = Field(512, ge=1, description="Requests in progress at once; another one gets 503.")
    cors_origins: tuple[str, ...] = Field((), description="Web pages that may call: origins, or `*`.")
    store_responses: bool = Field(True, description="Whether responses are kept when a request does not say.")
    anonymous_seconds: float = Field(
        86_400.0, ge=0, description="Idle time after which a session that no client has named is deleted."
    )
    anonymous_sessions: int = Field(10_000, ge=1, description="Most of these a tenant may have; the oldest goes first.")


def server_settings(home: Path, **given: Any) -> ServerSettings:
    """Settings of a server on ``home``, whose ``agentkv.toml`` is read unless ``AGENTKV_CONFIG`` names another file.

    Raises pydantic's ``ValidationError``.
    """

    class Here(ServerSettings):
        folder: ClassVar[Path | None] = home

    return Here(**given)
