"""The same traffic against a server that speaks OpenAI's chat completions, wherever it is."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from agentkv.bench.serving import Answer
from agentkv.bench.traffic import Conversation, Turn
from agentkv.errors import AgentKVError, InvalidRequest

__all__ = ["Refused", "Remote"]

_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=600)


class Refused(AgentKVError):
    """The server did not answer a turn."""


class Remote:
    """A server by its URL (the part that ends with ``/v1``). Its agents send the whole conversation each time.

    What every such server takes is sent: tools as text behind the system prompt, their results as messages of the user.
    Answers end where the model ends them, after ``answer_tokens`` at most.
    """

    def __init__(self, http: aiohttp.ClientSession, url: str, model: str, key: str | None) -> None:
        self._http = http
        self._url = url.rstrip("/")
        self._model = model
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    @classmethod
    @asynccontextmanager
    async def connected(cls, url: str, model: str | None, key: str | None) -> AsyncIterator[Remote]:
        """``model``: by default the first that it lists. ``InvalidRequest`` where nobody answers or none is listed."""
        async with aiohttp.ClientSession(timeout=_TIMEOUT, connector=aiohttp.TCPConnector(limit=0)) as http:
            remote = cls(http, url, model or "", key)
            if model is None:
                remote._model = await remote._listed()
            yield remote

    @property
    def model(self) -> str:
        """What it calls the model."""
        return self._model

    def agent(self, conversation: Conversation) -> _Agent:
        """Somebody who holds this conversation."""
        return _Agent(self, conversation)

    def bytes_by_tier(self) -> dict[str, int]:
        """Nothing is known of them."""
        return {}

    async def _listed(self) -> str:
        try:
            async with self._http.get(f"{self._url}/models", headers=self._headers) as response:
                text = await response.text()
                if response.status == 200:
                    return str(json.loads(text)["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
            raise InvalidRequest(
                f"{self._url}/models does not answer as OpenAI's API does: {type(error).__name__}: {error}",
                param="against",
            ) from error
        raise InvalidRequest(f"{self._url}/models answers {response.status}: {text[:200]}", param="against")

    async def ask(self, messages: list[dict[str, Any]], tokens: int) -> tuple[float, str, dict[str, Any]]:
        """Seconds to the first token, the text, and what the server says of its usage. Raises ``Refused``."""
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started, first, parts = time.perf_counter(), None, []
        usage: dict[str, Any] = {}
        try:
            async with self._http.post(f"{self._url}/chat/completions", json=body, headers=self._headers) as response:
                if response.status != 200:
                    raise Refused(f"{response.status}: {(await response.text())[:200]}")
                async for line in response.content:
                    if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise Refused(str(event["error"])[:200])
                    usage = event.get("usage") or usage
                    for choice in event.get("choices", ()):
                        if text := choice.get("delta", {}).get("content"):
                            first = first or time.perf_counter() - started
                            parts.append(text)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
        return first or time.perf_counter() - started, "".join(parts), usage


class _Agent:
    def __init__(self, server: Remote, conversation: Conversation) -> None:
        self._server = server
        tools = "\n".join(json.dumps(tool) for tool in conversation.tools)
        system = "\n\n".join(part for part in (conversation.system, tools) if part)
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self._known = 0

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def turn(self, turn: Turn) -> Answer:
        said = [{"role": "user", "content": str(message["content"])} for message in turn.messages]
        ttft, text, usage = await self._server.ask([*self._messages, *said], turn.answer_tokens)
        self._messages += [*said, {"role": "assistant", "content": text}]
        prompt, completion = int(usage.get("prompt_tokens", 0)), int(usage.get("completion_tokens", 0))
        reused = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        known, self._known = self._known, prompt + completion
        return Answer(ttft, known, min(reused, known), prompt, completion, "remote")
