"""The manager as a state machine: whatever is done to sessions, in whatever order, whatever fails meanwhile, every
committed turn is in the ledger, nothing else is, every token is the right one, and every byte is somebody's."""

from __future__ import annotations

import asyncio
import io
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar

import pytest
from homes import chat_folder
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, get_state_machine_test, initialize, invariant, rule
from managing.branches import fork, rewind
from managing.operations import POLICIES, Moment, Op, moments, ops
from managing.reference import Plan
from managing.world import Stage, World, stage
from soaking.oracle import Violation

from agentkv.sessions.db import repository
from agentkv.sessions.db.transactions import Patience

MOST_SESSIONS = 4
PATIENCE = 120
"""Seconds."""
SYSTEM = "You are a helpful assistant. How is the weather in Paris? " * 5
"""Long enough that sessions share the KV of it."""

plans = st.one_of(
    st.builds(
        Plan,
        st.booleans(),
        st.just(None),
        st.sampled_from(["full", *POLICIES]),
        st.sampled_from(["exact", "exact", "raw", "int8"]),
    ),
    st.builds(
        Plan,
        st.just(True),
        st.sampled_from(["Be brief.", SYSTEM, SYSTEM]),
        st.sampled_from(["full", "full", "sink:200,slack=32"]),
        st.sampled_from(["exact", "int8"]),
    ),
)
lives = st.fixed_dictionaries(
    {"layout": st.sampled_from(["dynamic", "dynamic", "static", "paged"])},
    optional={
        "device_budget": st.sampled_from([300_000, 600_000]),
        "host_budget": st.sampled_from([0, 40_000]),
        "residency": st.sampled_from(["lru", "lfu"]),
    },
)
ways = st.sampled_from(["flip", "flip", "truncate", "remove"])


async def _bounded(work: Coroutine[Any, Any, None]) -> None:
    """Whatever does not answer hangs: ``Violation`` says where."""
    task = asyncio.create_task(work)
    done, _ = await asyncio.wait([task], timeout=PATIENCE)
    if not done:
        stacks = io.StringIO()
        for each in asyncio.all_tasks():
            each.print_stack(file=stacks)
        raise Violation(f"no answer for {PATIENCE} s:\n{stacks.getvalue()}")
    task.result()


