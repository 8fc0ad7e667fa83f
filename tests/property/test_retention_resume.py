"""Under a policy that evicts, a session that is suspended, closed and reopened at random moments goes on token for
token as its twin that never was: all that is held is reused, and only what is new is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from families import VOCAB
from homes import model_folder, opened, prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from retaining import assert_equal_replies, check_held, check_stored, positions

from agentkv import AgentKV
from agentkv.policies.retention import RETENTION, RetentionPolicy, SessionView, parse_policy, policy_text
from agentkv.sessions.session import Session
from agentkv.types import Span

POLICIES = (
    "sink:48",
    "sink:64:4,slack=3",
    "sliding:48",
    "turns:64",
    "turns:96,keep_last_turns=1,drop_tool_results_first=false",
    "sink:128,slack=1",
)


@pytest.fixture(scope="module", autouse=True)
def _first_words() -> Iterator[None]:
    RETENTION._known["first"] = FirstWords
    yield
    del RETENTION._known["first"]


@dataclass(frozen=True, slots=True)
class FirstWords(RetentionPolicy):
    """A third party's: the first tokens stay, the last ones go. A turn may leave nothing of itself to be stored."""

    name: ClassVar[str] = "first"

    window: int

    def keep(self, view: SessionView) -> tuple[Span, ...]:
        most = Span(0, self.window // 2)
        return tuple(span for held in view.retained for span in (held.intersect(most),) if len(span))


@dataclass
class Bench:
    """A model, a home that opens and closes, and one that stays open for the twins."""

    model: Path
    root: Path
    layout: str
    runner: asyncio.Runner
    kv: AgentKV | None = None
    still: AgentKV | None = None

    async def open(self) -> AgentKV:
        if self.kv is None:
            self.kv = await opened(self.root / "home", self.model, layout=self.layout)
        return self.kv

    async def open_twins(self) -> AgentKV:
        if self.still is None:
            self.still = await opened(self.root / "twins", self.model, layout=self.layout)
        return self.still

    async def reopen(self) -> None:
        if self.kv is not None:
            await self.kv.close()
        self.kv = None

    async def close(self) -> None:
        await self.reopen()
        if self.still is not None:
            await self.still.close()


@pytest.fixture(
    scope="module",
    params=[
        ("llama", "dynamic"),
        ("gemma3", "static"),
        pytest.param(("gemma3", "dynamic"), marks=pytest.mark.full),
        pytest.param(("llama", "static"), marks=pytest.mark.full),
        pytest.param(("gpt_neox", "dynamic"), marks=pytest.mark.full),
        ("gemma3", "paged"),
        pytest.param(("llama", "offloaded:paged"), marks=pytest.mark.full),
        pytest.param(("gemma3", "offloaded"), marks=pytest.mark.full),
        pytest.param(("llama", "paged"), marks=pytest.mark.full),
        pytest.param(("mistral", "dynamic"), marks=pytest.mark.full),
        pytest.param(("gpt_oss", "static"), marks=pytest.mark.full),
        pytest.param(("cohere2", "dynamic"), marks=pytest.mark.full),
    ],
    ids="-".join,
)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    family, layout = request.param
    folder = tmp_path_factory.mktemp(family)
    with asyncio.Runner() as runner:
        found = Bench(model_folder(folder, family), folder, layout, runner)
        yield found
        runner.run(found.close())


@dataclass
class Played:
    """A session and its twin, which has the same turns and is left alone between them."""

    bench: Bench
    ids: list[str] = field(default_factory=list)
    where: str = "new"
    was: str = "new"
    changed: bool = False

    async def damage(self) -> None:
        pass

    async def play(self, policy: str, codec: str, operations: list[tuple[Any, ...]]) -> None:
        for kv in (await self.bench.open(), await self.bench.open_twins()):
            self.ids.append((await kv.sessions.create(policy=policy, idle_codec=codec)).id)
        for operation, *arguments in operations:
            await getattr(self, operation)(*arguments)
        await self.check()
        for session in await self.pair():
            await session.delete()

    async def pair(self) -> tuple[Session, Session]:
        kv, still = await self.bench.open(), await self.bench.open_twins()
        return await kv.sessions.get(self.ids[0]), await still.sessions.get(self.ids[1])

    async def append(self, ids: list[int]) -> None:
        session, twin = await self.pair()
        await self._counted(session, session.append_tokens(ids))
        await twin.append_tokens(ids)

    async def generate(self, ids: list[int], tokens: int) -> None:
        session, twin = await self.pair()
        before = await session.state()
        if not ids and not before.ledger_tokens:
            return
        mine = await self._counted(session, session.generate_tokens(ids, max_tokens=tokens, logprobs=0))
        other = await twin.generate_tokens(ids, max_tokens=tokens, logprobs=0)
        assert_equal_replies(mine, other)
        assert mine.usage == other.usage
        assert mine.restore.tokens == mine.usage.cached_tokens == before.kv_tokens
        assert (mine.restore.reason, mine.restore.recompute, mine.restore.recomputed_tokens) == (None, None, 0)
        if before.kv_tokens:
            assert mine.restore.source == self.was

    async def _counted(self, session: Session, turn: Any) -> Any:
        """The turn's result; the model has computed what the ledger has grown by, and nothing else."""
        engine, seen = (await self.bench.open()).model.engine, session._core.record.kv_length
        before = engine.computed_tokens
        result = await turn
        assert engine.computed_tokens - before == session._core.record.kv_length - seen
        self.was, self.where = self.where, "device"
        return result

    async def suspend(self, tier: str) -> None:
        session, _ = await self.pair()
        held = (await session.state()).kv_tokens
        report = await session.suspend(tier)
        assert report.tokens == held
        if held and not (self.where == "disk" and tier == "host"):
            assert report.tier == tier
            self.where = tier

    async def resume(self) -> None:
        session, _ = await self.pair()
        held = (await session.state()).kv_tokens
        report = await session.resume()
        assert (report.tokens, report.reason, report.recomputed_tokens) == (held, None, 0)
        if held:
            assert report.source == self.where
            self.where = "device"

    async def reopen(self) -> None:
        await self.bench.reopen()
        if (await (await self.pair())[0].state()).kv_tokens:
            self.where = "disk"

    async def set_policy(self, policy: str) -> None:
        if (await (await self.pair())[0].state()).policy == policy_text(parse_policy(policy)):
            return
        for session in await self.pair():
            await session.set_policy(policy)
        if self.bench.layout == "static" and self.where == "device":
            self.where = "host"  # until it has buffers of the right size
        self.changed = True

    async def check(self) -> None:
        session, twin = await self.pair()
        kv = await self.bench.open()
        mine, other = await session.state(), await twin.state()
        assert await session.token_ids() == await twin.token_ids()
        assert (mine.kept, mine.evicted, mine.next_position) == (other.kept, other.evicted, other.next_position)
        assert mine.bytes_by_layers == other.bytes_by_layers
        await check_held(kv, session, positions(session._core.record.held.kept) if self.changed else None)
        await check_stored(kv, session)


token = st.integers(0, VOCAB - 1)
fed = st.one_of(
    st.lists(token, min_size=1, max_size=12),
    st.builds(prompt, st.integers(1, 170), st.integers(0, 99)),
)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), fed),
        st.tuples(st.just("generate"), fed, st.integers(1, 20)),
        st.tuples(st.just("suspend"), st.sampled_from(["host", "disk"])),
        st.tuples(st.just("resume")),
        st.tuples(st.just("reopen")),
        st.tuples(st.just("set_policy"), st.sampled_from([*POLICIES, "full"])),
    ),
    min_size=3,
    max_size=10,
)

_SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
_LAST = [("generate", prompt(120, 1), 5), ("check",), ("reopen",), ("generate", [7, 8], 20)]
"""Whatever was drawn, the session has evicted, and wakes to speak."""


def plays(test: Any) -> Any:
    return given(policy=st.sampled_from(POLICIES), codec=st.sampled_from(["exact", "raw"]), played=operations)(test)


@pytest.mark.short(1)
@settings(max_examples=5, suppress_health_check=_SHARED)
@plays
def test_wherever_it_is_cut_a_session_goes_on_as_its_twin(
    bench: Bench, policy: str, codec: str, played: list[tuple[Any, ...]]
) -> None:
    bench.runner.run(Played(bench).play(policy, codec, [*played, *_LAST]))


@pytest.mark.full
@settings(max_examples=15, suppress_health_check=_SHARED)
@plays
def test_wherever_it_is_cut_a_session_goes_on_as_its_twin_many_times(
    bench: Bench, policy: str, codec: str, played: list[tuple[Any, ...]]
) -> None:
    bench.runner.run(Played(bench).play(policy, codec, [*played, *_LAST]))


LONG: list[tuple[Any, ...]] = [
    ("append", prompt(40)),
    ("generate", prompt(16), 20),
    ("suspend", "disk"),
    ("generate", prompt(150), 10),
    ("reopen",),
    ("check",),
    ("append", prompt(12)),
    ("suspend", "host"),
    ("generate", prompt(50), 20),
    ("reopen",),
    ("check",),
    ("resume",),
    ("damage",),
    ("generate", prompt(5), 10),
]
"""Prompts and generations longer than the window, and evictions between all kinds of rests."""


@pytest.mark.short(2)
@pytest.mark.parametrize(
    "policy",
    [
        "first:64",
        POLICIES[1],
        *(pytest.param(text, marks=pytest.mark.full) for text in (*POLICIES[2:4], *POLICIES[::4])),
    ],
)
@pytest.mark.parametrize("codec", ["exact", pytest.param("raw", marks=pytest.mark.full)])
def test_long_turns_between_rests(bench: Bench, policy: str, codec: str) -> None:
    bench.runner.run(Played(bench).play(policy, codec, LONG))


def test_control_a_damaged_restore_is_seen(bench: Bench) -> None:
    if bench.layout not in ("dynamic", "static"):
        pytest.skip("what this layout gives to read is a copy: there is nothing to damage")
    with pytest.raises(AssertionError):
        bench.runner.run(Damaged(bench).play("sink:64", "exact", LONG))


class Damaged(Played):
    async def damage(self) -> None:
        """The keys of one token change places with another's: what a wrong rotation or a wrong slot would do."""
        kv = (await self.pair())[0]._core.kv
        assert kv is not None
        for group in range(len(kv.geometry.groups)):
            for run in kv.visible(group)[-1:]:
                for values in kv.read(group, run).values:
                    values.copy_(values.flip(1))
