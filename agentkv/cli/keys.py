"""``agentkv keys``: who may talk to a server, and how much. Works while a server has the home: SQL alone is opened."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentkv.cli.display import age, nbytes, out_console, print_json
from agentkv.cli.options import AsJson, HomeFolder, settings_from
from agentkv.errors import HomeLocked, InvalidRequest, KeyNotFound

if TYPE_CHECKING:
    from agentkv.sessions.db.records import KeyRecord
    from agentkv.settings import Settings

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Keys of a server, each with sessions of its own: create, list, revoke.")


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Whose key it is; for people.")],
    admin: Annotated[bool, typer.Option("--admin", help="It may do what concerns all keys.")] = False,
    requests: Annotated[
        int | None, typer.Option("--requests-per-minute", min=0, metavar="N", help="The server's rate limit.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens-per-minute", min=0, metavar="N", help="The server's rate limit.")
    ] = None,
    sessions: Annotated[int | None, typer.Option("--max-sessions", min=0, metavar="N", help="Most sessions.")] = None,
    disk: Annotated[
        str | None, typer.Option("--max-disk", metavar="BYTES", help="Most bytes of stored KV, e.g. 2GiB.")
    ] = None,
    home: HomeFolder = None,
    as_json: AsJson = False,
) -> None:
    """Make a key. Its secret is printed once and kept nowhere."""
    limits = {
        "requests_per_minute": requests,
        "tokens_per_minute": tokens,
        "max_sessions": sessions,
        "max_disk": None if disk is None else _bytes(disk),
    }
    record, secret = asyncio.run(_created(settings_from(home=home), name, admin, limits))
    if as_json:
        print_json({**asdict(record), "secret": secret})
        return
    console = out_console()
    console.print(f"{record.id}  {record.name}{'  (admin)' if record.admin else ''}", markup=False)
    console.print(f"secret, shown this once: {secret}", markup=False, soft_wrap=True)


def _bytes(text: str) -> int:
    from pydantic import TypeAdapter, ValidationError

    from agentkv.settings import Bytes

    try:
        return TypeAdapter(Bytes).validate_python(text)
    except ValidationError:
        raise InvalidRequest(
            f"--max-disk {text!r} is not a number of bytes; write e.g. 500MB, 2GiB or a plain number", param="max_disk"
        ) from None


async def _created(settings: Settings, name: str, admin: bool, limits: dict[str, int | None]) -> tuple[KeyRecord, str]:
    from agentkv.sessions.db.repository import Repository

    async with await Repository.open(settings.database_url) as repository:
        return await repository.create_key(name, admin=admin, **limits)


@app.command("list")
def list_(home: HomeFolder = None, as_json: AsJson = False) -> None:
    """All keys, what each may use and has; revoked ones last."""
    settings = settings_from(home=home)
    rows = asyncio.run(_rows(settings))
    if as_json:
        print_json({"keys": rows})
        return
    console = out_console()
    if not rows:
        console.print(f"no keys in {settings.home}", soft_wrap=True)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "id", "name", "", "sessions", "on disk", "requests/min", "tokens/min", "made", "used", box=None, pad_edge=False
    )
    for row in sorted(rows, key=lambda row: row["revoked_at"] is not None):
        used = "never" if row["last_used_at"] is None else age(row["last_used_at"])
        state = "admin" if row["admin"] else ""
        if row["revoked_at"] is not None:
            state = "revoked"
        numbers = [
            _of(f"{row['sessions']:,}", row["max_sessions"], str),
            _of(nbytes(row["disk_bytes"]), row["max_disk"], nbytes),
            *("" if row[rate] is None else f"{row[rate]:,}" for rate in ("requests_per_minute", "tokens_per_minute")),
        ]
        table.add_row(row["id"], Text(row["name"]), state, *numbers, age(row["created_at"]), used)
    console.print(table)


def _of(used: str, limit: int | None, written: Any) -> str:
    return used if limit is None else f"{used} of {written(limit)}"


async def _rows(settings: Settings) -> list[dict[str, Any]]:
    from agentkv.cli.stored import is_empty
    from agentkv.sessions.db.repository import Repository

    if is_empty(settings):
        return []
    async with await Repository.open(settings.database_url) as repository:
        stored = await repository.tenant_bytes()
        return [
            asdict(key)
            | {"sessions": await repository.count_sessions(key.tenant), "disk_bytes": stored.get(key.tenant, 0)}
            for key in await repository.keys()
        ]


@app.command("revoke")
def revoke(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Its name or id.")],
    purge: Annotated[
        bool, typer.Option("--purge", help="Delete its sessions too. Not while a server has the home.")
    ] = False,
    home: HomeFolder = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before --purge.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a key useless, at once and for good. Its sessions stay where they are, unless they are purged."""
    settings = settings_from(home=home)
    if purge and not yes:
        typer.confirm(f"revoke {key} and delete all its sessions for good?", abort=True, err=True)
    record, sessions = asyncio.run(_revoked(settings, key))
    freed = None
    if purge:
        try:
            freed = asyncio.run(_purged(settings, record.tenant))
        except HomeLocked:
            typer.echo(f"{record.id} is revoked, its {sessions:,} sessions are not deleted", err=True)
            raise
    if as_json:
        left = sessions if freed is None else 0
        print_json({**asdict(record), "sessions": left, "deleted": sessions - left, "freed": freed or 0})
        return
    console = out_console()
    console.print(f"revoked {record.id}  {record.name}", markup=False)
    if freed is not None:
        console.print(f"deleted {sessions:,} sessions, {nbytes(freed)} freed")
    elif sessions:
        console.print(
            f"its {sessions:,} sessions are still stored: agentkv keys revoke {record.id} --purge deletes them",
            markup=False,
            soft_wrap=True,
        )


async def _revoked(settings: Settings, key: str) -> tuple[KeyRecord, int]:
    from agentkv.cli.stored import is_empty
    from agentkv.sessions.db.repository import Repository

    if is_empty(settings):
        raise KeyNotFound(key)
    async with await Repository.open(settings.database_url) as repository:
        record = await repository.revoke_key(key)
        return record, await repository.count_sessions(record.tenant)


async def _purged(settings: Settings, tenant: str) -> int:
    from agentkv.cli.stored import stored_home

    async with stored_home(settings) as home:
        while page := await home.repository.list_sessions(tenant):
            for record in page:
                await home.repository.delete_session(record.id, tenant)
        return await home.collect_garbage()
