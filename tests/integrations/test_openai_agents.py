"""A ``Runner``'s session that is a session of a server: the ledger is its memory, also after a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal, Self

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    RunResult,
    SessionSettings,
    function_tool,
    set_tracing_disabled,
)
from agents.memory import Session
from asking import MODEL, client_of, quiet, sessions, state, until
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel
from served import Served

from agentkv.client import AsyncAgentKV
from agentkv.errors import InvalidRequest
from agentkv.integrations.openai_agents import AgentKVSession

set_tracing_disabled(True)


class Said(BaseModel):
    """The library takes no answer that was cut, and a random model ends none by itself: a schema does."""

    word: Literal["yes", "no"]


class Talking:
    """An agent and its thread at a server, as a process has them that has just started."""

    def __init__(self, served: Served, thread: str = "my-thread", *, chat: bool = False, **agent: Any) -> None:
        self.served = served
        self.client = AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        kind: Any = OpenAIChatCompletionsModel if chat else OpenAIResponsesModel
        self.agent: Agent[None] = Agent(
            **{
                "name": "Bolt",
                "instructions": "You are terse.",
                "model": kind(MODEL, openai_client=self.client),
                "output_type": Said,
                **agent,
            }
        )
        self.session = AgentKVSession(thread, client=self.client)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.client.close()

    async def run(self, said: str) -> RunResult:
        config = RunConfig(model_settings=self.session.model_settings)
        return await Runner.run(self.agent, said, session=self.session, run_config=config)

    async def roles(self) -> list[str]:
        items: list[Any] = await self.session.get_items()
        return [item.get("role") or item["type"] for item in items]


def cached(result: RunResult) -> int:
    return result.raw_responses[-1].usage.input_tokens_details.cached_tokens


def total(result: RunResult) -> int:
    return result.raw_responses[-1].usage.total_tokens


@pytest.mark.parametrize("chat", [False, pytest.param(True, marks=pytest.mark.full)], ids=["responses", "chat"])
async def test_a_thread_goes_on_after_both_sides_were_killed(tmp_path: Path, model: Path, chat: bool) -> None:
    served = quiet(tmp_path / "home", model)
    with served, client_of(served) as client:
        async with Talking(served, chat=chat) as talking:
            first = await talking.run("One?")
            second = await talking.run("Two?")
            assert cached(second) == total(first) - 1
            assert await talking.roles() == ["user", "assistant"] * 2
        (name,) = sessions(client)  # all of it was answered in the thread's own session
        until(lambda: state(client, name)["stored_tokens"] >= total(second) - 1)
        served.kill()
    with served, client_of(served) as client:
        async with Talking(served, chat=chat) as later:
            third = await later.run("Three?")
            assert cached(third) == total(second) - 1
            assert await later.roles() == ["user", "assistant"] * 3
        assert sessions(client) == [name]


async def test_calls_and_their_results_are_in_the_ledger_once(served: Served) -> None:
    @function_tool
    def weather(city: Literal["Paris"]) -> str:
        """The weather."""
        return f"Sunny in {city}."

    calling: Any = {"output_type": None, "tools": [weather], "tool_use_behavior": "stop_on_first_tool"}
    calling["model_settings"] = ModelSettings(max_tokens=150, tool_choice="required")
    async with Talking(served, "tools", **calling) as talking:
        for turn, said in enumerate(("The weather?", "And now?"), 1):
            result = await talking.run(said)
            assert result.final_output == "Sunny in Paris."
            assert await talking.roles() == ["user", "function_call", "function_call_output"] * turn
        assert cached(result) > 0
        with client_of(served) as client:
            items: Any = client.get("/sessions/tools/items", cast_to=object)
            assert [item["kind"] for item in items["data"]][-3:] == ["message", "tool_call", "tool_result"]


async def test_a_stream_is_stored_once_too(served: Served) -> None:
    async with Talking(served, "streamed") as talking:
        for turn, said in enumerate(("One?", "One?"), 1):
            config = RunConfig(model_settings=talking.session.model_settings)
            result = Runner.run_streamed(talking.agent, said, session=talking.session, run_config=config)
            async for _ in result.stream_events():
                pass
            assert await talking.roles() == ["user", "assistant"] * turn
        assert result.raw_responses[-1].usage.input_tokens_details.cached_tokens > 0


async def test_a_run_that_names_no_session_is_recognised_and_stored_all_the_same(served: Served) -> None:
    async with Talking(served, "unnamed") as talking:
        first = await Runner.run(talking.agent, "One, unnamed?", session=talking.session)
        second = await Runner.run(talking.agent, "Two, unnamed?", session=talking.session)
        assert cached(second) == total(first) - 1
        assert await talking.roles() == ["user", "assistant"] * 2


async def test_another_agent_with_other_instructions_leaves_the_thread_whole(served: Served) -> None:
    async with Talking(served, "two") as talking, Talking(served, "two", instructions="You are verbose.") as other:
        first = await talking.run("One of two?")
        await other.run("Two of two?")
        third = await talking.run("Three of two?")
        assert await talking.roles() == ["user", "assistant"] * 3
        assert cached(third) >= total(first) - 1


async def test_items_are_read_taken_back_and_deleted(served: Served) -> None:
    async with Talking(served, "a/thread ä") as talking:
        session = talking.session
        assert isinstance(session, Session)
        assert (await session.get_items(), await session.pop_item()) == ([], None)
        await session.clear_session()
        first = await talking.run("One?")
        await talking.run("Two?")
        items: list[Any] = await session.get_items()
        assert await session.get_items(3) == items[-3:]
        assert await session.get_items(0) == []
        limited = AgentKVSession("a/thread ä", client=talking.client, session_settings=SessionSettings(limit=1))
        assert await limited.get_items() == items[-1:]
        assert [await session.pop_item() for _ in range(2)] == items[:1:-1]
        assert await session.get_items() == items[:2]
        again = await talking.run("Two, then?")
        assert cached(again) == total(first) - 1, "what is left has its KV"
        await session.clear_session()
        assert await session.get_items() == []
        anew = await talking.run("One?")
        assert cached(anew) < total(first) - 1
        assert await talking.roles() == ["user", "assistant"]
        while await session.pop_item():
            pass
        assert await session.get_items() == []


async def test_what_is_added_is_kept_without_a_run_and_a_history_can_be_brought_along(served: Served) -> None:
    said: list[Any] = [
        {"role": "user", "content": "Brought?"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "along", "annotations": []}]},
    ]
    async with Talking(served, "brought") as talking:
        await talking.session.add_items([])
        assert await talking.session.get_items() == []
        await talking.session.add_items(said)
        # The same again is said again: nothing of it was said by a model meanwhile.
        await AgentKVSession("brought", client=talking.client).add_items(said)
        assert await talking.roles() == ["user", "assistant"] * 2
        first = await talking.run("And?")
        second = await talking.run("And?")
        assert cached(second) == total(first) - 1
        assert await talking.roles() == ["user", "assistant"] * 4
        many: list[Any] = [{"role": "user", "content": f"{n}"} for n in range(120)]
        other = AgentKVSession("many", client=talking.client)
        await other.add_items(many)
        assert [item["content"][0]["text"] for item in await other.get_items()] == [str(n) for n in range(120)]  # type: ignore
        assert len(await other.get_items(101)) == 101


async def test_items_that_are_added_at_once_are_all_there(served: Served) -> None:
    """Each waits for the one before: the server takes one at a time, and the client here does not ask again."""
    async with Talking(served) as talking:
        words = [f"word {n}" for n in range(6)]
        adds = [talking.session.add_items([{"role": "user", "content": word}]) for word in words]
        await asyncio.gather(*adds)
        found: list[Any] = await talking.session.get_items()
        assert [item["content"][0]["text"] for item in found] == words


async def test_what_a_session_cannot_hold_is_refused_by_its_name(served: Served) -> None:
    async with AsyncAgentKV(served.url) as kv:
        session = AgentKVSession("refused", client=kv)
        with pytest.raises(BadRequestError, match="input_image"):
            part = {"type": "input_image", "image_url": "data:", "detail": "auto"}
            await session.add_items([{"role": "user", "content": [part]}])  # type: ignore
        await session.close()
        with pytest.raises(BadRequestError, match="does not begin with 'sess_'"):
            async with Talking(served, "sess_mine") as talking:
                await talking.session.add_items([{"role": "user", "content": "Hi"}])
    with pytest.raises(InvalidRequest, match="not str"):
        AgentKVSession("x", client=served.url)  # type: ignore
