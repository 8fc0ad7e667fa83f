"""openai-agents: a ``Session`` whose items are a session of a server.

    session = AgentKVSession("my-thread", client=kv)
    await Runner.run(agent, "Hello", session=session, run_config=RunConfig(model_settings=session.model_settings))

The model's requests name the session, and so are answered in it: what the model says is in the ledger before the runner
stores it, and is not stored twice. ::

    runner                 ledger of my-thread
    add_items(user)   ──▶  user
    model(all of it)  ──▶  user ── answer          one turn, committed whole, KV kept
    add_items(answer) ──▶  it is there already
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from agentkv.api.openai.names import conversation_of
from agentkv.client import AsyncAgentKV
from agentkv.errors import InvalidRequest

try:
    from agents import ModelSettings, SessionSettings
    from agents.items import TResponseInputItem
    from openai import AsyncOpenAI, BadRequestError, NotFoundError
except ModuleNotFoundError as error:
    if error.name not in ("agents", "openai"):
        raise
    raise ModuleNotFoundError(
        f"agentkv.integrations.openai_agents needs the package {error.name!r}: pip install 'agentkv[openai-agents]'",
        name=error.name,
    ) from error

if TYPE_CHECKING:
    from agents.memory import Session

__all__ = ["AgentKVSession"]

_PAGE = 100
Items = list[dict[str, Any]]


class AgentKVSession:
    """A thread of an openai-agents ``Runner``, kept under its name until it is cleared.

    ``client``: the server; the ``AsyncOpenAI`` that the agent's model has, or an ``AsyncAgentKV``. Pass
    ``model_settings`` to the run, so that the model answers in this session: without them its requests are recognised
    by what was said, and their KV goes when they have been idle for a day.
    """

    _ignore_ids_for_matching = True
    """Read by the runner: ids are given by the server, not those that items came with."""

    def __init__(
        self,
        session_id: str,
        *,
        client: AsyncOpenAI | AsyncAgentKV,
        session_settings: SessionSettings | None = None,
    ) -> None:
        """``session_id``: 1 to 200 printable characters. ``session_settings``: how many items a run reads."""
        if not isinstance(client, AsyncOpenAI | AsyncAgentKV):
            raise InvalidRequest(
                f"client: must be openai.AsyncOpenAI or agentkv.client.AsyncAgentKV, not {type(client).__name__}",
                param="client",
            )
        self.session_id = session_id
        self.session_settings = session_settings
        self._openai = client if isinstance(client, AsyncOpenAI) else client.openai
        self._own = self._openai is not client
        self._seen: str | None = None
        self._looked = False
        self._writing = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<AgentKVSession {self.session_id!r} at {self._openai.base_url}>"

    @property
    def model_settings(self) -> ModelSettings:
        """For ``RunConfig``: the model's requests name this session. ``resolve`` adds settings of your own."""
        return ModelSettings(extra_body={"session_id": self.session_id})

    async def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        """What was said, the latest ``limit`` items of it, oldest first. Empty where the thread has not begun."""
        if limit is None and self.session_settings is not None:
            limit = self.session_settings.limit
        conversation = await self._conversation()
        found = [] if conversation is None else await self._items(conversation, limit)
        if found or limit != 0:
            self._saw(found[-1]["id"] if found else None)
        return cast("list[TResponseInputItem]", found)

    async def add_items(self, items: list[TResponseInputItem]) -> None:
        """Commit what of ``items`` the session does not have; nothing is computed before the model answers.

        Begins the thread where there is none. Items that a session cannot hold (images, reasoning …) are refused.
        """
        if items:
            async with self._writing:
                await self._add(items)

    async def _add(self, items: list[TResponseInputItem]) -> None:
        conversation = await self._conversation() or await self._begin()
        try:
            said, by_id = await self._items(conversation, behind=self._seen), not self._looked
        except LookupError:
            said, by_id = await self._items(conversation), True
        new, last = _unsaid([_plain(item) for item in items], said, by_id=by_id)
        if new:
            added = await self._ask("POST", f"/conversations/{conversation}/items", {"items": new})
            last = added["last_id"] or last
        if last is not None:
            self._saw(last)

    async def pop_item(self) -> TResponseInputItem | None:
        """Take the last item back. The KV of all before it stays."""
        async with self._writing:
            conversation = await self._conversation()
            last = [] if conversation is None else await self._items(conversation, 2)
            if not last:
                return None
            await self._ask("DELETE", f"/conversations/{conversation}/items/{last[-1]['id']}")
            self._saw(last[0]["id"] if len(last) > 1 else None)
            return cast("TResponseInputItem", last[-1])

    async def clear_session(self) -> None:
        """Delete the session with its KV. The next item begins it anew, under the same name."""
        async with self._writing:
            if await self._conversation() is not None:
                await self._ask("DELETE", self._path)
            self._saw(None)

    async def close(self) -> None:
        """Give connections back, where they are not those of a client that was passed. Idempotent."""
        if self._own:
            await self._openai.close()

    def _saw(self, item: str | None) -> None:
        """All up to there is known here; ``None``: that there is nothing."""
        self._seen, self._looked = item, True

    # -- the server ---------------------------------------------------------------------------------------------------

    @property
    def _path(self) -> str:
        return f"/sessions/{quote(self.session_id, safe='')}"

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        call = getattr(self._openai, method.lower())
        return await (call(path, cast_to=object) if body is None else call(path, body=body, cast_to=object))

    async def _conversation(self) -> str | None:
        """The session's name as a conversation; ``None`` before the first item."""
        try:
            return conversation_of((await self._ask("GET", self._path))["id"])
        except NotFoundError as error:
            if error.code != "session_not_found":
                raise
            return None

    async def _begin(self) -> str:
        try:
            return conversation_of((await self._ask("POST", "/sessions", {"name": self.session_id}))["id"])
        except BadRequestError:
            if (found := await self._conversation()) is None:
                raise
            return found  # somebody else has begun it meanwhile

    async def _items(self, conversation: str, limit: int | None = None, *, behind: str | None = None) -> Items:
        """The latest ``limit`` items, oldest first, or those behind an item. ``LookupError`` where there is none."""
        found: Items = []
        more = True
        while more and (limit is None or len(found) < limit):
            query = f"order=desc&limit={_PAGE if limit is None else min(_PAGE, limit - len(found))}"
            if found:
                query += f"&after={found[-1]['id']}"
            page = await self._ask("GET", f"/conversations/{conversation}/items?{query}")
            for item in page["data"]:
                if item["id"] == behind:
                    return found[::-1]
                found.append(item)
            more = page["has_more"]
        if behind is not None:
            raise LookupError(behind)
        return found[::-1]


