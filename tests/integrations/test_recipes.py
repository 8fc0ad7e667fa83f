"""What docs/integrations.md says of frameworks that need no adapter: two turns, a restart, a third turn that reuses."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from asking import MODEL, client_of, quiet, sessions, state, until
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, messages_from_dict, messages_to_dict
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, AgentRunResult
from pydantic_ai.messages import ModelMessagesTypeAdapter
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings
from pydantic_ai.providers.openai import OpenAIProvider
from served import Served


def stop(served: Served, tokens: int) -> str:
    """Kill it once all but the last of ``tokens`` is on disk. The one session that there is."""
    with client_of(served) as client:
        (name,) = sessions(client)
        until(lambda: state(client, name)["stored_tokens"] >= tokens - 1)
    served.kill()
    return name


def same_session(served: Served, name: str) -> bool:
    with client_of(served) as client:
        return sessions(client) == [name]


def test_langchain_sends_all_of_it_and_names_the_session(tmp_path: Path, model: Path) -> None:
    served = quiet(tmp_path / "home", model)

    def chat() -> ChatOpenAI:
        options: Any = {"api_key": "none", "max_tokens": 8, "extra_body": {"session_id": "my-thread"}}
        return ChatOpenAI(model=MODEL, base_url=f"{served.url}/v1", **options)

    def tokens(answer: AIMessage) -> tuple[int, int]:
        usage = answer.usage_metadata
        assert usage is not None
        return usage["input_token_details"]["cache_read"], usage["total_tokens"]

    with served:
        talking = chat()
        messages: list[Any] = [SystemMessage("You are terse."), HumanMessage("One?")]
        first = talking.invoke(messages)
        messages += [first, HumanMessage("Two?")]
        second = talking.invoke(messages)
        assert tokens(second)[0] == tokens(first)[1] - 1
        saved = messages_to_dict([*messages, second])
        talking.root_client.close()
        name = stop(served, tokens(second)[1])
    with served:
        talking = chat()
        third = talking.invoke([*messages_from_dict(saved), HumanMessage("Three?")])
        assert tokens(third)[0] == tokens(second)[1] - 1
        assert same_session(served, name)
        talking.root_client.close()


@pytest.mark.full
async def test_pydantic_ai_sends_all_of_it_and_names_the_session(tmp_path: Path, model: Path) -> None:
    served = quiet(tmp_path / "home", model)

    def agent(client: AsyncOpenAI) -> Agent[None, str]:
        chat = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))
        settings = OpenAIChatModelSettings(extra_body={"session_id": "my-thread"}, max_tokens=8)
        return Agent(chat, instructions="You are terse.", model_settings=settings)

    def tokens(result: AgentRunResult[str]) -> tuple[int, int]:
        usage = result.usage
        return usage.cache_read_tokens, usage.input_tokens + usage.output_tokens

    with served:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            first = await agent(client).run("One?")
            second = await agent(client).run("Two?", message_history=first.all_messages())
        assert tokens(second)[0] == tokens(first)[1] - 1
        saved = second.all_messages_json()
        name = stop(served, tokens(second)[1])
    with served:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            history = ModelMessagesTypeAdapter.validate_json(saved)
            third = await agent(client).run("Three?", message_history=history)
        assert tokens(third)[0] == tokens(second)[1] - 1
        assert same_session(served, name)


class Said(BaseModel):
    """openai-agents takes no answer that was cut, and a random model ends none by itself."""

    word: Literal["yes", "no"]


@pytest.mark.full
async def test_the_page_runs_as_it_is_printed(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    blocks = re.findall(r"^```python\n(.+?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"Said": Said}
    with quiet(tmp_path / "home", model) as served:
        for code in blocks:
            code = code.replace("http://127.0.0.1:8000", served.url).replace("smollm2-135m", MODEL)
            code = code.replace('Agent(name="Bolt"', 'Agent(output_type=Said, name="Bolt"')
            run = eval(compile(code, "docs/integrations.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
            if inspect.iscoroutine(run):
                await run
        assert names["result"].usage.cache_read_tokens > 0
        await names["client"].close()
        with client_of(served) as client:
            named: Any = client.get("/sessions/my-thread/items", cast_to=object)
            assert named["data"]
