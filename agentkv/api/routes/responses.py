"""``/v1/responses``, as OpenAI's clients call them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from agentkv.api.bodies import NoBody
from agentkv.api.calls import Call, Routes
from agentkv.api.openai.belonging import session_for, told
from agentkv.api.openai.names import ConversationUnknown, conversation_of, session_of
from agentkv.api.openai.responding import RUNNING, responding
from agentkv.api.openai.response_answer import ResponseAnswer, ResponseEvent, ResponseObject
from agentkv.api.openai.response_body import Counted, ResponseBody
from agentkv.api.openai.response_items import listed, opening_and_rest
from agentkv.api.openai.translating import model_name
from agentkv.api.streams import stream_answer
from agentkv.engine.tokenbytes import token_bytes
from agentkv.errors import InvalidRequest, ResponseNotFound, SessionNotFound, Unsupported
from agentkv.schemas.messages import Message
from agentkv.sessions.continuing import (
    Context,
    NewItems,
    Wanted,
    conversation_context,
    conversed,
    responded,
    response_context,
)
from agentkv.sessions.counting import counted, counted_behind
from agentkv.sessions.heads import Head, joined
from agentkv.sessions.histories import History
from agentkv.sessions.recognising import Recognised

__all__ = ["routes"]

routes = Routes("OpenAI")


class ResponseDeleted(BaseModel):
    """It is gone."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(BaseModel):
    """Tokens before the answer."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ItemsQuery(BaseModel):
    """A page of items."""

    model_config = ConfigDict(extra="forbid")

    after: str | None = Field(None, description="The last id of the page before.")
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"


class ItemList(BaseModel):
    """A page of items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool

    @classmethod
    def page(cls, items: Sequence[dict[str, Any]], query: ItemsQuery) -> ItemList:
        """Of ``items``, which are in order. ``InvalidRequest`` where ``after`` is none of them."""
        said = list(items) if query.order == "asc" else list(reversed(items))
        if query.after is not None:
            at = next((i for i, item in enumerate(said, 1) if item["id"] == query.after), None)
            if at is None:
                raise InvalidRequest(f"after: there is no item {query.after!r} here", param="after")
            said = said[at:]
        return cls.of(said[: query.limit], has_more=len(said) > query.limit)

    @classmethod
    def of(cls, items: Sequence[dict[str, Any]], *, has_more: bool = False) -> ItemList:
        """All of ``items``."""
        ids = [item["id"] for item in items] or [""]
        return cls(data=list(items), first_id=ids[0], last_id=ids[-1], has_more=has_more)


@routes.post(
    "/v1/responses",
    body=ResponseBody,
    answer=ResponseObject,
    events=ResponseEvent,
    reads=("X-Session-ID",),
    tells=("X-AgentKV-Session", "X-AgentKV-Cache", "X-AgentKV-Diverged"),
    errors=(404, 409),
)
async def create_response(call: Call) -> web.StreamResponse:
    """Answer.

    It is answered in a session, whose KV is reused: that of `conversation`; of `previous_response_id`, or a fork of it
    where it has gone on; else as for chat completions. The headers say which (`X-AgentKV-Session`), and what was reused
    (`X-AgentKV-Cache`). With `stream` the answer comes as typed events. Whoever disconnects before it is complete has
    it rolled back. Kept under its id, unless `store: false`, for as long as its session."""
    body: ResponseBody = call.body
    body.check()
    name, sampling, wanted, new = model_name(call, body.model), body.sampling(), body.wanted(), body.messages()
    found, head = await _found(call, body, wanted, new)
    told(call, found)
    store = call.server.store_responses if body.store is None else body.store
    model = call.kv.model
    answer = ResponseAnswer(
        _echo(body, name, head, store, found),
        tokens=None if body.logprobs is None else await asyncio.to_thread(token_bytes, model.tokenizer),
        end_ids=model.end_ids,
    )
    events = responding(call, found, sampling, answer, instructions=head.instructions, store=store)
    if body.stream:
        return await stream_answer(call, events, lambda event: (event,), failed=answer.failed)
    async with aclosing(events):
        async for _ in events:
            pass
    text = json.dumps(answer.object(), ensure_ascii=False)
    return web.Response(text=text, content_type="application/json", headers=call.headers)


@routes.get("/v1/responses/{response_id}", answer=ResponseObject, errors=(404,))
async def retrieve_response(call: Call) -> web.Response:
    """Say a response again; one in progress, as it is."""
    name = call.path("response_id")
    running = call.request.app[RUNNING].get(name)
    if running is not None and running.tenant == call.tenant.name:
        return web.json_response(running.answer.object())
    return web.json_response((await call.sessions.repository.get_response(name, call.tenant.name)).body)


@routes.delete("/v1/responses/{response_id}", answer=ResponseDeleted, errors=(404,))
async def delete_response(call: Call) -> ResponseDeleted:
    """Forget a response. What was said stays in its session."""
    name = call.path("response_id")
    await call.sessions.repository.delete_response(name, call.tenant.name)
    return ResponseDeleted(id=name)


@routes.get("/v1/responses/{response_id}/input_items", query=ItemsQuery, answer=ItemList, errors=(404,))
async def list_response_input_items(call: Call) -> ItemList:
    """List what a response answers: all items before it, the last first."""
    repository, name = call.sessions.repository, call.path("response_id")
    response = await repository.get_response(name, call.tenant.name)
    if response.session_id is None:
        return ItemList.page([], call.query)
    context = await response_context(call.sessions, response, Wanted())
    return ItemList.page(listed(context.session.record, context.items[:-1], response.instructions), call.query)


