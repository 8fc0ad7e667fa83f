"""``agentkv demo``: three conversations sleep on disk and wake in another operating-system process.

What makes it a proof: every agent is held twice, with the same inputs and greedy decoding. One of the pair is suspended
and continues in the new process. Its twin, which is never suspended, continues at once in the first process. Their
replies are compared token for token, those before the suspension too.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentkv.cli.display import error_console, nbytes, out_console, print_json, seconds
from agentkv.cli.options import AsJson, Device, Dtype, HomeFolder, Model, settings_from
from agentkv.errors import AgentKVError

if TYPE_CHECKING:
    from rich.progress import Progress

    from agentkv.cli.demo_script import Agent
    from agentkv.settings import Settings

__all__ = ["demo"]


@dataclass(slots=True)
class _Row:
    """What is known of one session; ``expected`` are the twin's uninterrupted ids."""

    agent: str
    id: str
    message: str
    twins_agree: bool = True
    expected: list[int] = field(default_factory=list)
    tokens: int = 0
    bytes_disk: int = 0
    cold_ttft_s: float = 0.0
    resumed: dict[str, Any] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        return self.twins_agree and self.resumed.get("ids") == self.expected

    def public(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "id": self.id,
            "tokens": self.tokens,
            "bytes_disk": self.bytes_disk,
            "cold_ttft_s": self.cold_ttft_s,
            "resumed_ttft_s": self.resumed["ttft_s"],
            "cached_tokens": self.resumed["cached_tokens"],
            "identical": self.identical,
        }


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="A shorter document, fewer turns.")] = False,
    home: HomeFolder = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the sessions (and a temporary home) behind.")] = False,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Suspend three conversations, resume them in a new process, compare every token. About two minutes."""
    from agentkv.cli.pulling import pull_shown

    # The sessions get a home of their own, the model comes from the user's.
    mine = settings_from(home=home, model=model, device=device, dtype=dtype)
    local = pull_shown(mine.model, mine)
    temporary = None if home is not None else Path(tempfile.mkdtemp(prefix="agentkv-demo-"))
    settings = settings_from(
        home=temporary or mine.home,
        model=mine.model if home is not None else str(local.path),
        device=device,
        dtype=dtype,
        idle_codec="exact",
    )
    try:
        with _progress() as bars:
            rows = _first_process(settings, bars, quick=quick)
            _second_process(settings, rows, bars, quick=quick)
        if not keep and temporary is None:
            asyncio.run(_delete(settings, rows))
    finally:
        if temporary is not None and not keep:
            shutil.rmtree(temporary, ignore_errors=True)
    if as_json:
        print_json({"sessions": [row.public() for row in rows]})
    else:
        _print(rows)
        if keep:
            for row in rows:
                where = f"--home {settings.home} --model {settings.model}"
                typer.echo(f"go on with {row.agent}: agentkv chat {where} --session {row.id}")
    if not all(row.identical and row.resumed["source"] == "disk" for row in rows):
        typer.echo("error: a resumed session was not what the uninterrupted one is; see above", err=True)
        raise typer.Exit(1)


@contextmanager
def _progress() -> Iterator[Progress]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = error_console()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        yield bars


def _stage(bars: Progress, text: str, total: int) -> Any:
    """A bar for a stage; where nobody sees bars, a line."""
    if not bars.console.is_terminal:
        bars.console.print(f"{text} …")
    return bars.add_task(text, total=total)


def _first_process(settings: Settings, bars: Progress, *, quick: bool) -> list[_Row]:
    return asyncio.run(_talk(settings, bars, quick=quick))


def _max_tokens(*, quick: bool) -> int:
    return 16 if quick else 40


