"""``/v1/chat/completions`` and ``/v1/models``, as OpenAI's clients call them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any, Literal

from aiohttp import web
from pydantic import BaseModel

from agentkv.api.calls import Call, Routes
from agentkv.api.openai.belonging import session_for, tell, told
from agentkv.api.openai.chat_answer import Answer, ChatCompletion, ChatCompletionChunk
from agentkv.api.openai.chat_body import ChatBody
from agentkv.api.openai.translating import function_tools, model_name
from agentkv.api.streams import ServerEvent, stream_answer
from agentkv.engine.tokenbytes import token_bytes
from agentkv.schemas.replies import Done
from agentkv.sessions.histories import History

__all__ = ["routes"]

routes = Routes("OpenAI")


class ServedModel(BaseModel):
    """A model that requests can name. ``created``: when its files were written, in unix seconds."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "agentkv"


class ServedModels(BaseModel):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[ServedModel]


@routes.get("/v1/models", answer=ServedModels)
async def list_models(call: Call) -> ServedModels:
    """List the models that are served: one."""
    return ServedModels(data=[await _served(call)])


@routes.get("/v1/models/{model}", answer=ServedModel, errors=(404,))
async def retrieve_model(call: Call) -> ServedModel:
    """Say whether a model is served."""
    model_name(call, call.path("model"))
    return await _served(call)


@routes.post(
    "/v1/chat/completions",
    body=ChatBody,
    answer=ChatCompletion,
    events=ChatCompletionChunk,
    last="[DONE]",
    reads=("X-Session-ID",),
    tells=("X-AgentKV-Session", "X-AgentKV-Cache", "X-AgentKV-Diverged"),
    errors=(404, 409),
)
async def create_chat_completion(call: Call) -> web.StreamResponse:
    """Answer a conversation.

    It is answered in a session, whose KV is reused: the one that `session_id` names, or the header `X-Session-ID`;
    else the one in which the longest beginning of `messages` was said; else a new one. The headers say which
    (`X-AgentKV-Session`), and what was reused (`X-AgentKV-Cache`). With `stream` the answer comes as chunks, and ends
    with `[DONE]`. Whoever disconnects before it is complete has it rolled back."""
    body: ChatBody = call.body
    body.check()
    name, sampling = model_name(call, body.model), body.sampling()
    history = History.of(body.messages, tools=function_tools(body.tools), template_args=body.template_args)
    model = call.kv.model
    answer = Answer(
        name,
        model.fingerprints.kv,
        tokens=await asyncio.to_thread(token_bytes, model.tokenizer) if body.logprobs else None,
        end_ids=model.end_ids,
        usage=bool(body.stream_options and body.stream_options.include_usage),
    )
    found = await session_for(call, history, session_id=body.session_id, cache_key=body.prompt_cache_key)
    told(call, found)
    events = found.stream(sampling)
    if body.stream:
        return await stream_answer(
            call,
            events,
            answer.chunks,
            opened=lambda first: tell(call, first),
            failed=answer.failed,
            last=ServerEvent(str(call.route.last)),
        )
    async with aclosing(events):
        async for event in events:
            tell(call, event)
            if isinstance(event, Done):
                text = answer.whole(event.reply)
                return web.Response(text=text, content_type="application/json", headers=call.headers)
    raise AssertionError("a turn ends with Done or an error")


async def _served(call: Call) -> ServedModel:
    model = call.kv.model
    written: Any = await asyncio.to_thread(model.path.stat)
    return ServedModel(id=model.name, created=int(written.st_mtime))
