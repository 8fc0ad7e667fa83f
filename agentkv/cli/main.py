"""The command line. Importing it imports neither torch nor the runtime: each command loads what it needs."""

from __future__ import annotations

import logging
import os
from typing import Annotated, Any

import typer
import typer.core

from agentkv import __version__
from agentkv.bench.app import app as bench
from agentkv.cli import advise, calibrate, chat, demo, doctor, keys, models, serve, sessions, store, top
from agentkv.errors import AgentKVError
from agentkv.logs import LogFormat, configure_logging

__all__ = ["app"]


class _Commands(typer.core.TyperGroup):
    """The root group: errors become one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AgentKVError as error:
            if ctx.params.get("debug"):
                raise
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Durable KV state for LLM agent conversations: sessions that sleep on disk and wake in another process.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"agentkv {__version__}")
        raise typer.Exit()


@app.callback()
def _common(
    debug: Annotated[
        bool, typer.Option("--debug", help="Log everything that agentkv does, and show tracebacks.")
    ] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    # In full as the command's settings say it; this much is known before they are read.
    log_format: LogFormat = "json" if os.environ.get("AGENTKV_LOG_FORMAT") == "json" else "text"
    configure_logging(log_format, logging.DEBUG if debug else logging.WARNING)
    if debug:
        return
    # What transformers says while it loads is not about the user's command.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


app.command("demo")(demo.demo)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.add_typer(models.app, name="models")
app.add_typer(sessions.app, name="sessions")
app.command("calibrate")(calibrate.calibrate)
app.add_typer(store.app, name="store")
app.add_typer(keys.app, name="keys")
app.command("advise")(advise.advise)
app.command("doctor")(doctor.doctor)
app.command("top")(top.top)
app.add_typer(bench, name="bench")

if __name__ == "__main__":
    app()
