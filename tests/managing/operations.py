"""What can be done to sessions, as values: drawn by hypothesis, carried out one by one or at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from agentkv.errors import AgentKVError, Closed
from agentkv.schemas.replies import Done
from managing.reference import Asked, Given, Known
from managing.trouble import POINTS

if TYPE_CHECKING:
    from managing.world import World

__all__ = ["POLICIES", "TEXTS", "Moment", "Op", "Resume", "SetPolicy", "Suspend", "carried_out", "moments", "ops"]

POLICIES = ("full", "sink:96", "sink:200,slack=32", "sliding:128", "turns:160")
TEXTS = ("How is the weather in Paris?", "tool ", "user ")


@dataclass(frozen=True)
class Op:
    """On session ``pick`` of those that there are, counted around."""

    pick: int

    def chosen(self, world: World) -> Known:
        return world.sessions[self.pick % len(world.sessions)]

    async def run(self, world: World, asked: Asked) -> None:
        """Do it, and note what it returned."""
        raise NotImplementedError


@dataclass(frozen=True)
class Say(Op):
    """Input of about ``size`` tokens, and a reply of ``tokens``: whole, or as a stream.

    ``leaves``: the listener goes away after so many steps of the model (events of a stream); 0: at once.
    """

    size: int
    tokens: int
    streams: bool = False
    leaves: int | None = None

    async def run(self, world: World, asked: Asked) -> None:
        session, wait = asked.known.handle, world.waits
        asked.given = given = world.input("send", asked.known, self.size)
        if given.ids is not None:
            turn = session.generate_tokens(given.ids, max_tokens=self.tokens, wait=wait)
        elif self.streams:
            asked.reply = await self._streamed(session.stream(given.text or "", max_tokens=self.tokens, wait=wait))
            asked.fate = "told" if asked.reply is not None else "unknown"
            return
        else:
            turn = session.send(given.text or "", max_tokens=self.tokens, wait=wait)
        if self.leaves is None:
            asked.reply = await turn
            return
        task = asyncio.create_task(turn)
        await world.steps(self.leaves, task)
        task.cancel()
        asked.fate = "unknown"
        with contextlib.suppress(asyncio.CancelledError):
            asked.reply = await task
            asked.fate = "told"

    async def _streamed(self, stream: Any) -> Any:
        left = 10**6 if self.leaves is None else self.leaves
        async with contextlib.aclosing(stream) as events:
            async for event in events:
                if isinstance(event, Done):
                    return event.reply
                left -= 1
                if left < 0:
                    return None
        raise AssertionError("a stream ended without its reply")


@dataclass(frozen=True)
class Append(Op):
    """Input without a reply."""

    size: int

    async def run(self, world: World, asked: Asked) -> None:
        asked.given = given = world.input("append", asked.known, self.size)
        session, wait = asked.known.handle, world.waits
        if given.ids is not None:
            asked.items = await session.append_tokens(given.ids, wait=wait)
        else:
            asked.items = await session.append(given.text or "", wait=wait)


@dataclass(frozen=True)
class GoOn(Op):
    """A reply without input."""

    tokens: int

    async def run(self, world: World, asked: Asked) -> None:
        known = asked.known
        session, wait = known.handle, world.waits
        if not known.plan.chat and known.ledger:
            asked.given = Given("send", ids=())
            asked.reply = await session.generate_tokens(max_tokens=self.tokens, wait=wait)
        elif known.plan.chat and (known.cut or (known.items and known.items[-1].role == "user")):
            asked.given = Given("continue")
            asked.reply = await session.continue_(max_tokens=self.tokens, wait=wait)


@dataclass(frozen=True)
class Suspend(Op):
    tier: str

    async def run(self, world: World, asked: Asked) -> None:
        asked.value = await asked.known.handle.suspend(self.tier)


@dataclass(frozen=True)
class Resume(Op):
    async def run(self, world: World, asked: Asked) -> None:
        asked.value = await asked.known.handle.resume()


@dataclass(frozen=True)
class SetPolicy(Op):
    policy: str

    async def run(self, world: World, asked: Asked) -> None:
        asked.policy = self.policy
        await asked.known.handle.set_policy(self.policy)


@dataclass(frozen=True)
class Hint(Op):
    """What its user knows of its future."""

    what: str

    async def run(self, world: World, asked: Asked) -> None:
        session = asked.known.handle
        match self.what:
            case "expect":
                asked.value = await session.expect(0.5)
            case "prefetch":
                asked.value = await session.prefetch()
            case "pin":
                asked.value = await session.pin(60)
            case "unpin":
                asked.value = await session.pin(0)
            case "tool_wait":
                async with session.tool_wait(1.2) as asked.value:
                    await asyncio.sleep(0)
            case _:
                asked.value = await session.close()


@dataclass(frozen=True)
class Delete(Op):
    async def run(self, world: World, asked: Asked) -> None:
        asked.value = await asked.known.handle.delete()


@dataclass(frozen=True)
class Flush(Op):
    async def run(self, world: World, asked: Asked) -> None:
        await world.kv.flush()


@dataclass(frozen=True)
class Moment:
    """When ``op`` comes to ``point`` for the ``passing``-th time."""

    op: Op
    point: str
    passing: int


async def carried_out(world: World, op: Op) -> Asked:
    """Whatever becomes of it."""
    asked = Asked(op.chosen(world), type(op).__name__)
    try:
        await op.run(world, asked)
    except asyncio.CancelledError as error:
        asked.error, asked.fate = error, "unknown"
    except Closed as error:
        asked.error = error
        asked.fate = "surely" if "after it was committed" in str(error) else "refused"
    except AgentKVError as error:
        asked.error, asked.fate = error, "refused"
    return asked


_make: Callable[..., st.SearchStrategy[Op]] = st.builds
_picks = st.integers(0, 3)
_sizes = st.sampled_from([1, 5, 20, 60, 150, 270])
_tokens = st.sampled_from([1, 2, 4, 8, 16])
_says = _make(Say, _picks, _sizes, _tokens, st.booleans())
_leaves = _make(Say, _picks, _sizes, st.sampled_from([8, 48]), st.booleans(), st.sampled_from([0, 1, 2, 4, 9]))
_appends = _make(Append, _picks, _sizes)
_suspends = _make(Suspend, _picks, st.sampled_from(["host", "disk"]))
_resumes = _make(Resume, _picks)
_deletes = _make(Delete, _picks)


def ops() -> st.SearchStrategy[Op]:
    """Any of them; turns as often as all the others."""
    return st.one_of(
        _says,
        _says,
        _says,
        _leaves,
        _appends,
        _make(GoOn, _picks, _tokens),
        _suspends,
        _resumes,
        _make(SetPolicy, _picks, st.sampled_from(POLICIES)),
        _make(Hint, _picks, st.sampled_from(["expect", "prefetch", "pin", "unpin", "tool_wait", "close"])),
        _deletes,
        _make(Flush, _picks),
    )


def moments() -> st.SearchStrategy[Moment]:
    """An operation, and a place that it comes to, at its first passing or a later one."""
    turns, stores, suspends, restores, collections = (
        st.sampled_from([point for point in POINTS if point.split(".")[0] in kinds])
        for kinds in (("turn",), ("store", "blob"), ("suspend",), ("restore",), ("gc",))
    )
    says = st.one_of(_says, _appends)
    return st.one_of(
        st.builds(Moment, says, turns, st.just(1)),
        st.builds(Moment, says, stores, st.sampled_from([1, 1, 2])),
        st.builds(Moment, _suspends, suspends, st.just(1)),
        st.builds(Moment, st.one_of(_says, _resumes), restores, st.just(1)),
        st.builds(Moment, _deletes, collections, st.sampled_from([1, 2])),
    )
