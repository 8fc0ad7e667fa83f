"""Sessions with an equal head: computed once, stored once, and never at the price of an answer."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from homes import chat_folder, check_home, check_session, model_folder, opened, written

from agentkv import AgentKV
from agentkv.schemas.replies import Reply
from agentkv.sessions.session import Session
from agentkv.storage.chunkfile import read_header
from agentkv.types import Span

LONG = "You are Bolt, a terse assistant who looks things up before answering, and says where each answer comes from."
VERY_LONG = " ".join(f"{i}. {LONG}" for i in range(4))
QUESTIONS = ("How is the weather in Paris?", "And in Rome?", "What did I ask first?")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


async def asked(session: Session, *questions: str) -> list[Reply]:
    return [await session.send(text, max_tokens=8, ignore_eos=True) for text in questions or QUESTIONS]


async def alone(home: Path, model: Path, *questions: str, **create: Any) -> list[tuple[int, ...]]:
    """The replies of a session that shares its home with nobody."""
    async with opened(home, model) as kv:
        return [reply.ids for reply in await asked(await kv.sessions.create(**create), *questions)]


async def head(kv: AgentKV, session: Session) -> list[str]:
    """Chunks that hold the session's pinned prefix."""
    manifest = await kv.sessions.repository.manifest(session.id)
    return [s.chunk_id for s in manifest.segments if s.span.stop <= session._core.record.pinned]


def blob(home: Path, name: str) -> Path:
    return home / "blobs" / name[:2] / name


def attached(reply: Reply, pinned: int, source: str = "disk") -> None:
    restore = reply.restore
    assert (restore.source, restore.tokens, restore.reason) == (source, pinned, None)
    assert (reply.usage.cached_tokens, restore.recomputed_tokens) == (pinned, 0)


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.short(3)
@pytest.mark.parametrize(
    ("family", "policy", "system"),
    [
        ("llama", "full", LONG),
        ("llama", "sink:400", VERY_LONG[:330]),
        ("llama", "turns:360", LONG),
        ("gemma3", "full", VERY_LONG),
        ("gemma3", "sink:300", LONG),
        ("mistral", "full", LONG),
        ("gpt_neox", "sliding:200", LONG),
        ("gpt2", "full", LONG),
        ("qwen3_next", "full", VERY_LONG),
        *(
            pytest.param(family, policy, system, marks=pytest.mark.full)
            for family in ("gemma2", "gpt_oss", "glm", "cohere2", "smollm3", "qwen2")
            for policy in ("full", "sink:400", "turns:500")
            for system in (LONG, VERY_LONG[:330])
        ),
    ],
)
async def test_the_second_session_begins_with_the_first_ones_head_and_answers_as_if_alone(
    models: Path, tmp_path: Path, family: str, policy: str, system: str
) -> None:
    model, create = chat_folder(models, family), {"system": system, "policy": policy}
    questions = (*QUESTIONS, "Once more, and at length please: " + "why? " * 30, *QUESTIONS)
    twin = await alone(tmp_path / "twin", model, *questions, **create)
    async with opened(tmp_path / "home", model) as kv:
        first = await kv.sessions.create(**create)
        assert (await asked(first, "Something else entirely"))[0].restore.source == "new"
        await written(kv)
        second = await kv.sessions.create(**create)
        replies = await asked(second, *questions)
        pinned = (await second.state()).pinned.stop
        assert pinned >= 64
        attached(replies[0], pinned)
        assert [reply.ids for reply in replies] == twin
        assert [reply.restore.source for reply in replies[1:]] == ["device"] * (len(questions) - 1)
        for session in (first, second):
            await check_session(kv, session)
            await session.suspend()
            report = await session.resume()
            assert (report.source, report.reason, report.recomputed_tokens) == ("disk", None, 0)
            await check_session(kv, session)
        await check_home(kv)
    async with opened(tmp_path / "home", model) as kv:
        third = await kv.sessions.create(**create)
        shared = await head(kv, await kv.sessions.get(first.id))
        replies = await asked(third, *questions)
        if shared:
            attached(replies[0], pinned)
        else:
            assert policy.startswith("sliding"), "only a policy that gives up the head has none to share"
        assert [reply.ids for reply in replies] == twin
        await check_session(kv, third)


