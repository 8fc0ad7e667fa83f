"""The session endpoints, through a real server and a client that knows nothing of agentkv."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from homes import chat_folder, opened
from served import Served

SYSTEM = "You are a helpful assistant."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("served") / "home"
    with Served(home, model, server_heartbeat_seconds=0.2, server_max_body="200kB") as running:
        yield running


@pytest.fixture
async def http(served: Served) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(served.url) as client:
        yield client


async def asked(http: aiohttp.ClientSession, method: str, path: str, body: Any = None, status: int = 200) -> Any:
    async with http.request(method, path, json=body) as response:
        answer = await response.json()
        assert response.status == status, (response.status, answer)
        return answer


async def created(http: aiohttp.ClientSession, **body: Any) -> str:
    return (await asked(http, "POST", "/v1/sessions", {"system": SYSTEM} | body, 201))["id"]


async def becomes(http: aiohttp.ClientSession, name: str, *, busy: bool) -> Any:
    for _ in range(500):
        if (info := await asked(http, "GET", f"/v1/sessions/{name}"))["busy"] == busy:
            return info
        await asyncio.sleep(0.02)
    raise AssertionError(info)


async def events_of(response: aiohttp.ClientResponse) -> list[tuple[str, Any]]:
    found, name = [], ""
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            found.append((name, json.loads(line[6:])))
    return found


async def test_a_conversation_goes_on_over_http_as_it_does_in_process(
    http: aiohttp.ClientSession, model: Path, tmp_path: Path
) -> None:
    """Plain, streamed, after a suspend and in a fork: the same tokens, and the KV of all turns before is reused."""
    name = await created(http, agent_id="a", metadata={"k": 1})
    first = await asked(http, "POST", f"/v1/sessions/{name}/messages", {"messages": "Hello", "max_tokens": 6})
    async with http.post(
        f"/v1/sessions/{name}/messages", json={"messages": "Again", "max_tokens": 6, "stream": True}
    ) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        cache = dict(part.split("=") for part in response.headers["X-AgentKV-Cache"].split(";"))
        assert (cache["source"], response.headers["X-AgentKV-Session"]) == ("device", name)
        events = await events_of(response)
    kinds = [kind for kind, _ in events]
    assert (kinds[0], kinds[-1]) == ("begun", "done") and set(kinds[1:-1]) == {"delta"}
    second = events[-1][1]["reply"]
    assert "".join(data["text"] for kind, data in events if kind == "delta") == second["text"]
    assert int(cache["reused"]) == second["usage"]["cached_tokens"] == first["usage"]["prompt_tokens"] + 6 - 1
    fork = (await asked(http, "POST", f"/v1/sessions/{name}/fork", {"turns": 1}, 201))["id"]
    assert (await asked(http, "POST", f"/v1/sessions/{name}/suspend"))["tier"] == "disk"
    third = await asked(http, "POST", f"/v1/sessions/{name}/messages", {"messages": "More", "max_tokens": 6})
    assert third["restore"]["source"] == "disk"
    other = await asked(http, "POST", f"/v1/sessions/{fork}/messages", {"messages": "Again", "max_tokens": 6})
    assert other["ids"] == second["ids"]
    async with opened(tmp_path / "home", model) as kv:
        twin = await kv.sessions.create(SYSTEM)
        ids = [list((await twin.send(text, max_tokens=6)).ids) for text in ("Hello", "Again", "More")]
    assert [first["ids"], second["ids"], third["ids"]] == ids
    info = await asked(http, "GET", f"/v1/sessions/{name}")
    assert (info["turns"], info["agent_id"], info["metadata"]) == (4, "a", {"k": 1})
    items = (await asked(http, "GET", f"/v1/sessions/{name}/items"))["data"]
    assert [item["role"] for item in items] == ["system", *["user", "assistant"] * 3]


async def test_rewind_regenerate_append_hints_update_and_delete(http: aiohttp.ClientSession) -> None:
    name = await created(http)
    path = f"/v1/sessions/{name}"
    reply = await asked(http, "POST", f"{path}/messages", {"messages": "Hello", "max_tokens": 5})
    again = await asked(http, "POST", f"{path}/regenerate", {"max_tokens": 5})
    assert again["ids"] == reply["ids"] and again["item_id"] != reply["item_id"]
    added = await asked(http, "POST", f"{path}/messages", {"messages": "One more", "generate": False})
    assert [item["content"]["content"] for item in added] == ["One more"]
    turns = (await asked(http, "GET", path))["turns"]
    cost = await asked(http, "POST", f"{path}/rewind", {"turns": 1, "dry_run": True})
    assert (await asked(http, "GET", path))["turns"] == turns, cost
    assert await asked(http, "POST", f"{path}/rewind", {"turns": 1}) == cost
    assert (await asked(http, "GET", path))["turns"] == turns - 1
    changed = await asked(http, "PATCH", path, {"policy": "sink:600", "metadata": {"x": [1]}, "agent_id": "b"})
    assert (changed["policy"].split(",")[0], changed["metadata"], changed["agent_id"]) == ("sink:600", {"x": [1]}, "b")
    assert (await asked(http, "POST", f"{path}/hints", {"kind": "pin", "seconds": 5}))["outcome"] == "accepted"
    assert (await asked(http, "POST", f"{path}/hints", {"kind": "close"}))["outcome"] == "accepted"
    assert (await asked(http, "POST", f"{path}/resume"))["source"] == "disk"
    assert (await asked(http, "POST", f"{path}/verify", {"tokens": 8}))["tokens"] == 8
    page = await asked(http, "GET", "/v1/sessions?agent_id=b&limit=1")
    assert [one["id"] for one in page["data"]] == [name] and not page["has_more"]
    assert (await asked(http, "DELETE", path))["freed_bytes"] > 0
    assert (await asked(http, "GET", path, status=404))["error"]["code"] == "session_not_found"


async def test_events_of_a_session_are_told_until_it_is_deleted(http: aiohttp.ClientSession) -> None:
    name = await created(http)
    async with http.get(f"/v1/sessions/{name}/events") as response:
        await asked(http, "POST", f"/v1/sessions/{name}/messages", {"messages": "Hello", "max_tokens": 2})
        await asked(http, "POST", f"/v1/sessions/{name}/suspend")
        await asked(http, "POST", f"/v1/sessions/{name}/resume")
        await asyncio.sleep(0.5)
        await asked(http, "DELETE", f"/v1/sessions/{name}")
        text = (await response.content.read()).decode()
    assert ": ping" in text, "a silent stream is kept open"
    kinds = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
    assert kinds == ["demoted", "restored", "deleted"]


async def test_a_session_leaves_as_a_file_and_comes_back(http: aiohttp.ClientSession) -> None:
    name = await created(http)
    await asked(http, "POST", f"/v1/sessions/{name}/messages", {"messages": "Hello", "max_tokens": 5})
    async with http.get(f"/v1/sessions/{name}/export") as response:
        assert response.status == 200 and name in response.headers["Content-Disposition"]
        whole = await response.read()
    ask = {"messages": "Again", "max_tokens": 5}
    expected = await asked(http, "POST", f"/v1/sessions/{name}/messages", ask)
    async with http.post("/v1/sessions/import", data=whole) as response:
        report = await response.json()
        assert response.status == 201 and report["kv_tokens"] > 0, report
    got = await asked(http, "POST", f"/v1/sessions/{report['session_id']}/messages", ask)
    assert (got["ids"], got["restore"]["source"]) == (expected["ids"], "disk")
    broken = bytearray(whole)
    broken[len(broken) // 2] ^= 1
    async with http.post("/v1/sessions/import", data=bytes(broken)) as response:
        refused = await response.json()
    assert (response.status, refused["error"]["code"]) == (400, "import_refused")
    assert "home" not in refused["error"]["message"], "no path of the server"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "param"),
    [
        ("POST", "/v1/sessions", {"system": 3}, 400, "invalid_request", "system"),
        ("POST", "/v1/sessions", {"policy": "sink"}, 400, "invalid_request", "policy"),
        ("POST", "/v1/sessions", {"colour": "red"}, 400, "unsupported", "colour"),
        (
            "POST",
            "/v1/sessions/NAME/messages",
            {"messages": "x", "temperature": 9},
            400,
            "invalid_request",
            "temperature",
        ),
        (
            "POST",
            "/v1/sessions/NAME/messages",
            {"messages": [{"role": "x"}]},
            400,
            "invalid_request",
            "messages[0].role",
        ),
        ("POST", "/v1/sessions/NAME/messages", {"messages": "a " * 3000}, 400, "context_length_exceeded", "messages"),
        ("POST", "/v1/sessions/NAME/messages", {"messages": "a" * 300_000}, 413, "body_too_large", None),
        ("POST", "/v1/sessions/NAME/hints", {"kind": "pin"}, 400, "invalid_request", "seconds"),
        ("GET", "/v1/sessions?limit=0", None, 400, "invalid_request", "limit"),
        ("GET", "/v1/sessions?sort=up", None, 400, "invalid_request", "sort"),
        ("GET", "/v1/sessions/sess_no", None, 404, "session_not_found", None),
        ("GET", "/v1/nothing", None, 404, "not_found", None),
        ("PUT", "/v1/sessions", {}, 405, "method_not_allowed", None),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    http: aiohttp.ClientSession, method: str, path: str, body: Any, status: int, code: str, param: str | None
) -> None:
    name = await created(http)
    refused = (await asked(http, method, path.replace("NAME", name), body, status))["error"]
    assert (refused["code"], refused["param"]) == (code, param)
    assert refused["message"] and refused["type"]
    assert (await asked(http, "GET", f"/v1/sessions/{name}"))["turns"] == 1, "nothing was begun"


async def test_a_busy_session_says_when_to_come_again_and_one_who_leaves_has_his_turn_rolled_back(
    http: aiohttp.ClientSession,
) -> None:
    name = await created(http)
    path = f"/v1/sessions/{name}/messages"
    long = {"messages": "Hello", "max_tokens": 900, "ignore_eos": True}
    for stream in (True, False):
        task = asyncio.create_task(http.post(path, json=long | {"stream": stream}).__aenter__())
        assert (await becomes(http, name, busy=True))["turns"] == 1
        async with http.post(path, json={"messages": "x"}) as response:
            assert response.status == 409 and int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == "session_busy"
        if stream:
            (await task).close()
        else:
            task.cancel()
        assert (await becomes(http, name, busy=False))["turns"] == 1, "rolled back"
    await asked(http, "POST", path, {"messages": "x", "max_tokens": 2})


async def test_the_document_is_valid_and_the_page_shows_every_call(http: aiohttp.ClientSession) -> None:
    from openapi_spec_validator import validate

    document = await asked(http, "GET", "/openapi.json")
    validate(document)
    async with http.get("/docs") as response:
        page = await response.text()
    assert all(path in page for path in document["paths"]) and "<script" not in page and "https://" not in page


async def test_health_metrics_version_and_strange_origins(http: aiohttp.ClientSession, served: Served) -> None:
    for path in ("/livez", "/readyz", "/health"):
        assert (await asked(http, "GET", path))["status"] == "ok"
    assert (await asked(http, "GET", "/version"))["model"] == "chat-llama-0"
    async with http.get("/metrics") as response:
        assert "agentkv_uptime_seconds" in await response.text()
    async with http.get("/v1/sessions", headers={"Origin": "http://elsewhere"}) as response:
        assert response.status == 403
    async with http.get("/v1/sessions", headers={"Origin": served.url}) as response:
        assert response.status == 200


async def test_it_stops_when_told_to_with_everything_stored(model: Path, tmp_path: Path) -> None:
    """Running turns are finished within the deadline or rolled back; the exit status is 0; all is there afterwards."""
    with Served(tmp_path / "home", model, server_shutdown_seconds=0.5) as server:
        async with aiohttp.ClientSession(server.url) as http:
            name = await created(http)
            await asked(http, "POST", f"/v1/sessions/{name}/messages", {"messages": "Hello", "max_tokens": 5})
            busy = {"messages": "Hello", "max_tokens": 900, "ignore_eos": True, "stream": True}
            async with (
                http.get(f"/v1/sessions/{name}/events"),  # who only watches holds nobody up
                http.post(f"/v1/sessions/{name}/messages", json=busy) as response,
            ):
                await response.content.readline()
                assert await server.stopped() == 0, server.said
        server.start()
        async with aiohttp.ClientSession(server.url) as http:
            reply = await asked(http, "POST", f"/v1/sessions/{name}/messages", {"messages": "On", "max_tokens": 5})
            assert reply["restore"]["source"] == "disk" and reply["restore"]["reason"] is None
            server.kill()


async def test_more_requests_than_it_takes_at_once_are_told_to_come_again(model: Path, tmp_path: Path) -> None:
    with Served(tmp_path / "home", model, server_max_streams=2) as server:
        async with aiohttp.ClientSession(server.url) as http:
            name = await created(http)
            async with http.get(f"/v1/sessions/{name}/events"), http.get(f"/v1/sessions/{name}/events"):
                async with http.get(f"/v1/sessions/{name}") as response:
                    assert response.status == 503 and "Retry-After" in response.headers
                    assert (await response.json())["error"]["code"] == "overloaded"
                await asked(http, "GET", "/livez")
            for _ in range(100):
                async with http.get(f"/v1/sessions/{name}") as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.05)
            assert response.status == 200, "they have left"


@pytest.mark.full
def test_it_listens_beyond_loopback_only_with_keys(model: Path, tmp_path: Path) -> None:
    server = Served(tmp_path / "home", model)
    server.command += ["--host", "0.0.0.0"]
    with pytest.raises(AssertionError, match="agentkv keys create"):
        server.start()


@pytest.mark.full
async def test_the_table_of_its_home_is_read_and_what_a_killed_server_left_is_deleted(
    model: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    (home / "transfers" / "left").mkdir(parents=True)
    (home / "agentkv.toml").write_text("max_tokens = 3\n[server]\nmax_body = 400\n")
    with Served(home, model) as server:
        assert not (home / "transfers").exists()
        async with aiohttp.ClientSession(server.url) as http:
            name = await created(http)
            reply = await asked(http, "POST", f"/v1/sessions/{name}/messages", {"messages": "x", "ignore_eos": True})
            assert reply["usage"]["completion_tokens"] == 3
            refused = await asked(http, "POST", f"/v1/sessions/{name}/messages", {"messages": "x" * 500}, 413)
            assert refused["error"]["code"] == "body_too_large"
            async with http.get(f"/v1/sessions/{name}/export") as response:
                assert len(await response.read()) == response.content_length
        assert await server.stopped() == 0
        assert not list((home / "transfers").iterdir())
