"""The other process of ``agentkv bench http``: a bare aiohttp client that streams one turn a line of its input.

A line is ``URL BODY``; the answer is a line of JSON, when each token came, in seconds from the request.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import aiohttp

__all__ = ["main", "streamed"]


async def streamed(client: aiohttp.ClientSession, url: str, body: bytes) -> list[float]:
    """Seconds from the request to each ``delta`` event. ``RuntimeError`` for any answer but a whole stream."""
    times: list[float] = []
    started = time.perf_counter()
    async with client.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        name = b""
        async for line in response.content:
            if line.startswith(b"event: "):
                name = line[7:].strip()
                if name == b"delta":
                    times.append(time.perf_counter() - started)
                if name == b"error":
                    raise RuntimeError((await response.text())[:500])
        if name != b"done":
            raise RuntimeError("the stream ended before its turn did")
    return times


async def main() -> None:
    """Serve standard input until it ends."""
    loop = asyncio.get_running_loop()
    async with aiohttp.ClientSession() as client:
        while line := await loop.run_in_executor(None, sys.stdin.buffer.readline):
            url, _, body = line.strip().partition(b" ")
            print(json.dumps(await streamed(client, url.decode(), body)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
