"""Sessions to files and back, beside whatever else the runtime does: who holds what for how long, and cancellation."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentkv.engine.loading import LoadedModel
from agentkv.errors import AgentKVError, Closed
from agentkv.sessions.core import SessionCore
from agentkv.sessions.db.whole import WholeSession
from agentkv.sessions.exporting import Exporter, check_plain_allowed
from agentkv.sessions.importing import Importer
from agentkv.sessions.waiting import finished, outlast
from agentkv.types import ExportReport, ImportReport

if TYPE_CHECKING:
    from agentkv.sessions.manager import Sessions

__all__ = ["Moving"]

T = TypeVar("T")


class _Abandoned(Exception):
    """Raised where work stops whose caller has gone away."""


class Moving:
    """Export and import of one tenant's sessions. Runs on the event loop."""

    def __init__(self, sessions: Sessions, model: LoadedModel, home: Path, importing: asyncio.Lock) -> None:
        """``importing``: one import at a time, of all tenants'."""
        self._sessions = sessions
        self._tiers = sessions.tiers
        self._model = model
        self._home = home
        self._importing = importing

    async def export(
        self, core: SessionCore, path: str | os.PathLike[str], *, allow_plain: bool, replace: bool
    ) -> ExportReport:
        """See ``Session.export``. The gate is held until all is stored and SQL is read, not while the file is written.

        A cancelled export leaves nothing behind, unless the file was complete already.
        """
        check_plain_allowed(self._tiers.blobs, allow_plain)
        writer = self._tiers.writer
        try:
            async with AsyncExitStack() as stack:
                async with core.gate:
                    core.check_open()
                    reading = self._sessions.tracked(self._snapshot(core))
                    if (cancelled := await finished(reading)) is not None:
                        raise cancelled
                    whole, held = reading.result()
                    # A later turn may give some of these chunks up: their files stay until they are copied.
                    stack.enter_context(writer.spared({segment.chunk_id for segment in whole.manifest.segments}))
                rotations = writer.geometry.rotations
                exporter = Exporter(
                    self._tiers.blobs,
                    self._home,
                    codecs=writer.codecs,
                    rotations=rotations if whole.record.kv_fingerprint == writer.kv_fingerprint else None,
                    held=held,
                )

                async def write(go_on: Callable[[], None]) -> ExportReport:
                    work = partial(exporter.write, whole, Path(path), replace=replace, go_on=go_on)
                    return await asyncio.get_running_loop().run_in_executor(writer.executor, work)

                return await self._abandonable(write)
        finally:
            with suppress(Closed):
                await outlast(writer.try_collecting(core.id))

    async def _snapshot(self, core: SessionCore) -> tuple[WholeSession, dict[str, bytes]]:
        """The session at rest, all of it; chunks of it that only host memory has."""
        await self._tiers.behind.flush(core)
        whole = await self._tiers.repository.whole_session(core.id, core.record.tenant)
        if core.unsaved is None:
            return whole, {}
        chunks = {segment.chunk_id: self._tiers.host.get(segment.chunk_id) for segment in core.unsaved.segments}
        held = {name: chunk for name, chunk in chunks.items() if chunk is not None}
        return replace(whole, manifest=whole.manifest.followed_by(core.unsaved)), held

    async def import_(self, path: str | os.PathLike[str], *, keep_id: bool) -> tuple[SessionCore, ImportReport]:
        """See ``Sessions.import_``. Of a cancelled import nothing is left."""
        importer = Importer(self._model, self._tiers, self._home, self._sessions.tenant)

        async def take(go_on: Callable[[], None]) -> tuple[SessionCore, ImportReport]:
            taken = await importer.take(Path(path), keep_id=keep_id, go_on=go_on, check_core=self._sessions.check_core)
            self._sessions.adopt(taken[0])
            return taken

        async def undo(taken: tuple[SessionCore, ImportReport]) -> None:
            await self._sessions.delete(taken[0].id)

        async with self._importing:
            return await self._abandonable(take, undo)

    async def _abandonable(
        self,
        work: Callable[[Callable[[], None]], Coroutine[Any, Any, T]],
        undo: Callable[[T], Awaitable[None]] | None = None,
    ) -> T:
        """``work``, given what it calls between its steps. Cancelled, it stops at the next one and leaves nothing: this
        is waited for, and so is ``undo`` of its result where there was no step left."""
        if self._sessions.closed:
            raise Closed("this runtime is closed")
        stop = threading.Event()

        def go_on() -> None:
            if stop.is_set():
                raise _Abandoned

        task = self._sessions.tracked(work(go_on))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            stop.set()
            try:
                result = await outlast(task)
                if undo is not None:
                    await outlast(undo(result))
            except (_Abandoned, AgentKVError):
                pass  # it was cancelled: nobody asks any more what it would have said
            raise