def where(holds: Callable[[Manager], Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A rule that does nothing unless it ``holds``. No precondition: what there is depends on what was faster, and what
    is drawn may not."""

    def decorated(act: Callable[..., None]) -> Callable[..., None]:
        @wraps(act)
        def acted(self: Manager, **drawn: Any) -> None:
            if holds(self):
                act(self, **drawn)

        return acted

    return decorated


class Manager(RuleBasedStateMachine):
    """``stages``: one for each family of models. Runs an event loop of its own between steps."""

    stages: ClassVar[dict[str, Stage]]
    runner: ClassVar[asyncio.Runner]
    root: ClassVar[Path]

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.failed = False

    def run(self, work: Any) -> None:
        try:
            self.runner.run(_bounded(work))
        except BaseException:
            self.failed = True
            raise

    @property
    def there(self) -> World:
        assert self.world is not None
        return self.world

    @initialize(family=st.sampled_from(["llama", "gemma3"]), life=lives, plan=plans)
    def open(self, family: str, life: dict[str, Any], plan: Plan) -> None:
        self.world = World(self.stages[family], Path(tempfile.mkdtemp(dir=self.root)))
        self.run(self.world.open(**life))
        self.run(self.world.create(plan))

    def teardown(self) -> None:
        if self.world is None:
            return
        try:
            if not self.failed:
                self.run(self.world.end())
        finally:
            self.world.trouble.accept(None)
            self.run(self.world.kv.close())
            shutil.rmtree(self.world.root)

    @invariant()
    def everything_holds(self) -> None:
        if self.world is not None:
            self.run(self.world.check())

    # -- operations ---------------------------------------------------------------------------------------------------

    @rule(plan=plans)
    @where(lambda self: len(self.there.sessions) < MOST_SESSIONS)
    def create(self, plan: Plan) -> None:
        self.run(self.there.create(plan))

    @rule(ops=st.lists(ops(), min_size=1, max_size=4))
    @where(lambda self: self.there.sessions)
    def act(self, ops: list[Op]) -> None:
        for op in ops:
            if self.there.sessions:
                self.run(self.there.do([op]))

    @rule(op=ops())
    @where(lambda self: self.there.sessions)
    def act_once(self, op: Op) -> None:
        self.run(self.there.do([op]))

    @rule(ops=st.lists(ops(), min_size=2, max_size=3), wait=st.booleans())
    @where(lambda self: self.there.sessions)
    def act_at_once(self, ops: list[Op], wait: bool) -> None:
        self.run(self.there.do(ops, at_once=True, wait=wait))

    @rule(ops=st.lists(ops(), min_size=2, max_size=3))
    @where(lambda self: self.there.sessions)
    def act_on_a_slow_disk(self, ops: list[Op]) -> None:
        self.run(self.there.do(ops, at_once=True, slow=True))

    @rule(pick=st.integers(0, 3), turns=st.integers(0, 3))
    @where(lambda self: 0 < len(self.there.sessions) < MOST_SESSIONS)
    def fork(self, pick: int, turns: int) -> None:
        self.run(fork(self.there, pick, turns))

    @rule(pick=st.integers(0, 3), turns=st.integers(0, 3), op=st.none() | ops())
    @where(lambda self: self.there.sessions)
    def rewind(self, pick: int, turns: int, op: Op | None) -> None:
        self.run(rewind(self.there, pick, turns))
        if op is not None:
            self.run(self.there.do([op]))

    @rule(moment=moments())
    @where(lambda self: self.there.sessions)
    def go_away_in_the_middle(self, moment: Moment) -> None:
        self.run(self.there.do_cancelled(moment))

    @rule(life=lives, op=st.none() | ops(), steps=st.integers(0, 8))
    @where(lambda self: self.there.sessions)
    def restart(self, life: dict[str, Any], op: Op | None, steps: int) -> None:
        self.run(self.there.restart(life, op, steps))

    # -- faults -------------------------------------------------------------------------------------------------------

    @rule(life=lives, moment=st.one_of(moments(), moments(), st.none()))
    @where(lambda self: self.there.sessions)
    def die(self, life: dict[str, Any], moment: Moment | None) -> None:
        self.run(self.there.crash(life, moment))

    @rule(op=ops())
    @where(lambda self: self.there.sessions)
    def act_while_the_database_is_locked(self, op: Op) -> None:
        self.run(self.there.do_locked(op))

    @rule(way=ways, which=st.integers(0, 7), where=st.integers(0, 2**20))
    @where(lambda self: self.there.trouble.files() and not self.there.trouble.read_only)
    def spoil_a_file(self, way: str, which: int, where: int) -> None:
        names = sorted(self.there.trouble.files())
        self.there.trouble.spoil(names[which % len(names)], way, where)

    @rule(pick=st.integers(0, 3), way=ways, which=st.integers(0, 3), where=st.integers(0, 2**20))
    @where(lambda self: self.there.sessions)
    def wake_to_a_bad_file(self, pick: int, way: str, which: int, where: int) -> None:
        self.run(self.there.wake_to_a_bad_file(pick, way, which, where))

    @rule(how=st.sampled_from(["budget", "read only"]), room=st.sampled_from([0, 3000, 12000]))
    @where(lambda self: self.there.trouble.files())
    def change_the_disk(self, how: str, room: int) -> None:
        """It is full or read-only from now on; or it is well again."""
        world = self.there
        if world.trouble.active:
            world.trouble.accept(world.kv)
        elif how == "budget" or not world.trouble.make_read_only():
            world.trouble.refuse(world.kv, room)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[Manager]]:
    """The machine with a model of each family, and their oracles."""
    root = tmp_path_factory.mktemp("machine")

    async def start(stack: AsyncExitStack) -> dict[str, Stage]:
        return {
            name: await stack.enter_async_context(stage(root / name, chat_folder(root, name)))
            for name in ("llama", "gemma3")
        }

    patience, repository.Patience = repository.Patience, lambda: Patience(2, 0.01, 0.1)  # type: ignore[assignment, misc]
    logging.disable(logging.ERROR)
    try:
        with asyncio.Runner() as runner:
            stack = AsyncExitStack()
            Manager.stages, Manager.runner, Manager.root = runner.run(start(stack)), runner, root
            yield Manager
            runner.run(stack.aclose())
    finally:
        logging.disable(logging.NOTSET)
        repository.Patience = patience  # type: ignore[misc]


def played(machine: type[Manager], number: int, examples: int, steps: int, *phases: Phase) -> Counter[str]:
    """What has happened in so many examples."""
    for one in machine.stages.values():
        one.done.clear()
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    configured = settings(
        max_examples=examples, stateful_step_count=steps, phases=phases, suppress_health_check=quiet, deadline=None
    )
    seed(number)(get_state_machine_test(machine, settings=configured))()
    return sum((one.done for one in machine.stages.values()), Counter[str]())


def test_whatever_is_done_and_whatever_fails_sessions_are_what_they_were_told_to_be(
    machine: type[Manager], seed: int
) -> None:
    done = played(machine, seed, 10, 26, Phase.generate)
    assert done["committed"] > 30, done
    print(done)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_same_for_minutes(machine: type[Manager], seed: int) -> None:
    done = played(machine, seed + 1, 100, 30, Phase.generate, Phase.shrink)
    assert done["committed"] > 300, done
