"""Sessions under the policy ``adaptive``: full while that fits, then as a session whose policy was set by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from driving import assert_same, prompt, snapshot
from homes import CONTEXT, chat_folder, check_session, model_folder, opened, said, turns
from retaining import assert_equal_replies, check_held, check_stored, same_words
from test_cli import agentkv
from test_concurrency import cancel_at

from agentkv import Adaptive, AgentKV
from agentkv.errors import ContextTooLong, DatabaseUnavailable, InvalidRequest, Unsupported
from agentkv.policies.retention import parse_policy
from agentkv.schemas.replies import Reply
from agentkv.sessions.events import LifecycleEvent
from agentkv.sessions.session import Session

SYSTEM = "You are Bolt, a terse assistant."
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@asynccontextmanager
async def told(kv: AgentKV) -> AsyncIterator[list[LifecycleEvent]]:
    """The ``adapted`` events of what happens inside; complete at its end."""
    found: list[LifecycleEvent] = []

    async def listen() -> None:
        found.extend([event async for event in kv.events() if event.kind == "adapted"])

    listener = asyncio.create_task(listen())
    await asyncio.sleep(0)
    yield found
    kv.sessions.tiers.observer.events.close()
    await listener


async def policy_of(session: Session) -> str:
    return (await session.state()).policy


def turned(kv: AgentKV) -> int:
    """Bytes of the sinks' keys as they are attended, which come on top of the window's."""
    return kv.model.adapter.geometry.nbytes(4)


def talk(session: Session, i: int, *, tools: bool) -> Coroutine[Any, Any, Any]:
    """One turn of a conversation: a question, or a tool's long result."""
    if tools and i % 2:
        called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        return session.append([called, {"role": "tool", "content": same_words(300, i), "tool_call_id": "c"}])
    return session.send(same_words(50 if tools else 200, i), max_tokens=5, ignore_eos=True, logprobs=0)


async def in_step(session: Session, twin: Session, rounds: Sequence[int], *, tools: bool) -> list[str]:
    """Say the same to both; where ``session`` adapts, ``twin`` is set by hand. The policies that it was under."""
    under = [await policy_of(session)]
    for i in rounds:
        mine = await talk(session, i, tools=tools)
        if (now := await policy_of(session)) != under[-1]:
            under.append(now)
            chosen = parse_policy(now)
            assert isinstance(chosen, Adaptive)
            await twin.set_policy(chosen.in_force)
        other = await talk(twin, i, tools=tools)
        if isinstance(mine, Reply):
            assert_equal_replies(mine, other)
            assert mine.usage == other.usage
            assert mine.restore.reason == other.restore.reason is None
        one, two = await session.state(), await twin.state()
        assert (one.kept, one.evicted, one.next_position) == (two.kept, two.evicted, two.next_position)
    assert_same(snapshot(session._core.kv), snapshot(twin._core.kv))
    return under


# -- when it moves ----------------------------------------------------------------------------------------------------


