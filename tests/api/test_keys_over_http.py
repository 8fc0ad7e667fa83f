"""Keys: who may call, how often, and that tenants see nothing of one another."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from homes import chat_folder
from served import Served

from agentkv.api.auth import Bucket

PROMPT = "You are a helpful assistant. How is the weather in Paris? " * 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("models"))


def key(home: Path, name: str, *options: str) -> str:
    command = [
        sys.executable,
        "-m",
        "agentkv.cli.main",
        "keys",
        "create",
        name,
        "--home",
        str(home),
        "--json",
        *options,
    ]
    return str(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["secret"])


def client(server: Served, secret: str | None) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(server.url, headers={"Authorization": f"Bearer {secret}"} if secret else {})


async def asked(
    http: aiohttp.ClientSession, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any]:
    async with http.request(method, path, json=body, headers=headers) as response:
        if response.content_type != "application/json":
            return response.status, await response.text()
        return response.status, await response.json()


@pytest.mark.full
async def test_a_server_whose_keys_are_all_revoked_stays_closed_when_it_is_started_again(
    model: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    await asyncio.to_thread(key, home, "one")
    command = [sys.executable, "-m", "agentkv.cli.main", "keys", "revoke", "one", "--home", str(home)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    with Served(home, model) as server:
        async with client(server, None) as nobody:
            assert (await asked(nobody, "GET", "/v1/sessions"))[0] == 401


async def test_from_the_first_key_on_each_call_needs_one_and_tenants_share_nothing(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with Served(home, model) as server:
        async with client(server, None) as nobody:
            assert (await asked(nobody, "GET", "/v1/sessions"))[0] == 200
            status, body = await asked(nobody, "GET", "/v1/sessions", Host="elsewhere.example")
            assert (status, body["error"]["code"]) == (403, "forbidden"), "a name that was made to point here"
        one, two = await asyncio.to_thread(key, home, "one"), await asyncio.to_thread(key, home, "two", "--admin")
        await asyncio.sleep(5.1)  # for so long the server believes what it knows
        async with client(server, None) as nobody, client(server, "akv_wrong") as wrong:
            for stranger in (nobody, wrong):
                status, body = await asked(stranger, "GET", "/v1/sessions")
                assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            assert (await asked(nobody, "GET", "/health"))[0] == 200
        async with client(server, one) as http, client(server, two) as admin:
            uses = []
            for _ in range(2):
                for each in (http, admin):
                    _, session = await asked(each, "POST", "/v1/sessions", {"system": PROMPT})
                    path = f"/v1/sessions/{session['id']}"
                    _, reply = await asked(each, "POST", f"{path}/messages", {"messages": "Hello", "max_tokens": 2})
                    await asked(each, "POST", f"{path}/suspend")
                    uses.append(reply["usage"]["cached_tokens"])
            assert uses[:2] == [0, 0] and min(uses[2:]) > 0, "what one computed serves nobody else; the control: itself"
            for method, where, body in (
                ("GET", "", None),
                ("DELETE", "", None),
                ("GET", "/export", None),
                ("POST", "/fork", {}),
                ("POST", "/messages", {"messages": "x"}),
            ):
                status, found = await asked(http, method, path + where, body)
                assert (status, found["error"]["code"]) == (404, "session_not_found"), "another's id"
            assert len((await asked(http, "GET", "/v1/sessions"))[1]["data"]) == 2
            assert (await asked(http, "GET", "/metrics"))[0] == 403
            assert (await asked(admin, "GET", "/metrics"))[0] == 200


async def test_a_key_that_asks_too_often_or_too_much_is_told_when_to_come_again(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    often = key(home, "often", "--requests-per-minute", "3")
    much = key(home, "much", "--tokens-per-minute", "30", "--max-sessions", "1")
    with Served(home, model) as server:
        async with client(server, often) as http:
            statuses = [(await asked(http, "GET", "/v1/sessions"))[0] for _ in range(4)]
            assert statuses == [200, 200, 200, 429]
            async with http.get("/v1/sessions") as response:
                assert 1 <= int(response.headers["Retry-After"]) <= 20
                assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
        async with client(server, much) as http:
            _, session = await asked(http, "POST", "/v1/sessions", {})
            path = f"/v1/sessions/{session['id']}/messages"
            status, reply = await asked(http, "POST", path, {"messages": "Hello", "max_tokens": 40, "ignore_eos": True})
            assert (status, reply["usage"]["completion_tokens"]) == (200, 40)
            status, body = await asked(http, "POST", path, {"messages": "Hello", "max_tokens": 4})
            assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
            assert "30 tokens a minute" in body["error"]["message"]


def test_a_bucket_fills_with_time() -> None:
    bucket = Bucket.full(60, 0.0)
    bucket.left -= 70
    assert bucket.wait(1) == pytest.approx(11)
    bucket.refill(5.0)
    assert bucket.wait(1) == pytest.approx(6)
    bucket.refill(500.0)
    assert (bucket.left, bucket.wait(60)) == (60, 0)
    assert Bucket.full(0, 0.0).wait(1) > 60


@pytest.mark.full
def test_beyond_loopback_it_serves_with_a_key(model: Path, tmp_path: Path) -> None:
    key(tmp_path / "home", "one")
    server = Served(tmp_path / "home", model)
    server.command += ["--host", "0.0.0.0"]
    with server:
        assert server.url
