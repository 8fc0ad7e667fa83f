"""Random traffic over sessions whose every committed turn is held against the ledger in SQL and the oracle."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from agentkv import AgentKV
from agentkv.errors import (
    CapacityExceeded,
    Closed,
    ContextTooLong,
    DatabaseUnavailable,
    InvalidRequest,
    SessionBusy,
    SessionNotFound,
    StorageError,
)
from agentkv.schemas.replies import Done, Reply
from agentkv.sessions.db.records import TurnRecord
from agentkv.sessions.session import Session
from agentkv.types import Span
from soaking.oracle import Oracle, Violation

__all__ = ["Known", "Plan", "Traffic"]

_SYSTEM = "You are a helpful assistant. How is the weather in Paris? " * 3
_POLICIES = ("full", "full", "sink:96", "sink:160,slack=32", "turns:200")
_PATIENCE = 90.0
"""Seconds after which whatever does not answer hangs."""


@dataclass(frozen=True)
class Plan:
    """How a session is made."""

    chat: bool
    system: str | None
    policy: str
    codec: str

    @classmethod
    def drawn(cls, draw: random.Random) -> Plan:
        chat = draw.random() < 0.4
        system = draw.choice([None, "Be brief.", _SYSTEM]) if chat else None
        policy = draw.choice(_POLICIES)
        if system is _SYSTEM:
            policy = "full"
        return cls(chat, system, policy, draw.choice(["exact", "exact", "raw", "int8"]))

    @property
    def compared(self) -> bool:
        return self.codec != "int8"


@dataclass(eq=False)
class Known:
    """A session, as far as somebody outside has been told. ``turns`` and ``ledger``: those that were looked at.

    ``whole``: nothing was ever evicted, so that the whole ledger can be recomputed. ``told``: replies by turn.
    """

    id: str
    plan: Plan
    turns: int
    ledger: list[int]
    twin: Session | None = None
    whole: bool = True
    told: dict[int, tuple[int, ...]] = field(default_factory=dict)
    behind: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    gone: bool = False
    fallbacks: int = 0


class Traffic:
    """``workers`` tasks that do random things to a pool of about ``size`` sessions. ``totals``: of the open runtime."""

    def __init__(self, draw: random.Random, oracle: Oracle, size: int) -> None:
        self._draw = draw
        self._oracle = oracle
        self._size = size
        self.sessions: dict[str, Known] = {}
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        self.kv: AgentKV
        self.running: dict[asyncio.Task[Any], str] = {}
        self.may_be_locked: Callable[[], bool] = lambda: False

    def opened(self, kv: AgentKV) -> None:
        """A runtime begins to count anew."""
        self.kv = kv
        self.totals = Counter()
        for known in self.sessions.values():
            known.fallbacks = 0

    # -- one operation after the other --------------------------------------------------------------------------------

    async def work(self, until: float) -> None:
        """Operations until that moment (monotonic seconds), or until the runtime closes."""
        while time.monotonic() < until:
            verb, operation = self._drawn()
            began = time.monotonic()
            try:
                async with asyncio.timeout(_PATIENCE):
                    await operation()
            except TimeoutError:
                raise Violation(f"{verb} has not answered for {time.monotonic() - began:.0f} s") from None
            except CapacityExceeded:
                self.refusals["capacity"] += 1
            except SessionBusy:
                self.refusals["busy"] += 1
            except StorageError as error:
                self.refusals[f"storage in {verb}"] += 1
                if verb not in ("suspend", "turn"):
                    raise Violation(f"{verb} raised {error!r}") from error
            except DatabaseUnavailable as error:
                self.refusals["database"] += 1
                if not self.may_be_locked():
                    raise Violation(f"{verb}: nobody locks the database, but {error}") from error
            except SessionNotFound:
                self.refusals["deleted meanwhile"] += 1
            except Closed:
                if self.kv._state != "open":
                    return
                self.refusals["deleted meanwhile"] += 1
            self.counts[verb] += 1

    def _drawn(self) -> tuple[str, Callable[[], Awaitable[None]]]:
        draw = self._draw
        there = [known for known in self.sessions.values() if not known.gone]
        if len(there) < self._size // 2 or (len(there) < self._size and draw.random() < 0.2):
            return "create", self._create
        known = draw.choice(there)
        verb = draw.choices(
            ["turn", "suspend", "resume", "hint", "policy", "look", "delete"], [50, 12, 8, 14, 3, 6, 2]
        )[0]
        work = getattr(self, f"_{verb}")
        return verb, lambda: work(known)

    async def _create(self) -> None:
        plan = Plan.drawn(self._draw)
        session = await self.kv.sessions.create(
            plan.system, policy=plan.policy, idle_codec=plan.codec, agent_id=self._draw.choice([None, "a", "b"])
        )
        self.totals["created"] += 1
        known = Known(session.id, plan, session._core.record.turns, await self._patiently(session.token_ids))
        if plan.compared and (plan.policy != "full" or self._draw.random() < 0.3):
            known.twin = await self._oracle.twin(plan.system, plan.policy)
            known.whole = plan.policy == "full"
        self.sessions[known.id] = known

    async def _session(self, known: Known) -> Session:
        return await self.kv.sessions.get(known.id)

    async def _turn(self, known: Known) -> None:
        async with known.lock:
            if known.gone:
                return
            session = await self._session(known)
            task = asyncio.create_task(self._said(session, known))
            reply, trouble = None, None
            try:
                if self._draw.random() < 0.25:
                    await asyncio.wait([task], timeout=self._draw.expovariate(20))
                    self.counts["cancelled"] += task.cancel()
                reply = await task
            except asyncio.CancelledError:
                if (me := asyncio.current_task()) is not None and me.cancelling():
                    task.cancel()
                    await asyncio.wait([task])
                    raise
            except Exception as error:
                trouble = error
            if reply is not None and not known.behind:
                known.told[known.turns] = reply.ids
            # While it closes nobody looks any more, and the next reply is of a turn whose number is not known.
            known.behind = self.kv._state != "open"
            if not known.behind:
                added = await self.look(known)
                if reply is not None and added != 1:
                    raise Violation(f"a reply of {known.id} was told, and {added} turns were committed")
                if trouble is not None and not isinstance(trouble, Closed) and added:
                    raise Violation(f"{trouble!r} was told, and a turn was committed") from trouble
            if isinstance(trouble, ContextTooLong):
                await self._deleted(known)
            elif trouble is not None:
                raise trouble

    async def _said(self, session: Session, known: Known) -> Reply | None:
        draw, tokens = self._draw, self._draw.choice([1, 2, 4, 8, 16])
        kind = draw.choices(["send", "stream", "append", "continue"], [60, 25, 8, 7])[0]
        text = draw.choice(["How is the weather in Paris?", "tool ", "user "]) * draw.choice([1, 1, 3])
        # One token of input a turn, sometimes: the smallest of chunks.
        ids = [draw.randrange(1, 256) for _ in range(draw.choice([1, 5, 20, 60]))]
        wait = draw.random() < 0.5
        if kind == "append":
            await (session.append(text, wait=wait) if known.plan.chat else session.append_tokens(ids, wait=wait))
            return None
        if kind == "continue" and session._core.record.turns:
            going_on = session.continue_ if known.plan.chat else session.generate_tokens
            return await going_on(max_tokens=tokens, wait=wait)
        if not known.plan.chat:
            return await session.generate_tokens(ids, max_tokens=tokens, wait=wait)
        if kind == "send":
            return await session.send(text, max_tokens=tokens, wait=wait)
        return await self._streamed(session.stream(text, max_tokens=tokens, wait=wait))

    async def _streamed(self, stream: AsyncGenerator[Any]) -> Reply | None:
        leaves = self._draw.randrange(12) if self._draw.random() < 0.3 else 10**6
        async with contextlib.aclosing(stream) as events:
            async for event in events:
                if isinstance(event, Done):
                    return event.reply
                leaves -= 1
                if leaves < 0:
                    self.counts["left"] += 1
                    return None
        return None

    async def _suspend(self, known: Known) -> None:
        await (await self._session(known)).suspend(self._draw.choice(["host", "disk"]))

    async def _resume(self, known: Known) -> None:
        await (await self._session(known)).resume()

    async def _hint(self, known: Known) -> None:
        session, draw = await self._session(known), self._draw
        match draw.randrange(5):
            case 0:
                await session.expect(draw.uniform(0, 3))
            case 1:
                await session.prefetch()
            case 2:
                await session.pin(draw.choice([0, 1, 3]))
            case 3:
                await session.close()
            case _:
                async with session.tool_wait(draw.uniform(0, 3)):
                    await asyncio.sleep(draw.uniform(0, 0.3))

    async def _policy(self, known: Known) -> None:
        async with known.lock:
            if known.gone or (known.plan.compared and known.twin is None):
                return
            policy = self._draw.choice([p for p in _POLICIES if known.plan.system is not _SYSTEM or p == "full"])
            try:
                await (await self._session(known)).set_policy(policy)
            except InvalidRequest:
                return
            if known.twin is not None:
                await known.twin.set_policy(policy)
            known.whole = known.whole and policy == "full"

    async def _look(self, known: Known) -> None:
        session = await self._session(known)
        state = await session.state()
        if not state.stored_tokens <= state.ledger_tokens:
            raise Violation(f"{state} is impossible")
        session.usage()
        self.kv.stats()

    async def _delete(self, known: Known) -> None:
        async with known.lock:
            if not known.gone:
                await self._deleted(known)

    async def _deleted(self, known: Known) -> None:
        await self.kv.sessions.delete(known.id)
        known.gone = True
        self.totals["deleted"] += 1
        self.sessions.pop(known.id)
        if known.twin is not None:
            await known.twin.delete()

    # -- what must be true --------------------------------------------------------------------------------------------

    async def _patiently(self, read: Callable[[], Awaitable[Any]]) -> Any:
        for _ in range(40):
            try:
                return await read()
            except DatabaseUnavailable:
                await asyncio.sleep(0.2)
        return await read()

    async def look(self, known: Known) -> int:
        """Hold what SQL has of the session against what was known and told; how many turns are new."""
        repository = self.kv.sessions.repository
        turns = [t for t in await self._patiently(lambda: repository.turns(known.id)) if t.seq >= known.turns]
        ledger = list(await self._patiently(lambda: repository.ledger(known.id)))
        if ledger[: len(known.ledger)] != known.ledger:
            raise Violation(f"the ledger of {known.id} was changed in its first {len(known.ledger)} tokens")
        if len(ledger) != (turns[-1].span.stop if turns else len(known.ledger)):
            raise Violation(f"the ledger of {known.id} has {len(ledger)} tokens, its turns end at {turns[-1:]}")
        if missing := [seq for seq in known.told if seq >= known.turns + len(turns)]:
            raise Violation(f"turns {missing} of {known.id} were told and are not there")
        for turn in turns:
            said = tuple(ledger[turn.span.stop - turn.completion_tokens : turn.span.stop])
            if (told := known.told.pop(turn.seq, said)) != said:
                raise Violation(f"turn {turn.seq} of {known.id} has {said}, told was {told}")
            self.totals.update(
                turns=1, prompt=turn.prompt_tokens, said=turn.completion_tokens, cached=turn.cached_tokens
            )
        if known.plan.compared:
            await self._compare(known, turns, ledger)
        known.ledger, known.turns, known.behind = ledger, known.turns + len(turns), False
        return len(turns)

    async def _compare(self, known: Known, turns: list[TurnRecord], ledger: list[int]) -> None:
        if known.whole:
            spans = [Span(t.span.stop - t.completion_tokens, t.span.stop) for t in turns]
            await self._oracle.check_full(ledger, spans)
        elif self._approximate(known, turns) and known.twin is not None:
            # The tokens that were held were computed again without what they had seen: it said so, and is another now.
            self.counts["recomputed approximately"] += 1
            await known.twin.delete()
            known.twin = None
        if known.twin is None:
            return
        items = await self._patiently(lambda: self.kv.sessions.repository.items(known.id)) if turns else []
        for turn in turns:
            mine = [item for item in items if item.turn == turn.seq]
            if not await self._oracle.replay(known.twin, turn, mine, ledger[turn.span.start : turn.span.stop]):
                await known.twin.delete()
                known.twin = None
                return

    def _approximate(self, known: Known, turns: list[TurnRecord]) -> bool:
        """Whether a turn, or one that was rolled back, found its stored KV lost."""
        if any((turn.restore or {}).get("recompute") == "retained" for turn in turns):
            return True
        core = next((core for core in self.kv.sessions.cores() if core.id == known.id), None)
        before, known.fallbacks = known.fallbacks, core.counts.fallbacks.total() if core is not None else 0
        return not turns and known.fallbacks > before
