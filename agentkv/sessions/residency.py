"""The device's budget: who gets memory, who waits for it, and who gives it up.

One turn at a time decides, the first in line. It demotes idle sessions by a plan that is carried out whole or not at
all; where no plan suffices it waits, holding nothing: its own session's KV leaves the device too, so that two turns can
never wait for each other's memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from agentkv.errors import CapacityExceeded, StorageError
from agentkv.kv.contract import Evictions, Layout
from agentkv.kv.turning import turned_of
from agentkv.logs import Log, fault
from agentkv.policies.residency import ResidencyPolicy, SessionFacts, plan
from agentkv.policies.retention.sink import ATTENTION_SINKS
from agentkv.sessions.admission import Admission, QueueFull
from agentkv.sessions.core import SessionCore
from agentkv.sessions.rates import Rates
from agentkv.sessions.sizes import free_memory
from agentkv.types import Span, Tier

if TYPE_CHECKING:
    from agentkv.sessions.tiers import Tiers

__all__ = ["Residency"]

log = Log(__name__)

_RETRY_AFTER = 2.0
_RESTORE_BYTES_SECOND = 500e6
"""What a restore is taken for until one was measured."""


class Residency:
    """Admits turns to the device. Runs on the event loop."""

    def __init__(
        self,
        tiers: Tiers,
        layout: Layout[Any],
        cores: Callable[[], Iterable[SessionCore]],
        policy: ResidencyPolicy,
        *,
        context: int,
        budget: int,
        most_waiting: int,
        wait_seconds: float,
    ) -> None:
        self._tiers = tiers
        self._layout = layout
        self._cores = cores
        self.context = context
        self.policy = policy
        self.budget = budget
        self.share = context
        """Tokens that an adaptive session may hold."""
        self.rates = Rates()
        self.admission = Admission(most_waiting, wait_seconds)

    @property
    def used(self) -> int:
        """Bytes reserved on the device by all sessions."""
        return sum(core.reserved for core in self._cores())

    async def reserve(self, core: SessionCore, tokens: int) -> None:
        """Make sure that ``core`` may hold ``tokens`` tokens: free memory, then idle sessions', then what others give
        back while it waits. Call with the gate held.

        ``CapacityExceeded`` at once where it can never fit, or where too many wait; else after ``wait_seconds``.
        """
        needed = self._needed(core, tokens)
        if needed > self.budget:
            self._tiers.observer.refused(core, needed)
            raise CapacityExceeded(
                f"this conversation needs {needed:,} bytes of KV on the device, the whole budget is {self.budget:,}: "
                f"{self._advice(core.record.pinned)}, or raise device_budget",
                needed=needed,
                available=self.budget,
                budget=self.budget,
                retry_after=None,
            )
        if self.admission.waiting:
            await self._let_go(core)
        elif self._fits(core, needed):
            return
        stuck: set[SessionCore] = set()
        try:
            if await self.admission.until(lambda: self._admitted(core, tokens, stuck)):
                return
            why = "in time"
        except QueueFull:
            why = f"now, and {self.admission.waiting} turns wait for memory already"
        self._tiers.observer.refused(core, needed)
        movable = sum(other.reserved for other in self._movable(core) if other not in stuck)
        available = self.budget - self.used + core.reserved + movable
        raise CapacityExceeded(
            f"this turn needs {needed:,} bytes of KV on the device; {available:,} of the budget of {self.budget:,} "
            f"could be freed {why}. Retry later, lower max_tokens, or raise device_budget",
            needed=needed,
            available=available,
            budget=self.budget,
            retry_after=_RETRY_AFTER,
        )

    def take_free(self, core: SessionCore, tokens: int) -> bool:
        """``reserve`` as far as memory is free: nobody gives way, and nobody who waits is passed."""
        return self.take_bytes(core, self._needed(core, tokens))

    def is_free(self, nbytes: int) -> bool:
        """Whether nobody would have to give way for so many."""
        return not self.admission.waiting and self.used + nbytes <= self.budget

    def take_bytes(self, core: SessionCore, nbytes: int) -> bool:
        """The same for a state that is known to take so many."""
        return not self.admission.waiting and self._fits(core, nbytes)

    def reserve_copies(self, core: SessionCore, tokens: int, copies: int) -> None:
        """Count so many copies of ``core``'s state, each of ``tokens`` tokens, until ``settle``.

        ``CapacityExceeded`` where they do not fit what is free: nobody gives way, and nobody is waited for.
        """
        limit = core.limit(self.context)
        # They have its capacity from the start, and its masters.
        needed = copies * self._layout.bytes_needed(core.kv, min(tokens, limit), limit, self._evictions(core, tokens))
        free = self.budget - self.used
        if needed > free:
            self._tiers.observer.refused(core, needed)
            raise CapacityExceeded(
                f"{copies} beams of {tokens:,} tokens need {needed:,} bytes of KV on the device, {free:,} of "
                f"{self.budget:,} are free. Ask for fewer beams, lower max_tokens, or raise device_budget",
                needed=needed,
                available=free,
                budget=self.budget,
                retry_after=_RETRY_AFTER,
            )
        core.reserved += needed

    def tokens_within(self, nbytes: int, pinned: int | None = None) -> int:
        """Most tokens, of those that the model attends to, whose KV takes at most so many bytes; with ``pinned``: as a
        window that always begins with so many."""
        low, high = 0, min(self.context, 2**20)
        while low < high:
            middle = (low + high + 1) // 2
            evictions = None if pinned is None else Evictions(2 * middle, pinned)
            if self._layout.bytes_needed(None, middle, middle, evictions) <= nbytes:
                low = middle
            else:
                high = middle - 1
        return low

    def settle(self, core: SessionCore) -> None:
        """After a turn: count what is really reserved. What one that was rolled back needed for that is given up."""
        core.drop_closed()
        if core.kv is not None:
            core.kv.settle()
        nbytes = core.kv.nbytes if core.kv is not None else 0
        if nbytes > core.reserved:
            log.warning("outgrew", session=core.id, nbytes=nbytes, reserved=core.reserved, policy=core.record.policy)
        core.reserved = nbytes
        self.admission.freed()

    def facts(self, core: SessionCore, now: float) -> SessionFacts:
        """What a residency policy may know of a session that is on the device."""
        source = "host" if core.record.kv_length == core.stored else "disk"
        known = self.rates.estimate(source, core.record.held.tokens).restore
        return SessionFacts(
            id=core.id,
            nbytes=core.reserved,
            idle=now - core.last_used,
            gap=core.gap,
            uses=core.uses,
            expected=None if core.expected_at is None else core.expected_at - now,
            restore=core.reserved / _RESTORE_BYTES_SECOND if known is None else known,
        )

    async def clear(self, but: SessionCore) -> tuple[int, int]:
        """All idle sessions that are not pinned leave the device, as far as they can: how many did, and their bytes.

        Where the device is a CPU they go to disk: it is host memory that there is too little of.
        """
        tier = Tier.DISK if self._layout.device.type == "cpu" else Tier.HOST
        moved = nbytes = 0
        for other in self._movable(but):
            if not other.idle or other.kv is None:
                continue  # a turn was faster
            held = other.reserved
            try:
                await self._tiers.suspend(other, tier)
            except Exception as error:  # one that cannot go, for want of memory itself, does not keep the others
                log.error("not_demoted", session=other.id, **fault(error))
                continue
            moved, nbytes = moved + 1, nbytes + held
        return moved, nbytes

    def exhausted(self, core: SessionCore, tokens: int, moved: int, nbytes: int) -> CapacityExceeded:
        """What to tell of a turn that ran out of device memory again after ``moved`` sessions had given ``nbytes``."""
        needed, free = self._needed(core, tokens), free_memory(self._layout.device)
        self._tiers.observer.refused(core, needed)
        return CapacityExceeded(
            f"the device ran out of memory, and again after {moved} idle sessions had given {nbytes:,} bytes back: "
            f"{needed:,} bytes of KV are needed, and what a step takes beside them; {free:,} are free. Retry later, or "
            f"leave more for steps: lower device_budget ({self.budget:,}), or prefill_tokens, which makes them smaller",
            needed=needed,
            available=free,
            budget=self.budget,
            retry_after=_RETRY_AFTER,
        )

    def _needed(self, core: SessionCore, tokens: int) -> int:
        limit, kv = core.limit(self.context), core.kv
        evictions, tokens = self._evictions(core, tokens), min(tokens, limit)
        if kv is None:
            return self._layout.bytes_needed(None, tokens, limit, evictions)
        kv.limit = limit
        needed = self._layout.bytes_needed(kv, tokens, limit, evictions)
        if needed > self.budget:  # with room to grow; this turn will do without
            kv.limit = tokens
            needed = self._layout.bytes_needed(kv, tokens, tokens, evictions)
        return needed

    def _evictions(self, core: SessionCore, tokens: int) -> Evictions | None:
        """What those of a turn that leads to ``tokens``, evicted ones included, may take; of a restore, too."""
        record, policy = core.record, core.policy
        placement = record.held if core.kv is None else core.kv.placement
        if placement.trivial and (policy.window is None or tokens <= policy.window):
            return None
        added = tokens - record.held.tokens
        # A live state may be short of the last commit, and catches up.
        new = tokens if core.kv is None else max(0, record.kv_length + added - core.kv.length)
        widest = max((group.window or 0 for group in self._layout.geometry.groups), default=0)
        rebased = bool(placement.bases) and placement.bases[-1][0] > placement.length - widest
        turned = turned_of(placement)
        if policy.window is None or not new or (core.kv is None and not added):
            return Evictions(new, turned, rebases=rebased)
        foreseen = policy.turned_tokens(Span(0, record.pinned))
        return Evictions(
            new,
            max(turned, foreseen),
            scattered=foreseen >= policy.window,
            rebases=rebased or placement.next_position + new > self._layout.rebase_at,
        )

    def _fits(self, core: SessionCore, needed: int) -> bool:
        if self.used - core.reserved + needed > self.budget:
            return False
        core.reserved = needed
        return True

    def _movable(self, but: SessionCore) -> list[SessionCore]:
        now = time.monotonic()
        return [
            core
            for core in self._cores()
            if core is not but and core.kv is not None and core.idle and not core.pinned(now)
        ]

    async def _admitted(self, core: SessionCore, tokens: int, stuck: set[SessionCore]) -> bool:
        """Whether there is room now; ``stuck`` becomes the sessions that can be moved nowhere."""
        stuck.clear()
        while not self._fits(core, self._needed(core, tokens)):
            missing = self.used - core.reserved + self._needed(core, tokens) - self.budget
            now = time.monotonic()
            candidates = {c.id: c for c in self._movable(core) if c not in stuck}
            chosen = plan(self.policy, [self.facts(c, now) for c in candidates.values()], missing)
            if chosen is None:
                await self._let_go(core)
                return False
            for name in chosen.sessions:
                victim = candidates[name]
                if not victim.idle or victim.kv is None:
                    break  # a turn was faster: plan anew
                try:
                    await self._tiers.suspend(victim, Tier.HOST)
                except StorageError as error:
                    log.error("not_demoted", session=victim.id, **fault(error))
                    stuck.add(victim)
                    break
        return True

    async def _let_go(self, core: SessionCore) -> None:
        """What waits holds nothing."""
        if core.kv is None:
            return
        try:
            await self._tiers.demote(core, Tier.HOST)
        except StorageError as error:
            log.error("waits_with_its_memory", session=core.id, **fault(error))

    def _advice(self, pinned: int) -> str:
        """A policy that would fit, or another layout."""
        most = self.tokens_within(self.budget, max(ATTENTION_SINKS, pinned))
        window = most // 256 * 256 or most
        return f"policy 'sink:{window}' would fit" if window >= 32 else "no policy would fit"
