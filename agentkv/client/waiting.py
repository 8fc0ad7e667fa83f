"""The same SDK for programs without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, Self, TypeVar

from agentkv.client.remote import AsyncAgentKV, RemoteSession, RemoteSessions

__all__ = ["AgentKV"]

T = TypeVar("T")


class AgentKV:
    """``AsyncAgentKV`` for programs without an event loop: the same methods, without ``await``.

    Coroutines run on a loop in a thread of its own; sessions that they return are of this kind too, and streams are
    plain iterators.
    """

    def __init__(self, base_url: str, api_key: str | None = None, *, timeout: float | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agentkv-client", daemon=True)
        self._thread.start()
        self._kv = AsyncAgentKV(base_url, api_key, timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return _Waiting(self._kv, self._run).__getattr__(name)

    def close(self) -> None:
        """Give connections and the thread back. Idempotent."""
        if self._thread.is_alive():
            self._run(self._kv.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class _Waiting:
    """An object whose coroutine methods are waited for."""

    def __init__(self, target: Any, run: Any) -> None:
        self._target = target
        self._run = run

    def __repr__(self) -> str:
        return repr(self._target)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if isinstance(found, RemoteSessions):
            return _Waiting(found, self._run)
        if not callable(found):
            return found

        def method(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            if isinstance(result, AsyncGenerator):
                return self._iterated(result)
            if asyncio.iscoroutine(result):
                result = self._run(result)
            return _Waiting(result, self._run) if isinstance(result, RemoteSession) else result

        return method

    def _iterated(self, events: AsyncGenerator[T]) -> Iterator[T]:
        async def step() -> tuple[T] | None:
            try:
                return (await anext(events),)
            except StopAsyncIteration:
                return None

        try:
            while (found := self._run(step())) is not None:
                yield found[0]
        finally:
            self._run(events.aclose())
