"""``agentkv serve``: sessions and OpenAI's endpoints over HTTP."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from agentkv.cli.options import Device, Dtype, HomeFolder, Model, Policy, settings_from

__all__ = ["serve"]


def serve(
    home: HomeFolder = None,
    model: Model = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on (default 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option("--port", help="TCP port (default 8000; 0 takes a free one).")] = None,
    policy: Policy = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Serve conversations over HTTP until Ctrl-C.

    All other settings: environment (AGENTKV_…, AGENTKV_SERVER_…) or agentkv.toml in the home folder, table [server].
    """
    settings = settings_from(home=home, model=model, default_policy=policy, device=device, dtype=dtype)
    from agentkv.api.serving import serve as run
    from agentkv.cli.options import server_settings_from

    def ready(url: str) -> None:
        typer.echo(f"serving {settings.model} at {url}  (OpenAI clients: base_url={url}/v1, docs: {url}/docs)")

    asyncio.run(run(settings, server_settings_from(settings.home, host=host, port=port), ready=ready))
