"""A graph whose checkpoints lead to sessions of a server: time travel computes what is new, also after a restart."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from asking import MODEL, client_of, quiet, sessions, state, until
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, SystemMessage, ToolMessage
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from openai import DefaultAsyncHttpxClient, OpenAI
from served import Served

from agentkv.integrations.langgraph import ChatAgentKV, session_of

SYSTEM = SystemMessage("You are terse.")


def model_of(served: Served, **options: Any) -> ChatAgentKV:
    """With connections of its own: LangChain's are the process's, and each test has its own event loop."""
    own: Any = {"http_async_client": DefaultAsyncHttpxClient(), "max_retries": 0}
    return ChatAgentKV(base_url=served.url, model=MODEL, **own, **options)


class Thread:
    """A thread of a graph with one model, as a process has it that has just started."""

    def __init__(self, served: Served, saver: BaseCheckpointSaver[Any], **model: Any) -> None:
        self.model = model_of(served, max_tokens=8, **model)

        async def answer(state: MessagesState) -> Any:
            return {"messages": [await self.model.ainvoke([SYSTEM, *state["messages"]])]}

        graph = StateGraph(MessagesState)
        graph.add_node("model", answer)
        graph.add_edge(START, "model")
        graph.add_edge("model", END)
        self.app = graph.compile(checkpointer=saver)
        self.config: Any = {"configurable": {"thread_id": "t-1"}}

    async def say(self, text: str | None, at: Any = None) -> AIMessage:
        """The answer; ``None`` is said where a checkpoint is only gone on from."""
        given: Any = None if text is None else {"messages": [HumanMessage(text)]}
        found = await self.app.ainvoke(given, at or self.config)
        return found["messages"][-1]  # type: ignore[no-any-return]

    async def at(self, messages: int, following: tuple[str, ...] = ()) -> Any:
        """The newest checkpoint with so many messages before which ``following`` is to run."""
        async for found in self.app.aget_state_history(self.config):
            if len(found.values.get("messages", ())) == messages and found.next == following:
                return found.config
        raise AssertionError("no such checkpoint")


@asynccontextmanager
async def talking(served: Served, path: Path, **model: Any) -> AsyncIterator[Thread]:
    async with AsyncSqliteSaver.from_conn_string(str(path)) as saver:
        thread = Thread(served, saver, **model)
        yield thread
        await thread.model.root_async_client.close()


def cached(answer: AIMessage) -> int:
    assert answer.usage_metadata is not None
    return answer.usage_metadata["input_token_details"]["cache_read"]


def total(answer: AIMessage) -> int:
    assert answer.usage_metadata is not None
    return answer.usage_metadata["total_tokens"]


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with client_of(served) as client:
        yield client


async def test_a_thread_goes_on_and_goes_back_after_both_sides_were_killed(tmp_path: Path, model: Path) -> None:
    served, checkpoints = quiet(tmp_path / "home", model), tmp_path / "checkpoints.db"
    with served, client_of(served) as client:
        async with talking(served, checkpoints) as thread:
            first = await thread.say("One?")
            second = await thread.say("Two?")
        assert cached(second) == total(first) - 1
        main = session_of(first)
        assert main is not None and sessions(client) == [main] == [session_of(second)]
        until(lambda: state(client, main)["stored_tokens"] >= total(second) - 1)
        served.kill()
    with served, client_of(served) as client:
        async with talking(served, checkpoints) as thread:
            back = await thread.at(2)
            third = await thread.say("Three?")
            assert (session_of(third), cached(third)) == (main, total(second) - 1)
            # Behind the first answer, which is long past: a fork that has all of it.
            other = await thread.say("Two, rather?", back)
            branch = session_of(other)
            assert branch != main and cached(other) == total(first) - 1
            # The thread has gone on there, and the other branch is where it was.
            on = await thread.say("And then?")
            assert (session_of(on), cached(on)) == (branch, total(other) - 1)
            assert state(client, main)["ledger_tokens"] == total(third)
        listed: Any = client.get("/sessions?agent_id=t-1", cast_to=object)
        assert {each["id"] for each in listed["data"]} == {main, branch}


async def test_an_old_checkpoint_can_be_run_again_and_each_branch_gone_on_with(served: Served, tmp_path: Path) -> None:
    async with talking(served, tmp_path / "checkpoints.db") as thread:
        first = await thread.say("One, of branches?")
        second = await thread.say("Two?")
        before, end = await thread.at(3, ("model",)), await thread.at(4)
        again = await thread.say(None, before)
        assert session_of(again) != session_of(first), "the answer that there was stays where it is"
        assert again.content == second.content
        assert cached(again) >= total(first) - 1
        third = await thread.say("Three?", end)
        assert (session_of(third), cached(third)) == (session_of(first), total(second) - 1)


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
async def test_a_graph_that_streams_and_calls_tools_keeps_one_session(
    served: Served, client: OpenAI, responses: bool
) -> None:
    def weather(city: Literal["Paris"]) -> str:
        """The weather."""
        return f"Sunny in {city}."

    model = model_of(served, max_tokens=150, use_responses_api=responses)
    calling = model.bind_tools([weather], tool_choice="weather")

    async def call(state: MessagesState) -> Any:
        return {"messages": [await calling.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", call)
    graph.add_node("tools", ToolNode([weather]))
    graph.add_edge(START, "model")
    graph.add_edge("model", "tools")
    graph.add_edge("tools", END)
    app = graph.compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": f"tools-{responses}"}}
    asked: Any = {"messages": [HumanMessage(f"The weather, {responses}?")]}
    answers = []
    for _ in range(2):
        parts = [part async for part, _ in app.astream(asked, config, stream_mode="messages")]
        assert len(parts) > 2
        messages = (await app.aget_state(config)).values["messages"]
        assert isinstance(messages[-1], ToolMessage) and messages[-1].content == "Sunny in Paris."
        answers.append(messages[-2])
        asked = {"messages": [HumanMessage("And now?")]}
    assert session_of(answers[0]) == session_of(answers[1])
    assert cached(answers[1]) == total(answers[0]) - 1
    assert all(name.startswith("x-agentkv-") for name in answers[0].response_metadata["headers"])
    listed: Any = client.get(f"/sessions?agent_id=tools-{responses}", cast_to=object)
    assert [each["id"] for each in listed["data"]] == [session_of(answers[0])]
    await model.root_async_client.close()


def test_without_an_event_loop_it_is_the_same(served: Served) -> None:
    model = ChatAgentKV(base_url=served.url, model=MODEL, max_tokens=8)
    history: list[Any] = [HumanMessage("Without a loop?")]
    first = model.invoke(history)
    history += [first, HumanMessage("Two?")]
    chunks = list(model.stream(history))
    second: Any = chunks[0]
    for chunk in chunks[1:]:
        second += chunk
    assert session_of(first) == session_of(second)
    assert cached(second) == total(first) - 1
    model.root_client.close()


async def test_a_changed_past_and_a_deleted_session_are_answered_all_the_same(
    served: Served, client: OpenAI, tmp_path: Path
) -> None:
    async with talking(served, tmp_path / "checkpoints.db") as thread:
        first = await thread.say("One, to change?")
        second = await thread.say("Two?")
        messages = (await thread.app.aget_state(thread.config)).values["messages"]
        await thread.app.aupdate_state(thread.config, {"messages": [HumanMessage("Two, changed?", id=messages[2].id)]})
        third = await thread.say("Three?")
        assert session_of(third) != session_of(second)
        assert cached(third) >= total(first) - 1
        await thread.app.aupdate_state(thread.config, {"messages": [RemoveMessage(id=messages[0].id)]})
        await thread.say("Four?")
        for name in sessions(client):
            client.delete(f"/sessions/{name}", cast_to=object)
        fifth = await thread.say("Five?")
        sixth = await thread.say("Six?")
        assert cached(sixth) == total(fifth) - 1


@pytest.mark.full
async def test_sessions_of_a_thread_are_kept_from_their_first_answer_on(tmp_path: Path, model: Path) -> None:
    with quiet(tmp_path / "home", model, server_anonymous_seconds=8.0) as served, client_of(served) as client:
        async with talking(served, tmp_path / "checkpoints.db") as thread:
            first = await thread.say("One?")
            passing = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Passing"}])
            assert passing.choices
            until(lambda: sessions(client) == [session_of(first)], 60)
            second = await thread.say("Two?")
            assert cached(second) == total(first) - 1


async def test_a_server_has_to_be_said_and_one_that_is_not_there_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="which server answers"):
        ChatAgentKV(model=MODEL)
    nobody: Any = SimpleNamespace(url="http://127.0.0.1:9")
    model = model_of(nobody)
    with caplog.at_level(logging.WARNING):
        await model._akeep(None, "sess_1", None)
    assert "session_not_kept session=sess_1" in caplog.text
    await model.root_async_client.close()
