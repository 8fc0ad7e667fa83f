"""``agentkv sessions tree``: which session was forked from which. Loads no model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentkv.cli.display import age, out_console, print_json
from agentkv.cli.options import AsJson, HomeFolder, Tenant, settings_from
from agentkv.errors import SessionNotFound

if TYPE_CHECKING:
    from agentkv.sessions.db.records import SessionRecord
    from agentkv.settings import Settings

__all__ = ["tree", "trees"]


def tree(
    session_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="Only the tree that it is in.")] = None,
    home: HomeFolder = None,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """Which session was forked from which, and where."""
    roots = asyncio.run(trees(settings_from(home=home), session_id, tenant))
    if as_json:
        print_json({"trees": roots})
        return
    from rich.tree import Tree

    console = out_console()

    def add(branch: Tree, node: dict[str, Any]) -> None:
        at = "" if node["forked_at"] is None else f" [dim]from token {node['forked_at']:,} of it[/]"
        label = f"{node['id']}{at}  {node['turns']} turns, {node['tokens']:,} tokens, {age(node['updated_at'])}"
        below = branch.add(label)
        for fork in node["forks"]:
            add(below, fork)

    for root in roots:
        gone = f"[dim]{root['parent_id']} (deleted)[/]" if root["parent_id"] else "[dim]·[/]"
        shown = Tree(gone)
        add(shown, root)
        console.print(shown)
    if not roots:
        console.print("no sessions")


async def trees(settings: Settings, session_id: str | None, tenant: str = "default") -> list[dict[str, Any]]:
    """Roots with their forks below them, oldest first. A fork whose parent is deleted is a root."""
    from agentkv.cli.stored import is_empty, stored_home

    records: list[SessionRecord] = []
    if not is_empty(settings):
        async with stored_home(settings) as home:
            if session_id is not None:
                await home.repository.get_session(session_id, tenant)
            before = None
            while page := await home.repository.list_sessions(tenant, None, 500, before):
                before = page[-1].id
                records += page
    elif session_id is not None:
        raise SessionNotFound(session_id)
    nodes: dict[str, dict[str, Any]] = {
        record.id: {
            "id": record.id,
            "parent_id": record.parent_id,
            "forked_at": record.forked_at,
            "agent_id": record.agent_id,
            "turns": record.turns,
            "tokens": record.ledger_length,
            "created_at": record.created_at,
            "updated_at": record.updated_at,
            "forks": [],
        }
        for record in reversed(records)
    }
    for node in nodes.values():
        if node["parent_id"] in nodes:
            nodes[node["parent_id"]]["forks"].append(node)
    if session_id is not None:
        node = nodes[session_id]
        while node["parent_id"] in nodes:
            node = nodes[node["parent_id"]]
        return [node]
    return [node for node in nodes.values() if node["parent_id"] not in nodes]
