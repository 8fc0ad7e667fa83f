"""What a session's user knows of its future: when it is wanted, that it must stay, that it is done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from agentkv.errors import AgentKVError, InvalidRequest
from agentkv.logs import Log
from agentkv.sessions.core import SessionCore
from agentkv.sessions.tiers import Tiers
from agentkv.types import SessionState, Tier

__all__ = ["HintOutcome", "Hints"]

log = Log(__name__)

_MOST_SECONDS = 7 * 86400.0
_LEAST_AWAY = 1.0
"""Seconds below which it is not worth moving a session away and back."""
_EARLY = 2.0
"""A prefetch begins so many times its expected duration before the session is wanted."""


@dataclass(frozen=True, slots=True)
class HintOutcome:
    """What became of a hint; never an error, since it changes no answer.

    ``accepted``; ``clipped``: accepted for less than was asked; ``deferred``: not now, it will be looked at again;
    ``rejected``: it cannot be followed; ``missing``: there is nothing to do it to. ``detail`` says why.
    """

    outcome: Literal["accepted", "clipped", "deferred", "rejected", "missing"]
    detail: str = ""


class Hints:
    """Acts on hints. Runs on the event loop."""

    def __init__(self, tiers: Tiers, cores: Callable[[], Iterable[SessionCore]], pin_budget: int) -> None:
        self._tiers = tiers
        self._cores = cores
        self._pin_budget = pin_budget
        self._tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """Nothing is brought back any more: the runtime is closing."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def expect(self, core: SessionCore, seconds: float) -> HintOutcome:
        """It is wanted again in so many seconds: what others need meanwhile it gives up, and is back before."""
        if not seconds >= 0:
            raise InvalidRequest(f"a session is expected in 0 or more seconds, not {seconds}", param="seconds")
        core.expected_at = due = time.monotonic() + min(seconds, _MOST_SECONDS)
        if core.record.kv_length == 0:
            return HintOutcome("missing", "it has no KV yet")
        if seconds >= _LEAST_AWAY:
            task = asyncio.create_task(self._return(core, due), name="agentkv-hint")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return _accepted(seconds)

    async def _return(self, core: SessionCore, due: float) -> None:
        """Bring it back shortly before ``due``, unless something else was heard of it since."""
        restore = self._tiers.residency.facts(core, time.monotonic()).restore
        await asyncio.sleep(max(0.0, due - time.monotonic() - max(0.2, _EARLY * restore)))
        if core.expected_at == due and not core.deleted and core.idle:
            outcome = await self.prefetch(core)
            log.debug("expected", session=core.id, outcome=outcome.outcome, detail=outcome.detail)

    @asynccontextmanager
    async def tool_wait(self, core: SessionCore, expected: float) -> AsyncIterator[HintOutcome]:
        """A tool runs inside this block, for about ``expected`` seconds."""
        outcome = await self.expect(core, expected)
        due = core.expected_at
        try:
            yield outcome
        finally:
            if core.expected_at == due:
                core.expected_at = time.monotonic()  # its result is about to be sent

    async def prefetch(self, core: SessionCore) -> HintOutcome:
        """Bring its KV to the device now, if that drives nobody away."""
        if core.kv is not None:
            return HintOutcome("accepted", "it is there")
        if core.record.kv_length == 0:
            return HintOutcome("missing", "it has no KV yet")
        if not core.idle:
            return HintOutcome("deferred", "it is being moved or used")
        room = self._tiers.residency
        try:
            async with core.gate:
                core.check_open()
                if not room.take_free(core, core.record.held.tokens):
                    return HintOutcome("deferred", f"{core.record.held.tokens:,} tokens of KV do not fit what is free")
                try:
                    report = await self._tiers.make_live(core)
                finally:
                    room.settle(core)
        except AgentKVError as error:
            return HintOutcome("rejected", str(error))
        return HintOutcome("accepted", f"restored from {report.source}")

    async def pin(self, core: SessionCore, seconds: float) -> HintOutcome:
        """Keep it on the device for so long, within the pin budget; 0 ends it."""
        if not seconds >= 0:
            raise InvalidRequest(f"a session is pinned for 0 or more seconds, not {seconds}", param="seconds")
        now = time.monotonic()
        if seconds == 0:
            core.pinned_until = 0.0
            self._tiers.residency.admission.freed()
            return HintOutcome("accepted", "it is not pinned any more")
        if core.kv is None:
            return HintOutcome("missing", "it is not on the device: prefetch it first")
        others = sum(c.reserved for c in self._cores() if c is not core and c.pinned(now))
        if others + core.reserved > self._pin_budget:
            detail = (
                f"it holds {core.reserved:,} bytes, others that are pinned {others:,}; pin_budget {self._pin_budget:,}"
            )
            return HintOutcome("rejected", detail)
        core.pinned_until = now + min(seconds, _MOST_SECONDS)
        return _accepted(seconds)

    async def close(self, core: SessionCore) -> HintOutcome:
        """It is not wanted again soon: to disk with it. The conversation stays."""
        core.pinned_until, core.expected_at = 0.0, None
        if core.kv is None and core.state is not SessionState.HOST:
            return HintOutcome("missing", "it holds no memory")
        if core.turns:
            return HintOutcome("deferred", "a turn is running: it goes when it is idle")
        try:
            report = await self._tiers.suspend(core, Tier.DISK)
        except AgentKVError as error:
            return HintOutcome("rejected", str(error))
        return HintOutcome("accepted" if report.tier is Tier.DISK else "clipped", f"it is in {report.tier} memory now")


def _accepted(seconds: float) -> HintOutcome:
    return HintOutcome("accepted") if seconds <= _MOST_SECONDS else HintOutcome("clipped", f"to {_MOST_SECONDS:.0f} s")
