"""``agentkv sessions``: what is stored, and moving it by hand. Listing, showing and deleting load no model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentkv.cli import lineage, moving
from agentkv.cli.display import age, nbytes, one_line, out_console, print_json, seconds
from agentkv.cli.options import AsJson, Device, Dtype, HomeFolder, Model, Tenant, settings_from
from agentkv.errors import SessionNotFound

if TYPE_CHECKING:
    from agentkv.sessions.db.records import ItemRecord, Manifest, SessionRecord
    from agentkv.sessions.session import Session
    from agentkv.settings import Settings
    from agentkv.types import Span

__all__ = ["app", "span_bar"]

app = typer.Typer(no_args_is_help=True, help="Stored conversations: list, tree, show, suspend, resume, move, delete.")
app.command("tree")(lineage.tree)
app.command("export")(moving.export)
app.command("import")(moving.import_)

_BAR = 60
SessionId = Annotated[str, typer.Argument(metavar="ID", help="sess_…")]


@app.command("list")
def list_(
    home: HomeFolder = None,
    agent: Annotated[str | None, typer.Option("--agent", help="Only this agent's.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many, newest first.")] = 100,
    tenant: Tenant = "default",
    as_json: AsJson = False,
) -> None:
    """The sessions of a home, newest first."""
    settings = settings_from(home=home)
    rows = asyncio.run(_rows(settings, tenant, agent, limit))
    if as_json:
        print_json({"sessions": rows})
        return
    console = out_console()
    if not rows:
        console.print(f"no sessions in {settings.home}", soft_wrap=True)
        return
    from rich.table import Table

    table = Table("id", "agent", "model", "turns", "tokens", "on disk", "bytes", "changed", box=None, pad_edge=False)
    for row in rows:
        numbers = [str(row["turns"]), f"{row['tokens']:,}", f"{row['stored_tokens']:,}", nbytes(row["bytes_disk"])]
        table.add_row(row["id"], row["agent_id"] or "", row["model"], *numbers, age(row["updated_at"]))
    console.print(table)


async def _rows(settings: Settings, tenant: str, agent: str | None, limit: int) -> list[dict[str, Any]]:
    from agentkv.cli.stored import is_empty, stored_home

    if is_empty(settings):
        return []
    async with stored_home(settings) as home:
        found = await home.repository.list_sessions(tenant, agent, limit)
        manifests = [await home.repository.manifest(record.id) for record in found]
        return [
            _summary(record, manifest, home.nbytes(manifest)) for record, manifest in zip(found, manifests, strict=True)
        ]


def _summary(record: SessionRecord, manifest: Manifest, size: int) -> dict[str, Any]:
    return {
        "id": record.id,
        "agent_id": record.agent_id,
        "model": record.model,
        "policy": record.policy,
        "idle_codec": record.idle_codec,
        "turns": record.turns,
        "tokens": record.ledger_length,
        "pinned": record.pinned,
        "stored_tokens": sum(len(segment.span) for segment in manifest.segments),
        "chunks": len(manifest.segments),
        "bytes_disk": size,
        "created_at": record.created_at,
        "updated_at": record.updated_at,
        "metadata": record.metadata,
    }


@app.command("show")
def show(session_id: SessionId, home: HomeFolder = None, tenant: Tenant = "default", as_json: AsJson = False) -> None:
    """One session: its items with the token spans they occupy, what its policy keeps, and what has stored KV."""
    from agentkv.sessions.spans import held_spans, item_states

    record, summary, items, stored = asyncio.run(_shown(settings_from(home=home), session_id, tenant))
    kept = held_spans(record.held, record.ledger_length)
    states = list(item_states(items, kept))
    if as_json:
        shown = [
            asdict(item) | {"span": list(item.span), "kept": state.kept, "evicted": state.evicted}
            for item, state in zip(items, states, strict=True)
        ]
        print_json(summary | {"kept": [list(span) for span in kept], "items": shown})
        return
    from rich.table import Table

    console = out_console()
    console.print(f"[bold]{summary['id']}[/]  {summary['agent_id'] or ''}")
    console.print(f"model {summary['model']}, policy {summary['policy']}, codec {summary['idle_codec']}")
    console.print(
        f"{summary['turns']} turns, created {age(summary['created_at'])}, changed {age(summary['updated_at'])}"
    )
    table = Table("turn", "span", "tokens", "kept", "role", "text", box=None, pad_edge=False)
    for item, state in zip(items, states, strict=True):
        text = str(item.content.get("content") or "") or f"({item.kind})"
        role = f"{item.role} *" if item.generated else item.role
        span = f"[{item.span.start}, {item.span.stop})"
        left = "evicted" if state.evicted else str(state.kept)
        tokens = str(len(item.span))
        table.add_row(str(item.turn), span.replace("[", r"\["), tokens, left, role, one_line(text, 90))
    console.print(table)
    console.print("* generated", style="dim")
    total, held = record.ledger_length, sum(map(len, kept))
    on_disk = sum(map(len, stored))
    console.print(f"kept     {span_bar(kept, total, pinned=record.pinned)}  {held:,} of {total:,} tokens")
    console.print(f"on disk  {span_bar(stored, total)}  {on_disk:,} tokens, {nbytes(summary['bytes_disk'])}")


def span_bar(spans: Sequence[Span], total: int, *, pinned: int = 0, width: int = _BAR) -> str:
    """Ledger positions ``[0, total)`` as ``width`` cells: ``█`` pinned, ``▓`` in one of ``spans``, ``·`` in none."""
    cells = []
    for cell in range(width):
        middle = (cell + 0.5) * total / width
        held = any(span.start <= middle < span.stop for span in spans)
        cells.append("·" if not held else "█" if cell * total < pinned * width else "▓")
    return "".join(cells)


async def _shown(
    settings: Settings, session_id: str, tenant: str
) -> tuple[SessionRecord, dict[str, Any], list[ItemRecord], list[Span]]:
    from agentkv.cli.stored import is_empty, stored_home

    if is_empty(settings):
        raise SessionNotFound(session_id)
    async with stored_home(settings) as home:
        record = await home.repository.get_session(session_id, tenant)
        manifest = await home.repository.manifest(session_id)
        items = await home.repository.items(session_id)
        stored = [segment.span for segment in manifest.segments]
        return record, _summary(record, manifest, home.nbytes(manifest)), items, stored


@app.command("suspend")
def suspend(
    session_id: SessionId,
    tier: Annotated[str, typer.Option("--tier", help="disk, or host (memory of this command only).")] = "disk",
    home: HomeFolder = None,
    tenant: Tenant = "default",
    model: Model = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Store all the KV that the session has. Loads the model."""
    settings = settings_from(home=home, model=model, device=device, dtype=dtype)

    async def work(session: Session) -> Any:
        return await session.suspend(tier)

    report = asyncio.run(_with_model(settings, session_id, tenant, model, work))
    if as_json:
        print_json(asdict(report))
        return
    out_console().print(
        f"{report.session_id}: {report.tokens:,} tokens on {report.tier}, {nbytes(report.nbytes)}, "
        f"{report.chunks_written} new chunks in {seconds(report.seconds)}",
        soft_wrap=True,
    )