async def test_a_session_whose_first_turn_evicts_shares_its_head_all_the_same(models: Path, tmp_path: Path) -> None:
    """The head was computed before anything was evicted: its KV is anybody's with that head."""
    model, create = chat_folder(models), {"system": LONG, "policy": "sink:260"}
    long = "Tell me all of it. " * 20
    twin = await alone(tmp_path / "twin", model, "Hello", QUESTIONS[0], **create)
    async with opened(tmp_path / "home", model) as kv:
        first = await kv.sessions.create(**create)
        await asked(first, long)
        await written(kv)
        assert (await first.state()).evicted
        second = await kv.sessions.create(**create)
        replies = await asked(second, "Hello", QUESTIONS[0])
        attached(replies[0], (await second.state()).pinned.stop)
        assert [reply.ids for reply in replies] == twin
        third = await kv.sessions.create(system=LONG)
        attached((await asked(third, "Hello"))[0], (await third.state()).pinned.stop)
        await check_home(kv)


async def test_a_head_in_host_memory_is_taken_from_there(models: Path, tmp_path: Path) -> None:
    model = chat_folder(models)
    twin = await alone(tmp_path / "twin", model, system=LONG)
    async with opened(tmp_path / "home", model) as kv:
        first = await kv.sessions.create(system=LONG)
        await asked(first)
        assert (await first.suspend(tier="host")).tier == "host"
        second = await kv.sessions.create(system=LONG)
        replies = await asked(second)
        attached(replies[0], (await second.state()).pinned.stop, "host")
        assert [reply.ids for reply in replies] == twin
        await check_session(kv, first)
        await check_home(kv)


async def test_what_is_computed_is_counted(models: Path, tmp_path: Path) -> None:
    """``cached_tokens`` is what the engine did not compute: its steps say so."""
    async with opened(tmp_path / "home", chat_folder(models)) as kv:
        first = await kv.sessions.create(system=LONG)
        await asked(first, QUESTIONS[0])
        await written(kv)
        second = await kv.sessions.create(system=LONG)
        fed: list[int] = []
        layout = kv.model.layout
        plan = layout.plan

        def watched(slots: Any) -> Any:
            fed.extend(slot.tokens for slot in slots)
            return plan(slots)

        layout.plan = watched
        (reply,) = await asked(second, QUESTIONS[0])
        del layout.plan
        assert sum(fed) == reply.usage.prompt_tokens - reply.usage.cached_tokens + len(reply.ids) - 1


# -- bytes -------------------------------------------------------------------------------------------------------------


async def many(kv: AgentKV, count: int, system: str) -> list[Session]:
    sessions = []
    for i in range(count):
        session = await kv.sessions.create(system=system)
        (reply,) = await asked(session, f"Number {i}?")
        pinned = session._core.record.pinned
        await written(kv)
        if i:
            attached(reply, pinned)
        await session.suspend()
        sessions.append(session)
    return sessions


