"""Sessions under retention policies: what stays, what ``state()`` says of it, what a turn that fails leaves, changing
the policy of a living session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest
from driving import assert_same, prompt, snapshot
from homes import CONTEXT, chat_folder, check_session, model_folder, opened, said, turns, written
from retaining import assert_equal_replies, check_held, check_stored, held_after, positions, same_words

from agentkv import AgentKV
from agentkv.errors import (
    AgentKVError,
    ContextTooLong,
    DatabaseUnavailable,
    InvalidRequest,
    SessionBusy,
    StorageFull,
    Unsupported,
)
from agentkv.policies.retention import RETENTION, Full, RetentionPolicy, SessionView, SinkWindow, TurnWindow
from agentkv.sessions.session import Session
from agentkv.types import Span

POLICIES = ("sink:96", "sliding:64", "turns:128", "sink:64:4", "turns:112,keep_last_turns=1,slack=5")
FAMILIES = ("llama", "gemma3", "gpt_neox")
LAYOUTS = ("dynamic", "static")
OTHER_LAYOUTS = ["paged", "offloaded", "offloaded:paged"]
EVERY_LAYOUT = [*LAYOUTS, *OTHER_LAYOUTS]
SYSTEM = "You are Bolt, a terse assistant."


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(params=[*LAYOUTS, *(pytest.param(name, marks=pytest.mark.full) for name in OTHER_LAYOUTS)])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# -- what stays -------------------------------------------------------------------------------------------------------


async def conversation(session: Session, rounds: int) -> Any:
    """Turns of every kind, some of them longer than the window; yields after each."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    for i in range(rounds):
        yield await session.send(same_words(20, i), max_tokens=5, ignore_eos=True)
        yield await session.append(same_words(15, i + 1))
        yield await session.continue_(max_tokens=5, ignore_eos=True)
        yield await session.continue_(max_tokens=6, ignore_eos=True)
        yield await session.append(
            [
                {"role": "user", "content": "and?"},
                {"role": "assistant", "content": same_words(9), "tool_calls": [call]},
                {"role": "tool", "content": same_words(40, i), "tool_call_id": "c"},
            ]
        )
        yield await session.send(same_words(100 if i % 2 else 300, i), max_tokens=30, ignore_eos=True)


@pytest.mark.short(2)
@pytest.mark.parametrize(
    ("family", "policy", "layout"),
    [
        *zip(FAMILIES * 2, POLICIES, LAYOUTS * 3, strict=False),
        *(pytest.param(*all_of, marks=pytest.mark.full) for all_of in product(FAMILIES, POLICIES, EVERY_LAYOUT)),
    ],
)
async def test_an_endless_session_stays_in_its_window_and_says_what_it_holds(
    models: Path, tmp_path: Path, family: str, policy: str, layout: str
) -> None:
    async with opened(tmp_path / "home", chat_folder(models, family), layout=layout) as kv:
        session = await kv.sessions.create(system=SYSTEM, policy=policy)
        ledger = await session.token_ids()
        heights, disk = [], []
        async for _ in conversation(session, 3):
            state = await check_held(kv, session)
            await check_stored(kv, session)
            now = await session.token_ids()
            assert now[: len(ledger)] == ledger, "the ledger only grows"
            ledger = now
            heights.append(state.device_bytes)
            disk.append((await session.state()).disk_bytes)
            if not policy.startswith("sliding"):
                pinned = state.pinned.stop if policy != "sink:64:4" else 4
                assert state.kept[0].stop >= pinned > 0
        assert len(ledger) > CONTEXT > state.kv_tokens
        # Gaps in the middle: what lies before them has its keys twice, as computed and as attended.
        twice = 1.5 if policy.startswith("turns") else 1.0
        # What is kept begins and ends within pages, wherever it lies.
        pages = 2 if layout.endswith("paged") else 0
        a_page = kv.model.adapter.geometry.nbytes(256)
        assert max(heights[6:]) <= twice * max(heights[:6]) + pages * a_page, "device bytes are flat"
        assert max(disk[12:]) <= 1.25 * max(disk[:12]), "and so are those on disk"
        assert state.items[0].evicted == policy.startswith("sliding")
        assert state.next_position == len(ledger) - 1


