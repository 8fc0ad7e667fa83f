"""Options that several commands share, and the settings they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from agentkv.errors import InvalidRequest
from agentkv.logs import configure_logging

if TYPE_CHECKING:
    from agentkv.api.settings import ServerSettings
    from agentkv.settings import Settings

__all__ = [
    "AsJson",
    "Device",
    "Dtype",
    "HomeFolder",
    "Model",
    "Policy",
    "Tenant",
    "server_settings_from",
    "settings_from",
]

S = TypeVar("S")

HomeFolder = Annotated[
    Path | None, typer.Option("--home", help="Home folder (default: AGENTKV_HOME, else ~/.local/share/agentkv).")
]
Model = Annotated[
    str | None, typer.Option("--model", help="Catalogue name, local folder, .gguf file, or Hugging Face id.")
]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:N, or auto.")]
Policy = Annotated[
    str | None, typer.Option("--policy", help="What stays in the KV state: full, sink:4096, turns:8192, adaptive …")
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="auto, bfloat16, float16 or float32.")]
Tenant = Annotated[str, typer.Option("--tenant", help="Whose sessions: default, or a key's id.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def settings_from(**given: Any) -> Settings:
    """Settings from what the command line gives; ``None`` leaves a field to environment, TOML and default.

    The log takes the form that they say. Raises ``InvalidRequest`` in one line for a value that does not fit.
    """
    from agentkv.settings import Settings

    settings = _made(Settings, given)
    configure_logging(settings.log_format)
    return settings


def server_settings_from(home: Path, **given: Any) -> ServerSettings:
    """The same for the server's settings, from the TOML file of ``home``."""
    from agentkv.api.settings import server_settings

    return _made(partial(server_settings, home), given)


def _made(kind: Callable[..., S], given: Mapping[str, Any]) -> S:
    from pydantic import ValidationError

    try:
        return kind(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise InvalidRequest(f"settings: {'; '.join(_told(fault) for fault in error.errors())}") from error
    except ValueError as error:
        raise InvalidRequest(f"settings: {error}") from error


def _told(fault: Any) -> str:
    """One thing that is wrong with settings, for a person."""
    name = ".".join(map(str, fault["loc"][:1]))
    if fault["type"] != "extra_forbidden":
        return f"{name}: {fault['msg']}, got {fault['input']!r}"
    from agentkv.api.settings import ServerSettings
    from agentkv.settings import Settings, nearest

    meant = nearest(name, {**Settings.model_fields, **ServerSettings.model_fields})
    hint = f"did you mean {meant!r}?" if meant else "docs/operations.md says where to find all of them"
    return f"{name!r}, as in agentkv.toml, is no setting: {hint}"
