"""What HTTP adds to a token: the same turns through the server, from another process, and in this one."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from aiohttp import web

from agentkv.api.app import make_app
from agentkv.api.settings import ServerSettings
from agentkv.bench.setup import machine, open_runtime, text_ids
from agentkv.schemas.replies import TextDelta
from agentkv.sessions.runtime import AgentKV
from agentkv.sessions.session import Session

__all__ = ["bench_http"]

_MESSAGE = "Go on, please: what else is there to say about it?"


async def bench_http(
    turns: int, tokens: int, busy: int, model: str, home: Path | None, dtype: str, threads: int | None, quick: bool
) -> dict[str, Any]:
    """Turns in turn, one through the server and one without, on two sessions with the same history, while ``busy``
    others generate. Added are the differences of medians: to the first token, and of the gaps between later ones."""
    if quick:
        turns, tokens = min(turns, 4), min(tokens, 16)
    async with open_runtime(model, home, dtype=dtype, threads=threads, idle_seconds=3600) as (kv, _):
        text = kv.model.tokenizer.decode(text_ids(kv, 256))  # type: ignore[union-attr]
        direct, served = await kv.sessions.create(system=text), await kv.sessions.create(system=text)
        sampling = {"max_tokens": tokens, "ignore_eos": True}
        body = json.dumps({"messages": _MESSAGE, "stream": True, **sampling}).encode()
        firsts: dict[str, list[float]] = {"direct": [], "http": []}
        gaps: dict[str, list[float]] = {"direct": [], "http": []}

        def note(side: str, times: list[float]) -> None:
            firsts[side].append(times[0])
            gaps[side] += [b - a for a, b in pairwise(times)]

        async with _server(kv) as url, _client() as client, _load(kv, busy):
            line = f"{url}/v1/sessions/{served.id}/messages ".encode() + body + b"\n"
            for number in range(turns + 1):
                times = await _streamed(direct, sampling), await _asked(client, line)
                if number:  # the first turn computes the system prompt
                    note("direct", times[0])
                    note("http", times[1])
        first = {side: median(values) for side, values in firsts.items()}
        gap = {side: median(values) for side, values in gaps.items()}
        return {
            "bench": "http",
            "model": model,
            "turns": turns,
            "tokens": tokens,
            "busy": busy,
            "dtype": kv.model.adapter.geometry.dtype,
            "direct_ttft_ms": first["direct"] * 1000,
            "http_ttft_ms": first["http"] * 1000,
            "added_ttft_ms": (first["http"] - first["direct"]) * 1000,
            "direct_token_ms": gap["direct"] * 1000,
            "http_token_ms": gap["http"] * 1000,
            "added_token_ms": (gap["http"] - gap["direct"]) * 1000,
            **machine(kv),
        }


async def _streamed(session: Session, sampling: dict[str, Any]) -> list[float]:
    started = time.perf_counter()
    async with aclosing(session.stream(_MESSAGE, **sampling)) as events:
        return [time.perf_counter() - started async for event in events if isinstance(event, TextDelta)]


@asynccontextmanager
async def _server(kv: AgentKV) -> AsyncIterator[str]:
    runner = web.AppRunner(make_app(kv, ServerSettings()), handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _client() -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "agentkv.bench.http_client",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with suppress(ProcessLookupError):
            await process.wait()


async def _asked(client: asyncio.subprocess.Process, line: bytes) -> list[float]:
    assert client.stdin is not None and client.stdout is not None
    client.stdin.write(line)
    await client.stdin.drain()
    answer = await client.stdout.readline()
    if not answer:
        raise RuntimeError("the client process ended; what it said is above")
    times: list[float] = json.loads(answer)
    return times


@asynccontextmanager
async def _load(kv: AgentKV, sessions: int) -> AsyncIterator[None]:
    """So many conversations that generate without end."""

    async def talk() -> None:
        while True:
            session = await kv.sessions.create()
            await session.send(_MESSAGE, max_tokens=400, ignore_eos=True)
            await session.delete()

    tasks = [asyncio.create_task(talk()) for _ in range(sessions)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