async def test_usage_counts_what_is_attended_to_and_what_of_it_was_held(models: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", model_folder(models)) as kv:
        session, engine = await kv.sessions.create(policy="sink:64"), kv.model.engine
        for i, ids in enumerate([*turns(3, tokens=20), *turns(2, tokens=150), *turns(2, tokens=5)]):
            before, state = engine.computed_tokens, await session.state()
            reply = await session.generate_tokens(ids, max_tokens=10)
            held = sum(len(span) for span in state.kept)
            assert reply.usage.prompt_tokens == held + len(ids)
            assert reply.usage.cached_tokens == state.kv_tokens
            assert reply.usage.completion_tokens == 10
            assert engine.computed_tokens - before == held - state.kv_tokens + len(ids) + 10 - 1
            assert reply.restore.tokens == state.kv_tokens
            assert (reply.restore.recompute, reply.restore.source) == (None, "device" if i else "new")
        await session.suspend()
        state = await session.state()
        reply = await session.generate_tokens([5], max_tokens=3)
        assert reply.usage.cached_tokens == reply.restore.tokens == state.kv_tokens <= 64
        assert reply.usage.prompt_tokens == sum(len(span) for span in state.kept) + 1


async def test_positions_that_start_anew_are_stored_and_restored(models: Path, tmp_path: Path, layout: str) -> None:
    """Far into a conversation keys are counted from a new base: chunks end where positions jump."""
    model = model_folder(models, "gemma3")
    replies = []
    for name, cut in (("whole", False), ("cut", True)):
        async with opened(tmp_path / name, model, layout=layout) as kv:
            kv.model.layout.rebase_at = 150
            session = await kv.sessions.create(policy="sink:64")
            for i, ids in enumerate(turns(10, tokens=35)):
                replies.append(await session.generate_tokens(ids, max_tokens=6, logprobs=0))
                state = await check_held(kv, session)
                assert state.next_position < 150 + 64 + 64
                await check_stored(kv, session)
                if cut:
                    report = await session.suspend("disk" if i % 2 else "host")
                    assert report.tokens == state.kv_tokens
                    restored = await session.resume()
                    assert (restored.tokens, restored.reason) == (state.kv_tokens, None)
            assert len(session._core.kv.placement.bases) > 1
    for one, other in zip(replies[:10], replies[10:], strict=True):
        assert_equal_replies(one, other)


async def test_a_prefix_that_a_long_first_turn_evicted_is_no_resume_point(models: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", chat_folder(models, "gemma3")) as kv:
        session = await kv.sessions.create(system=SYSTEM, policy="sliding:64")
        await session.send(same_words(150), max_tokens=5)
        await check_stored(kv, session)
        segments = (await kv.sessions.repository.manifest(session.id)).segments
        assert session._core.written_chunks == len(segments), "nothing is stored only to be deleted"
        pinned = await kv.sessions.create(system=SYSTEM, policy="sink:64")
        await pinned.send(same_words(150), max_tokens=5)
        await check_stored(kv, pinned)
        points = (await kv.sessions.repository.manifest(pinned.id)).resume_points
        assert points[0].position == (await pinned.state()).pinned.stop


async def test_two_collectors_do_not_delete_each_others_chunks(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second would take the first one's claims for a crash's, and delete what was written anew since."""
    async with opened(tmp_path / "home", model_folder(models)) as kv:
        session, writer = await kv.sessions.create(policy="sink:64"), kv.sessions.tiers.writer
        await said(session, turns(3, tokens=20))
        await written(kv)
        deleted: list[str] = []
        delete = kv.sessions.tiers.blobs.delete

        def slow(name: str) -> Any:
            deleted.append(name)
            time.sleep(0.05)
            return delete(name)

        monkeypatch.setattr(kv.sessions.tiers.blobs, "delete", slow)
        await kv.sessions.repository.truncate_manifest(session.id, 0)
        await asyncio.gather(*(writer.collect_garbage() for _ in range(3)))
        assert len(deleted) == len(set(deleted)) > 0


# -- turns that fail --------------------------------------------------------------------------------------------------

DOOMED = prompt(130, 3)


class Failing:
    """Ways for a turn to fail after it has evicted what was there before."""

    @staticmethod
    async def cancelled_in_prefill(kv: AgentKV, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        await Failing._cancelled(kv, session, 110)

    @staticmethod
    async def cancelled_while_it_generates(kv: AgentKV, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        await Failing._cancelled(kv, session, 200)

    @staticmethod
    async def cancelled_at_its_end(kv: AgentKV, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        commit = kv.sessions.repository.commit_turn

        async def never(*args: Any, **kwargs: Any) -> None:
            task = next(t for t in asyncio.all_tasks() if t.get_name() == "agentkv-turn")
            task.cancel()
            raise DatabaseUnavailable("gone")

        monkeypatch.setattr(kv.sessions.repository, "commit_turn", never)
        with pytest.raises(AgentKVError):
            await session.generate_tokens(DOOMED, max_tokens=30)
        monkeypatch.setattr(kv.sessions.repository, "commit_turn", commit)

    @staticmethod
    async def commit_refused(kv: AgentKV, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        commit = kv.sessions.repository.commit_turn

        async def refused(*args: Any, **kwargs: Any) -> None:
            raise DatabaseUnavailable("no")

        monkeypatch.setattr(kv.sessions.repository, "commit_turn", refused)
        with pytest.raises(DatabaseUnavailable):
            await session.generate_tokens(DOOMED, max_tokens=30)
        monkeypatch.setattr(kv.sessions.repository, "commit_turn", commit)

    @staticmethod
    async def append_refused(kv: AgentKV, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        commit = kv.sessions.repository.commit_turn

        async def refused(*args: Any, **kwargs: Any) -> None:
            raise DatabaseUnavailable("no")

        monkeypatch.setattr(kv.sessions.repository, "commit_turn", refused)
        with pytest.raises(DatabaseUnavailable):
            await session.append_tokens(DOOMED)
        monkeypatch.setattr(kv.sessions.repository, "commit_turn", commit)

    @staticmethod
    async def a_step_failed(kv: AgentKV, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        plan, left = kv.model.layout.plan, iter(range(12))

        def broken(slots: Any) -> Any:
            if next(left, None) is None:
                raise RuntimeError("kernel")
            return plan(slots)

        monkeypatch.setattr(kv.model.layout, "plan", broken)
        with pytest.raises(AgentKVError, match="kernel"):
            await session.generate_tokens(DOOMED, max_tokens=30)
        monkeypatch.setattr(kv.model.layout, "plan", plan)

    @staticmethod
    async def _cancelled(kv: AgentKV, session: Session, after: int) -> None:
        engine = kv.model.engine
        start = engine.computed_tokens
        task = asyncio.create_task(session.generate_tokens(DOOMED, max_tokens=100_000))
        while engine.computed_tokens - start < after:  # noqa: ASYNC110  the engine counts, it sends no event
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


WAYS: tuple[Callable[..., Any], ...] = (
    Failing.cancelled_in_prefill,
    Failing.cancelled_while_it_generates,
    Failing.cancelled_at_its_end,
    Failing.commit_refused,
    Failing.append_refused,
    Failing.a_step_failed,
)


@pytest.mark.short(4)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("gemma3", "dynamic"),
        ("llama", "static"),
        pytest.param("llama", "dynamic", marks=pytest.mark.full),
        pytest.param("gemma3", "static", marks=pytest.mark.full),
    ],
)
async def test_a_turn_that_fails_after_it_evicted_never_was(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, layout: str, way: Callable[..., Any]
) -> None:
    policy = "sink:80" if family == "llama" else "turns:80"
    async with opened(tmp_path / "home", model_folder(models, family), layout=layout) as kv:
        session, twin = [await kv.sessions.create(policy=policy) for _ in range(2)]
        past, more = turns(3, tokens=35), turns(2, tokens=60, seed=5)
        for one in (session, twin):
            await said(one, past, 10)
        for i, ids in enumerate(more):
            if i == 1:
                await session.suspend("host")
                await session.resume()
            before, bits = await check_held(kv, session), snapshot(session._core.kv)
            await way(kv, session, monkeypatch)
            after = await check_held(kv, session)
            assert (after.kept, after.items, after.next_position) == (before.kept, before.items, before.next_position)
            assert_same(snapshot(session._core.kv), bits)
            (one,) = await said(session, [ids], 12, logprobs=0)
            (other,) = await said(twin, [ids], 12, logprobs=0)
            assert_equal_replies(one, other)
            assert one.usage == other.usage
            assert one.restore.reason is None
        await check_stored(kv, session)
        await session.suspend()
        await check_held(kv, session)
        report = await session.resume()
        assert (report.reason, report.recomputed_tokens) == (None, 0)
        (one,), (other,) = await said(session, past[:1], 10), await said(twin, past[:1], 10)
        assert one.ids == other.ids


# -- another policy ---------------------------------------------------------------------------------------------------


async def test_a_smaller_window_evicts_at_the_next_turn(models: Path, tmp_path: Path, layout: str) -> None:
    async with opened(tmp_path / "home", model_folder(models, "gemma3"), layout=layout) as kv:
        session, twin = [await kv.sessions.create(policy="full") for _ in range(2)]
        for one in (session, twin):
            await said(one, turns(4, tokens=50), 6)
            await one.set_policy(SinkWindow(64))
            state = await one.state()
            assert state.policy == "sink:64"
            assert state.kv_tokens == state.ledger_tokens - 1 > 64, "until the next turn nothing is evicted"
            await check_held(kv, one, range(state.kv_tokens))
        length = state.ledger_tokens - 1
        await session.suspend()
        assert (await session.resume()).reason is None
        for ids in turns(3, tokens=30, seed=4):
            mine, other = [await said(s, [ids], 10, logprobs=0) for s in (session, twin)]
            assert_equal_replies(mine[0], other[0])
            await session.suspend("host")
            await session.resume()
            state = await session.state()
            items = await session.items()
            expected = held_after("sink:64", items, 0, session._core.record.kv_length, held=range(length), start=length)
            await check_held(kv, session, expected)
            await check_stored(kv, session)
        assert state.kv_tokens <= 64


async def test_a_larger_window_has_room_at_once(models: Path, tmp_path: Path, layout: str) -> None:
    async with opened(tmp_path / "home", model_folder(models), layout=layout) as kv:
        session = await kv.sessions.create(policy="sink:64")
        await said(session, turns(1, tokens=100), 5)
        await session.set_policy("sink:200")
        (reply,) = await said(session, turns(1, tokens=100), 5)
        assert (reply.restore.reason, reply.restore.recomputed_tokens) == (None, 0)
        assert 64 < (await session.state()).kv_tokens <= 200
        await session.set_policy("full")
        await said(session, turns(1, tokens=200), 5)
        assert (await session.state()).kv_tokens > 300
        await check_session(kv, session)


async def test_a_policy_persists_and_full_stops_evicting(models: Path, tmp_path: Path, layout: str) -> None:
    model = model_folder(models)
    async with opened(tmp_path / "home", model, layout=layout) as kv:
        session = await kv.sessions.create(policy=TurnWindow(64))
        await said(session, turns(3, tokens=40), 6)
        held = (await session.state()).kept
        await session.set_policy("full")
        assert (await session.state()).kept == held, "what is gone stays gone"
    async with opened(tmp_path / "home", model, layout=layout) as kv:
        session = await kv.sessions.get(session.id)
        assert (await session.state()).policy == "full"
        reply = (await said(session, turns(1, tokens=200), 6))[0]
        assert reply.restore.source == "disk"
        assert reply.restore.reason is None
        state = await session.state()
        assert positions(state.kept) == [*positions(held), *range(held[-1].stop, state.ledger_tokens)]
        await check_stored(kv, session)
        await session.set_policy("sink:300")
        await session.set_policy("sink:300")
        assert (await session.state()).policy == "sink:300"
        await said(session, turns(2, tokens=200), 6)
        state = await session.state()
        assert 200 < state.kv_tokens <= 300
        await check_session(kv, session)
    async with opened(tmp_path / "home", model, layout=layout) as kv:
        session = await kv.sessions.get(session.id)
        assert (await session.state()).policy == "sink:300"
        assert (await session.resume()).reason is None


async def test_a_policy_that_does_not_fit_is_refused_with_its_numbers(models: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", chat_folder(models)) as kv:
        session = await kv.sessions.create(system=same_words(90), policy="sink:256")
        await session.send("Hello", max_tokens=5)
        before = await session.state()
        pinned = f"{before.pinned.stop:,}"
        refused: list[tuple[Any, list[str]]] = [
            ("sink:64", [pinned, "64", f"{before.pinned.stop + 16:,}"]),
            (TurnWindow(32), [pinned, "32"]),
            ("sink:4096", ["4,096", f"{CONTEXT:,}"]),
            ("sink:1", ["16"]),
            ("sink:200,slack=150", ["150", "100"]),
            ("snik:64", ["snik", "sink", "turns"]),
            ("", ["sink:4096"]),
            (None, ["sink:4096"]),
            (64, ["64"]),
            ("sink", ["window"]),
        ]
        for policy, words in refused:
            with pytest.raises(InvalidRequest) as caught:
                await session.set_policy(policy)
            assert caught.value.param == "policy", policy
            for word in words:
                assert word in str(caught.value), (policy, word, str(caught.value))
            if policy is not None:
                with pytest.raises(InvalidRequest):
                    await kv.sessions.create(system=same_words(90), policy=policy)
        after = await session.state()
        assert (after.policy, after.kept, after.updated_at) == (before.policy, before.kept, before.updated_at)
        assert (await session.send("And?", max_tokens=5)).restore.source == "device"


async def test_a_busy_session_keeps_its_policy(models: Path, tmp_path: Path, layout: str) -> None:
    async with opened(tmp_path / "home", model_folder(models), layout=layout) as kv:
        session = await kv.sessions.create(policy="sink:64")
        task = asyncio.create_task(session.generate_tokens(prompt(10), max_tokens=200))
        await asyncio.sleep(0.02)
        assert (await session.state()).busy
        with pytest.raises(SessionBusy):
            await session.set_policy("full")
        assert (await task).usage.completion_tokens == 200
        assert (await session.state()).policy == "sink:64"
        await check_held(kv, session)


async def test_a_static_session_that_can_go_nowhere_keeps_its_policy(models: Path, tmp_path: Path) -> None:
    async with opened(
        tmp_path / "home", model_folder(models), layout="static", disk_budget=1000, host_budget=1000
    ) as kv:
        session = await kv.sessions.create(policy="sink:64")
        await said(session, turns(3, tokens=30))
        with pytest.raises(StorageFull):
            await session.set_policy("sink:128")
        assert (await session.state()).policy == "sink:64"
        await said(session, turns(3, tokens=30))
        await check_held(kv, session)


async def test_learned_positions_are_refused_every_policy_that_evicts(models: Path, tmp_path: Path) -> None:
    model = model_folder(models, "gpt2")
    async with opened(tmp_path / "home", model) as kv:
        session = await kv.sessions.create()
        for policy in ("sink:64", TurnWindow(64), "sliding:64"):
            for attempt in (kv.sessions.create(policy=policy), session.set_policy(policy)):
                with pytest.raises(Unsupported, match=r"gpt2.*position|position.*gpt2") as caught:
                    await attempt
                assert "full" in str(caught.value)
        await session.set_policy("full")
        await said(session, turns(2))
        assert len(await kv.sessions.list()) == 1
        with pytest.raises(ContextTooLong) as too_long:
            await session.append_tokens(prompt(CONTEXT))
        assert "policy" not in str(too_long.value)
    async with opened(tmp_path / "home", model, default_policy="sink:64") as kv:
        with pytest.raises(Unsupported, match="sink"):
            await kv.sessions.create()
        await kv.sessions.create(policy=Full())


async def test_the_default_policy_is_a_setting(models: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", model_folder(models), default_policy="turns:96") as kv:
        session = await kv.sessions.create()
        assert (await session.state()).policy == "turns:96"
        assert (await (await kv.sessions.create(policy="full")).state()).policy == "full"
        await said(session, turns(3, tokens=60))
        await check_held(kv, session)
    async with opened(tmp_path / "home", model_folder(models)) as kv:
        assert (await (await kv.sessions.get(session.id)).state()).policy == "turns:96"
        assert (await (await kv.sessions.create()).state()).policy == "full"


# -- third parties' policies ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rogue(RetentionPolicy):
    """Goes wrong in its ``at``-th eviction and later ones; before, and after ``mended``, it is a sliding window."""

    name: ClassVar[str] = "rogue"
    asked: ClassVar[set[int]] = set()
    mended: ClassVar[bool] = False

    window: int
    how: str = "none"
    at: int = 0

    def keep(self, view: SessionView) -> tuple[Span, ...]:
        good = (Span(view.length - self.window // 2, view.length),)
        good = tuple(span for have in view.retained for span in (have.intersect(good[0]),) if len(span))
        if type(self).mended or view.length < self.at:
            return good
        match self.how:
            case "raises":
                raise ZeroDivisionError("division by zero")
            case "keeps-all":
                return tuple(view.retained)
            case "invents":
                return (Span(0, view.length + 5),)
            case "nonsense":
                return 17  # type: ignore[return-value]
            case "fickle":
                if view.length in self.asked:
                    return good
                self.asked.add(view.length)
                return (Span(view.length - 8, view.length),)
            case _:
                return good


@pytest.fixture
def rogue() -> Iterator[type[Rogue]]:
    RETENTION._known.setdefault("rogue", Rogue)
    Rogue.asked, Rogue.mended = set(), False
    yield Rogue
    RETENTION._known.pop("rogue", None)


@pytest.mark.parametrize(
    ("how", "where", "layout"),
    [
        ("raises", "decode", "static"),
        ("keeps-all", "prefill", "dynamic"),
        *(
            pytest.param(how, where, "static", marks=pytest.mark.full)
            for how, where in product(["raises", "keeps-all", "invents", "nonsense"], ["prefill", "decode"])
        ),
    ],
)
async def test_a_policy_that_misbehaves_fails_its_own_turn_only(
    models: Path, tmp_path: Path, rogue: type[Rogue], how: str, where: str, layout: str
) -> None:
    async with opened(tmp_path / "home", model_folder(models, "gemma3"), layout=layout) as kv:
        sick = await kv.sessions.create(policy=rogue(64, how, 250))
        well, twin = [await kv.sessions.create(policy="sink:64") for _ in range(2)]
        for session in (sick, well, twin):
            await said(session, turns(3, tokens=30), 10)
        before, bits = await check_held(kv, sick), snapshot(sick._core.kv)
        feed, tokens = (prompt(200, 8), 5) if where == "prefill" else (prompt(5, 8), 140)
        results = await asyncio.gather(
            sick.generate_tokens(feed, max_tokens=tokens),
            well.generate_tokens(feed, max_tokens=tokens, logprobs=0),
            return_exceptions=True,
        )
        error, reply = results
        assert isinstance(error, InvalidRequest), error
        assert "'rogue'" in str(error)
        assert "keep()" in str(error)
        if how == "raises":
            assert "division by zero" in str(error)
            assert isinstance(error.__cause__, ZeroDivisionError)
        assert_equal_replies(reply, await twin.generate_tokens(feed, max_tokens=tokens, logprobs=0))  # type: ignore[arg-type]
        after = await check_held(kv, sick, positions(before.kept)[:-1])
        assert (after.kept, after.turns) == (before.kept, before.turns)
        assert_same(snapshot(sick._core.kv), bits)
        rogue.mended = True
        assert len((await sick.generate_tokens(feed, max_tokens=tokens)).ids) == tokens
        await check_stored(kv, sick)


async def test_a_policy_that_changes_its_mind_stays_in_its_window(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rogue: type[Rogue], layout: str
) -> None:
    """A prefill is cut where the policy said it would evict: what it says the second time does not count."""
    async with opened(tmp_path / "home", model_folder(models), layout=layout) as kv:
        sick, well = await kv.sessions.create(policy=rogue(64, "fickle")), await kv.sessions.create(policy="sink:64")
        plan, most = kv.model.layout.plan, []

        def watched(slots: Any) -> Any:
            most.extend(slot.kv.tokens + slot.tokens for slot in slots)
            return plan(slots)

        monkeypatch.setattr(kv.model.layout, "plan", watched)
        replies = await asyncio.gather(
            *(session.generate_tokens(prompt(300, 8), max_tokens=40) for session in (sick, well))
        )
        assert [len(reply.ids) for reply in replies] == [40, 40]
        assert max(most) <= 64
        await check_session(kv, sick)


async def test_a_session_whose_policy_is_not_installed_says_so_and_takes_another(
    models: Path, tmp_path: Path, rogue: type[Rogue]
) -> None:
    model = model_folder(models)
    async with opened(tmp_path / "home", model) as kv:
        session = await kv.sessions.create(policy=rogue(64))
        await said(session, turns(3, tokens=30))
        held = (await session.state()).kept
    RETENTION._known.pop("rogue")
    async with opened(tmp_path / "home", model) as kv:
        session = await kv.sessions.get(session.id)
        with pytest.raises(InvalidRequest, match="rogue"):
            await session.generate_tokens([5], max_tokens=3)
        assert (await session.state()).kept == held
        await session.set_policy("sink:64")
        reply = await session.generate_tokens([5], max_tokens=3)
        assert (reply.restore.source, reply.restore.reason) == ("disk", None)


async def test_a_policy_without_a_text_is_refused(models: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", model_folder(models)) as kv:
        with pytest.raises(InvalidRequest, match=r"text|unknown"):
            await kv.sessions.create(policy=Rogue(64))


# -- too long ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [0, 100, 260, 420])
async def test_the_advice_about_a_context_that_is_too_long_works(models: Path, tmp_path: Path, words: int) -> None:
    async with opened(tmp_path / "home", chat_folder(models)) as kv:
        session = await kv.sessions.create(system=same_words(words) or None)
        await session.send("Hello", max_tokens=5)
        with pytest.raises(ContextTooLong) as caught:
            await session.send(same_words(1200), max_tokens=5)
        advice = str(caught.value)
        policy = advice.split("policy='")[1].split("'")[0]
        assert f"set_policy({policy!r})" in advice
        await session.set_policy(policy)
        reply = await session.send(same_words(1200), max_tokens=5)
        assert reply.text is not None
        fresh = await kv.sessions.create(system=same_words(words) or None, policy=policy)
        await fresh.send(same_words(1200), max_tokens=5)
        state = await check_held(kv, fresh)
        assert state.kept[0].stop >= state.pinned.stop


async def test_where_no_policy_would_help_none_is_advised(models: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", chat_folder(models)) as kv:
        text = same_words(470)
        session = await kv.sessions.create(system=text)
        while (await session.state()).pinned.stop < CONTEXT - 40:
            text += " w1"
            session = await kv.sessions.create(system=text)
        with pytest.raises(ContextTooLong) as caught:
            await session.send(same_words(200), max_tokens=5)
        if "policy='" in str(caught.value):
            await session.set_policy(str(caught.value).split("policy='")[1].split("'")[0])
            await session.send(same_words(200), max_tokens=5)


async def test_no_policy_promises_what_an_earlier_one_evicted(models: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", chat_folder(models)) as kv:
        session = await kv.sessions.create(system=SYSTEM, policy="sliding:64")
        await session.send(same_words(60), max_tokens=20, ignore_eos=True)
        state = await session.state()
        assert state.items[0].evicted
        with pytest.raises(InvalidRequest, match=r"system prompt and tools\), of which 'sliding:64' has evicted"):
            await session.set_policy("sink:96")
        assert (await session.state()).policy == "sliding:64"
        await session.set_policy("full")
        assert len((await session.send("and?", max_tokens=3, ignore_eos=True)).ids) == 3


async def test_a_default_policy_is_checked_when_the_runtime_opens(models: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="unknown retention policy 'rolling'"):
        async with AgentKV.open(model=str(model_folder(models)), home=tmp_path / "home", default_policy="rolling:64"):
            pass
    async with AgentKV.open(
        model=str(model_folder(models)), home=tmp_path / "home", default_policy=SinkWindow(64)
    ) as kv:
        assert (await (await kv.sessions.create()).state()).policy == "sink:64"
