"""A conversation is found again by what was said in it, on a real runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from homes import chat_folder, check_home, check_session, opened

from agentkv import Done
from agentkv.errors import ContextTooLong, SessionBusy
from agentkv.schemas.constraints import Constraint
from agentkv.schemas.replies import Begun, Reply
from agentkv.schemas.sampling import SamplingParams
from agentkv.sessions.following import followed
from agentkv.sessions.histories import History
from agentkv.sessions.manager import Sessions
from agentkv.sessions.recognising import Recognised, recognised

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("models"))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said_as(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def said(reply: Reply) -> dict[str, Any]:
    return said_as(reply.text)


async def taken(found: Recognised, **sampling: Any) -> Reply:
    """The reply; what was reused is what the engine did not compute."""
    async with aclosing(found.stream(SamplingParams.build(**{"max_tokens": 6} | sampling))) as events:
        async for event in events:
            if isinstance(event, Begun):
                assert event.session_id == found.session.id
            if isinstance(event, Done):
                return event.reply
    raise AssertionError


async def answered(sessions: Sessions, messages: Sequence[Any], **sampling: Any) -> Reply:
    return await taken(await recognised(sessions, History.of(list(messages))), **sampling)


async def test_reasoning_that_the_client_leaves_out_does_not_count(tmp_path: Path, model: Path) -> None:
    thinks = Constraint.regex("<think>[ab]{4}</think>ok")
    async with opened(tmp_path, model) as kv:
        first = await answered(kv.sessions, [SYSTEM, user("Think.")], constraint=thinks, max_tokens=60)
        assert first.text.endswith("</think>ok")
        for text in (" ok", first.text):
            history = [SYSTEM, user("Think."), said_as(text), user("Why?")]
            found = await recognised(kv.sessions, History.of(history))
            assert (found.session.id, found.matched) == (first.session_id, 2)
        other = await recognised(
            kv.sessions, History.of([*history[:2], {"role": "assistant", "content": "no"}, history[3]])
        )
        assert (other.session.id == first.session_id, other.matched) == (False, 1)


async def test_of_two_at_once_one_goes_on_and_one_is_a_fork_and_none_is_refused(tmp_path: Path, model: Path) -> None:
    async with opened(tmp_path, model) as kv:
        history = [SYSTEM, user("Who?")]
        first = await answered(kv.sessions, history)
        history += [said(first), user("And?")]
        # Both are placed before either has begun: they want the same session.
        places = [await recognised(kv.sessions, History.of(history)) for _ in range(3)]
        assert {place.session.id for place in places} == {first.session_id}
        replies = await asyncio.gather(*map(taken, places))
        assert len({reply.text for reply in replies}) == 1
        assert len({reply.session_id for reply in replies}) == 3
        assert first.session_id in {reply.session_id for reply in replies}
        assert min(reply.usage.cached_tokens for reply in replies) == first.usage.total_tokens - 1
        # One that was placed before the session went on must not land behind what came since.
        late = await recognised(kv.sessions, History.of([*history[:3], user("Late?")]))
        assert late.made
        for record in await kv.sessions.list():
            await check_session(kv, await kv.sessions.get(record.id))


async def test_a_place_that_has_gone_on_meanwhile_is_forked(tmp_path: Path, model: Path) -> None:
    async with opened(tmp_path, model) as kv:
        history = [SYSTEM, user("Who?")]
        first = await answered(kv.sessions, history)
        history += [said(first), user("And?")]
        early, late = [await recognised(kv.sessions, History.of(history)) for _ in range(2)]
        one = await taken(early)
        other = await taken(late)
        assert one.session_id == first.session_id != other.session_id
        assert other.text == one.text, "it has seen what the other one has said"


async def test_what_fails_or_is_given_up_leaves_no_session(tmp_path: Path, model: Path) -> None:
    async with opened(tmp_path, model) as kv:
        with pytest.raises(ContextTooLong):
            await answered(kv.sessions, [user("long " * 2000)])
        assert await kv.sessions.list() == []
        found = await recognised(kv.sessions, History.of([user("Given up?")]))
        async with aclosing(found.stream(SamplingParams.build(max_tokens=200))) as events:
            await anext(events)
        assert await kv.sessions.list() == []
        first = await answered(kv.sessions, [user("Kept?")])
        assert [record.id for record in await kv.sessions.list()] == [first.session_id]
        found = await recognised(kv.sessions, History.of([user("Kept?"), said(first), user("Given up?")]))
        async with aclosing(found.stream(SamplingParams.build(max_tokens=200))) as events:
            await anext(events)
        assert found.session.record.ledger_length == first.usage.total_tokens
        await check_home(kv)


async def test_only_a_named_session_that_runs_refuses_new_messages(tmp_path: Path, model: Path) -> None:
    async with opened(tmp_path, model) as kv:
        session = await kv.sessions.create(system=SYSTEM["content"])
        first = await session.send("Who?", max_tokens=6)
        running = await followed(kv.sessions, session, History.of([user("And?")]))
        new = await followed(kv.sessions, session, History.of([user("Or?")]))
        whole = await followed(kv.sessions, session, History.of([user("Who?"), said(first), user("And?")]))
        async with aclosing(running.stream(SamplingParams.build(max_tokens=100))) as events:
            await anext(events)
            with pytest.raises(SessionBusy):
                await taken(new)
            beside = await taken(whole)
        assert beside.session_id != session.id
        assert beside.usage.cached_tokens == first.usage.total_tokens - 1
        assert (await kv.sessions.get(beside.session_id)).record.anonymous
        assert not session.record.anonymous


async def test_an_imported_conversation_and_one_that_went_back_are_found(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "session.akv"
    async with opened(tmp_path / "a", model) as kv:
        history = [SYSTEM, user("Who?")]
        first = await answered(kv.sessions, history)
        history += [said(first), user("And?")]
        await answered(kv.sessions, history)
        session = await kv.sessions.get(first.session_id)
        await session.rewind(turns=1)
        again = await recognised(kv.sessions, History.of(history))
        assert (again.session.id, again.matched) == (session.id, 2)
        await session.export(file)
    async with opened(tmp_path / "b", model) as kv:
        imported = await kv.sessions.import_(file)
        found = await recognised(kv.sessions, History.of(history))
        assert found.matched == 2
        reply = await taken(found)
        assert reply.session_id != imported.id, "somebody holds its id"
        assert reply.usage.cached_tokens == first.usage.total_tokens - 1


async def test_tenants_and_policies_keep_conversations_apart(tmp_path: Path, model: Path) -> None:
    history = [SYSTEM, user("Who?")]
    async with opened(tmp_path, model) as kv:
        first = await answered(kv.sessions, history)
        history += [said(first), user("And?")]
        other = await recognised(kv.tenant("other"), History.of(history))
        assert (other.made, other.matched) == (True, 0)
    async with opened(tmp_path, model, default_policy="sink:512") as kv:
        found = await recognised(kv.sessions, History.of(history))
        assert (found.made, found.matched) == (True, 0)


async def test_a_key_that_may_have_no_more_sessions_gives_up_the_oldest_that_nobody_named(
    tmp_path: Path, model: Path
) -> None:
    async with opened(tmp_path, model) as kv:
        key, _ = await kv.sessions.repository.create_key("ann", max_sessions=2)
        sessions = kv.tenant(key.tenant)
        replies = [await answered(sessions, [user(f"Who, {name}?")]) for name in "abc"]
        left = {record.id for record in await sessions.list()}
        assert left == {reply.session_id for reply in replies[1:]}


async def test_a_conversation_of_many_messages_is_found_from_its_end(tmp_path: Path, model: Path) -> None:
    async with opened(tmp_path, model) as kv:
        history: list[Any] = [SYSTEM]
        for index in range(600):
            history += [user(str(index % 10)), said_as("k")]
        made = History.of([*history[:31], user("?")])
        first = await taken(await recognised(kv.sessions, made))
        found = await recognised(kv.sessions, History.of([*history[:31], user("?"), said(first), *history[31:]]))
        assert (found.session.id, found.matched) == (first.session_id, 32)
