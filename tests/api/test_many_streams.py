"""Two hundred streams at once, and a server that dies among them: nothing is lost, nothing is kept."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from homes import chat_folder
from served import Served

STREAMS = 200
SYSTEM = "You are a helpful assistant."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("models"))


async def created(http: aiohttp.ClientSession) -> str:
    async with http.post("/v1/sessions", json={"system": SYSTEM}) as response:
        assert response.status == 201, await response.text()
        return str((await response.json())["id"])


async def streamed(http: aiohttp.ClientSession, name: str, tokens: int) -> tuple[int, dict[str, Any] | None]:
    """The status, and the reply where it came to one."""
    body = {"messages": f"I am {name}", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    async with http.post(f"/v1/sessions/{name}/messages", json=body) as response:
        if response.status != 200:
            assert response.status in (429, 503) and "Retry-After" in response.headers, await response.text()
            return response.status, None
        kind = ""
        async for line in response.content:
            if line.startswith(b"event: "):
                kind = line[7:].strip().decode()
            elif kind == "error" and line.startswith(b"data: "):
                assert json.loads(line[6:])["error"]["code"] == "capacity_exceeded", line
                return 503, None  # it waited for longer than a stream does for its headers
            elif kind == "done" and line.startswith(b"data: "):
                return 200, json.loads(line[6:])["reply"]
    raise aiohttp.ClientPayloadError("the stream ended before its turn did")


@pytest.mark.parametrize("streams", [60, pytest.param(STREAMS, marks=pytest.mark.full)])
async def test_many_streams_complete_or_are_told_to_come_again(model: Path, tmp_path: Path, streams: int) -> None:
    """On a device that holds some of them, with places for three in four: memory is what it was once all have left."""
    with Served(
        tmp_path / "home",
        model,
        device_budget=30_000 * streams,
        admission_queue=streams // 2,
        server_max_streams=streams * 3 // 4,
    ) as server:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(server.url, connector=connector) as http:
            assert server.process is not None
            process = psutil.Process(server.process.pid)
            names = [await created(http) for _ in range(streams)]
            resident = []
            for _ in range(3):
                outcomes = await asyncio.gather(*(streamed(http, name, 12) for name in names))
                statuses = Counter(status for status, _ in outcomes)
                assert statuses[200] >= streams // 4 and sum(statuses.values()) == streams, statuses
                assert all(len(reply["ids"]) == 12 for _, reply in outcomes if reply is not None)
                async with http.get("/health") as response:
                    assert response.status == 200, await response.text()
                gc.collect()
                resident.append(process.memory_info().rss)
            assert resident[2] - resident[1] < 48 << 20, resident
            for name, (status, reply) in zip(names, outcomes, strict=True):
                async with http.get(f"/v1/sessions/{name}/items") as response:
                    last = (await response.json())["data"][-1]
                assert status != 200 or (reply is not None and last["id"] == reply["item_id"])


@pytest.mark.full
async def test_killed_among_two_hundred_streams_it_has_every_committed_turn_after_a_restart(
    model: Path, tmp_path: Path
) -> None:
    committed: dict[str, str] = {}
    with Served(tmp_path / "home", model) as server:
        async with aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(limit=0)) as http:
            names = [await created(http) for _ in range(STREAMS)]

            async def one(number: int, name: str) -> None:
                status, reply = await streamed(http, name, 4 + number % 40)
                if status == 200 and reply is not None:
                    committed[name] = reply["item_id"]

            tasks = [asyncio.create_task(one(number, name)) for number, name in enumerate(names)]
            while len(committed) < STREAMS // 4:  # noqa: ASYNC110  any of them
                await asyncio.sleep(0.01)
            server.kill()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert any(isinstance(outcome, aiohttp.ClientError) for outcome in outcomes), "some were under way"
            assert all(outcome is None or isinstance(outcome, aiohttp.ClientError) for outcome in outcomes), outcomes
        server.start()
        async with aiohttp.ClientSession(server.url) as http:
            for name in names:
                async with http.get(f"/v1/sessions/{name}/items") as response:
                    items = (await response.json())["data"]
                assert name not in committed or committed[name] in {item["id"] for item in items}
                assert len(items) in (1, 3), "whole or not at all"
            status, reply = await streamed(http, names[0], 4)
            assert status == 200 and reply is not None
            server.kill()
