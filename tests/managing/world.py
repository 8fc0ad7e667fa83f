"""One home with its runtime, what is known of it and wrong with it: each operation, and all that must follow."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homes import opened, written
from soaking.checks import Watch, at_any_moment
from soaking.oracle import Oracle, Violation

from agentkv import AgentKV
from agentkv.errors import AgentKVError, SessionNotFound
from agentkv.sessions.core import SessionCore
from agentkv.types import Placement
from managing.checks import check_bytes, check_counts, check_index, check_sessions
from managing.foresight import Foreseen, foreseen
from managing.judging import Circumstances
from managing.operations import TEXTS, Moment, Op, Resume, SetPolicy, Suspend, carried_out
from managing.reference import Asked, Fate, Given, Known, Plan, Tongue
from managing.rows import Rows, SessionRow, rows_of
from managing.trouble import Trouble, armed, copied, held_up, locked
from managing.witness import Witness

__all__ = ["Stage", "World"]


@dataclass(frozen=True)
class Stage:
    """What all worlds of one model share. ``done`` counts what happened in them."""

    model: Path
    oracle: Oracle
    tongue: Tongue
    done: Counter[str]


@dataclass(frozen=True)
class Before:
    """A session before an operation: what its KV state held, how often its stored KV was found lost, or is now."""

    held: Placement
    fallbacks: int
    short: bool

    @classmethod
    def of(cls, row: SessionRow, core: SessionCore | None) -> Before:
        if core is None:
            return cls(row.held, 0, False)
        short = core.kv is not None and core.kv.length < row.kv_length
        return cls(row.held, core.counts.fallbacks.total(), short)

    def may_be_another(self, core: SessionCore | None) -> bool:
        """Whether a turn since may have computed the KV state anew."""
        return self.short or (core is not None and core.counts.fallbacks.total() > self.fallbacks)


class World:
    """Every method ends at rest: nothing is under way but what hints have put off."""

    def __init__(self, stage: Stage, root: Path) -> None:
        self.stage = stage
        self.root = root
        self.sessions: list[Known] = []
        self.waits = True
        self.trouble = Trouble(root / "home-0")
        self.kv: AgentKV
        self._homes = 0
        self._witness = Witness(stage.oracle)
        self._watch: Watch
        self._totals: Counter[str] = Counter()
        self._draw = random.Random(0)
        self._small = False

    # -- lives of the runtime -----------------------------------------------------------------------------------------

    @property
    def home(self) -> Path:
        return self.trouble.home

    async def open(self, **settings: Any) -> None:
        """A runtime on the home; what the last one left is as it was told."""
        self._small = "device_budget" in settings
        self.trouble.altered, self.trouble.orphans = 0, set()
        self.kv = await opened(self.home, self.stage.model, admission_seconds=0.3, busy_wait_seconds=60, **settings)
        self._watch = Watch(self.kv)
        await asyncio.sleep(0)
        self._totals = Counter()
        with rows_of(self.home) as rows:
            there = rows.sessions().keys()
        for known in self.sessions:
            if known.id in there:  # else it was deleted as the last runtime ended, or must be found missing
                known.handle = await self.kv.sessions.get(known.id)

    async def close(self) -> None:
        """As a program does that ends."""
        await self.kv.close()
        await self._watch.ended()

    async def restart(self, settings: dict[str, Any], op: Op | None, steps: int) -> None:
        """Close it, perhaps in the middle of an operation, and open it again."""
        self.stage.done["restart"] += 1
        task = None if op is None else asyncio.create_task(carried_out(self, op))
        if task is not None:
            await self.steps(steps, task)
        there = self._before()
        live = set() if self.trouble.active else {core.id for core in self.kv.sessions.cores() if _is_whole(core)}
        await self.close()
        asked = [] if task is None else [await task]
        self._judge(asked, closing=True)
        self.trouble.accept(None)
        await self.open(**settings)
        await self._take_in(asked, there, count=False)
        self._check_stored(live)

    async def crash(self, settings: dict[str, Any], moment: Moment | None) -> None:
        """The process dies: in the middle of an operation, or after it where it never comes there."""
        self._homes += 1
        to, there = self.root / f"home-{self._homes}", self._before()
        asked: list[Asked] = []

        def die() -> None:
            if not to.exists():
                copied(self.kv, self.home, to)

        if moment is not None:
            with armed(moment.point, moment.passing, die):
                asked.append(await carried_out(self, moment.op))
                await self.at_rest()
            self._judge(asked)
            if to.exists():
                self.stage.done["died in the middle"] += 1
                _untell(asked[0], moment.point)
        die()
        trouble = self.trouble.moved(to)
        self.trouble.accept(self.kv)
        await self.close()
        shutil.rmtree(self.home)
        self.trouble = trouble
        await self.open(**settings)
        await self._take_in(asked, there, count=False)
        self._check_stored(set())

    async def end(self) -> None:
        """All sessions are deleted, and nothing is left of them."""
        self.trouble.accept(self.kv)
        for known in list(self.sessions):
            await self._witness.forget(known)
            await known.handle.delete()
        self._totals["deleted"] += len(self.sessions)
        self.sessions, self.trouble.garbage = [], True
        await self.check()
        tiers = self.kv.sessions.tiers
        left = self.trouble.files().keys() - self.trouble.orphans
        if left or tiers.device_bytes or tiers.host.used_bytes or self.kv.sessions.cores():
            raise Violation(f"all sessions are deleted; left are {left}, {self.kv.stats()}")
        await self.close()

    # -- operations ---------------------------------------------------------------------------------------------------

    async def create(self, plan: Plan) -> None:
        """A session more."""
        handle = await self.kv.sessions.create(plan.system, policy=plan.policy, idle_codec=plan.codec)
        head = self.stage.tongue.head(plan.system)
        known = Known(handle.id, plan, handle, plan.policy, len(head))
        with rows_of(self.home) as rows:
            known.ledger, known.turns, known.items = (
                rows.ledger(known.id),
                rows.turns(known.id),
                rows.items(known.id),
            )
            known.policy = rows.sessions()[known.id].policy
        if known.ledger != head or len(known.turns) != bool(head):
            raise Violation(f"a session begins with {known.ledger} in {known.turns}, its head is {head}")
        self.sessions.append(known)
        self._totals["created"] += 1

    async def do(self, ops: Sequence[Op], *, at_once: bool = False, slow: bool = False, wait: bool = True) -> None:
        """One after the other, or at once; ``slow``: the disk takes no file until all of them are under way."""
        ops = [
            op for i, op in enumerate(ops) if not (isinstance(op, SetPolicy) and any(_is_policy(o) for o in ops[:i]))
        ]
        there, before = self._before(), self._foreseen(ops, alone=not at_once)
        self.waits = wait
        if slow:
            with held_up(self.kv) as go_on:
                tasks = [asyncio.create_task(carried_out(self, op)) for op in ops]
                await asyncio.wait(tasks, timeout=0.05)
                go_on()
                asked = list(await asyncio.gather(*tasks))
        elif at_once:
            asked = list(await asyncio.gather(*(carried_out(self, op) for op in ops)))
        else:
            asked = [await carried_out(self, op) for op in ops]
        self.waits = True
        await self.at_rest()
        self._judge(asked, together=at_once)
        for one, expected in zip(asked, before, strict=True):
            if expected is not None:
                expected.check(one)
        await self._take_in(asked, there)
        if not self.trouble.active:
            self._check_written([one.known for one in asked if one.is_turn and one.fate == "told"])

    async def wake_to_a_bad_file(self, pick: int, way: str, which: int, where: int) -> None:
        """A session goes to disk, and one of its files is spoilt before it comes back."""
        known = self.sessions[pick % len(self.sessions)]
        await self.do([Suspend(pick, "disk")])
        with rows_of(self.home) as rows:
            names = [segment.chunk_id for segment in rows.manifest(known.id).segments]
        there = [name for name in names if name not in self.trouble.damaged]
        if there and not self.trouble.read_only:
            self.trouble.spoil(there[which % len(there)], way, where)
            self.stage.done[way] += 1
        await self.do([Resume(pick)])

    async def do_locked(self, op: Op) -> None:
        """While another process writes to the database and does not end."""
        there = self._before()
        self.trouble.garbage = True
        with locked(self.home):
            asked = await carried_out(self, op)
            await self.at_rest()
        self._judge([asked], locked=True)
        with rows_of(self.home) as rows:
            self.trouble.orphans |= self.trouble.files().keys() - rows.chunks().keys()
        await self._take_in([asked], there)

    async def do_cancelled(self, moment: Moment) -> None:
        """Its caller goes away in the middle."""
        there = self._before()
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(carried_out(self, moment.op))

        def go_away() -> None:
            loop.call_soon_threadsafe(task.cancel)

        with armed(moment.point, moment.passing, go_away):
            asked = await task
            await self.at_rest()
        self._judge([asked])
        await self._take_in([asked], there)

    def input(self, kind: Any, known: Known, size: int) -> Given:
        """About so many tokens of it, different each time."""
        if known.plan.chat:
            return Given(kind, TEXTS[size % 3] * max(1, size // 12), generates=kind == "send")
        ids = tuple(self._draw.randrange(1, 256) for _ in range(size))
        return Given(kind, ids=ids, generates=kind == "send")

    async def steps(self, count: int, task: asyncio.Task[Any]) -> None:
        """Until the model has made so many, or the task has ended."""
        engine = self.kv.model.engine
        until = engine.steps + count
        await asyncio.sleep(0)
        while count and engine.steps < until and not task.done():  # noqa: ASYNC110  it sends no event
            await asyncio.sleep(0.0005)

    # -- what follows -------------------------------------------------------------------------------------------------

    async def at_rest(self) -> None:
        """What runs behind its caller's back has ended."""
        while tasks := [task for task in self.kv.sessions._tasks if not task.done()]:
            await asyncio.wait(tasks)
        await written(self.kv)

    async def forget(self, known: Known) -> None:
        """What stood for it hears another script from now on."""
        await self._witness.forget(known)

    def count(self, what: str) -> None:
        """It was told once more."""
        self._totals[what] += 1

    def _before(self) -> dict[str, Before]:
        cores = self.kv.sessions._cores
        with rows_of(self.home) as rows:
            return {name: Before.of(row, cores.get(name)) for name, row in rows.sessions().items()}

    def _foreseen(self, ops: Sequence[Op], *, alone: bool) -> list[Foreseen | None]:
        if not alone or len(ops) != 1:
            return [None for _ in ops]
        with rows_of(self.home) as rows:
            return [foreseen(self.kv, op.chosen(self), rows, self.trouble) for op in ops]

    def _judge(self, asked: Sequence[Asked], **circumstances: bool) -> None:
        for one in asked:
            self.stage.done[type(one.error).__name__] += one.error is not None
        Circumstances(small=self._small, refusing=self.trouble.active, **circumstances).check(asked)

    async def _take_in(self, asked: Sequence[Asked], there: dict[str, Before], *, count: bool = True) -> None:
        """What has become of the sessions concerned, as SQL says."""
        before = list(self.sessions)
        with rows_of(self.home) as rows:
            for known in before:
                if mine := [one for one in asked if one.known is known]:
                    await self._take_in_one(known, mine, rows, there, count=count)
        for known in before:
            if known not in self.sessions:
                await self._check_gone(known)
                if any(one.is_turn and one.known is known for one in asked):
                    self._recount()

    async def _take_in_one(
        self, known: Known, asked: list[Asked], rows: Rows, there: dict[str, Before], *, count: bool
    ) -> None:
        row = rows.sessions().get(known.id)
        deletes = [one for one in asked if one.is_delete and one.fate != "refused"]
        if row is None:
            if not deletes:
                raise Violation(f"{known.id} is gone after {asked}")
            self.sessions.remove(known)
            await self._witness.forget(known)
            self._totals["deleted"] += count
            return
        if any(one.fate == "told" for one in deletes):
            raise Violation(f"{known.id} was deleted, and is there")
        turns = known.take_in(rows, row, asked, self.stage.tongue)
        if count:
            for turn in turns:
                self._totals.update(
                    turns=1, prompt=turn.prompt_tokens, said=turn.completion_tokens, cached=turn.cached_tokens
                )
        before, core = there[known.id], self.kv.sessions._cores.get(known.id)
        silent = [one for one in asked if one.is_turn and one.fate != "told"]
        if silent and not before.held.trivial and before.may_be_another(core):
            known.approximate, known.rebuilt = True, None  # computed anew by a turn that was then rolled back
        self.stage.done["rolled back"] += bool(silent) and not turns
        self.stage.done["committed"] += len(turns)
        await self._witness.hear(known, turns, before.held, row.held)
        if core is not None and core.kv is not None and core.idle:
            await self._witness.compare(known, core.kv)

    def _recount(self) -> None:
        """Of turns that were committed before their session was deleted nothing is left but the counts."""
        stats = self.kv.stats()
        self._totals.update({"turns": stats.turns - self._totals["turns"]})
        self._totals.update({"prompt": stats.prompt_tokens - self._totals["prompt"]})
        self._totals.update({"said": stats.completion_tokens - self._totals["said"]})
        self._totals.update({"cached": stats.cached_tokens - self._totals["cached"]})

    def _check_written(self, spoken: Sequence[Known]) -> None:
        """A turn that was told is on disk soon after, with all that was before it."""
        with rows_of(self.home) as rows:
            for known in spoken:
                row = rows.sessions().get(known.id)
                if row is not None and (length := rows.manifest(known.id).length) != row.kv_length:
                    raise Violation(f"of {known.id} KV of {length} tokens is stored, it has {row.kv_length}")

    def _check_stored(self, live: Set[str]) -> None:
        """After a start: stored KV reaches as far as it did; of what was ``live`` at an orderly end, to its end."""
        with rows_of(self.home) as rows:
            there = rows.sessions()
            for known in self.sessions:
                length, kv_length = rows.manifest(known.id).length, there[known.id].kv_length
                wanted = kv_length if known.id in live else min(known.stored, kv_length)
                if length < wanted:
                    raise Violation(f"of {known.id} KV of {length} tokens is stored, {wanted} were")

    async def check(self) -> None:
        """Every invariant. Files that were in the way of a fault are collected first."""
        await self.at_rest()
        kv, trouble = self.kv, self.trouble
        if trouble.garbage and not trouble.active:
            await kv.sessions.tiers.writer.collect_garbage()
            trouble.garbage = False
        trouble.garbage = trouble.garbage or trouble.read_only
        at_any_moment(kv, squeezed=False)
        with rows_of(self.home) as rows:
            trouble.notice_repairs(rows.uses().keys())
            check_sessions(kv, rows, self.sessions)
            check_index(rows, trouble)
            for known in self.sessions:
                known.stored = 0 if trouble.damaged else rows.manifest(known.id).length
        check_bytes(kv, trouble)
        await asyncio.sleep(0)  # the last events are read
        check_counts(kv, self._watch.counts, self._totals)

    async def _check_gone(self, known: Known) -> None:
        """It cannot be found, by its id, by its handle, nor in the list."""
        await _expect(SessionNotFound, self.kv.sessions.get(known.id))
        await _expect(SessionNotFound, self.kv.sessions.delete(known.id))
        if [record.id for record in await self.kv.sessions.list()] != [known.id for known in self.sessions[::-1]]:
            raise Violation("the list of sessions is not that of those that are there, the newest first")


def _untell(asked: Asked, point: str) -> None:
    """It was answered by a process that went on; the one that died had not, and may have come less far."""
    fates: dict[str, Fate] = {"turn.before_commit": "never", "turn.after_commit": "surely"}
    asked.fate = fates.get(point, "unknown") if asked.is_turn else "unknown"
    asked.reply, asked.items, asked.error = None, None, None


def _is_whole(core: SessionCore) -> bool:
    return core.kv is not None and core.kv.length == core.record.kv_length


def _is_policy(op: Op) -> bool:
    return isinstance(op, SetPolicy)


async def _expect(kind: type[AgentKVError], work: Awaitable[Any]) -> None:
    try:
        await work
    except kind:
        return
    raise Violation(f"{kind.__name__} was to be raised")


@asynccontextmanager
async def stage(root: Path, model: Path) -> AsyncIterator[Stage]:
    """An oracle for one model."""
    from transformers import AutoTokenizer

    async with Oracle(model, root / "oracle") as oracle:
        yield Stage(model, oracle, Tongue(AutoTokenizer.from_pretrained(model)), oracle.counts)
