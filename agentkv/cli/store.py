"""``agentkv store``: the files of stored KV, looked at and put in order. Loads no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentkv.cli.display import nbytes, out_console, print_json
from agentkv.cli.options import AsJson, HomeFolder, settings_from

if TYPE_CHECKING:
    from agentkv.cli.stored import StoredHome
    from agentkv.settings import Settings
    from agentkv.storage.blobs import BlobStore

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Stored KV: verify, count, collect garbage, rebuild the index.")


@app.command("stats")
def stats(home: HomeFolder = None, as_json: AsJson = False) -> None:
    """What is stored: bytes by codec and by model, against the budget."""
    settings = settings_from(home=home)
    facts = asyncio.run(_stats(settings))
    if as_json:
        print_json(facts)
        return
    console = out_console()
    console.print(f"{facts['chunks']:,} chunks in {nbytes(facts['chunk_bytes'])}, {facts['sessions']:,} sessions")
    for title in ("by_codec", "by_model"):
        for name, size in facts[title].items():
            console.print(f"  {title[3:]:<6} {name:<44} {nbytes(size)}", markup=False)
    console.print(f"used: {nbytes(facts['used_bytes'])} of {nbytes(facts['budget_bytes'])}, everything counted")
    console.print(f"quarantine: {facts['quarantined']} files, {nbytes(facts['quarantine_bytes'])}")
    console.print(f"shared: {nbytes(facts['shared_bytes'])} more would be needed if sessions shared nothing")


async def _stats(settings: Settings) -> dict[str, Any]:
    async with _opened(settings) as home:
        swept = await asyncio.to_thread(home.blobs.sweep)
        rows = await home.repository.chunk_facts()
        by_codec: dict[str, int] = {}
        by_model: dict[str, int] = {}
        for row in rows:
            by_codec[row.codec] = by_codec.get(row.codec, 0) + row.nbytes
            by_model[row.kv_fingerprint] = by_model.get(row.kv_fingerprint, 0) + row.nbytes
        return {
            "sessions": await home.repository.count_sessions(),
            "chunks": len(rows),
            "chunk_bytes": sum(row.nbytes for row in rows),
            "shared_bytes": sum(row.nbytes * max(0, row.sessions - 1) for row in rows),
            "by_codec": dict(sorted(by_codec.items())),
            "by_model": dict(sorted(by_model.items())),
            "files": swept.blobs,
            "file_bytes": swept.blob_bytes,
            "quarantined": swept.quarantined,
            "quarantine_bytes": swept.quarantine_bytes,
            "used_bytes": home.blobs.used_bytes(),
            "budget_bytes": home.blobs.budget_bytes,
        }


@app.command("verify")
def verify(
    home: HomeFolder = None,
    repair: Annotated[bool, typer.Option("--repair", help="Move faulty files to quarantine.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every file and check every byte of it. Exit status 1 if something is wrong.

    A faulty or missing file costs a recompute of its tokens at the session's next turn, nothing else.
    """
    facts = asyncio.run(_verify(settings_from(home=home), repair))
    if as_json:
        print_json(facts)
    else:
        console = out_console()
        console.print(f"{facts['intact']:,} of {facts['files']:,} files are intact")
        for fault in facts["faulty"]:
            console.print(f"faulty: {fault['chunk']}: {fault['reason']}: {fault['detail']}", markup=False)
        for name in facts["missing"]:
            console.print(f"missing: {name}", markup=False)
        for name in facts["unknown"]:
            console.print(f"not in the index: {name} (agentkv store rebuild)", markup=False)
        if facts["quarantined"]:
            console.print(f"moved to quarantine: {facts['quarantined']}")
    if facts["faulty"] or facts["missing"] or facts["unknown"]:
        raise typer.Exit(1)


async def _verify(settings: Settings, repair: bool) -> dict[str, Any]:
    async with _opened(settings) as home:
        rows = await home.repository.chunk_facts()
        known = {row.id for row in rows}
        needed = {row.id for row in rows if row.sessions}

        def look() -> dict[str, Any]:
            there = {name for name, _ in home.blobs.list()}
            faulty = list(_faults(home.blobs, sorted(there)))
            # What only gives no answer may be well.
            altered = [fault for fault in faulty if repair and fault["reason"] != "unreachable"]
            moved = sum(home.blobs.quarantine(fault["chunk"], fault["reason"]) for fault in altered)
            return {
                "files": len(there),
                "intact": len(there) - len(faulty),
                "faulty": faulty,
                "missing": sorted(needed - there),
                "unknown": sorted(there - known),
                "quarantined": moved,
            }

        return await asyncio.to_thread(look)


def _faults(blobs: BlobStore, names: list[str]) -> Iterator[dict[str, str]]:
    from agentkv.errors import ChunkFault
    from agentkv.storage.blobs import Scratch
    from agentkv.storage.chunkfile import verify as verify_chunk

    scratch = Scratch()
    for name in names:
        try:
            verify_chunk(blobs.read_into(name, scratch), name)
        except ChunkFault as fault:
            yield {"chunk": name, "reason": fault.reason, "detail": fault.detail}


@app.command("gc")
def gc(home: HomeFolder = None, as_json: AsJson = False) -> None:
    """Delete what no session needs, and what interrupted writes left behind."""
    facts = asyncio.run(_gc(settings_from(home=home)))
    if as_json:
        print_json(facts)
    else:
        out_console().print(f"freed {nbytes(facts['freed_bytes'])}; {nbytes(facts['used_bytes'])} are used")


async def _gc(settings: Settings) -> dict[str, Any]:
    async with _opened(settings) as home:
        freed = await home.collect_garbage()
        return {"freed_bytes": freed, "used_bytes": home.blobs.used_bytes()}


@app.command("rebuild")
def rebuild(home: HomeFolder = None, as_json: AsJson = False) -> None:
    """Take up files that the index does not know: each says itself whose KV it is.

    For a database that was restored from a backup, or lost rows. Starting a runtime does the same.
    """
    facts = asyncio.run(_rebuild(settings_from(home=home)))
    if as_json:
        print_json(facts)
        return
    out_console().print(
        f"{facts['files']:,} files were not in the index as what they are: {facts['adopted']:,} taken up "
        f"({facts['tokens']:,} tokens of {facts['sessions']:,} sessions), {facts['deleted']:,} deleted ones removed, "
        f"{facts['aside']:,} moved aside"
    )


async def _rebuild(settings: Settings) -> dict[str, Any]:
    from agentkv.sessions.rebuilding import adopt_orphans
    from agentkv.sessions.workers import start_workers

    async with _opened(settings) as home:
        with await asyncio.to_thread(start_workers, 2) as workers:
            return asdict(await adopt_orphans(home.repository, home.blobs, home.secret, workers))


@asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[StoredHome]:
    from agentkv.cli.stored import is_empty, stored_home
    from agentkv.errors import InvalidRequest

    if is_empty(settings):
        raise InvalidRequest(f"nothing was ever stored in {settings.home}; choose another with --home")
    async with stored_home(settings) as home:
        yield home
