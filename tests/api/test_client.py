"""One suite for both: sessions of a runtime in this process, and of a server through the remote SDK."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from homes import chat_folder, opened
from pydantic import BaseModel
from served import Served

from agentkv import SinkWindow, errors
from agentkv.client import AgentKV, AsyncAgentKV, RemoteFailure
from agentkv.schemas.replies import Begun, Done, TextDelta


class City(BaseModel):
    name: str


SYSTEM = "You are a helpful assistant."
SHORT = {"max_tokens": 5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("served") / "home", model) as running:
        yield running


@pytest.fixture(params=["in process", "remote"])
async def kv(request: pytest.FixtureRequest, model: Path, served: Served, tmp_path: Path) -> AsyncIterator[Any]:
    opening = opened(tmp_path / "home", model) if request.param == "in process" else AsyncAgentKV(served.url)
    async with opening as kv:
        yield kv


async def test_turns_items_and_branches(kv: Any) -> None:
    session = await kv.sessions.create(SYSTEM, agent_id="a", metadata={"n": 1})
    assert (session.agent_id, session.metadata) == ("a", {"n": 1})
    first = await session.send("Hello", **SHORT)
    async with aclosing(session.stream("Again", begun=True, **SHORT)) as stream:
        events = [event async for event in stream]
    assert isinstance(events[0], Begun) and isinstance(events[-1], Done)
    second = events[-1].reply
    assert events[0].cached_tokens == second.usage.cached_tokens > 0
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == second.text
    more = await session.continue_(max_tokens=3)
    assert more.usage.completion_tokens == 3
    fork = await session.fork(turns=2)
    assert (await fork.send("Again", **SHORT)).ids == second.ids
    again = await fork.regenerate(**SHORT)
    assert again.ids == second.ids
    items = await session.append([{"role": "user", "content": "Added"}])
    assert [item.text for item in items] == ["Added"]
    report = await session.rewind((await session.items())[2].id)
    assert report.session_id == session.id
    assert [item.text for item in await session.items()][1:] == ["Hello", first.text]
    found = await kv.sessions.get(session.id)
    assert (found.id, found.metadata) == (session.id, {"n": 1})


async def test_rest_hints_moving_and_the_end(kv: Any, tmp_path: Path) -> None:
    session = await kv.sessions.create(SYSTEM)
    await session.send("Hello", **SHORT)
    assert (await session.suspend()).tier == "disk"
    assert (await session.state()).state == "disk"
    assert (await session.resume()).source == "disk"
    assert (await session.pin(3)).outcome == "accepted"
    assert (await session.prefetch()).outcome in ("accepted", "missing")
    async with session.tool_wait(expected=30) as outcome:
        assert outcome.outcome == "accepted"
    assert (await session.verify(tokens=8)).tokens == 8
    await session.set_policy("sink:600")
    await session.update(metadata={"m": 2})
    assert session.metadata == {"m": 2}
    assert (await session.state()).policy.startswith("sink:600")
    path = tmp_path / "moved.akv"
    await session.export(path)
    with pytest.raises(errors.InvalidRequest):
        await session.export(path)
    copy = await kv.sessions.import_(path)
    assert copy.imported.kv_tokens > 0
    assert (await copy.send("On", **SHORT)).ids == (await session.send("On", **SHORT)).ids
    assert (await session.close()).outcome == "accepted"
    assert await session.delete() >= 0
    with pytest.raises(errors.SessionNotFound):
        await kv.sessions.get(session.id)


async def test_policies_can_be_objects(kv: Any) -> None:
    session = await kv.sessions.create(SYSTEM, policy=SinkWindow(600))
    assert (await session.state()).policy.startswith("sink:600")
    await session.set_policy(SinkWindow(700))
    assert (await session.state()).policy.startswith("sink:700")


async def test_a_schema_over_http_is_no_class(served: Served) -> None:
    async with AsyncAgentKV(served.url) as kv:
        session = await kv.sessions.create(SYSTEM)
        before = (await session.state()).turns
        with pytest.raises(errors.Unsupported, match=r"City.*response_format"):
            await session.send("Hello", schema=City, **SHORT)
        assert (await session.state()).turns == before


async def test_errors_are_the_same(kv: Any, tmp_path: Path) -> None:
    session = await kv.sessions.create(SYSTEM)
    with pytest.raises(errors.InvalidRequest) as wrong:
        await session.send("x", top_p=7.0)
    assert wrong.value.param == "top_p"
    with pytest.raises(errors.ContextTooLong):
        await session.send("a " * 4000)
    with pytest.raises(errors.InvalidRequest, match="role"):
        await session.send([{"role": "nobody", "content": "x"}])
    async with aclosing(session.stream("x", max_tokens=900, ignore_eos=True)) as stream:
        await anext(stream)
        with pytest.raises(errors.SessionBusy) as busy:
            await session.send("y")
        assert busy.value.retry_after >= 1
    (tmp_path / "bad").write_bytes(b"no export")
    with pytest.raises(errors.ImportRefused):
        await kv.sessions.import_(tmp_path / "bad")


def test_programs_without_a_loop_have_the_same(served: Served, tmp_path: Path) -> None:
    with AgentKV(served.url) as kv:
        session = kv.sessions.create(SYSTEM)
        reply = session.send("Hello", **SHORT)
        events = list(session.stream("Again", **SHORT))
        assert events[-1].reply.usage.cached_tokens == reply.usage.total_tokens - 1
        assert kv.sessions.get(session.id).items()[1].text == "Hello"
        fork = session.fork()
        assert fork.id != session.id and fork.send("x", **SHORT).text is not None
        with pytest.raises(errors.SessionNotFound):
            kv.sessions.get("sess_none")
        for event in session.stream("x", max_tokens=900, ignore_eos=True):
            assert event.text is not None
            break
        assert kv.health()["status"] == "ok"


async def test_nobody_there_is_said() -> None:
    async with AsyncAgentKV("http://127.0.0.1:9") as kv:
        with pytest.raises(RemoteFailure, match=r"127.0.0.1:9 did not answer"):
            await kv.sessions.create()