async def test_a_session_that_fits_is_as_one_under_full(models: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", chat_folder(models)) as kv, told(kv) as events:
        session, twin = [await kv.sessions.create(system=SYSTEM, policy=policy) for policy in ("adaptive", "full")]
        assert await in_step(session, twin, range(3), tools=False) == ["adaptive"]
        state = await check_held(kv, session)
        assert state.evicted == ()
        assert 500 < state.ledger_tokens < CONTEXT
    assert events == []


@pytest.mark.parametrize(
    ("family", "layout", "tools"),
    [
        ("llama", "dynamic", False),
        ("gemma3", "static", True),
        pytest.param("llama", "paged", False, marks=pytest.mark.full),
        pytest.param("gpt_neox", "offloaded", True, marks=pytest.mark.full),
        pytest.param("gemma3", "paged", True, marks=pytest.mark.full),
        pytest.param("gemma3", "static", False, marks=pytest.mark.full),
    ],
)
async def test_before_it_outgrows_the_context_it_moves_and_goes_on_as_if_set_by_hand(
    models: Path, tmp_path: Path, family: str, layout: str, tools: bool
) -> None:
    kind = "turns" if tools else "sink"
    async with opened(tmp_path / "home", chat_folder(models, family), layout=layout) as kv:
        async with told(kv) as events:
            session, twin = [await kv.sessions.create(system=SYSTEM, policy=p) for p in ("adaptive", "full")]
            under = await in_step(session, twin, range(8), tools=tools)
        assert under == ["adaptive", f'adaptive:now="{kind}:{CONTEXT}"']
        state = await check_held(kv, session)
        assert state.ledger_tokens > 1.3 * CONTEXT
        assert state.evicted
        assert state.kept[0].stop >= state.pinned.stop > 0
        await check_stored(kv, session)
        (event,) = events
        assert event.session_id == session.id
        assert (event.details["before"], event.details["policy"]) == tuple(under)
        assert event.details["tokens"] > CONTEXT
        assert (await kv.sessions.list())[1].policy == state.policy, "the record says so too"


async def test_its_share_of_the_device_budget_is_its_limit_where_that_is_less(models: Path, tmp_path: Path) -> None:
    model = model_folder(models)
    async with opened(tmp_path / "home", model) as kv:
        share = kv.model.layout.bytes_needed(None, 300, 300)
    async with opened(tmp_path / "home", model, device_budget=4 * share, adaptive_budget="25%") as kv:
        window = kv.sessions.tiers.residency.share
        assert kv.model.layout.bytes_needed(None, window, window) <= share
        assert kv.model.layout.bytes_needed(None, window + 1, window + 1) > share
        session = await kv.sessions.create(policy=Adaptive())
        for ids in turns(12, tokens=60):
            before = await session.state()
            await session.generate_tokens(ids, max_tokens=10)
            state = await check_held(kv, session)
            fits = before.ledger_tokens + len(ids) + 10 <= window
            assert state.policy == ("adaptive" if fits else f'adaptive:now="sink:{window}"')
            assert state.device_bytes <= share + turned(kv)
        assert state.ledger_tokens > 2 * window


async def test_a_layout_that_reserves_takes_no_more_than_the_share_from_the_first_turn_on(
    models: Path, tmp_path: Path
) -> None:
    async with opened(tmp_path / "home", model_folder(models), layout="static") as kv:
        share = kv.model.layout.bytes_needed(None, 256, 256)
    async with opened(tmp_path / "home", model_folder(models), layout="static", adaptive_budget=share) as kv:
        session = await kv.sessions.create(policy="adaptive")
        for ids in turns(6, tokens=60):
            await said(session, [ids])
            state = await check_held(kv, session)
            assert state.policy == f'adaptive:now="sink:{kv.sessions.tiers.residency.share}"'
            assert state.device_bytes <= share + turned(kv)
        living = await kv.sessions.create()
        await said(living, turns(2, tokens=60))
        assert (await living.state()).device_bytes > share + turned(kv)
        await living.set_policy("adaptive")
        (reply,) = await said(living, turns(1, tokens=60))
        assert (reply.restore.reason, reply.restore.source) == (None, "host")
        assert (await check_held(kv, living)).device_bytes <= share + turned(kv)


async def test_what_else_runs_has_no_say(models: Path, tmp_path: Path) -> None:
    """Alone, and among others that crowd it out of memory: the same turns adapt, the same tokens are kept."""
    seen = []
    model = model_folder(models)
    for name, neighbours in (("alone", 0), ("among", 2)):
        async with opened(tmp_path / name, model) as kv:
            share = kv.model.layout.bytes_needed(None, 200, 200)
        async with opened(tmp_path / name, model, device_budget=2 * share, adaptive_budget=share) as kv:
            session = await kv.sessions.create(policy="adaptive")
            others = [await kv.sessions.create(policy="adaptive") for _ in range(neighbours)]
            path = []
            for ids in turns(6, tokens=50):
                asked = [one.generate_tokens(ids, max_tokens=8) for one in (session, *others)]
                reply, *_ = await asyncio.gather(*asked)
                state = await session.state()
                path.append((state.policy, state.kept, reply.ids, reply.usage))
            seen.append(path)
    assert seen[0] == seen[1]
    assert len({policy for policy, *_ in seen[0]}) == 2


# -- what it remembers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tools", [False, True])
async def test_a_runtime_that_opens_later_goes_on_with_it_where_it_was(
    models: Path, tmp_path: Path, tools: bool
) -> None:
    model = chat_folder(models)
    names: list[str] = []
    under: list[str] = []
    for rounds in (range(2), range(2, 5), range(5, 8)):
        async with opened(tmp_path / "home", model) as kv:
            if names:
                pair = [await kv.sessions.get(name) for name in names]
                assert await policy_of(pair[0]) == under[-1]
            else:
                pair = [await kv.sessions.create(system=SYSTEM, policy=p) for p in ("adaptive", "full")]
                names = [one.id for one in pair]
            for now in await in_step(*pair, rounds, tools=tools):
                under += [] if now in under else [now]
            await check_stored(kv, pair[0])
    assert under == ["adaptive", f'adaptive:now="{"turns" if tools else "sink"}:{CONTEXT}"']


async def test_a_turn_that_brings_another_models_session_here_may_be_the_one_that_moves_it(
    models: Path, tmp_path: Path
) -> None:
    async with opened(tmp_path / "home", model_folder(models)) as kv:
        session = await kv.sessions.create(policy="adaptive")
        await said(session, turns(3, tokens=300))
    async with opened(tmp_path / "home", model_folder(models, seed=1)) as kv:
        session = await kv.sessions.get(session.id)
        await said(session, turns(1, tokens=300))
        state = await check_held(kv, session)
        assert state.evicted
        record = await kv.sessions.repository.get_session(session.id)
        assert record.policy == state.policy == f'adaptive:now="sink:{CONTEXT}"'
        assert record.kv_fingerprint == kv.model.fingerprints.kv


async def test_a_smaller_budget_makes_its_window_smaller_and_a_larger_one_does_not_make_it_promise_what_is_gone(
    models: Path, tmp_path: Path
) -> None:
    model = model_folder(models)
    name, windows, shares = "", [], []
    for tokens in (400, 200, 800):
        async with opened(tmp_path / "home", model) as kv:
            share = kv.model.layout.bytes_needed(None, tokens, tokens)
        async with opened(tmp_path / "home", model, adaptive_budget=share) as kv:
            session = await (kv.sessions.get(name) if name else kv.sessions.create(policy="adaptive"))
            name = session.id
            await said(session, turns(8, tokens=50), 10)
            state = await session.state()
            await check_session(kv, session)
            await check_stored(kv, session)
            windows.append(parse_policy(state.policy).window)
            shares.append(kv.sessions.tiers.residency.share)
            assert state.kv_tokens <= windows[-1]
    assert shares[1] < shares[0] < shares[2]
    assert windows == [shares[0], shares[1], shares[1]]


@pytest.mark.parametrize("layout", ["dynamic", "static"])
async def test_a_turn_that_fails_leaves_it_under_what_it_was(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    model = model_folder(models)
    async with opened(tmp_path / "home", model, layout=layout) as kv:
        share = kv.model.layout.bytes_needed(None, 200, 200)
    async with opened(tmp_path / "home", model, layout=layout, adaptive_budget=share) as kv, told(kv) as events:
        session, twin = [await kv.sessions.create(policy="full") for _ in range(2)]
        for one in (session, twin):
            await said(one, turns(2))
        await session.set_policy("adaptive")
        commit = kv.sessions.repository.commit_turn

        async def refused(*args: Any, **kwargs: Any) -> None:
            assert session._core.record.policy != "adaptive", "this turn needs another policy"
            raise DatabaseUnavailable("no")

        monkeypatch.setattr(kv.sessions.repository, "commit_turn", refused)
        with pytest.raises(DatabaseUnavailable):
            await session.generate_tokens(prompt(CONTEXT + 100), max_tokens=5)
        monkeypatch.setattr(kv.sessions.repository, "commit_turn", commit)
        record = await kv.sessions.repository.get_session(session.id)
        assert (record.policy, session._core.record.policy) == ("adaptive", "adaptive")
        assert session._core.record.policy_since == record.policy_since
        assert events == []
        await check_session(kv, session)
        if layout == "dynamic":
            (mine,), (other,) = await said(session, turns(1), logprobs=0), await said(twin, turns(1), logprobs=0)
            assert_equal_replies(mine, other)
            assert await policy_of(session) == "adaptive"
            assert (await check_held(kv, session)).evicted == ()
        else:
            await session.set_policy("full")
            (mine,), (other,) = await said(session, turns(1, tokens=700)), await said(twin, turns(1, tokens=700))
            assert mine.ids == other.ids
            await check_held(kv, session)


async def test_cancelled_at_any_moment_memory_and_database_agree_on_its_policy(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_folder(models)
    async with opened(tmp_path / "home", model, layout="static") as kv:
        share = kv.model.layout.bytes_needed(None, 200, 200)
    async with opened(tmp_path / "home", model, layout="static", adaptive_budget=share) as kv, told(kv) as events:
        moved = f'adaptive:now="sink:{kv.sessions.tiers.residency.share}"'
        committed = []
        for at in range(1, 100):
            session = await kv.sessions.create()
            await said(session, turns(1))
            await session.set_policy("adaptive")
            await session.resume()
            outcome = await cancel_at(
                monkeypatch,
                at,
                lambda s=session: s.generate_tokens(prompt(50), max_tokens=5),  # type: ignore[misc]
            )
            async with session._core.gate:
                record = await kv.sessions.repository.get_session(session.id)
                assert (record.policy, record.policy_since, record.turns) == (
                    session._core.record.policy,
                    session._core.record.policy_since,
                    session._core.record.turns,
                )
                committed.append(record.turns == 2)
                assert record.policy == (moved if committed[-1] else "adaptive")
                await check_session(kv, session)
            (reply,) = await said(session, turns(1, tokens=200))
            assert reply.restore.reason is None
            await check_held(kv, session)
            await session.delete()
            if outcome is None:
                break
        assert outcome is None, "the turn never got through"
        assert committed == sorted(committed)
        assert len(committed) - sum(committed) > 5
    assert len(events) == len(committed), "each session once"


async def test_an_answer_made_again_may_need_another_policy(models: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", chat_folder(models)) as kv:
        session = await kv.sessions.create(system=SYSTEM, policy="adaptive")
        while len(await session.token_ids()) < CONTEXT - 150:
            await session.send(same_words(60), max_tokens=5, ignore_eos=True)
        before = await session.state()
        assert before.policy == "adaptive"
        reply = await session.regenerate(max_tokens=200, ignore_eos=True)
        assert len(reply.ids) == 200
        after = await check_held(kv, session)
        assert after.policy == f'adaptive:now="sink:{CONTEXT}"'
        assert after.ledger_tokens == before.ledger_tokens + 200 - 5 > CONTEXT
        await session.rewind(1)
        await session.send("and?", max_tokens=5, ignore_eos=True)
        await check_session(kv, session)
    async with opened(tmp_path / "home", chat_folder(models)) as kv:
        again = await kv.sessions.get(session.id)
        assert len((await again.send("and?", max_tokens=5, ignore_eos=True)).ids) == 5
        await check_session(kv, again)


async def test_a_search_by_beams_takes_what_the_context_leaves_and_is_refused_once_something_is_evicted(
    models: Path, tmp_path: Path
) -> None:
    async with opened(tmp_path / "home", model_folder(models)) as kv:
        session, twin = [await kv.sessions.create(policy=policy) for policy in ("adaptive", "full")]
        replies = []
        for one in (session, twin):
            await said(one, turns(1, tokens=CONTEXT - 30))
            replies.append(await one.generate_tokens([5], max_tokens=100, beams=2, ignore_eos=True))
        assert replies[0].ids == replies[1].ids
        assert len(replies[0].ids) < 30
        assert await policy_of(session) == "adaptive"
        await said(session, turns(1))
        with pytest.raises(Unsupported, match="beams=2 under policy 'adaptive'"):
            await session.generate_tokens([5], max_tokens=5, beams=2)


# -- by hand ----------------------------------------------------------------------------------------------------------


async def test_a_living_session_becomes_adaptive_and_stays_it_when_told_again(models: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", model_folder(models)) as kv:
        session = await kv.sessions.create(policy="sink:64")
        await said(session, turns(4))
        held = (await session.state()).kept
        await session.set_policy("adaptive")
        await said(session, turns(1, tokens=300))
        state = await session.state()
        assert (state.policy, state.kept[:-1]) == ("adaptive", held[:-1]), "what is gone stays gone, the rest stays"
        assert state.kv_tokens > 300
        await said(session, turns(4, tokens=300))
        moved = f'adaptive:now="sink:{CONTEXT}"'
        assert await policy_of(session) == moved
        for again in ("adaptive", Adaptive(), moved):
            if again != moved:
                await session.set_policy(again)
            assert await policy_of(session) == moved
        await session.set_policy("full")
        assert await policy_of(session) == "full"


async def test_it_can_be_the_default(models: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", model_folder(models), default_policy="adaptive") as kv:
        session = await kv.sessions.create()
        await said(session, turns(3, tokens=400))
        assert await policy_of(session) == f'adaptive:now="sink:{CONTEXT}"'
        assert await policy_of(await kv.sessions.create(policy="full")) == "full"


@pytest.mark.full
def test_the_command_line_takes_it_and_shows_it(models: Path, tmp_path: Path) -> None:
    options = ("--home", tmp_path / "home", "--model", chat_folder(models), "--device", "cpu", "--max-tokens", 4)
    done = agentkv("chat", "--policy", "adaptive", *options, given="How is Paris?\n")
    assert done.returncode == 0, done.stderr
    session = done.stdout.split("--session ")[1].split()[0]
    again = agentkv("chat", "--session", session, "--policy", "adaptive", *options, given=f"{same_words(1300)}\n")
    assert again.returncode == 0, again.stderr
    shown = agentkv("sessions", "show", session, "--home", tmp_path / "home")
    assert f'policy adaptive:now="sink:{CONTEXT}"' in shown.stdout


# -- what is refused --------------------------------------------------------------------------------------------------


async def test_a_model_from_which_nothing_can_be_evicted_refuses_it(models: Path, tmp_path: Path) -> None:
    model = model_folder(models, "gpt2")
    async with opened(tmp_path / "home", model, default_policy="adaptive") as kv:
        session = await kv.sessions.create(policy="full")
        for attempt in (kv.sessions.create(), session.set_policy("adaptive")):
            with pytest.raises(Unsupported, match=r"policy 'adaptive' with 'gpt2.*use 'full'"):
                await attempt
        assert await policy_of(session) == "full"


async def test_under_a_model_from_which_nothing_can_be_evicted_a_session_made_under_another_stays_full(
    models: Path, tmp_path: Path
) -> None:
    async with opened(tmp_path / "home", model_folder(models)) as kv:
        session = await kv.sessions.create(policy="adaptive")
        await said(session, turns(2))
    async with opened(tmp_path / "home", model_folder(models, "gpt2"), adaptive_budget=1) as kv:
        session = await kv.sessions.get(session.id)
        await said(session, turns(2))
        with pytest.raises(ContextTooLong, match="the model holds no more"):
            await session.append_tokens(prompt(CONTEXT))
        assert await policy_of(session) == "adaptive"


async def test_it_chooses_for_itself_and_promises_nothing_that_is_gone(models: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", chat_folder(models)) as kv:
        session = await kv.sessions.create(system=SYSTEM, policy="sliding:64")
        for attempt in (
            kv.sessions.create(policy='adaptive:now="sink:64"'),
            kv.sessions.create(policy=Adaptive("turns:64")),
            session.set_policy('adaptive:now="sink:64"'),
        ):
            with pytest.raises(InvalidRequest, match="begins as 'full'"):
                await attempt
        await session.send(same_words(60), max_tokens=20, ignore_eos=True)
        with pytest.raises(InvalidRequest, match=r"'adaptive' keeps the first .* of which 'sliding:64' has evicted"):
            await session.set_policy("adaptive")
        assert await policy_of(session) == "sliding:64"


async def test_where_what_is_pinned_leaves_no_room_it_ends_as_full_does(models: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", chat_folder(models)) as kv:
        text = same_words(760)
        while (
            len(await (session := await kv.sessions.create(system=text, policy="adaptive")).token_ids()) < CONTEXT - 3
        ):
            text += " w"
        with pytest.raises(ContextTooLong, match="leave no room"):
            await session.send(same_words(30), max_tokens=5)
        assert await policy_of(session) == "adaptive"