@app.command("resume")
def resume(
    session_id: SessionId,
    home: HomeFolder = None,
    tenant: Tenant = "default",
    model: Model = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Bring the KV back once, and say how that went: it is checked, and what is unusable is set aside."""
    settings = settings_from(home=home, model=model, device=device, dtype=dtype)

    async def work(session: Session) -> Any:
        return await session.resume()

    report = asyncio.run(_with_model(settings, session_id, tenant, model, work))
    if as_json:
        print_json({"session_id": session_id, **asdict(report)})
        return
    console = out_console()
    codec = f" ({report.codec})" if report.codec else ""
    console.print(f"{session_id}: {report.tokens:,} tokens from {report.source}{codec} in {seconds(report.seconds)}")
    if report.reason:
        console.print(f"{report.recomputed_tokens:,} tokens will be recomputed by the next turn: {report.reason}")


async def _with_model(settings: Settings, session_id: str, tenant: str, model: str | None, work: Any) -> Any:
    """``work`` on the live session, in a runtime with the session's own model unless another was asked for."""
    from agentkv.cli.pulling import pull_shown
    from agentkv.cli.stored import settings_of_session
    from agentkv.sessions.runtime import AgentKV

    if model is None:
        settings = await settings_of_session(settings, session_id, tenant)
    await asyncio.to_thread(pull_shown, settings.model, settings)
    async with AgentKV(settings) as kv:
        return await work(await kv.tenant(tenant).get(session_id))


@app.command("rm")
def rm(
    session_ids: Annotated[list[str], typer.Argument(metavar="ID…", help="Sessions to delete.")],
    home: HomeFolder = None,
    tenant: Tenant = "default",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete sessions: history, KV and files. There is no way back."""
    if not yes:
        typer.confirm(f"delete {', '.join(session_ids)} for good?", abort=True, err=True)
    freed = asyncio.run(_deleted(settings_from(home=home), session_ids, tenant))
    if as_json:
        print_json({"deleted": session_ids, "freed": freed})
    else:
        out_console().print(f"deleted {len(session_ids)}, {nbytes(freed)} freed")


async def _deleted(settings: Settings, session_ids: Sequence[str], tenant: str) -> int:
    from agentkv.cli.stored import is_empty, stored_home

    if is_empty(settings):
        raise SessionNotFound(session_ids[0])
    async with stored_home(settings) as home:
        for session_id in session_ids:  # all are there, before any goes
            await home.repository.get_session(session_id, tenant)
        return sum([await home.delete(session_id, tenant) for session_id in session_ids])
