"""Forks, rewinds, answers made again: a branch goes on as a session of its own would, and nothing is copied or lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from homes import chat_folder, check_home, check_session, model_folder, opened, prompt, said, turns, written
from test_concurrency import cancel_at

from agentkv import AgentKV, Session
from agentkv.api.errors import envelope
from agentkv.cli.lineage import trees
from agentkv.errors import InvalidRequest, SessionBusy, SessionDeleted, SessionNotFound, StorageError
from agentkv.kv.paged import PagedKV
from agentkv.sessions.storing import ChunkWriter

TOKENS = 8


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, models: Path) -> Path:
    return model_folder(models, request.param)


async def alone(kv: AgentKV, inputs: Sequence[Sequence[int]], **created: Any) -> list[tuple[int, ...]]:
    """What a session says that hears nothing else."""
    return [reply.ids for reply in await said(await kv.sessions.create(**created), inputs, TOKENS)]


async def ends(session: Session) -> list[str]:
    """The id of each turn's last item."""
    found: dict[int, str] = {item.turn: item.id for item in await session.items()}
    return list(found.values())


def taken_pages(kv: PagedKV) -> list[int]:
    """Pages in use, by layer group."""
    return [table.pool.nbytes // table.pool.page_nbytes - table.pool.free for table in kv._tables]


@pytest.mark.short(4)
@pytest.mark.parametrize("layout", ["dynamic", "paged"])
@pytest.mark.parametrize("where", ["live", "host", "disk"])
async def test_both_sides_of_a_fork_go_on_as_two_sessions_would(
    tmp_path: Path, model: Path, layout: str, where: str
) -> None:
    first, second, third, other = [*turns(3), prompt(33, 99)]
    async with opened(tmp_path, model, layout=layout) as kv:
        session = await kv.sessions.create()
        await said(session, [first, second], TOKENS)
        if where != "live":
            await session.suspend(where)
        fork = await session.fork()
        earlier = await session.fork((await ends(session))[0])
        branches = (session, third), (fork, other), (earlier, other)
        there = [(await said(branch, [ids], TOKENS))[0].ids for branch, ids in branches]
        assert there == [
            (await alone(kv, [first, second, third]))[-1],
            (await alone(kv, [first, second, other]))[-1],
            (await alone(kv, [first, other]))[-1],
        ]
        for each in (session, fork, earlier):
            await check_session(kv, each)
        assert fork._core.record.parent_id == earlier._core.record.parent_id == session.id
        await check_home(kv)


async def test_a_fork_reuses_what_was_computed_and_copies_no_file(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path, model_folder(models)) as kv:
        session = await kv.sessions.create()
        await said(session, [prompt(400), prompt(60, 2)], TOKENS)
        await session.suspend("disk")
        files = dict(kv.sessions.tiers.blobs.list())
        middle = (await session.items())[1]
        forks = [await session.fork() for _ in range(3)] + [await session.fork(middle.id)]
        assert dict(kv.sessions.tiers.blobs.list()) == files
        for fork in forks:
            reply = await fork.generate_tokens(prompt(10, 3), max_tokens=2)
            start = middle.span.stop if fork is forks[-1] else 400 + 60 + 2 * TOKENS
            assert reply.usage.cached_tokens == start - 1
            assert reply.restore.source == "disk"
        await session.delete()
        await forks[0].delete()
        again = await forks[1].generate_tokens(prompt(10, 4), max_tokens=2)
        assert again.usage.cached_tokens >= start - 1
        await check_home(kv)


async def test_on_the_device_a_fork_takes_no_memory_until_one_side_writes(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path, model_folder(models), layout="paged") as kv:
        session = await kv.sessions.create()
        await said(session, [prompt(600)], TOKENS)
        kv_state = session._core.kv
        assert isinstance(kv_state, PagedKV)
        taken = taken_pages(kv_state)
        forks = [await session.fork() for _ in range(8)]
        assert all(fork._core.kv is not None for fork in forks)
        assert taken_pages(kv_state) == taken
        await said(forks[0], [prompt(8)], 2)
        assert taken_pages(kv_state) > taken, "a fork that writes takes pages of its own"


@pytest.mark.short(3)
@pytest.mark.parametrize("where", ["live", "disk"])
@pytest.mark.parametrize("policy", ["full", "sink:96,sinks=8"])
async def test_a_session_that_went_back_goes_on_as_if_nothing_had_been_said_since(
    tmp_path: Path, model: Path, where: str, policy: str
) -> None:
    first, second, third = turns(3)
    async with opened(tmp_path, model) as kv:
        session = await kv.sessions.create(policy=policy)
        await said(session, [first, second, third], TOKENS)
        before = await session.token_ids()
        if where == "disk":
            await session.suspend("disk")
        told = await session.rewind(turns=2, dry_run=True)
        assert await session.token_ids() == before
        done = await session.rewind((await ends(session))[0])
        assert (done.items, done.tokens, done.recompute_tokens) == (told.items, told.tokens, told.recompute_tokens)
        assert done.items == 4
        await check_session(kv, session)
        assert await session.token_ids() == before[: done.ledger_tokens]
        reply = (await said(session, [third], TOKENS))[0]
        assert reply.ids == (await alone(kv, [first, third], policy=policy))[-1]
        assert reply.usage.cached_tokens == done.ledger_tokens - done.recompute_tokens
        await check_session(kv, session)
        await check_home(kv)
    async with opened(tmp_path, model) as kv:
        await check_session(kv, await kv.sessions.get(session.id))


async def test_going_back_behind_what_was_evicted_is_computed_and_told_before(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path, model_folder(models)) as kv:
        session = await kv.sessions.create(policy="sink:64,sinks=4")
        inputs = [prompt(40 + i, i) for i in range(6)]
        await said(session, inputs, TOKENS)
        told = await session.rewind(turns=4, dry_run=True)
        assert told.recompute_tokens > 0
        assert told.recompute_seconds is None or told.recompute_seconds > 0
        await session.rewind(turns=4)
        reply = (await said(session, [prompt(30, 50)], TOKENS))[0]
        assert reply.ids == (await alone(kv, [*inputs[:2], prompt(30, 50)], policy="sink:64,sinks=4"))[-1]


@pytest.mark.parametrize("where", ["live", "disk"])
async def test_an_answer_is_made_again_in_its_place(tmp_path: Path, models: Path, where: str) -> None:
    model = chat_folder(models)
    async with opened(tmp_path, model) as kv:
        session = await kv.sessions.create(system="You are a helpful assistant.")
        first = await session.send("How is the weather?", max_tokens=TOKENS, ignore_eos=True)
        if where == "disk":
            await session.suspend("disk")
        items = await session.items()
        again = await session.regenerate(max_tokens=TOKENS, ignore_eos=True)
        assert again.ids == first.ids
        assert [item.role for item in await session.items()] == [item.role for item in items]
        other = await session.regenerate(max_tokens=TOKENS, temperature=2.0, seed=3, ignore_eos=True)
        assert other.ids != first.ids
        assert (await session.items())[-1].id == other.item_id
        await check_session(kv, session)
        twin = await kv.sessions.create(system="You are a helpful assistant.")
        same = await twin.send("How is the weather?", max_tokens=TOKENS, temperature=2.0, seed=3, ignore_eos=True)
        assert same.ids == other.ids
        assert await twin.token_ids() == await session.token_ids()
        following = [await s.send("Paris?", max_tokens=TOKENS) for s in (session, twin)]
        assert following[0].ids == following[1].ids
        await check_home(kv)


@pytest.mark.parametrize("where", ["live", "disk"])
async def test_an_answer_that_cannot_be_made_again_is_still_there(
    tmp_path: Path, models: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, chat_folder(models)) as kv:
        session = await kv.sessions.create(system="You are a helpful assistant.")
        await session.send("How is the weather?", max_tokens=TOKENS, ignore_eos=True)
        before, items = await session.token_ids(), await session.items()
        for cause in ("cancelled", "failed"):
            if where == "disk":
                await session.suspend("disk")
            if cause == "failed":

                async def refused(*_args: Any, **_more: Any) -> None:
                    raise StorageError("the disk is gone")

                monkeypatch.setattr(kv.sessions.repository, "commit_turn", refused)
                with pytest.raises(StorageError):
                    await session.regenerate(max_tokens=TOKENS, ignore_eos=True)
                monkeypatch.undo()
            else:
                task = asyncio.create_task(session.regenerate(max_tokens=500, ignore_eos=True))
                await asyncio.sleep(0.2)
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled()
            assert await session.token_ids() == before
            assert await session.items() == items
            await check_session(kv, session)
        twin = await kv.sessions.create(system="You are a helpful assistant.")
        await twin.send("How is the weather?", max_tokens=TOKENS, ignore_eos=True)
        following = [await s.send("Paris?", max_tokens=TOKENS) for s in (session, twin)]
        assert following[0].ids == following[1].ids
        await written(kv)
        await check_home(kv)


async def test_a_fork_during_a_turn_holds_what_was_committed_before(tmp_path: Path, models: Path) -> None:
    first, second, other = [*turns(2), prompt(33, 99)]
    async with opened(tmp_path, model_folder(models)) as kv:
        session = await kv.sessions.create()
        await said(session, [first], TOKENS)
        ledger = await session.token_ids()
        running = asyncio.create_task(session.generate_tokens(second, max_tokens=300))
        while not session._core.turns:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        fork = await session.fork()
        with pytest.raises(SessionBusy):
            await session.rewind(turns=1)
        assert not running.done()
        assert await fork.token_ids() == ledger
        assert (await said(fork, [other], TOKENS))[0].ids == (await alone(kv, [first, other]))[-1]
        await running


@pytest.mark.parametrize("where", ["of a running session", "for which memory is not free"])
async def test_a_fork_has_what_the_disk_was_still_writing(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    store = ChunkWriter.store

    async def slow(*given: Any) -> Any:
        await asyncio.sleep(0.3)
        return await store(*given)

    monkeypatch.setattr(ChunkWriter, "store", slow)
    async with opened(tmp_path, model_folder(models)) as kv:
        session, tiers = await kv.sessions.create(), kv.sessions.tiers
        (first,) = await said(session, turns(1), TOKENS)
        while (writing := session._core.writing) is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        (end,) = await ends(session)
        if where == "of a running session":
            running = asyncio.create_task(session.generate_tokens(prompt(33, 5), max_tokens=40))
            while not session._core.turns:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert not writing.done()
            fork = await session.fork(end)
            await running
        else:
            roomy, tiers.device_budget = tiers.device_budget, tiers.device_bytes
            fork = await session.fork()
            tiers.device_budget = roomy
        (reply,) = await said(fork, [prompt(12, 6)], TOKENS)
        assert reply.restore.reason is None
        assert reply.usage.cached_tokens == first.usage.total_tokens - 1


async def test_what_cannot_be_cut_there_is_refused_by_name(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path, model_folder(models)) as kv:
        session = await kv.sessions.create()
        with pytest.raises(InvalidRequest, match="no answer"):
            await session.regenerate(max_tokens=3)
        await said(session, turns(2), TOKENS)
        for work in (
            session.fork("item_nobody"),
            session.rewind("item_nobody"),
            session.rewind(),
            session.rewind(turns=3),
            session.rewind(turns=-1),
        ):
            with pytest.raises(InvalidRequest):
                await work
        assert (await session.rewind(turns=0)).tokens == 0
        await session.rewind(turns=2)
        assert await session.token_ids() == []
        assert (await said(session, turns(1), TOKENS))[0].ids == (await alone(kv, turns(1)))[0]
        await check_home(kv)


async def test_samples_equal_sessions_of_their_own_and_leave_theirs_as_it_was(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path, chat_folder(models)) as kv:
        session = await kv.sessions.create(system="You are a helpful assistant.")
        await session.send("How is the weather?", max_tokens=TOKENS)
        ledger = await session.token_ids()
        greedy = await session.sample("Paris?", n=3, max_tokens=TOKENS)
        drawn = await session.sample("Paris?", n=3, max_tokens=TOKENS, temperature=1.5, seed=7)
        assert await session.token_ids() == ledger
        replies = [branch.reply for branch in (*greedy, *drawn)]
        assert len({reply.ids for reply in replies[3:] if reply}) > 1
        for i, reply in enumerate(replies):
            assert reply is not None
            twin = await kv.sessions.create(system="You are a helpful assistant.")
            await twin.send("How is the weather?", max_tokens=TOKENS)
            sampling: dict[str, Any] = {} if i < 3 else {"temperature": 1.5, "seed": 7 + i - 3}
            assert (await twin.send("Paris?", max_tokens=TOKENS, **sampling)).ids == reply.ids
            await twin.delete()
        for branch in (*greedy, *drawn):
            await check_session(kv, branch.session)
            await branch.session.delete()
        await check_home(kv)


async def test_where_one_sample_fails_none_is_left(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path, chat_folder(models)) as kv:
        session = await kv.sessions.create()
        for work in (
            session.sample("Paris?", n=2, top_k=-4),
            session.sample("Paris?", n=0),
            session.sample([{"role": "tool", "content": 3}], n=2),
        ):
            with pytest.raises(InvalidRequest):
                await work
        task = asyncio.create_task(session.sample("Paris?", n=3, max_tokens=500, ignore_eos=True))
        while len(await kv.sessions.list()) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [record.id for record in await kv.sessions.list()] == [session.id]


async def test_an_edited_question_is_answered_in_a_fork(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path, chat_folder(models)) as kv:
        session = await kv.sessions.create(system="You are a helpful assistant.")
        for text in ("How is the weather?", "Paris?", "How?"):
            await session.send(text, max_tokens=TOKENS)
        ledger, items = await session.token_ids(), await session.items()
        once = await session.edit(items[3].id, "weather in Paris", max_tokens=TOKENS)
        all_again = await session.edit(items[1].id, "Hello", replay=True, max_tokens=TOKENS)
        put = await session.edit(items[2].id, "It is fine.")
        assert await session.token_ids() == ledger
        for branch, texts in (
            (once, ["How is the weather?", "weather in Paris"]),
            (all_again, ["Hello", "Paris?", "How?"]),
        ):
            twin = await kv.sessions.create(system="You are a helpful assistant.")
            said_there = [await twin.send(text, max_tokens=TOKENS) for text in texts]
            assert branch.reply is not None
            assert branch.reply.ids == said_there[-1].ids
            assert await branch.session.token_ids() == await twin.token_ids()
        assert put.reply is None
        assert [item.text for item in await put.session.items()][1:] == ["How is the weather?", "It is fine."]
        with pytest.raises(InvalidRequest, match="system prompt"):
            await session.edit(items[0].id, "Be rude.")


async def test_the_tree_shows_who_was_forked_from_whom(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path, model_folder(models)) as kv:
        root = await kv.sessions.create(agent_id="root")
        await said(root, turns(2), 4)
        child = await root.fork()
        grandchild = await child.fork((await ends(child))[0])
        orphan = await (middle := await root.fork(turns=1)).fork()
        await middle.delete()
        settings, start = kv.settings, (await root.items())[1].span.stop
    found = await trees(settings, None)
    assert [node["id"] for node in found] == [root.id, orphan.id]
    assert found[1]["parent_id"] == middle.id
    (below,) = found[0]["forks"]
    assert (below["id"], [node["id"] for node in below["forks"]]) == (child.id, [grandchild.id])
    assert below["forks"][0]["forked_at"] == below["forks"][0]["tokens"] == start
    assert [node["id"] for node in await trees(settings, grandchild.id)] == [root.id]
    with pytest.raises(SessionNotFound):
        await trees(settings, "sess_nobody")


async def test_an_answer_being_made_again_that_is_cancelled_at_any_await_is_the_old_or_the_new_one(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = set()
    async with opened(tmp_path, chat_folder(models)) as kv:
        for at in range(1, 60):
            session = await kv.sessions.create(system="You are Bolt.")
            await session.send("Paris?", max_tokens=4, ignore_eos=True)
            before = await session.token_ids()
            again = await cancel_at(
                monkeypatch, at, lambda session=session: session.regenerate(max_tokens=6, ignore_eos=True)
            )
            async with session._core.gate:
                record = await kv.sessions.repository.get_session(session.id)
            ours = session._core.record
            assert (record.ledger_length, record.turns, record.kv_length) == (
                ours.ledger_length,
                ours.turns,
                ours.kv_length,
            ), at
            outcomes.add(record.ledger_length - len(before))
            await session.send("How?", max_tokens=4)
            await check_session(kv, session)
            await session.delete()
            if again is None:
                break
        else:
            pytest.fail("no await was left uncancelled: it never came to its end")
        assert outcomes == {0, 2}
        await check_home(kv)


async def test_forks_while_turns_are_committed_are_whole(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path / "home", model_folder(models)) as kv:
        session = await kv.sessions.create()
        talking = asyncio.create_task(said(session, turns(25, tokens=6), 4))
        forks = []
        while not talking.done():
            forks.append(await session.fork())
            await asyncio.sleep(0)
        replies = await talking
        ledger = await session.token_ids()
        assert len(replies) == 25 and len(forks) > 2
        for fork in forks:
            ids = await fork.token_ids()
            assert ids == ledger[: len(ids)]
            await check_session(kv, fork)
        assert len({fork.record.ledger_length for fork in forks}) > 1, "none of them met a turn"


async def test_a_session_that_was_deleted_is_not_found(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path / "home", model_folder(models)) as kv:
        session = await kv.sessions.create()
        await said(session, turns(1))
        await kv.sessions.delete(session.id)
        with pytest.raises(SessionDeleted) as caught:
            await session.suspend()
        status, body, headers = envelope(caught.value)
        assert (status, body["error"]["code"]) == (404, "session_not_found") and "Retry-After" not in headers