def _unsaid(given: Items, said: Items, *, by_id: bool) -> tuple[Items, str | None]:
    """``given`` without what ``said`` has in the same order, and the last of ``said`` that it has.

    ``by_id``: the same id alone makes two items one; else also that they say the same."""
    at, new = 0, []
    for item in given:
        for index in range(at, len(said)):
            alike = not by_id and _meaning(item) == _meaning(said[index])
            if alike or item.get("id") == said[index]["id"]:
                at = index + 1
                break
        else:
            new.append(item)
    return new, said[at - 1]["id"] if at else None


def _meaning(item: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes two items the same, whatever they are called."""
    kind = item.get("type") or "message"
    if kind == "function_call":
        try:
            return kind, item.get("name"), json.loads(item.get("arguments") or "{}")
        except ValueError:
            return kind, item.get("name"), item.get("arguments")
    if kind == "function_call_output":
        return kind, item.get("call_id"), _text(item.get("output"))
    return kind, item.get("role"), _text(item.get("content"))


def _text(content: Any) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "\n".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return str(content or "").strip()


def _plain(item: Any) -> dict[str, Any]:
    """As the server takes it: without what only says where it came from."""
    given = dict(item) if isinstance(item, Mapping) else item.model_dump(exclude_unset=True)
    given.pop("provider_data", None)
    return given


if TYPE_CHECKING:

    def _is_one(session: AgentKVSession) -> Session:
        return session
