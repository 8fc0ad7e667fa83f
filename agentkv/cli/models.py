"""``agentkv models``: what is here, fetching more, deleting."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentkv.cli.display import nbytes, out_console, print_json
from agentkv.cli.options import AsJson, HomeFolder, settings_from

if TYPE_CHECKING:
    from agentkv.models import LocalModel

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Models on this machine: pull, list, delete.")


@app.command("pull")
def pull(
    name: Annotated[str, typer.Argument(help="Catalogue name, Hugging Face id, local folder or .gguf file.")],
    home: HomeFolder = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a model, and convert it once where needed. What is here already is left alone."""
    from agentkv.cli.pulling import pull_shown

    found = pull_shown(name, settings_from(home=home))
    if as_json:
        print_json(_local(found))
        return
    console = out_console()
    console.print(f"[bold]{found.name}[/]  {nbytes(found.nbytes)}  from {found.source}")
    console.print(f"licence: {found.licence or 'not known here; see its source'}")
    console.print(f"folder:  {found.path}", soft_wrap=True)


@app.command("list")
def list_(home: HomeFolder = None, as_json: AsJson = False) -> None:
    """The catalogue, and everything else that was pulled."""
    from agentkv.models import list_models

    listed = list_models(settings_from(home=home))
    if as_json:
        print_json({"models": [{**asdict(it), "local": _local(it.local) if it.local else None} for it in listed]})
        return
    from rich.table import Table

    table = Table("model", "here", "size", "licence", "description", box=None, pad_edge=False)
    for it in listed:
        here = "yes" if it.local else "no"
        table.add_row(it.name, here, nbytes(it.nbytes), it.licence or "not known", it.description)
    out_console().print(table)


@app.command("rm")
def rm(
    name: Annotated[str, typer.Argument(help="A pulled model.")], home: HomeFolder = None, as_json: AsJson = False
) -> None:
    """Delete a pulled model. Sessions that used it keep their history."""
    from agentkv.models import remove

    freed = remove(name, settings_from(home=home))
    if as_json:
        print_json({"name": name, "freed": freed})
    else:
        out_console().print(f"deleted {name}, {nbytes(freed)} freed")


def _local(model: LocalModel) -> dict[str, Any]:
    return asdict(model) | {"path": str(model.path)}
