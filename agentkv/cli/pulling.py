"""Having the model here before it is needed, with something to look at while it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentkv.cli.display import error_console, nbytes

if TYPE_CHECKING:
    from agentkv.models import LocalModel
    from agentkv.settings import Settings

__all__ = ["pull_shown"]


def pull_shown(name: str, settings: Settings) -> LocalModel:
    """The model called ``name``; where it is not here yet it is pulled, with licence and progress on standard error.

    Blocking. Raises as ``agentkv.models.pull`` does; an interrupt leaves nothing half-made.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from agentkv.models import CATALOGUE, pull, resolve

    found = resolve(name, settings)
    if found is not None:
        return found
    console = error_console()
    if (entry := CATALOGUE.get(name)) is not None:
        console.print(f"[bold]{name}[/]: {entry.description} About {nbytes(entry.nbytes)}.")
        console.print(f"Licence: {entry.licence.name} ({entry.licence.url}). {entry.licence.note}")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        current: tuple[str, int] | None = None

        def report(stage: str, done: int, total: int | None, /) -> None:
            nonlocal current
            if current is None or current[0] != stage:
                if current is not None:
                    bars.stop_task(bars.tasks[current[1]].id)
                if not console.is_terminal:
                    console.print(f"{stage} …")
                current = stage, int(bars.add_task(stage, total=total))
            bars.update(bars.tasks[current[1]].id, completed=done, total=total)

        return pull(name, settings, report)