async def _talk(settings: Settings, bars: Progress, *, quick: bool) -> list[_Row]:
    """Hold every conversation twice, continue the twins, suspend the others."""
    from agentkv.cli.demo_script import agents
    from agentkv.sessions.runtime import AgentKV

    loading = _stage(bars, "loading the model", 1)
    async with AgentKV(settings) as kv:
        bars.advance(loading)
        cast = agents(quick=quick)
        talking = _stage(bars, "three agents talk, each with a twin", sum(2 * len(a.messages) + 1 for a in cast))

        async def hold(agent: Agent) -> tuple[Any, list[tuple[int, ...]]]:
            session = await kv.sessions.create(
                system=agent.system, agent_id=agent.name, idle_codec="exact", metadata={"demo": True}
            )
            said = []
            for message in agent.messages:
                reply = await session.send(message, max_tokens=_max_tokens(quick=quick))
                said.append(reply.ids)
                bars.advance(talking)
            return session, said

        rows = []
        sessions = []
        for agent in cast:
            started = time.perf_counter()
            session, said = await hold(agent)
            twin, twin_said = await hold(agent)
            took = time.perf_counter() - started
            bars.console.print(f"  {agent.name}: {len(agent.messages)} answers, twice, in {took:.0f} s")
            row = _Row(agent.name, session.id, agent.next_message, twins_agree=said == twin_said)
            uninterrupted = await twin.send(agent.next_message, max_tokens=_max_tokens(quick=quick))
            row.expected = list(uninterrupted.ids)
            bars.advance(talking)
            await twin.delete()
            rows.append(row)
            sessions.append(session)
        suspending = _stage(bars, "all three go to disk", len(rows))
        for row, session in zip(rows, sessions, strict=True):
            report = await session.suspend(tier="disk")
            row.tokens, row.bytes_disk = len(await session.token_ids()), report.nbytes
            bars.advance(suspending)
    return rows


def _second_process(settings: Settings, rows: list[_Row], bars: Progress, *, quick: bool) -> None:
    """Fill in what a new process measures. ``AgentKVError`` where it fails."""
    waking = _stage(bars, "a new process wakes them", 2 * len(rows) + 1)
    given = settings.model_dump(mode="json", include={"home", "model", "device", "dtype", "idle_codec"})
    task = {
        "settings": given,
        "max_tokens": _max_tokens(quick=quick),
        "sessions": [{"id": row.id, "message": row.message} for row in rows],
    }
    by_id = {row.id: row for row in rows}
    with tempfile.TemporaryFile("w+") as errors:
        worker = subprocess.Popen(
            [sys.executable, "-m", "agentkv.cli.demo_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write(json.dumps(task) + "\n")
            worker.stdin.close()
            for line in worker.stdout:
                event = json.loads(line)
                if event["event"] == "error":
                    raise AgentKVError(f"the new process failed: {event['message']}")
                if event["event"] == "resumed":
                    by_id[event["id"]].resumed = event
                elif event["event"] == "cold":
                    by_id[event["id"]].cold_ttft_s = event["ttft_s"]
                bars.advance(waking)
            status = worker.wait()
        finally:
            worker.kill()
            worker.wait()
            if worker.stdout is not None:
                worker.stdout.close()
        if status:
            errors.seek(0)
            last = [line for line in errors.read().splitlines() if line.strip()][-1:]
            raise AgentKVError(f"the new process ended with status {status}: {' '.join(last)}")


async def _delete(settings: Settings, rows: list[_Row]) -> None:
    from agentkv.cli.stored import stored_home

    async with stored_home(settings) as home:
        for row in rows:
            await home.delete(row.id)


def _print(rows: list[_Row]) -> None:
    from rich.table import Table

    console = out_console()
    table = Table(box=None, pad_edge=False)
    for name in ("session", "tokens", "on disk", "first token, cold", "first token, resumed", "ratio", "reused"):
        table.add_column(name, justify="left" if name == "session" else "right")
    table.add_column("identical")
    for row in rows:
        resumed = row.resumed
        table.add_row(
            f"{row.agent}  {row.id[:13]}…",
            f"{row.tokens:,}",
            nbytes(row.bytes_disk),
            seconds(row.cold_ttft_s),
            seconds(resumed["ttft_s"]),
            f"{row.cold_ttft_s / resumed['ttft_s']:.1f}×",
            f"{resumed['cached_tokens']:,} of {resumed['prompt_tokens']:,}",
            "[green]yes[/]" if row.identical else "[bold red]NO[/]",
        )
    console.print(table)
    console.print(
        "Both times are the new process's, model loaded and used once. Cold: the same prompt from its first token, "
        "nothing cached. Resumed: KV read from disk (files in the page cache), verified and decoded, then the next "
        "message. Identical: every token equals that of a twin session that was never suspended.",
        style="dim",
    )
    for row in rows:
        if row.resumed["source"] != "disk" or row.resumed["reason"]:
            console.print(f"{row.agent}: KV came from {row.resumed['source']}: {row.resumed['reason']}", markup=False)
        console.print(f"{row.agent} < {row.message}", style="dim", markup=False)
        console.print(f"{row.agent} > {' '.join(row.resumed['text'].split())}", markup=False)
