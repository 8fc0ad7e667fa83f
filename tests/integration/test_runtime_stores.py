"""A runtime on an encrypted store, on an object store, in memory: the same answers, and plain words for a wrong key."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from homes import check_home, check_session, model_folder, opened, prompt, said, turns, written
from s3 import ACCESS_KEY, S3, SECRET_KEY, FaultyWay, faulty_way, s3_server

from agentkv import AgentKV
from agentkv.errors import InvalidRequest, StorageError, WrongKey
from agentkv.storage import endpoint
from agentkv.storage.encrypted import EncryptedBlobs
from agentkv.storage.remote import RemoteBlobs

KEY, OTHER = "11" * 32, "22" * 32
NEXT = [prompt(11, 77), prompt(12, 78)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture
def way(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyWay]:
    """A way to the server that settings lead to: credentials and endpoint come from the environment."""
    monkeypatch.setattr(endpoint, "_PAUSE_SECONDS", 0.0)
    with faulty_way(s3) as way:
        for name, value in {
            "AWS_ENDPOINT": f"http://127.0.0.1:{way.port}",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ALLOW_HTTP": "true",
        }.items():
            monkeypatch.setenv(name, value)
        yield way


async def alone(home: Path, model: Path, **create: str) -> list[tuple[int, ...]]:
    """The replies without a suspend, in a plain home."""
    async with opened(home, model) as kv:
        session = await kv.sessions.create(**create)
        return [reply.ids for reply in await said(session, [*turns(2, tokens=150), *NEXT])]


async def suspended(kv: AgentKV, **create: str) -> str:
    """A session of two turns at rest; it comes back in this process too."""
    session = await kv.sessions.create(**create)
    await said(session, turns(2, tokens=150))
    assert (await session.suspend()).tier == "disk"
    report = await session.resume()
    assert (report.source, report.reason, report.recomputed_tokens) == ("disk", None, 0)
    await check_session(kv, session)
    await session.suspend()
    return session.id


async def goes_on(kv: AgentKV, name: str, twin: list[tuple[int, ...]], which: int) -> None:
    session = await kv.sessions.get(name)
    (reply,) = await said(session, [NEXT[which]])
    assert (reply.restore.source, reply.restore.reason, reply.ids) == ("disk", None, twin[2 + which])
    await check_session(kv, session)
    await session.suspend()


# -- encrypted ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["text", "file"])
async def test_an_encrypted_home_goes_on_exactly_and_holds_nothing_in_plain(
    models: Path, tmp_path: Path, how: str
) -> None:
    model, home = model_folder(models, "gemma3"), tmp_path / "home"
    twin = await alone(tmp_path / "twin", model)
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    file.chmod(0o600)
    given = {"encryption_key": KEY} if how == "text" else {"encryption_key_file": str(file)}
    async with opened(home, model, **given) as kv:
        name = await suspended(kv)
        await check_home(kv)
        assert KEY not in repr(kv.settings)
    blobs = [path for path in (home / "blobs").glob("??/*") if len(path.name) == 40]
    assert len(blobs) == 2
    for path in blobs:
        data = path.read_bytes()
        assert b"AGENTKV\x1a" not in data
        assert b"kv_fingerprint" not in data
    for which in range(2):
        async with opened(home, model, **given) as kv:
            await goes_on(kv, name, twin, which)
            await check_home(kv)


async def test_a_lossy_evicting_session_and_a_lost_index_on_an_encrypted_store(models: Path, tmp_path: Path) -> None:
    model, home = model_folder(models), tmp_path / "home"
    async with opened(home, model, encryption_key=KEY) as kv:
        session = await kv.sessions.create(idle_codec="int8", policy="sink:320")
        await said(session, turns(3, tokens=150))
        await session.suspend()
        tokens = session._core.record.held.tokens
    with sqlite3.connect(home / "agentkv.db") as db:
        db.execute("DELETE FROM agentkv_segments")
        db.execute("DELETE FROM agentkv_chunks")
    db.close()
    async with opened(home, model, encryption_key=KEY) as kv:
        again = await kv.sessions.get(session.id)
        report = await again.resume()
        assert (report.source, report.reason, report.tokens) == ("disk", None, tokens)
        await check_home(kv)
        await again.delete()
        assert list(kv.sessions.tiers.blobs.list()) == []


async def test_a_key_that_does_not_fit_is_refused_in_words_that_say_what_to_do(models: Path, tmp_path: Path) -> None:
    model, home, plain = model_folder(models), tmp_path / "home", tmp_path / "plain"
    async with opened(home, model, encryption_key=KEY) as kv:
        name = await suspended(kv)
    async with opened(plain, model) as kv:
        await suspended(kv)
    for folder, given, words in (
        (home, {"encryption_key": OTHER}, "AGENTKV_ENCRYPTION_KEY"),
        (home, {}, "AGENTKV_ENCRYPTION_KEY"),
        (plain, {"encryption_key": KEY}, "without the key"),
    ):
        with pytest.raises(WrongKey, match=words) as caught:
            await opened(folder, model, **given)
        assert OTHER not in str(caught.value)
    with pytest.raises(InvalidRequest, match="64 hex digits"):
        await opened(home, model, encryption_key="short")
    with pytest.raises(InvalidRequest, match="both set"):
        await opened(home, model, encryption_key=KEY, encryption_key_file=tmp_path / "key")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        await opened(home, model, encryption_key_file=tmp_path / "key")
    async with opened(home, model, encryption_key=KEY) as kv:
        assert (await (await kv.sessions.get(name)).resume()).reason is None, "nothing was touched meanwhile"


@pytest.mark.full
def test_the_command_line_says_it_in_one_line(models: Path, tmp_path: Path) -> None:
    model, home = model_folder(models), tmp_path / "home"

    async def made() -> None:
        async with opened(home, model, encryption_key=KEY) as kv:
            await suspended(kv)

    asyncio.run(made())
    for command in (["sessions", "list"], ["store", "verify"], ["chat", "--model", str(model), "--device", "cpu"]):
        done = subprocess.run(
            [sys.executable, "-m", "agentkv.cli.main", *command, "--home", str(home)],
            input="",
            capture_output=True,
            text=True,
            timeout=200,
            env={**os.environ, "AGENTKV_DISK_MARGIN": "0", "AGENTKV_ENCRYPTION_KEY": OTHER},
        )
        assert done.returncode == 1, command
        assert "Traceback" not in done.stderr
        assert OTHER not in done.stderr + done.stdout
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("error: ") and "AGENTKV_ENCRYPTION_KEY" in last, done.stderr


# -- memory ------------------------------------------------------------------------------------------------------------


async def test_in_memory_sessions_come_back_within_the_process_and_are_computed_after_it(
    models: Path, tmp_path: Path
) -> None:
    model, home = model_folder(models, "gemma3"), tmp_path / "home"
    twin = await alone(tmp_path / "twin", model)
    async with opened(home, model, blobs_url="memory:") as kv:
        name = await suspended(kv)
        await goes_on(kv, name, twin, 0)
        used = kv.sessions.tiers.blobs.used_bytes()
        assert used == sum(size for _, size in kv.sessions.tiers.blobs.list()) > 0
        assert not [path for path in (home / "blobs").rglob("*") if path.is_file()]
    async with opened(home, model, blobs_url="memory:") as kv:
        session = await kv.sessions.get(name)
        (reply,) = await said(session, [NEXT[1]])
        assert (reply.restore.source, reply.ids) == ("recompute", twin[3])
        assert (reply.restore.reason or "").startswith("missing")
        await session.suspend()
        assert (await session.resume()).reason is None
        await session.delete()
        assert kv.sessions.tiers.blobs.used_bytes() == 0


# -- an object store ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
async def test_a_home_on_s3_goes_on_exactly_in_another_process(
    models: Path, tmp_path: Path, s3: S3, way: FaultyWay, key: str | None
) -> None:
    model, home, url = model_folder(models, "gemma3"), tmp_path / "home", s3.url()
    twin = await alone(tmp_path / "twin", model)
    settings = {"blobs_url": url, "encryption_key": key}
    async with opened(home, model, **settings) as kv:
        name = await suspended(kv)
        blobs = kv.sessions.tiers.blobs
        there = RemoteBlobs((blobs.inner if isinstance(blobs, EncryptedBlobs) else blobs).url, config=s3.config())
    assert len(dict(there.list())) == 2 + (key is not None)
    assert not [path for path in (home / "blobs").rglob("*") if path.is_file()]
    for which in range(2):
        async with opened(home, model, **settings) as kv:
            await goes_on(kv, name, twin, which)
    if key is not None:
        with pytest.raises(WrongKey):
            await opened(home, model, blobs_url=url, encryption_key=OTHER)
    async with opened(home, model, **settings) as kv:
        assert await kv.sessions.delete(name) > 0
    assert len(dict(RemoteBlobs(there.url, config=s3.config()).list())) == (key is not None)


async def test_a_store_that_does_not_answer_costs_a_recompute_and_its_url_is_named_at_the_start(
    models: Path, tmp_path: Path, s3: S3, way: FaultyWay, caplog: pytest.LogCaptureFixture
) -> None:
    model, home, url = model_folder(models), tmp_path / "home", s3.url()
    twin = await alone(tmp_path / "twin", model)
    async with opened(home, model, blobs_url=url) as kv:
        name = await suspended(kv)
        way.rule = lambda method, key: "503"
        session = await kv.sessions.get(name)
        with caplog.at_level(logging.WARNING, logger="agentkv"):
            (reply,) = await said(session, [NEXT[0]])
        assert (reply.ids, reply.restore.source) == (twin[2], "recompute")
        assert (reply.restore.reason or "").startswith("unreachable")
        await written(kv)
        assert kv.sessions.tiers.behind.storage_error is not None
        assert (await session.suspend()).tier == "host", "nothing is lost while the store is away"
        way.heal()
        (reply,) = await said(session, [NEXT[1]])
        assert (reply.ids, reply.restore.source, reply.restore.reason) == (twin[3], "host", None)
        assert (await session.suspend()).tier == "disk"
        assert SECRET_KEY not in caplog.text
    way.rule = lambda method, key: "503"
    with pytest.raises(StorageError, match=r"s3://.*cannot be opened"):
        await opened(home, model, blobs_url=url)
    way.heal()
    async with opened(home, model, blobs_url=url) as kv:
        report = await (await kv.sessions.get(name)).resume()
        assert (report.source, report.reason, report.recomputed_tokens) == ("disk", None, 0)