async def stores_its_head_once(kv: AgentKV, count: int, system: str) -> None:
    sessions = await many(kv, count, system)
    pinned = sessions[0]._core.record.pinned
    heads = {tuple(await head(kv, session)) for session in sessions}
    (names,) = heads
    assert len(names) == -(-pinned // 256)
    blobs = kv.sessions.tiers.blobs
    once = sum(blobs.size(name) for name in names)
    tails = [await kv.sessions.repository.manifest(session.id) for session in sessions]
    own = sum(blobs.size(s.chunk_id) for manifest in tails for s in manifest.segments if s.chunk_id not in names)
    assert blobs.used_bytes() == once + own
    assert len(dict(blobs.list())) == len(names) + count
    await check_home(kv)


async def test_twenty_sessions_store_one_long_system_prompt_once(models: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", chat_folder(models)) as kv:
        await stores_its_head_once(kv, 20, VERY_LONG)


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_a_thousand_sessions_store_a_system_prompt_of_two_thousand_tokens_once(
    models: Path, tmp_path: Path
) -> None:
    model = models / "larger"
    shutil.copytree(chat_folder(models), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    system = " ".join(f"{i}. {LONG}" for i in range(100))
    async with opened(tmp_path / "home", model) as kv:
        tokens = len(kv.model.tokenizer.encode(system))
        system = system[: int(len(system) * 2000 / tokens)]
        await stores_its_head_once(kv, 1000, system)
        assert kv.sessions.cores()[-1].record.pinned >= 1950


async def test_heads_too_short_to_look_up_are_stored_once_too(models: Path, tmp_path: Path) -> None:
    model = chat_folder(models)
    async with opened(tmp_path / "home", model) as kv:
        sessions = [await kv.sessions.create(system="You are terse.") for _ in range(3)]
        for i, session in enumerate(sessions):
            (reply,) = await asked(session, f"Number {i}?")
            assert (reply.restore.source, reply.usage.cached_tokens) == ("new", 0)
            await written(kv)
        assert 0 < sessions[0]._core.record.pinned < 64
        assert len({tuple(await head(kv, session)) for session in sessions}) == 1
        assert len(dict(kv.sessions.tiers.blobs.list())) == 1 + len(sessions)
        await check_home(kv)
        for i, session in enumerate(sessions):
            await session.delete()
            await check_home(kv)
            assert len(dict(kv.sessions.tiers.blobs.list())) == (3 - i if i < 2 else 0)


# -- who never shares --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [("int8", "exact"), ("exact", "int8"), ("int8", "int4")])
async def test_exact_and_lossy_sessions_never_share(models: Path, tmp_path: Path, first: str, second: str) -> None:
    model = chat_folder(models)
    twin = await alone(tmp_path / "twin", model, system=VERY_LONG)
    async with opened(tmp_path / "home", model) as kv:
        one = await kv.sessions.create(system=VERY_LONG, idle_codec=first)
        await asked(one)
        await one.suspend()
        two = await kv.sessions.create(system=VERY_LONG, idle_codec=second)
        replies = await asked(two)
        assert (replies[0].restore.source, replies[0].usage.cached_tokens) == ("new", 0)
        assert [reply.ids for reply in replies] == twin
        await two.suspend()
        assert not set(await head(kv, one)) & set(await head(kv, two))
        blobs = kv.sessions.tiers.blobs
        for session, codec in ((one, first), (two, second)):
            parts = {p.codec for name in await head(kv, session) for p in read_header(blobs.get(name), name).parts}
            assert codec in parts, "the control: the heads of lossy sessions are sealed"


async def test_sessions_of_one_lossy_codec_share_what_was_sealed_once(models: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", chat_folder(models, "gemma3"), idle_codec="int8") as kv:
        first = await kv.sessions.create(system=VERY_LONG)
        await asked(first)
        await first.suspend()
        names = await head(kv, first)
        sealed = {name: bytes(kv.sessions.tiers.blobs.get(name)) for name in names}
        codecs = {p.codec for name, data in sealed.items() for p in read_header(data, name).parts}
        assert codecs == {"int8", "exact"}
        for i in range(3):
            session = await kv.sessions.create(system=VERY_LONG)
            (reply, *_) = await asked(session)
            attached(reply, session._core.record.pinned)
            assert set((reply.restore.codec or "").split("+")) == {"int8", "exact"}
            await session.suspend()
            assert await head(kv, session) == names, "encoded with loss once"
            report = await session.resume()
            assert (report.reason, report.recomputed_tokens) == (None, 0), i
            await check_session(kv, session)
        assert {name: bytes(kv.sessions.tiers.blobs.get(name)) for name in names} == sealed
        await check_home(kv)


async def test_another_secret_never_shares(models: Path, tmp_path: Path) -> None:
    """Tenants differ by their salt, which comes from the home's secret: with another one nothing is found."""
    model, home = chat_folder(models), tmp_path / "home"
    twin = await alone(tmp_path / "twin", model, system=LONG)
    async with opened(home, model) as kv:
        first = await kv.sessions.create(system=LONG)
        await asked(first)
        await written(kv)
        names = await head(kv, first)
    (home / "secret").write_bytes(bytes(range(32)))
    async with opened(home, model) as kv:
        second = await kv.sessions.create(system=LONG)
        replies = await asked(second)
        assert (replies[0].restore.source, replies[0].usage.cached_tokens) == ("new", 0)
        assert [reply.ids for reply in replies] == twin
        await written(kv)
        assert not set(names) & set(await head(kv, second))
        # Nor does the first one go on from files that are another tenant's now.
        (reply,) = await asked(await kv.sessions.get(first.id), "Go on")
        assert (reply.restore.source, (reply.restore.reason or "").split(":")[0]) == ("recompute", "fingerprint")
        await written(kv)
        await check_home(kv)


async def test_other_heads_other_weights_and_other_tools_share_nothing(models: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with opened(home, chat_folder(models)) as kv:
        await asked(await kv.sessions.create(system=LONG), QUESTIONS[0])
        await written(kv)
        for system in (LONG[:-1] + "!", LONG + " Always.", "X" + LONG[1:]):
            (reply,) = await asked(await kv.sessions.create(system=system), QUESTIONS[0])
            assert reply.restore.source == "new"
        waiting = await kv.sessions.create(system=LONG)
    async with opened(home, chat_folder(models, seed=1)) as kv:
        (reply,) = await asked(await kv.sessions.create(system=LONG), QUESTIONS[0])
        assert reply.restore.source == "new"
        await written(kv)
        # Created under the other weights, first spoken to under these.
        waiting = await kv.sessions.get(waiting.id)
        first = (await asked(waiting, QUESTIONS[0]))[0]
        assert (first.ids, first.restore.reason) == (reply.ids, None)
        await waiting.suspend()
        report = await waiting.resume()
        assert (report.source, report.reason) == ("disk", None)


async def test_token_sessions_have_no_head_to_share(models: Path, tmp_path: Path) -> None:
    async with opened(tmp_path / "home", model_folder(models)) as kv:
        for _ in range(2):
            session = await kv.sessions.create()
            reply = await session.generate_tokens(list(range(1, 100)), max_tokens=4)
            assert (reply.restore.source, reply.usage.cached_tokens) == ("new", 0)
            await written(kv)
        assert len(dict(kv.sessions.tiers.blobs.list())) == 1, "the same tokens, the same bits, the same file"


# -- damage, deletion, races -------------------------------------------------------------------------------------------


@pytest.mark.short(4)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
@pytest.mark.parametrize("which", [0, -1])
async def test_a_damaged_head_costs_a_recompute_and_never_an_answer(
    models: Path, tmp_path: Path, family: str, damage: str, which: int
) -> None:
    model, home = chat_folder(models, family), tmp_path / "home"
    twin = await alone(tmp_path / "twin", model, system=VERY_LONG)
    async with opened(home, model) as kv:
        first = await kv.sessions.create(system=VERY_LONG)
        await asked(first)
        await first.suspend()
        names = await head(kv, first)
        assert len(names) > 1
        path = blob(home, names[which])
        data = bytearray(path.read_bytes())
        if damage == "missing":
            path.unlink()
            kv.sessions.tiers.blobs._used -= len(data)  # type: ignore[attr-defined]
        elif damage == "truncated":
            path.write_bytes(data[:-9])
            kv.sessions.tiers.blobs._used -= 9  # type: ignore[attr-defined]
        else:
            header = read_header(bytes(data), names[which])
            full = next(i for i, group in enumerate(kv.model.adapter.geometry.groups) if group.window is None)
            part = next(part for part in header.parts if part.group == full)
            data[len(data) - header.payload_nbytes + part.offset + part.length // 2] ^= 1
            path.write_bytes(data)
        second = await kv.sessions.create(system=VERY_LONG)
        replies = await asked(second)
        assert [reply.ids for reply in replies] == twin
        restore = replies[0].restore
        assert restore.tokens == replies[0].usage.cached_tokens < second._core.record.pinned
        if restore.reason is not None:
            assert restore.reason.split(":")[0] in ("checksum", "truncated", "missing")
        await written(kv)
        third = await kv.sessions.create(system=VERY_LONG)
        assert [reply.ids for reply in await asked(third)] == twin
        # The first one's turn: it finds the file that the second wrote anew, or computes what it lacks.
        before = len(await first.token_ids())
        (reply,) = await asked(first, "Go on")
        assert len(reply.ids) == 8
        assert len(await first.token_ids()) > before
        for session in (first, second, third):
            await session.suspend()
            assert (await session.resume()).reason is None
            await check_session(kv, session)
        await check_home(kv)


async def test_shared_files_stay_until_the_last_user_goes_and_delete_says_what_it_freed(
    models: Path, tmp_path: Path
) -> None:
    async with opened(tmp_path / "home", chat_folder(models)) as kv:
        sessions = await many(kv, 3, VERY_LONG)
        blobs = kv.sessions.tiers.blobs
        names = await head(kv, sessions[0])
        once = sum(blobs.size(name) for name in names)
        for left, session in zip((2, 1, 0), sessions, strict=True):
            manifest = await kv.sessions.repository.manifest(session.id)
            own = sum(blobs.size(s.chunk_id) for s in manifest.segments if s.chunk_id not in names)
            before = blobs.used_bytes()
            freed = await session.delete()
            assert freed == before - blobs.used_bytes() == (own if left else own + once)
            assert all(blobs.exists(name) for name in names) is (left > 0)
            if left:
                (reply,) = await asked(sessions[-1], "Still there?")
                assert reply.restore.reason is None
                await sessions[-1].suspend()
            await check_home(kv)
        assert blobs.used_bytes() == 0


async def test_two_first_turns_at_once(models: Path, tmp_path: Path) -> None:
    model = chat_folder(models)
    twin = await alone(tmp_path / "twin", model, system=LONG)
    async with opened(tmp_path / "home", model) as kv:
        sessions = [await kv.sessions.create(system=LONG) for _ in range(6)]
        replies = await asyncio.gather(*(asked(session) for session in sessions))
        assert [[reply.ids for reply in each] for each in replies] == [twin] * 6
        await written(kv)
        await check_home(kv)
        late = await kv.sessions.create(system=LONG)
        attached((await asked(late))[0], late._core.record.pinned)
        for session in sessions:
            await session.suspend()
            assert (await session.resume()).reason is None
            await check_session(kv, session)


@pytest.mark.short(2)
@pytest.mark.parametrize("number", [*range(6), *(pytest.param(n, marks=pytest.mark.full) for n in range(6, 40))])
async def test_attaching_while_the_only_other_user_is_deleted(
    models: Path, tmp_path: Path, number: int, seed: int
) -> None:
    """Whichever comes first, and wherever in the other's way: the answer is right and every stored segment a file."""
    model = chat_folder(models)
    twin = await alone(tmp_path / "twin", model, system=LONG)
    async with opened(tmp_path / "home", model) as kv:
        print(f"seed {seed}, number {number}")
        for round_ in range(4):
            first = await kv.sessions.create(system=LONG)
            await asked(first, "Hello")
            await first.suspend()
            second = await kv.sessions.create(system=LONG)

            async def later(session: Session, pause: float) -> int:
                await asyncio.sleep(pause)
                return await session.delete()

            pause = 0.0004 * (number * 4 + round_)
            _, replies = await asyncio.gather(later(first, pause), asked(second))
            assert [reply.ids for reply in replies] == twin
            await written(kv)
            await check_home(kv)
            await check_session(kv, second)
            await second.suspend()
            report = await second.resume()
            assert (report.reason, report.recomputed_tokens) == (None, 0)
            await second.delete()
            assert kv.sessions.tiers.blobs.used_bytes() == 0


async def test_a_head_that_is_claimed_for_deletion_is_computed_and_stored_anew(models: Path, tmp_path: Path) -> None:
    model = chat_folder(models)
    twin = await alone(tmp_path / "twin", model, system=LONG)
    async with opened(tmp_path / "home", model) as kv:
        first = await kv.sessions.create(system=LONG)
        await asked(first, "Hello")
        await written(kv)
        names = await head(kv, first)
        repository = kv.sessions.repository
        await repository.delete_session(first.id)
        assert set(names) <= set(await repository.claim_garbage()), "claimed, and its file still there"
        second = await kv.sessions.create(system=LONG)
        replies = await asked(second)
        assert replies[0].restore.source == "new"
        assert [reply.ids for reply in replies] == twin
        await written(kv)
        assert kv.sessions.tiers.behind.storage_error is None
        assert await head(kv, second) == names
        await check_home(kv)


async def test_a_file_that_a_sweep_took_between_put_and_manifest_is_written_again(models: Path, tmp_path: Path) -> None:
    """The sweep claims the old chunk, the new session writes the same file, the sweep deletes and forgets it: only
    then is it named."""
    async with opened(tmp_path / "home", chat_folder(models)) as kv:
        writer, repository = kv.sessions.tiers.writer, kv.sessions.repository
        first = await kv.sessions.create(system="You are terse.")
        await asked(first, "Hello")
        await written(kv)
        names = await head(kv, first)
        await repository.delete_session(first.id)
        claimed = await repository.claim_garbage()
        put = writer.put

        async def put_then_swept(encoded: Any) -> None:
            await put(encoded)
            writer.put = put  # type: ignore[method-assign]
            await asyncio.to_thread(writer._delete, claimed)
            await repository.forget_chunks(claimed)

        writer.put = put_then_swept  # type: ignore[method-assign]
        second = await kv.sessions.create(system="You are terse.")
        await asked(second, "Hello")
        await written(kv)
        assert await head(kv, second) == names
        await check_home(kv)
        await second.suspend()
        assert (await second.resume()).reason is None


async def test_an_unfinished_head_is_used_as_far_as_it_reaches(models: Path, tmp_path: Path) -> None:
    """Where every prefix is a state; with sliding windows there is nothing to go on from, and it is computed."""
    for family, reached in (("llama", 256), ("gemma3", 0)):
        model, home = chat_folder(models, family), tmp_path / family
        twin = await alone(tmp_path / f"twin-{family}", model, system=VERY_LONG)
        async with opened(home, model) as kv:
            first = await kv.sessions.create(system=VERY_LONG)
            await asked(first, "Hello")
            await written(kv)
            await kv.sessions.repository.truncate_manifest(first.id, 256)
            await kv.sessions.tiers.writer.collect_garbage()
            first._core.stored = None
            second = await kv.sessions.create(system=VERY_LONG)
            replies = await asked(second)
            assert replies[0].usage.cached_tokens == reached
            assert [reply.ids for reply in replies] == twin
            await check_session(kv, second)
            assert Span(0, 256) in [s.span for s in (await kv.sessions.repository.manifest(second.id)).segments]
