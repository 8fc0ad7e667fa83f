"""``agentkv doctor``: what is installed, what is stored, what is wrong and what to do."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from agentkv.cli.display import nbytes, out_console, print_json
from agentkv.cli.options import AsJson, Device, Dtype, HomeFolder, Model, settings_from

__all__ = ["doctor"]


def doctor(
    fast: Annotated[bool, typer.Option("--fast", help="Neither import torch nor load the model.")] = False,
    home: HomeFolder = None,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Check this installation and this home. Exit status 1 if something is wrong."""
    from agentkv.cli.checkup import examine

    report = examine(settings_from(home=home, model=model, device=device, dtype=dtype), fast=fast)
    if as_json:
        print_json(report)
    else:
        _print(report)
    if report["problems"]:
        raise typer.Exit(1)


def _print(report: dict[str, Any]) -> None:
    console = out_console()
    for title in ("versions", "machine", "home", "database", "storage", "model", "bits", "speed", "codec"):
        facts = report[title]
        if facts is None:
            continue
        console.print(f"[bold]{title}[/]")
        for name, value in facts.items():
            if value is not None:
                console.print(f"  {name.replace('_', ' '):<18} {_shown(name, value)}", markup=False, soft_wrap=True)
    for note in report["notes"]:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    for warning in report["warnings"]:
        console.print(f"[yellow]warning:[/] {_plain(warning['what'])}", soft_wrap=True)
        console.print(f"  to do:  {_plain(warning['do'])}", soft_wrap=True)
    if not report["problems"] and not report["warnings"]:
        console.print("[green]nothing is wrong[/]")
    for problem in report["problems"]:
        console.print(f"[red]problem:[/] {_plain(problem['what'])}", soft_wrap=True)
        console.print(f"  to do:  {_plain(problem['do'])}", soft_wrap=True)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _shown(name: str, value: Any) -> str:
    if name.endswith("bytes"):
        return nbytes(value)
    if isinstance(value, float) and value >= 1:
        return f"{value:,.1f}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)
