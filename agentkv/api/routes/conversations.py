"""``/v1/conversations``: sessions, as OpenAI's clients call them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentkv.api.calls import Call, Routes
from agentkv.api.openai.names import ConversationUnknown, conversation_of, session_of
from agentkv.api.openai.response_items import items_of, listed, messages_of, opening_and_rest, without_item
from agentkv.api.routes.responses import ItemList, ItemsQuery
from agentkv.api.shapes import InputItem
from agentkv.api.strict import exactly
from agentkv.errors import InvalidRequest, SessionNotFound
from agentkv.schemas.messages import Message
from agentkv.sessions.db.records import ItemRecord
from agentkv.sessions.following import keep
from agentkv.sessions.heads import Head, behind_head, joined
from agentkv.sessions.noting import noted
from agentkv.sessions.rewriting import rewritten
from agentkv.sessions.session import Session

__all__ = ["routes"]

routes = Routes("OpenAI")


class ConversationCreate(BaseModel):
    """A new conversation."""

    model_config = exactly({"items": [{"role": "user", "content": "Hello!"}], "metadata": {"agent": "bolt"}})

    items: list[InputItem] | None = Field(None, description="What was said so far: messages, calls and their outputs.")
    metadata: dict[str, Any] | None = None


class ConversationUpdate(BaseModel):
    """What of a conversation can be changed."""

    model_config = ConfigDict(extra="forbid")

    metadata: dict[str, Any] | None


class ConversationItems(BaseModel):
    """More of what was said."""

    model_config = exactly({"items": [{"role": "user", "content": "Hello!"}]})

    items: list[InputItem] = Field(min_length=1)


class Conversation(BaseModel):
    """A conversation: the session of the same name, `sess_…`."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, Any]


class ConversationDeleted(BaseModel):
    """It is gone."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


@routes.post(
    "/v1/conversations", body=ConversationCreate, body_optional=True, answer=Conversation, tells=("X-AgentKV-Session",)
)
async def create_conversation(call: Call) -> Conversation:
    """Begin a conversation, which is a session.

    Its items are computed by the first response. Leading system messages are its system prompt."""
    opening, said = opening_and_rest(messages_of(call.body.items, "items"))
    session = await call.sessions.create(opening, metadata=call.body.metadata)
    if said:
        try:
            await noted(call.sessions, session, said)
        except BaseException:
            await session.delete()
            raise
    return _told(call, session)


@routes.get("/v1/conversations/{conversation_id}", answer=Conversation, tells=("X-AgentKV-Session",), errors=(404,))
async def retrieve_conversation(call: Call) -> Conversation:
    """Say what a conversation is called and since when it is there."""
    return _told(call, await _session(call))


@routes.post(
    "/v1/conversations/{conversation_id}",
    body=ConversationUpdate,
    answer=Conversation,
    tells=("X-AgentKV-Session",),
    errors=(404,),
)
async def update_conversation(call: Call) -> Conversation:
    """Change a conversation's metadata."""
    session = await _session(call)
    await session.update(metadata=call.body.metadata or {})
    return _told(call, session)


@routes.delete(
    "/v1/conversations/{conversation_id}", answer=ConversationDeleted, tells=("X-AgentKV-Session",), errors=(404,)
)
async def delete_conversation(call: Call) -> ConversationDeleted:
    """Delete a conversation: its session, its responses, and the files that no other needs."""
    session = await _session(call)
    await session.delete()
    return ConversationDeleted(id=conversation_of(session.id))


@routes.get(
    "/v1/conversations/{conversation_id}/items",
    query=ItemsQuery,
    answer=ItemList,
    tells=("X-AgentKV-Session",),
    errors=(404,),
)
async def list_conversation_items(call: Call) -> ItemList:
    """List what was said, the last first."""
    session = await _session(call)
    return ItemList.page(listed(session.record, await call.sessions.repository.items(session.id)), call.query)


@routes.post(
    "/v1/conversations/{conversation_id}/items",
    body=ConversationItems,
    answer=ItemList,
    tells=("X-AgentKV-Session",),
    errors=(404, 409),
)
async def create_conversation_items(call: Call) -> ItemList:
    """Add to what was said. It is computed by the next response."""
    session, said = await _session(call), messages_of(call.body.items, "items")
    record = session.record
    if not behind_head(record, await call.sessions.repository.items(session.id)):
        opening, said = opening_and_rest(said)
        if opening is not None:
            head = Head.of(record)
            await rewritten(call.sessions, session, replace(head, system=joined(head.system, opening)))
    added = await noted(call.sessions, session, said) if said else []
    if not added:
        return ItemList.of(listed(session.record, await call.sessions.repository.items(session.id)))
    return ItemList.of([each for item in added for each in items_of(item)])


@routes.get(
    "/v1/conversations/{conversation_id}/items/{item_id}",
    answer=dict[str, Any],
    tells=("X-AgentKV-Session",),
    errors=(404,),
)
async def retrieve_conversation_item(call: Call) -> dict[str, Any]:
    """Say one item again."""
    session, name = await _session(call), call.path("item_id")
    for item in listed(session.record, await call.sessions.repository.items(session.id)):
        if item["id"] == name:
            return item
    raise ConversationUnknown(f"there is no item {name!r} in this conversation")


@routes.delete(
    "/v1/conversations/{conversation_id}/items/{item_id}",
    answer=Conversation,
    tells=("X-AgentKV-Session",),
    errors=(404, 409),
)
async def delete_conversation_item(call: Call) -> Conversation:
    """Delete one item, as if it had never been said.

    Of the last item the conversation keeps all KV before it; of another it is said anew without it, and computed by the
    next response."""
    session, name = await _session(call), call.path("item_id")
    items = await call.sessions.repository.items(session.id)
    said = behind_head(session.record, items)
    at = next((i for i, item in enumerate(said) if any(each["id"] == name for each in items_of(item))), None)
    if at is None:
        if any(item["id"] == name for item in listed(session.record, items)):
            raise InvalidRequest("item_id: this is the conversation's system prompt, which stays", param="item_id")
        raise ConversationUnknown(f"there is no item {name!r} in this conversation")
    if at and at == len(said) - 1 and without_item(said[at], name) is None:
        await session.rewind(said[at - 1].id)
        return _told(call, session)

    def left(item: ItemRecord) -> Message | None:
        return without_item(item, name)

    await rewritten(call.sessions, session, Head.of(session.record), left)
    return _told(call, session)


async def _session(call: Call) -> Session:
    name = call.path("conversation_id")
    try:
        session = await call.sessions.get(session_of(name))
    except SessionNotFound:
        raise ConversationUnknown(f"there is no conversation {name!r}") from None
    if call.route.method != "GET":
        await keep(call.sessions, session)
    call.headers["X-AgentKV-Session"] = session.id
    return session


def _told(call: Call, session: Session) -> Conversation:
    call.headers["X-AgentKV-Session"] = session.id
    record = session.record
    return Conversation(
        id=conversation_of(record.id), created_at=int(record.created_at), metadata=dict(record.metadata)
    )
