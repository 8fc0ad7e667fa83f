"""An event loop in a thread of its own, so that the main thread can wait for the terminal.

A runtime has work to do between turns (writing behind, demoting what is idle), and ``input()`` blocks whoever calls it.
Ctrl-C reaches the main thread only, and from there cancels the one coroutine it waits for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

__all__ = ["BackgroundLoop"]

T = TypeVar("T")


class BackgroundLoop:
    """``with BackgroundLoop() as loop: loop.run(coroutine)``.

    Ctrl-C can come when a coroutine has just ended, and its result is lost then: what must be closed is made before
    it is run. Tasks that are left at the end are cancelled.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agentkv-loop")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.run(self._end())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. ``KeyboardInterrupt`` cancels it, and is raised once it has ended."""
        outcome: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            task = self._loop.create_task(work)
            tasks.append(task)
            task.add_done_callback(deliver)

        def deliver(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                outcome.set_exception(asyncio.CancelledError())
            elif (error := task.exception()) is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(task.result())

        def stop() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # interrupted before it was begun
                work.close()
                outcome.set_exception(asyncio.CancelledError())

        try:
            self._loop.call_soon_threadsafe(start)
            return outcome.result()
        except KeyboardInterrupt:
            self._loop.call_soon_threadsafe(stop)
            outcome.exception()
            raise