@routes.post(
    "/v1/responses/{response_id}/cancel", body=NoBody, body_optional=True, answer=ResponseObject, errors=(404,)
)
async def cancel_response(call: Call) -> web.Response:
    """Stop a response in progress. It is rolled back: nothing of it was said."""
    name = call.path("response_id")
    running = call.request.app[RUNNING].get(name)
    if running is None or running.tenant != call.tenant.name:
        record = await call.sessions.repository.get_response(name, call.tenant.name)
        raise InvalidRequest(
            f"response {name} is {record.body['status']}: only one in progress can be cancelled", param="response_id"
        )
    running.stop.set()
    await running.ended.wait()
    return web.json_response(running.answer.object())


@routes.post("/v1/responses/input_tokens", body=Counted, answer=InputTokens, errors=(404,))
async def count_input_tokens(call: Call) -> InputTokens:
    """Count what a request would put before its answer. Nothing is computed or kept."""
    body: Counted = call.body
    body.check()
    if body.model is not None:
        model_name(call, body.model)
    wanted, new = body.wanted(), body.messages()
    if (context := await _context(call, body, wanted)) is not None:
        context, new = _begun(context, new)
        context.check(new)
        return InputTokens(input_tokens=await counted_behind(call.sessions, context, new))
    head, said = _opened(wanted, new)
    return InputTokens(input_tokens=await counted(call.sessions, head, said))


async def _context(call: Call, body: ResponseBody | Counted, wanted: Wanted) -> Context | None:
    """What the request names that it goes on from."""
    sessions = call.sessions
    if body.conversation_id is not None:
        try:
            return await conversation_context(sessions, session_of(body.conversation_id), wanted)
        except SessionNotFound:
            raise ConversationUnknown(f"there is no conversation {body.conversation_id!r}") from None
    if body.previous_response_id is None:
        return None
    try:
        response = await sessions.repository.get_response(body.previous_response_id, sessions.tenant)
    except ResponseNotFound as error:
        raise ResponseNotFound(error.response_id, param="previous_response_id") from None
    return await response_context(sessions, response, wanted)


async def _found(call: Call, body: ResponseBody, wanted: Wanted, new: Sequence[Message]) -> tuple[Recognised, Head]:
    """Where it is answered, and under which head."""
    context = await _context(call, body, wanted)
    if context is not None:
        _check_truncation(body, context.session.record.policy, context.session._core.policy.evicts)
        context, said = _begun(context, new)
        if body.conversation_id is not None:
            return await conversed(call.sessions, context, said), context.head
        return await responded(call.sessions, context, said, cache_key=body.prompt_cache_key or None), context.head
    head, said = _opened(wanted, new)
    kind = NewItems if head.system == wanted.instructions else History
    history = kind(tuple(said), head.system, tuple(map(dict, head.tools or ())) or None)
    found = await session_for(call, history, session_id=body.session_id, cache_key=body.prompt_cache_key)
    try:
        record = found.session.record
        _check_truncation(body, record.policy, found.session._core.policy.evicts)
    except Unsupported:
        if found.made:
            await found.session.delete()
        raise
    return found, Head(record.system, tuple(record.tools) if record.tools else None, wanted.instructions)


def _opened(wanted: Wanted, new: Sequence[Message]) -> tuple[Head, list[Message]]:
    """A conversation that begins with these messages. ``InvalidRequest`` where there is nothing to answer."""
    opening, said = opening_and_rest(new)
    if not said:
        raise InvalidRequest("input: there is nothing to answer; pass a text or a list of items", param="input")
    return Head(joined(wanted.instructions, opening), wanted.tools or None, wanted.instructions), said


def _begun(context: Context, new: Sequence[Message]) -> tuple[Context, list[Message]]:
    """Leading system messages of what is new belong to the head of a conversation in which nothing was said yet."""
    if not context.bare:
        return context, list(new)
    opening, said = opening_and_rest(new)
    if opening is None:
        return context, said
    head = context.head
    return replace(context, head=replace(head, system=joined(head.system, opening))), said


def _check_truncation(body: ResponseBody, policy: str, evicts: bool) -> None:
    """What a session holds is up to its policy: ``Unsupported`` where the request says otherwise."""
    if body.truncation == "auto" and not evicts:
        raise Unsupported(
            "truncation='auto'",
            f"the session's policy is {policy!r}, which keeps everything: give it one that evicts, such as "
            "'turns:4096', by PATCH /v1/sessions/{id}, or start the server with AGENTKV_DEFAULT_POLICY=turns:4096",
            param="truncation",
        )
    if body.truncation == "disabled" and evicts:
        raise Unsupported(
            "truncation='disabled'",
            f"the session's policy is {policy!r}, which evicts: leave it out, or give the session 'full'",
            param="truncation",
        )


def _echo(body: ResponseBody, name: str, head: Head, store: bool, found: Recognised) -> dict[str, Any]:
    """What comes back of the request."""
    tools = [{"strict": None, "parameters": None, **tool["function"], "type": "function"} for tool in head.tools or ()]
    given = {tool.get("name"): tool.get("strict") for tool in body.tools or ()}
    for tool in tools:
        tool["strict"] = given.get(tool["name"])
    text = body.text.format if body.text is not None else None
    evicts = found.session._core.policy.evicts
    return {
        "background": False,
        "conversation": None if body.conversation_id is None else {"id": conversation_of(found.session.id)},
        "instructions": head.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": name,
        "parallel_tool_calls": True,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": store,
        "temperature": body.temperature,
        "text": {"format": text or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "auto" if evicts else "disabled",
        "user": body.user,
    }
