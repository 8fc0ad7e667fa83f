"""Keys: a tenant each, whose secret is told once, and the limits that the runtime holds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from homes import check_home, check_session, model_folder, opened, prompt, said, turns, written
from typer.testing import CliRunner

from agentkv.cli.main import app
from agentkv.errors import InvalidRequest, KeyNotFound, LimitExceeded, QuotaReached
from agentkv.sessions.db.repository import Repository
from agentkv.sessions.events import LifecycleEvent

NEXT = prompt(11, 77)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture
async def repository(tmp_path: Path) -> AsyncIterator[Repository]:
    async with await Repository.open(f"sqlite:///{tmp_path / 'agentkv.db'}") as opened_:
        yield opened_


async def test_a_key_is_found_by_its_secret_until_it_is_revoked(repository: Repository, tmp_path: Path) -> None:
    limits = {"requests_per_minute": 60, "tokens_per_minute": 10_000, "max_sessions": 3, "max_disk": 2**31}
    key, secret = await repository.create_key("ann", admin=True, **limits)
    other, other_secret = await repository.create_key("bob")
    assert key.tenant.startswith("key_") and secret.startswith("akv_") and len(secret) == 4 + 43
    assert await repository.find_key(secret) == key
    assert await repository.find_key(other_secret) == other
    assert [(k.name, k.admin, k.max_disk) for k in await repository.keys()] == [
        ("ann", True, 2**31),
        ("bob", False, None),
    ]
    for wrong in ("", "akv_", secret[:-1], secret + "a", secret.swapcase(), key.id, "\ud800"):
        assert await repository.find_key(wrong) is None
    stored = await asyncio.to_thread(lambda: b"".join(path.read_bytes() for path in tmp_path.iterdir()))
    assert b"ann" in stored and secret.encode() not in stored and secret[4:].encode() not in stored
    await repository.key_used(key.id, 50.0)
    await repository.key_used(key.id, 40.0)
    revoked = await repository.revoke_key("ann")
    assert (revoked.id, revoked.last_used_at) == (key.id, 50.0)
    assert await repository.find_key(secret) is None
    assert await repository.find_key(other_secret) == other, "the control: another one's is as good as before"
    again, _ = await repository.create_key("ann")
    assert await repository.revoke_key(key.id) == revoked, "revoked once"
    assert (await repository.revoke_key("ann")).id == again.id
    with pytest.raises(InvalidRequest, match="2 keys are called 'ann'"):
        await repository.revoke_key("ann")


async def test_what_cannot_be_a_key_is_refused(repository: Repository) -> None:
    await repository.create_key("ann")
    wrong: tuple[dict[str, Any], ...] = ({"name": "ann"}, {"name": ""}, {"name": "a\nb"}, {"name": "c", "max_disk": -1})
    for given in wrong:
        with pytest.raises(InvalidRequest):
            await repository.create_key(**given)
    with pytest.raises(KeyNotFound):
        await repository.revoke_key("nobody")
    assert len(await repository.keys()) == 1


async def test_a_key_allows_so_many_sessions_however_they_come_to_be(tmp_path: Path, model: Path) -> None:
    async with opened(tmp_path / "home", model) as kv:
        key, _ = await kv.sessions.repository.create_key("small", max_sessions=2)
        small = kv.tenant(key.tenant)
        made = await asyncio.gather(*(small.create() for _ in range(5)), return_exceptions=True)
        first, second = (session for session in made if not isinstance(session, BaseException))
        errors = [error for error in made if isinstance(error, BaseException)]
        assert [(type(e), e.limit, e.used) for e in errors if isinstance(e, LimitExceeded)] == [
            (LimitExceeded, 2, 2)
        ] * 3
        await said(first, turns(1))
        await first.export(tmp_path / "file")
        await kv.flush()
        before = dict(kv.sessions.tiers.blobs.list())
        for making in (first.fork(), small.import_(tmp_path / "file")):
            with pytest.raises(LimitExceeded):
                await making
        assert dict(kv.sessions.tiers.blobs.list()) == before, "nothing of the import is left"
        assert len(await small.list()) == 2
        await kv.sessions.import_(tmp_path / "file")
        assert await second.delete() == 0
        assert (await first.fork()).id in [record.id for record in await small.list()]
        await check_home(kv)


async def test_over_its_quota_a_session_goes_on_and_only_its_kv_is_not_stored(tmp_path: Path, model: Path) -> None:
    async with opened(tmp_path / "home", model) as kv:
        repository, tiers = kv.sessions.repository, kv.sessions.tiers
        twin = await kv.tenant("free").create()
        expected = await said(twin, turns(4))
        await twin.suspend()
        await twin.export(tmp_path / "file")
        size = (await repository.tenant_bytes())["free"]
        key, _ = await repository.create_key("small", max_disk=size * 3 // 2)
        small = kv.tenant(key.tenant)
        told: list[tuple[str, str | None]] = []

        def note(event: LifecycleEvent) -> None:
            told.append((event.kind, event.session_id))

        def storage() -> list[tuple[str, str | None]]:
            return [event for event in told if event[0].startswith("storage")]

        async def listen() -> None:
            async for event in kv.events():
                note(event)

        listening = asyncio.create_task(listen())
        other, session = await small.create(), await small.create()
        await said(other, turns(4, seed=50))
        assert [reply.ids for reply in await said(session, turns(4))] == [reply.ids for reply in expected]
        await written(kv)
        used = (await repository.tenant_bytes())[key.tenant]
        assert size < used <= size * 3 // 2
        assert kv.stats().storage_error is None, "the disk is well"
        report = await session.suspend("host")
        assert "max_disk" in report.details["storage"]
        assert report.nbytes > 0
        assert tiers.host.used_bytes <= report.nbytes, "what could not be stored is not kept in memory instead"
        assert (await twin.suspend()).details == {}, "the control: nobody else is concerned"
        names = set(dict(tiers.blobs.list()))
        with pytest.raises(QuotaReached) as refused:
            await small.import_(tmp_path / "file")
        assert (refused.value.limit, refused.value.used) == (size * 3 // 2, used)
        assert set(dict(tiers.blobs.list())) == names
        (reply,), (twins,) = await said(session, [NEXT]), await said(twin, [NEXT])
        assert reply.ids == twins.ids
        assert reply.restore.tokens > 0
        assert (reply.restore.reason or "").startswith("unstored")
        assert storage() == [("storage_full", session.id)], "once"
        await other.delete()
        await said(session, [NEXT])
        await written(kv)
        assert (await repository.manifest(session.id)).length == session._core.record.kv_length
        assert storage()[-1] == ("storage_ok", session.id)
        await check_session(kv, session)
        await check_home(kv)
        listening.cancel()


def agentkv(*args: object) -> Result:
    done = CliRunner().invoke(app, [str(arg) for arg in args], env={"AGENTKV_DISK_MARGIN": "0", "COLUMNS": "300"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def as_json(*args: object) -> dict[str, Any]:
    done = agentkv(*args, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)  # type: ignore[no-any-return]


async def test_keys_are_made_and_revoked_beside_a_running_runtime(tmp_path: Path, model: Path) -> None:
    home = tmp_path / "home"
    assert await asyncio.to_thread(as_json, "keys", "list", "--home", home) == {"keys": []}
    assert not home.exists(), "looking makes nothing"

    async def beside(*args: object) -> Result:
        return await asyncio.to_thread(agentkv, *args, "--home", home)

    async with opened(home, model) as kv:
        made = json.loads((await beside("keys", "create", "ann", "--max-disk", "2GiB", "--json")).stdout)
        assert made["max_disk"] == 2**31
        key = await kv.sessions.repository.find_key(made["secret"])
        assert key is not None and key.id == made["id"]
        session = await kv.tenant(key.tenant).create()
        await said(session, turns(2))
        assert (await beside("keys", "revoke", "ann")).exit_code == 0
        assert await kv.sessions.repository.find_key(made["secret"]) is None
        refused = await beside("keys", "revoke", "ann", "--purge", "--yes")
        assert refused.exit_code == 1
        assert "is revoked" in refused.output and "in use by process" in refused.output
        assert (await kv.tenant(key.tenant).get(session.id)).id == session.id, "revoking deletes nothing"

    def rest() -> None:
        tenant = ("--tenant", key.tenant, "--home", home)
        assert [row["id"] for row in as_json("sessions", "list", *tenant)["sessions"]] == [session.id]
        assert as_json("sessions", "list", "--home", home)["sessions"] == []
        assert as_json("sessions", "tree", *tenant)["trees"][0]["id"] == session.id
        assert as_json("sessions", "show", session.id, *tenant)["turns"] == 2
        for command in ("show", "export", "rm"):
            more = {"export": [tmp_path / "file"], "rm": ["--yes"]}.get(command, [])
            done = agentkv("sessions", command, session.id, *more, "--home", home)
            assert (done.exit_code, "there is no session" in done.output) == (1, True)
        (row,) = as_json("keys", "list", "--home", home)["keys"]
        assert (row["sessions"], row["disk_bytes"] > 0, row["revoked_at"] is not None) == (1, True, True)
        assert "secret" not in row and "revoked" in agentkv("keys", "list", "--home", home).output
        gone = as_json("keys", "revoke", key.id, "--purge", "--yes", "--home", home)
        assert (gone["deleted"], gone["freed"]) == (1, row["disk_bytes"])
        assert as_json("sessions", "list", *tenant)["sessions"] == []
        done = agentkv("keys", "create", "bob", "--max-disk", "80%", "--home", home)
        assert (done.exit_code, "2GiB" in done.output) == (1, True)

    await asyncio.to_thread(rest)
