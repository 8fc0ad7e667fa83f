"""Frameworks that agents are built with, as they are, against a server: they hold ids and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest
from asking import MODEL, quiet
from homes import chat_folder
from openai import AsyncOpenAI, NotFoundError
from pydantic import BaseModel


class Said(BaseModel):
    word: Literal["yes", "no"]


pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[AsyncOpenAI]:
    with quiet(tmp_path / "home", chat_folder(tmp_path)) as served:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            yield client


async def test_openai_agents_keep_their_sessions_here(client: AsyncOpenAI) -> None:
    from agents import Agent, ModelSettings, OpenAIConversationsSession, OpenAIResponsesModel, Runner, function_tool
    from agents import set_tracing_disabled as without_tracing

    without_tracing(True)
    model = OpenAIResponsesModel(MODEL, openai_client=client)

    @function_tool
    def weather(city: Literal["Paris"]) -> str:
        """The weather."""
        return f"Sunny in {city}."

    # The library takes no answer that was cut, and a random model ends none by itself: a schema does.
    terse = Agent(name="Bolt", instructions="You are terse.", model=model, output_type=Said)
    session = OpenAIConversationsSession(openai_client=client)
    first = await Runner.run(terse, "One?", session=session)
    second = await Runner.run(terse, "Two?", session=session)
    before, after = first.raw_responses[-1].usage, second.raw_responses[-1].usage
    assert after.input_tokens_details.cached_tokens == before.total_tokens - 1
    items = await session.get_items()
    assert [item["role"] for item in items] == ["user", "assistant", "user", "assistant"]  # type: ignore[typeddict-item]
    assert (await session.pop_item() or {})["id"] == items[-1]["id"]  # type: ignore[typeddict-item]
    name = session.session_id
    await session.clear_session()
    with pytest.raises(NotFoundError):
        await client.conversations.retrieve(name)

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


async def test_langchain_goes_on_from_the_last_response(client: AsyncOpenAI) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model=MODEL,
        base_url=str(client.base_url),
        api_key="none",  # type: ignore[arg-type]
        use_responses_api=True,
        use_previous_response_id=True,
        max_tokens=8,  # type: ignore[call-arg]
    )
    said: list[AIMessage | HumanMessage | SystemMessage] = [SystemMessage("You are terse."), HumanMessage("One?")]
    first = await model.ainvoke(said)
    second = await model.ainvoke([*said, first, HumanMessage("Two?")])
    assert first.usage_metadata is not None and second.usage_metadata is not None
    cached = second.usage_metadata["input_token_details"]["cache_read"]
    assert cached == first.usage_metadata["total_tokens"] - 1
    kept = await client.responses.retrieve(second.response_metadata["id"])
    assert kept.previous_response_id == first.response_metadata["id"]
