"""A server's sessions, with the methods that a runtime's have."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from agentkv import errors
from agentkv.client.connection import Connection, reader
from agentkv.schemas.messages import MessageInput
from agentkv.schemas.replies import Begun, Done, Event, Item, Reply, SessionInfo, TextDelta, ToolCallEvent
from agentkv.types import ImportReport, RestoreReport, SuspendReport

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from agentkv.sessions.branching import RewindReport
    from agentkv.sessions.events import LifecycleEvent
    from agentkv.sessions.hints import HintOutcome
    from agentkv.sessions.verifying import Verification

__all__ = ["AsyncAgentKV", "RemoteSession", "RemoteSessions"]

_EVENTS: Mapping[str, type[Any]] = {"begun": Begun, "delta": TextDelta, "tool_call": ToolCallEvent, "done": Done}
_PART = 1 << 20


class AsyncAgentKV:
    """A server. Close it, or use it in ``async with``. ``api_key``: by default ``AGENTKV_API_KEY``."""

    def __init__(self, base_url: str, api_key: str | None = None, *, timeout: float | None = None) -> None:
        """``timeout``: seconds that a whole answer may take; by default for ever, as turns can."""
        self._server = Connection(base_url, api_key, timeout)
        self.base_url = self._server.base_url
        self.sessions = RemoteSessions(self._server)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Give connections back. Idempotent."""
        await self._server.close()

    @property
    def openai(self) -> AsyncOpenAI:
        """OpenAI's own client, pointed at this server. Needs the package ``openai``."""
        try:
            from openai import AsyncOpenAI
        except ImportError as error:
            raise errors.InvalidRequest("this needs OpenAI's client: pip install openai") from error
        return AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key=self._server.key or "none")

    async def health(self) -> dict[str, Any]:
        """What the server says of its parts; also where it is not well."""
        async with self._server.request("GET", "/health", ok=(200, 503)) as response:
            return dict(await response.json())


class RemoteSessions:
    """``kv.sessions`` of a server."""

    def __init__(self, server: Connection) -> None:
        self._server = server

    async def create(self, system: str | None = None, **options: Any) -> RemoteSession:
        """As in process: ``agent_id``, ``policy``, ``idle_codec``, ``tools``, ``template_args``, ``metadata``."""
        body = {"system": system, **options}
        given = {name: value for name, value in body.items() if value is not None}
        return RemoteSession(self._server, await self._server.call(dict[str, Any], "POST", "/v1/sessions", given))

    async def get(self, session_id: str) -> RemoteSession:
        """An existing conversation. ``SessionNotFound`` if there is none."""
        info = await self._server.call(SessionInfo, "GET", _path(session_id))
        facts = {"id": info.id, "agent_id": info.agent_id, "metadata": info.metadata, "policy": info.policy}
        return RemoteSession(self._server, facts)

    async def list(
        self, *, agent_id: str | None = None, limit: int = 100, before: str | None = None
    ) -> list[dict[str, Any]]:
        """Newest first; ``before`` is the last id of the previous page."""
        page = await self._server.call(
            dict[str, Any], "GET", "/v1/sessions", agent_id=agent_id, limit=limit, before=before
        )
        return list(page["data"])

    async def delete(self, session_id: str) -> int:
        """Returns the bytes freed on disk."""
        return int((await self._server.call(dict[str, Any], "DELETE", _path(session_id)))["freed_bytes"])

    async def import_(self, path: str | os.PathLike[str]) -> RemoteSession:
        """Send a file that ``export`` wrote; the session that the server made of it."""
        headers = {"Content-Type": "application/octet-stream"}
        async with self._server.request(
            "POST", "/v1/sessions/import", data=_parts(Path(path)), headers=headers
        ) as response:
            report = reader(ImportReport).validate_json(await response.read())
        session = await self.get(report.session_id)
        session.imported = report
        return session


