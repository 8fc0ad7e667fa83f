"""``agentkv store``: what it says of intact, damaged and empty homes, what it repairs, and its exit status."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from homes import check_home, model_folder, opened, prompt, said, turns
from typer.testing import CliRunner

from agentkv.cli.main import app

NEXT = prompt(11, 77)


@dataclass(frozen=True)
class Prepared:
    """A home at rest: one exact and one lossy session of several chunks, two that are the same."""

    model: Path
    home: Path
    sessions: list[str]
    names: list[str]
    nbytes: dict[str, int]
    after: list[tuple[int, ...]]


async def prepare(root: Path) -> Prepared:
    model, home = model_folder(root), root / "home"
    async with opened(home, model) as kv:
        sessions = [await kv.sessions.create(idle_codec=codec) for codec in ("exact", "int8", "exact", "exact")]
        for session, past in zip(
            sessions, (turns(3), [prompt(420, 1)], turns(1, seed=4), turns(1, seed=4)), strict=True
        ):
            await said(session, past)
            await session.suspend()
        nbytes = dict(kv.sessions.tiers.blobs.list())
        first = await kv.sessions.repository.manifest(sessions[0].id)
    shutil.copytree(home, root / "twin")
    async with opened(root / "twin", model) as kv:
        replies = [await said(await kv.sessions.get(session.id), [NEXT], 8) for session in sessions]
    return Prepared(
        model, home, [s.id for s in sessions], [s.chunk_id for s in first.segments], nbytes, [r[0].ids for r in replies]
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return asyncio.run(prepare(tmp_path_factory.mktemp("store")))


@pytest.fixture
def home(prepared: Prepared, tmp_path: Path) -> Path:
    shutil.copytree(prepared.home, tmp_path / "home")
    return tmp_path / "home"


def run(*args: object, env: dict[str, str] | None = None) -> Result:
    """An error that is not the product's own is raised."""
    done = CliRunner().invoke(
        app, [str(arg) for arg in args], env={"AGENTKV_DISK_MARGIN": "0", "COLUMNS": "300", **(env or {})}
    )
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def agentkv(*args: object, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit status and output, what is logged included."""
    done = run(*args, env=env)
    return done.exit_code, done.output


def as_json(*args: object, status: int = 0) -> dict[str, Any]:
    done = run(*args, "--json")
    assert done.exit_code == status, done.output
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def blob(home: Path, name: str) -> Path:
    return home / "blobs" / name[:2] / name


def sql(home: Path, statement: str) -> None:
    db = sqlite3.connect(home / "agentkv.db")
    with db:
        db.execute(statement)
    db.close()


# -- intact ------------------------------------------------------------------------------------------------------------


def test_stats_count_every_byte_once_and_say_what_sharing_saves(prepared: Prepared, home: Path) -> None:
    facts = as_json("store", "stats", "--home", home)
    files = [path.stat().st_size for path in (home / "blobs").rglob("*") if path.is_file()]
    assert facts["sessions"] == 4
    assert facts["chunks"] == facts["files"] == len(files) == len(prepared.nbytes)
    assert facts["chunk_bytes"] == facts["file_bytes"] == facts["used_bytes"] == sum(files)
    assert set(facts["by_codec"]) == {"exact", "int8"}
    assert sum(facts["by_codec"].values()) == sum(facts["by_model"].values()) == sum(files)
    assert len(facts["by_model"]) == 1
    assert (facts["quarantined"], facts["quarantine_bytes"]) == (0, 0)
    with sqlite3.connect(home / "agentkv.db") as db:
        shared = db.execute("SELECT sum(nbytes * (refs - 1)) FROM agentkv_chunks").fetchone()[0]
    db.close()
    assert facts["shared_bytes"] == shared > 0
    assert facts["budget_bytes"] > sum(files)
    code, text = agentkv("store", "stats", "--home", home)
    assert code == 0
    for words in (f"{len(files)} chunks in", "4 sessions", "int8", "exact", "used:", "quarantine: 0 files", "shared:"):
        assert words in text


def test_verify_reads_every_byte_of_an_intact_home_and_changes_nothing(prepared: Prepared, home: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (home / "blobs").rglob("*") if path.is_file()}
    count = len(prepared.nbytes)
    assert as_json("store", "verify", "--home", home, "--repair") == {
        "files": count, "intact": count, "faulty": [], "missing": [], "unknown": [], "quarantined": 0,
    }  # fmt: skip
    assert agentkv("store", "verify", "--home", home) == (0, f"{count} of {count} files are intact\n")
    assert {path: path.stat().st_mtime_ns for path in (home / "blobs").rglob("*") if path.is_file()} == before


def test_gc_and_rebuild_find_nothing_to_do_in_an_intact_home(prepared: Prepared, home: Path) -> None:
    used = sum(prepared.nbytes.values())
    assert as_json("store", "gc", "--home", home) == {"freed_bytes": 0, "used_bytes": used}
    assert set(as_json("store", "rebuild", "--home", home).values()) == {0}
    code, text = agentkv("store", "gc", "--home", home)
    assert (code, text.startswith("freed 0 ")) == (0, True), text
    code, text = agentkv("store", "rebuild", "--home", home)
    assert (code, text.startswith("0 files")) == (0, True), text
    assert as_json("store", "verify", "--home", home)["intact"] == len(prepared.nbytes)


# -- damaged -----------------------------------------------------------------------------------------------------------

Damage = Callable[[Path], Any]


def flipped(at: int) -> Damage:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 0x10
        path.write_bytes(data)

    return flip


def other_version(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:8] + (99).to_bytes(4, "little") + data[12:])


def of_another(path: Path) -> None:
    others = [other for other in sorted(path.parent.parent.glob("??/*")) if other != path]
    shutil.copyfile(others[0], path)


FAULTS: dict[str, tuple[Damage, str]] = {
    "header bit": (flipped(150), "checksum"),
    "payload bit": (flipped(-9), "checksum"),
    "magic": (flipped(0), "format"),
    "version": (other_version, "version"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-7]), "truncated"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "format"),
    "empty": (lambda path: path.write_bytes(b""), "truncated"),
    "another chunk": (of_another, "checksum"),
}


@pytest.mark.short(3)
@pytest.mark.parametrize("what", FAULTS)
def test_a_faulty_file_is_named_with_its_fault_and_repaired_if_asked(prepared: Prepared, home: Path, what: str) -> None:
    damage, reason = FAULTS[what]
    name = prepared.names[1]
    damage(blob(home, name))
    count = len(prepared.nbytes)
    facts = as_json("store", "verify", "--home", home, status=1)
    assert [(fault["chunk"], fault["reason"]) for fault in facts["faulty"]] == [(name, reason)]
    assert (facts["files"], facts["intact"], facts["missing"], facts["quarantined"]) == (count, count - 1, [], 0)
    assert blob(home, name).exists(), "it was not asked to repair"
    code, text = agentkv("store", "verify", "--home", home, "--repair")
    assert code == 1
    assert f"{count - 1} of {count} files are intact" in text
    assert f"faulty: {name}: {reason}: " in text
    assert "moved to quarantine: 1" in text
    assert not blob(home, name).exists()
    assert len(list((home / "blobs" / "quarantine").iterdir())) == 1
    facts = as_json("store", "verify", "--home", home, status=1)
    assert (facts["faulty"], facts["missing"]) == ([], [name])
    assert f"missing: {name}" in agentkv("store", "verify", "--home", home)[1]
    stats = as_json("store", "stats", "--home", home)
    assert (stats["quarantined"], stats["files"]) == (1, count - 1)
    assert stats["used_bytes"] == stats["file_bytes"] + stats["quarantine_bytes"]

    async def goes_on() -> None:
        async with opened(home, prepared.model) as kv:
            for session, after in zip(prepared.sessions, prepared.after, strict=True):
                (reply,) = await said(await kv.sessions.get(session), [NEXT], 8)
                assert reply.ids == after
                await (await kv.sessions.get(session)).suspend()
            await check_home(kv)

    asyncio.run(goes_on())
    facts = as_json("store", "verify", "--home", home)
    assert facts["intact"] == facts["files"], "the next turns made all good"


def test_an_unknown_file_is_named_and_rebuild_takes_it_up_or_moves_it_aside(prepared: Prepared, home: Path) -> None:
    name = prepared.names[-1]
    sql(home, f"DELETE FROM agentkv_segments WHERE chunk_id = '{name}'")
    sql(home, f"DELETE FROM agentkv_chunks WHERE id = '{name}'")
    stranger = blob(home, "ab" + "0" * 38)
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_bytes(b"what is this?")
    facts = as_json("store", "verify", "--home", home, status=1)
    assert facts["unknown"] == sorted([name, stranger.name])
    assert [fault["chunk"] for fault in facts["faulty"]] == [stranger.name]
    assert f"not in the index: {name} (agentkv store rebuild)" in agentkv("store", "verify", "--home", home)[1]
    facts = as_json("store", "rebuild", "--home", home)
    assert {key: facts[key] for key in ("files", "adopted", "sessions", "aside", "deleted")} == {
        "files": 2, "adopted": 1, "sessions": 1, "aside": 1, "deleted": 0,
    }  # fmt: skip
    assert facts["tokens"] > 0
    assert as_json("store", "verify", "--home", home)["intact"] == len(prepared.nbytes)
    assert not stranger.exists()


def test_gc_deletes_what_no_session_needs_and_says_how_much(prepared: Prepared, home: Path) -> None:
    """What a process leaves that dies between forgetting and deleting."""
    name = prepared.names[-1]
    sql(home, f"DELETE FROM agentkv_sessions WHERE id = '{prepared.sessions[0]}'")
    sql(home, f"DELETE FROM agentkv_segments WHERE session_id = '{prepared.sessions[0]}'")
    sql(home, "UPDATE agentkv_chunks SET refs = 0 WHERE id NOT IN (SELECT chunk_id FROM agentkv_segments)")
    temporary = home / "blobs" / name[:2] / ".tmp-1-1"
    temporary.write_bytes(bytes(100))
    gone = sum(prepared.nbytes[n] for n in prepared.names)
    assert as_json("store", "verify", "--home", home)["missing"] == [], "nothing that is needed is missing"
    temporary.write_bytes(bytes(100))
    facts = as_json("store", "gc", "--home", home)
    assert facts == {"freed_bytes": gone, "used_bytes": sum(prepared.nbytes.values()) - gone}
    assert not temporary.exists()
    assert not any(blob(home, n).exists() for n in prepared.names)
    assert as_json("store", "gc", "--home", home)["freed_bytes"] == 0
    assert as_json("store", "stats", "--home", home)["sessions"] == 3


def test_what_a_dead_sweep_deleted_already_is_not_missing(prepared: Prepared, home: Path) -> None:
    sql(home, f"DELETE FROM agentkv_sessions WHERE id = '{prepared.sessions[0]}'")
    sql(home, f"DELETE FROM agentkv_segments WHERE session_id = '{prepared.sessions[0]}'")
    sql(
        home, "UPDATE agentkv_chunks SET refs = 0, deleting = 1 WHERE id NOT IN (SELECT chunk_id FROM agentkv_segments)"
    )
    blob(home, prepared.names[0]).unlink()
    assert as_json("store", "verify", "--home", home)["missing"] == []
    assert as_json("store", "gc", "--home", home)["freed_bytes"] == sum(prepared.nbytes[n] for n in prepared.names[1:])


# -- empty, locked, encrypted ------------------------------------------------------------------------------------------

COMMANDS = ("stats", "verify", "gc", "rebuild")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_home_is_said_to_be_empty_and_stays_so(tmp_path: Path, command: str) -> None:
    code, text = agentkv("store", command, "--home", tmp_path / "home")
    assert code == 1
    assert text.splitlines() == [f"error: nothing was ever stored in {tmp_path / 'home'}; choose another with --home"]
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_home_without_sessions_has_nothing_wrong_with_it(prepared: Prepared, tmp_path: Path, command: str) -> None:
    async def made() -> None:
        async with opened(tmp_path / "home", prepared.model):
            pass

    asyncio.run(made())
    code, text = agentkv("store", command, "--home", tmp_path / "home")
    assert (code, "0" in text) == (0, True)
    facts = as_json("store", command, "--home", tmp_path / "home")
    assert all(not value for name, value in facts.items() if name != "budget_bytes"), facts


async def test_a_home_in_use_is_refused_with_the_owners_pid(prepared: Prepared, home: Path) -> None:
    async with opened(home, prepared.model):
        for command in COMMANDS:
            code, text = await asyncio.to_thread(agentkv, "store", command, "--home", home)
            assert code == 1
            (line,) = text.splitlines()
            assert line.startswith(f"error: the home {home} is in use by process {os.getpid()} on ")
            assert line.endswith("stop it, or open another home")


def test_an_encrypted_home_asks_for_its_key_in_one_line(prepared: Prepared, tmp_path: Path) -> None:
    home, key = tmp_path / "home", "11" * 32

    async def made() -> None:
        async with opened(home, prepared.model, encryption_key=key) as kv:
            session = await kv.sessions.create()
            await said(session, turns(2))
            await session.suspend()

    asyncio.run(made())
    for env in ({}, {"AGENTKV_ENCRYPTION_KEY": "22" * 32}):
        for command in COMMANDS:
            code, text = agentkv("store", command, "--home", home, env=env)
            assert code == 1
            (line,) = text.splitlines()
            assert line.startswith("error: ")
            assert "AGENTKV_ENCRYPTION_KEY" in line or "other key" in line
            assert "22222" not in line
    code, text = agentkv("store", "verify", "--home", home, "--json", env={"AGENTKV_ENCRYPTION_KEY": key})
    assert (code, json.loads(text)["faulty"], json.loads(text)["files"]) == (0, [], 2)
    path = next(path for path in sorted((home / "blobs").glob("??/*")) if len(path.name) == 40)
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    code, text = agentkv("store", "verify", "--home", home, "--json", "--repair", env={"AGENTKV_ENCRYPTION_KEY": key})
    facts = json.loads(text)
    assert (code, facts["quarantined"]) == (1, 1)
    assert [(fault["chunk"], fault["reason"]) for fault in facts["faulty"]] == [(path.name, "checksum")]
