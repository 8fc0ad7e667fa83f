"""Frameworks that agents are built with, as they are, against a server: they hold ids and nothing else."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from asking import MODEL, quiet
from homes import chat_folder
from openai import AsyncOpenAI, NotFoundError
from pydantic import BaseModel
from served import Served


class Said(BaseModel):
    word: Literal["yes", "no"]


pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with quiet(tmp_path / "home", chat_folder(tmp_path)) as served:
        yield served


def client_of(served: Served) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def again(served: Served) -> None:
    """Stopped as a user stops it, and started as another process."""
    assert served.stop() == 0, "".join(served.said)
    served.start()


async def test_openai_agents_keep_their_sessions_here(served: Served) -> None:
    from agents import Agent, OpenAIConversationsSession, OpenAIResponsesModel, Runner
    from agents import set_tracing_disabled as without_tracing

    without_tracing(True)

    def terse(client: AsyncOpenAI) -> Agent:
        # The library takes no answer that was cut, and a random model ends none by itself: a schema does.
        model = OpenAIResponsesModel(MODEL, openai_client=client)
        return Agent(name="Bolt", instructions="You are terse.", model=model, output_type=Said)

    async with client_of(served) as client:
        session = OpenAIConversationsSession(openai_client=client)
        first = await Runner.run(terse(client), "One?", session=session)
        second = await Runner.run(terse(client), "Two?", session=session)
        before, after = first.raw_responses[-1].usage, second.raw_responses[-1].usage
        assert after.input_tokens_details.cached_tokens == before.total_tokens - 1
        name = session.session_id
    again(served)
    async with client_of(served) as client:
        session = OpenAIConversationsSession(conversation_id=name, openai_client=client)
        third = await Runner.run(terse(client), "Three?", session=session)
        cached = third.raw_responses[-1].usage.input_tokens_details.cached_tokens
        assert cached == second.raw_responses[-1].usage.total_tokens - 1
        items = await session.get_items()
        assert [item["role"] for item in items] == ["user", "assistant"] * 3  # type: ignore[typeddict-item]
        assert (await session.pop_item() or {})["id"] == items[-1]["id"]  # type: ignore[typeddict-item]
        await session.clear_session()
        with pytest.raises(NotFoundError):
            await client.conversations.retrieve(name)


@pytest.mark.full
async def test_openai_agents_call_tools(served: Served) -> None:
    from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool
    from agents import set_tracing_disabled as without_tracing

    without_tracing(True)

    @function_tool
    def weather(city: Literal["Paris"]) -> str:
        """The weather."""
        return f"Sunny in {city}."

    async with client_of(served) as client:
        model = OpenAIResponsesModel(MODEL, openai_client=client)
        caller = Agent(
            name="Caller",
            instructions="You look things up.",
            model=model,
            tools=[weather],
            tool_use_behavior="stop_on_first_tool",
            model_settings=ModelSettings(max_tokens=150, tool_choice="required"),
        )
        conversation = await client.conversations.create()
        called = await Runner.run(caller, "The weather?", conversation_id=conversation.id)
        assert called.final_output == "Sunny in Paris."
        kinds = [item.type async for item in client.conversations.items.list(conversation.id, order="asc")]
        assert kinds == ["message", "function_call"]


@pytest.mark.full
async def test_langchain_goes_on_from_the_last_response(served: Served) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI

    def model(client: AsyncOpenAI) -> ChatOpenAI:
        return ChatOpenAI(
            model=MODEL,
            base_url=str(client.base_url),
            api_key="none",  # type: ignore[arg-type]
            use_responses_api=True,
            use_previous_response_id=True,
            max_tokens=8,  # type: ignore[call-arg]
        )

    def tokens(answer: AIMessage) -> tuple[int, int]:
        usage = answer.usage_metadata
        assert usage is not None
        return usage["input_token_details"]["cache_read"], usage["total_tokens"]

    said: list[AIMessage | HumanMessage | SystemMessage] = [SystemMessage("You are terse."), HumanMessage("One?")]
    async with client_of(served) as client:
        first = await model(client).ainvoke(said)
        said += [first, HumanMessage("Two?")]
        second = await model(client).ainvoke(said)
        assert tokens(second)[0] == tokens(first)[1] - 1
        kept = await client.responses.retrieve(second.response_metadata["id"])
        assert kept.previous_response_id == first.response_metadata["id"]
    again(served)
    async with client_of(served) as client:
        third = await model(client).ainvoke([*said, second, HumanMessage("Three?")])
        assert tokens(third)[0] == tokens(second)[1] - 1


def test_curl_sends_all_of_it_each_time(served: Served) -> None:
    history: list[dict[str, Any]] = [{"role": "system", "content": "You are terse."}]
    total = 0

    def ask(text: str) -> int:
        nonlocal total
        history.append({"role": "user", "content": text})
        body = json.dumps({"model": MODEL, "messages": history, "max_tokens": 8})
        command = ["curl", "-sS", "--fail-with-body", f"{served.url}/v1/chat/completions", "-d", body]
        answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)
        history.append(answer["choices"][0]["message"])
        before, total = total, answer["usage"]["total_tokens"]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == max(before - 1, 0)
        return int(cached)

    assert ask("One?") == 0
    assert ask("Two?") > 0
    again(served)
    assert ask("Three?") > 0