class RemoteSession:
    """One conversation on a server. Handles are cheap."""

    def __init__(self, server: Connection, facts: Mapping[str, Any]) -> None:
        self._server = server
        self._facts = facts
        self.imported: ImportReport | None = None

    def __repr__(self) -> str:
        return f"<RemoteSession {self.id} at {self._server.base_url}>"

    @property
    def id(self) -> str:
        """``sess_…``: keep it to come back."""
        return str(self._facts["id"])

    @property
    def agent_id(self) -> str | None:
        """The name given at creation."""
        found: str | None = self._facts["agent_id"]
        return found

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What was given at creation."""
        return dict(self._facts["metadata"])

    async def send(self, messages: MessageInput, **options: Any) -> Reply:
        """Add messages and generate the reply. Returns once it is committed."""
        reply: Reply = await self._ask(Reply, "messages", {"messages": messages, **options})
        return reply

    def stream(self, messages: MessageInput, *, begun: bool = False, **options: Any) -> AsyncGenerator[Event]:
        """As ``send``, as events. Leaving the loop early rolls the turn back."""
        return self._streamed({"messages": messages, **options}, begun)

    async def continue_(self, **options: Any) -> Reply:
        """Generate without new input."""
        reply: Reply = await self._ask(Reply, "messages", options)
        return reply

    def stream_continue(self, *, begun: bool = False, **options: Any) -> AsyncGenerator[Event]:
        """``continue_`` as events."""
        return self._streamed(options, begun)

    async def append(self, messages: MessageInput, *, wait: bool = False) -> list[Item]:
        """Commit messages and generate nothing."""
        items: list[Item] = await self._ask(
            list[Item], "messages", {"messages": messages, "wait": wait, "generate": False}
        )
        return items

    async def regenerate(self, **options: Any) -> Reply:
        """Make the last answer again, in its place."""
        reply: Reply = await self._ask(Reply, "regenerate", options)
        return reply

    async def fork(self, at_item: str | None = None, **options: Any) -> RemoteSession:
        """A new session that begins with this one's items."""
        return RemoteSession(self._server, await self._ask(dict[str, Any], "fork", {"at_item": at_item, **options}))

    async def rewind(
        self, to_item: str | None = None, *, turns: int | None = None, dry_run: bool = False
    ) -> RewindReport:
        """Go back to the end of an item, or by so many turns."""
        from agentkv.sessions.branching import RewindReport

        body = {"to_item": to_item, "turns": turns, "dry_run": dry_run}
        report: RewindReport = await self._ask(RewindReport, "rewind", body)
        return report

    async def items(self) -> list[Item]:
        """All items in order, the system prompt first."""
        page = await self._server.call(dict[str, list[Item]], "GET", f"{_path(self.id)}/items")
        return list(page["data"])

    async def state(self) -> SessionInfo:
        """Where the session is and what it weighs."""
        info: SessionInfo = await self._server.call(SessionInfo, "GET", _path(self.id))
        return info

    async def set_policy(self, policy: str) -> None:
        """Change what stays in the KV state, from the next turn on."""
        await self._server.call(SessionInfo, "PATCH", _path(self.id), {"policy": policy})

    async def update(self, *, agent_id: str | None = None, metadata: Mapping[str, Any] | None = None) -> None:
        """Another agent's name or other metadata; ``None`` leaves what was."""
        given = {"agent_id": agent_id, "metadata": metadata}
        body = {name: value for name, value in given.items() if value is not None}
        self._facts = {**self._facts, **body}
        await self._server.call(SessionInfo, "PATCH", _path(self.id), body)

    async def suspend(self, tier: str = "disk") -> SuspendReport:
        """Take the KV off the device."""
        report: SuspendReport = await self._ask(SuspendReport, "suspend", {"tier": tier})
        return report

    async def resume(self) -> RestoreReport:
        """Bring the KV back to the device now."""
        report: RestoreReport = await self._ask(RestoreReport, "resume")
        return report

    async def verify(self, *, tokens: int = 512) -> Verification:
        """Check every byte that is stored of it, and compute some of it again."""
        from agentkv.sessions.verifying import Verification

        found: Verification = await self._ask(Verification, "verify", {"tokens": tokens})
        return found

    async def export(self, path: str | os.PathLike[str], *, replace: bool = False) -> int:
        """Write the conversation with its stored KV into one file. Returns its bytes."""
        target, size = Path(path), 0
        if not replace and await asyncio.to_thread(target.exists):
            raise errors.InvalidRequest(f"{target} exists: pass replace=True to write over it", param="path")
        partial = target.with_name(f".{target.name}.part")
        try:
            async with self._server.request("GET", f"{_path(self.id)}/export") as response:
                with await asyncio.to_thread(partial.open, "wb") as file:
                    async for part in response.content.iter_chunked(_PART):
                        size += await asyncio.to_thread(file.write, part)
            await asyncio.to_thread(partial.replace, target)
        finally:
            await asyncio.to_thread(partial.unlink, missing_ok=True)
        return size

    async def events(self) -> AsyncGenerator[LifecycleEvent]:
        """What happens to its KV from now on."""
        from agentkv.sessions.events import LifecycleEvent

        async with aclosing(self._server.events("GET", f"{_path(self.id)}/events")) as events:
            async for _, data in events:
                yield reader(LifecycleEvent).validate_json(data)

    async def expect(self, seconds: float) -> HintOutcome:
        """It is wanted again in so many seconds."""
        return await self._hint("expect", seconds)

    @asynccontextmanager
    async def tool_wait(self, expected: float) -> AsyncIterator[HintOutcome]:
        """Around a tool that takes about so many seconds."""
        yield await self.expect(expected)

    async def prefetch(self) -> HintOutcome:
        """Bring the KV to the device now, if memory is free."""
        return await self._hint("prefetch")

    async def pin(self, seconds: float) -> HintOutcome:
        """Keep the KV on the device for so many seconds; 0 ends it."""
        return await self._hint("pin", seconds)

    async def close(self) -> HintOutcome:
        """The conversation rests: its KV goes to disk now."""
        return await self._hint("close")

    async def delete(self) -> int:
        """Delete the conversation. Returns the bytes freed on disk."""
        return await RemoteSessions(self._server).delete(self.id)

    async def _hint(self, kind: str, seconds: float | None = None) -> HintOutcome:
        from agentkv.sessions.hints import HintOutcome

        found: HintOutcome = await self._ask(HintOutcome, "hints", {"kind": kind, "seconds": seconds})
        return found

    async def _ask(self, kind: Any, what: str, body: Any = None) -> Any:
        return await self._server.call(kind, "POST", f"{_path(self.id)}/{what}", body)

    async def _streamed(self, body: Mapping[str, Any], begun: bool) -> AsyncGenerator[Event]:
        source = self._server.events("POST", f"{_path(self.id)}/messages", {**body, "stream": True})
        async with aclosing(source) as events:
            async for name, data in events:
                kind: Any = _EVENTS[name]
                event: Event = reader(kind).validate_json(data)
                if begun or name != "begun":
                    yield event


def _path(session_id: str) -> str:
    return f"/v1/sessions/{quote(session_id, safe='')}"


async def _parts(path: Path) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(path.open, "rb") as file:
        while part := await asyncio.to_thread(file.read, _PART):
            yield part
