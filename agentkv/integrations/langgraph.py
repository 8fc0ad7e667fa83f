"""LangGraph: a chat model whose answers say which session of a server they are in, so that a checkpoint leads there.

    model = ChatAgentKV(base_url="http://127.0.0.1:8000", model="smollm2-135m")
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})

A checkpoint holds the messages, and its last answer says which session the conversation was in then: whichever saver
keeps it, and whichever process reads it. ::

    checkpoints of a thread     c1 ── c2 ── c3          the last answer's session ends there: it goes on
                                 └─ c2'                 it has gone on since: a fork behind c1, without copying KV

Every session that has answered is kept until it is deleted; its agent is the thread.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from pydantic import model_validator

from agentkv.errors import InvalidRequest
from agentkv.logs import Log, fault

try:
    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
    from langchain_core.messages import AIMessage, BaseMessage
    from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
    from langchain_core.runnables.config import ensure_config
    from langchain_openai import ChatOpenAI
    from openai import NotFoundError, OpenAIError
except ModuleNotFoundError as error:
    if error.name not in ("langchain_core", "langchain_openai", "openai"):
        raise
    raise ModuleNotFoundError(
        f"agentkv.integrations.langgraph needs the package {error.name!r}: pip install 'agentkv[langgraph]'",
        name=error.name,
    ) from error

__all__ = ["ChatAgentKV", "session_of"]

log = Log(__name__)
_SESSION = "x-agentkv-session"
_OURS = "x-agentkv-"


def session_of(message: BaseMessage) -> str | None:
    """The session that a message was answered in; ``None`` where it does not say."""
    headers = message.response_metadata.get("headers") if isinstance(message, AIMessage) else None
    return headers.get(_SESSION) if isinstance(headers, Mapping) else None


class ChatAgentKV(ChatOpenAI):
    """``ChatOpenAI`` for a server of agentkv, with all that it can do.

    ``base_url``: the server's, with or without ``/v1``. ``api_key``: by default ``AGENTKV_API_KEY``.
    """

    include_response_headers: bool = True
    stream_usage: bool | None = True

    @model_validator(mode="before")
    @classmethod
    def _server(cls, values: Any) -> Any:
        given = dict(values)
        name = "openai_api_base" if "openai_api_base" in given else "base_url"
        url = given.get(name)
        if not isinstance(url, str):
            raise InvalidRequest("base_url: say which server answers, such as http://127.0.0.1:8000", param="base_url")
        given[name] = f"{url.rstrip('/').removesuffix('/v1')}/v1"
        if not {"api_key", "openai_api_key"} & given.keys():
            given["api_key"] = os.environ.get("AGENTKV_API_KEY") or "none"
        return given

    # -- as LangChain calls a model -----------------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        asked = self._going_on(messages)
        result = super()._generate(messages, stop, run_manager, **self._named(asked, kwargs))
        self._keep(asked, _told(result.generations), run_manager)
        return result

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        asked = await self._agoing_on(messages)
        result = await super()._agenerate(messages, stop, run_manager, **self._named(asked, kwargs))
        await self._akeep(asked, _told(result.generations), run_manager)
        return result

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        asked, answered = self._going_on(messages), None
        for chunk in super()._stream(messages, stop, run_manager, **self._named(asked, kwargs)):
            answered = _told([chunk]) or answered
            yield chunk
        self._keep(asked, answered, run_manager)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        asked, answered = await self._agoing_on(messages), None
        async for chunk in super()._astream(messages, stop, run_manager, **self._named(asked, kwargs)):
            answered = _told([chunk]) or answered
            yield chunk
        await self._akeep(asked, answered, run_manager)

    # -- which session ------------------------------------------------------------------------------------------------

    def _going_on(self, messages: Sequence[BaseMessage]) -> str | None:
        """The session that ends with the last answer; ``None`` where there is none, or where it has gone on since: then
        the server finds the session by what was said, and forks it there."""
        name, tokens = _last_answer(messages)
        if name is None:
            return None
        try:
            found: Any = self.root_client.get(f"/sessions/{name}", cast_to=object)
        except NotFoundError:
            return None
        return name if found.get("ledger_tokens") == tokens else None

    async def _agoing_on(self, messages: Sequence[BaseMessage]) -> str | None:
        name, tokens = _last_answer(messages)
        if name is None:
            return None
        try:
            found: Any = await self.root_async_client.get(f"/sessions/{name}", cast_to=object)
        except NotFoundError:
            return None
        return name if found.get("ledger_tokens") == tokens else None

    def _named(self, session: str | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What is asked, with the session's name."""
        if session is None:
            return dict(kwargs)
        body = {"session_id": session, **(self.extra_body or {}), **(kwargs.get("extra_body") or {})}
        return {**kwargs, "extra_body": body}

    def _keep(self, asked: str | None, answered: str | None, run: CallbackManagerForLLMRun | None) -> None:
        """A session that is new to this conversation is kept, however long it is idle."""
        if answered is not None and answered != asked:
            try:
                self.root_client.patch(f"/sessions/{answered}", body=_owner(run), cast_to=object)
            except OpenAIError as error:
                log.warning("session_not_kept", session=answered, **fault(error))

    async def _akeep(self, asked: str | None, answered: str | None, run: AsyncCallbackManagerForLLMRun | None) -> None:
        if answered is not None and answered != asked:
            try:
                await self.root_async_client.patch(f"/sessions/{answered}", body=_owner(run), cast_to=object)
            except OpenAIError as error:
                log.warning("session_not_kept", session=answered, **fault(error))


def _last_answer(messages: Sequence[BaseMessage]) -> tuple[str | None, int | None]:
    """The last answer's session, and how long its ledger was then."""
    for message in reversed(messages):
        if isinstance(message, AIMessage):
            usage = message.usage_metadata
            return session_of(message), usage["total_tokens"] if usage else None
    return None, None


def _told(generations: Sequence[ChatGeneration]) -> str | None:
    """The session that answered. Of the answer's headers only those that say something of it stay in the message."""
    found = None
    for generation in generations:
        # LangChain puts the first into the second, later; with the Responses API it is there at once.
        for said in (generation.generation_info, generation.message.response_metadata):
            if said and said.get("headers"):
                headers = {name.lower(): value for name, value in said["headers"].items()}
                said["headers"] = {name: value for name, value in headers.items() if name.startswith(_OURS)}
                found = headers.get(_SESSION, found)
    return found


def _owner(run: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None) -> dict[str, Any]:
    # Where a graph streams, its model is called without a run.
    told = (run.metadata if run is not None else None) or ensure_config().get("configurable", {})
    thread = told.get("thread_id")
    return {} if thread is None else {"agent_id": str(thread)[:200]}
