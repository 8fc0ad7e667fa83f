"""``agentkv top``: what a running process does with its memory, live."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentkv.cli.display import nbytes, out_console, print_json, seconds
from agentkv.cli.options import AsJson, HomeFolder, settings_from
from agentkv.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["top"]

_BAR = 30
_ROWS = 25


def top(
    home: HomeFolder = None,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print, end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Sessions, tiers and rates of the process that has this home. Ctrl-C ends the view, not the process."""
    from agentkv.sessions.control import ask

    folder = settings_from(home=home).home
    look = ask(folder)
    if look is None:
        raise InvalidRequest(f"no running agentkv process answers in {folder}; choose another with --home")
    if as_json:
        print_json(look)
        return
    if once:
        out_console().print(_view(look, None, every))
        return
    from rich.live import Live

    with Live(_view(look, None, every), console=out_console(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every)
            before, look = look, ask(folder)
            if look is None:
                raise InvalidRequest(f"the process in {folder} has ended")
            live.update(_view(look, before, every), refresh=True)


def _view(look: Mapping[str, Any], before: Mapping[str, Any] | None, every: float) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    stats = look["stats"]
    states = ", ".join(f"{count} {state}" for state, count in sorted(stats["sessions"].items())) or "none"
    lines = [
        Text(f"{look['model']}  pid {look['pid']}  up {seconds(stats['uptime'])}  layout {look['layout']}"),
        Text(f"sessions  {states}; {stats['running']} turns running, {stats['waiting']} waiting for memory"),
    ]
    for name, tier in stats["tiers"].items():
        share = min(1.0, tier["used"] / tier["budget"]) if tier["budget"] else 0.0
        full = round(share * _BAR)
        bar = "█" * full + "░" * (_BAR - full)
        lines.append(Text(f"{name:<7} {bar} {nbytes(tier['used'])} of {nbytes(tier['budget'])}"))
    past = before["stats"] if before else {}
    rate = (stats["completion_tokens"] - past.get("completion_tokens", stats["completion_tokens"])) / every
    computed = (stats["computed_tokens"] - past.get("computed_tokens", stats["computed_tokens"])) / every
    reused = "-" if stats["hit_rate"] is None else f"{stats['hit_rate']:.1%}"
    lines.append(
        Text(
            f"generated {rate:,.0f} tok/s, computed {computed:,.0f} tok/s; reused {reused} of known tokens, "
            f"saved {seconds(stats['seconds_saved'])}"
        )
    )
    if stats["storage_error"]:
        lines.append(Text(f"the disk refuses KV: {stats['storage_error']}", style="red"))
    table = Table("session", "agent", "state", "tokens", "turns", "device", "host", "idle", box=None, pad_edge=False)
    for row in look["sessions"][:_ROWS]:
        table.add_row(
            row["id"][:18],
            row["agent"] or "",
            row["state"] + (" *" if row["busy"] else ""),
            f"{row['tokens']:,}",
            str(row["turns"]),
            nbytes(row["device_bytes"]),
            nbytes(row["host_bytes"]),
            seconds(row["idle"]),
        )
    return Group(*lines, Text(), table)
