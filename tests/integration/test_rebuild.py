"""An index that lost rows, rebuilt from the files: every session comes back from disk, and nothing else does."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from homes import chat_folder, check_home, check_session, model_folder, opened, prompt, said, turns, written

from agentkv import AgentKV
from agentkv.sessions.db.repository import Repository
from agentkv.sessions.home import Home
from agentkv.sessions.rebuilding import RebuildReport, adopt_orphans
from agentkv.sessions.session import Session
from agentkv.storage.chunkfile import read_header
from agentkv.storage.local import LocalBlobs
from agentkv.types import Span

NEXT = prompt(11, 77)
TABLES = ("agentkv_chunks", "agentkv_segments", "agentkv_resume_points")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@dataclass(frozen=True)
class Kept:
    """A session as it was before the index lost rows, and how it goes on."""

    id: str
    manifest: list[tuple[str, Span]]
    after: tuple[int, ...]


async def stored(kv: AgentKV, session: Session) -> list[tuple[str, Span]]:
    manifest = await kv.sessions.repository.manifest(session.id)
    return [(s.chunk_id, s.span) for s in manifest.segments]


async def filled(root: Path, model: Path, home: str = "home", **create: Any) -> list[Kept]:
    """Three sessions of several turns, the first two with the same first turns; the third of a chunk and more."""
    pasts = [turns(4, tokens=60), [*turns(3, tokens=60), prompt(70, 5)], [prompt(300, 3), prompt(40, 4)]]
    async with opened(root / home, model, **create) as kv:
        sessions = [await kv.sessions.create() for _ in pasts]
        for session, past in zip(sessions, pasts, strict=True):
            await said(session, past)
            await session.suspend()
        found = [(session.id, await stored(kv, session)) for session in sessions]
    shutil.copytree(root / home, root / f"{home}-twin")
    async with opened(root / f"{home}-twin", model, **create) as kv:
        replies = [await said(await kv.sessions.get(name), [NEXT], 12) for name, _ in found]
    for (reply,) in replies:
        assert (reply.restore.source, reply.restore.reason) == ("disk", None), "the control: nothing was lost"
    return [Kept(name, manifest, reply.ids) for (name, manifest), (reply,) in zip(found, replies, strict=True)]


def sql(home: Path, *statements: str) -> int:
    """Run on the closed home's database, without its foreign keys. Rows changed by the last."""
    db = sqlite3.connect(home / "agentkv.db")
    try:
        with db:
            for statement in statements:
                changed = db.execute(statement).rowcount
        return changed
    finally:
        db.close()


def column(home: Path, query: str) -> list[Any]:
    db = sqlite3.connect(home / "agentkv.db")
    try:
        return [row[0] for row in db.execute(query)]
    finally:
        db.close()


async def rebuilt(home: Path) -> RebuildReport:
    """``agentkv store rebuild``, without its words."""
    lock = Home(home)
    try:
        async with await Repository.open(f"sqlite+aiosqlite:///{home / 'agentkv.db'}") as repository:
            with ThreadPoolExecutor(2) as executor:
                return await adopt_orphans(repository, LocalBlobs(home / "blobs"), lock.secret, executor)
    finally:
        lock.close()


def quarantined(home: Path) -> list[str]:
    return sorted(path.name.split("-", 1)[1] for path in (home / "blobs" / "quarantine").iterdir())


async def all_come_back(home: Path, model: Path, kept: Iterable[Kept], **settings: Any) -> None:
    async with opened(home, model, **settings) as kv:
        await check_home(kv)
        for before in kept:
            session = await kv.sessions.get(before.id)
            assert await stored(kv, session) == before.manifest
            (reply,) = await said(session, [NEXT], 12)
            assert (reply.restore.source, reply.restore.reason) == ("disk", None)
            assert (reply.restore.recomputed_tokens, reply.ids) == (0, before.after)
            await session.suspend()
            assert (await session.resume()).reason is None
            await check_session(kv, session)
        await check_home(kv)
        assert quarantined(home) == []
    assert column(home, "SELECT id FROM agentkv_chunks c WHERE refs != (SELECT count(*) FROM agentkv_segments s "
                        "WHERE s.chunk_id = c.id)") == []  # fmt: skip


# -- lost rows ---------------------------------------------------------------------------------------------------------

LOSSES = {
    **{table: [f"DELETE FROM {table}"] for table in TABLES},
    "chunks and segments": ["DELETE FROM agentkv_chunks", "DELETE FROM agentkv_segments"],
    "everything": [f"DELETE FROM {table}" for table in TABLES],
    "segments and points": ["DELETE FROM agentkv_segments", "DELETE FROM agentkv_resume_points"],
    "one session's": [
        f"DELETE FROM {table} WHERE session_id = (SELECT min(session_id) FROM {table})" for table in TABLES[1:]
    ],
    "wrong references": ["UPDATE agentkv_chunks SET refs = refs + 1"],
    "no references": ["UPDATE agentkv_chunks SET refs = 0"],
}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("gemma3", {}),
    ("mistral", {}),
    ("gemma3", {"default_policy": "sink:180"}),
    ("llama", {"default_policy": "turns:220"}),
    ("gemma3", {"idle_codec": "int8"}),
]
MORE: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"default_policy": "sink:200"}),
    ("llama", {"idle_codec": "int8"}),
    ("gpt_oss", {"default_policy": "sliding:200", "idle_codec": "int8"}),
]
QUICK = ("chunks and segments", "agentkv_segments", "agentkv_resume_points", "wrong references")


@pytest.mark.short(2)
@pytest.mark.parametrize(
    ("family", "settings", "by", "losses"),
    [
        *((*kind, by, QUICK) for kind, by in zip(KINDS, ["reopening", "rebuild"] * 3, strict=False)),
        *(
            pytest.param(*kind, by, tuple(LOSSES), marks=pytest.mark.full)
            for kind in (*KINDS, *MORE)
            for by in ("reopening", "rebuild")
        ),
    ],
)
async def test_lost_rows_are_found_again_in_the_files(
    models: Path, tmp_path: Path, family: str, settings: dict[str, Any], by: str, losses: tuple[str, ...]
) -> None:
    model = model_folder(models, family)
    kept = await filled(tmp_path, model, **settings)
    for what in losses:
        home = tmp_path / f"lost {what}"
        shutil.copytree(tmp_path / "home", home)
        assert sql(home, *LOSSES[what]) > 0, what
        if by == "rebuild":
            report = await rebuilt(home)
            assert (report.deleted, report.aside) == (0, 0), what
            if "segments" in what or "everything" in what:
                assert report.sessions == len(kept)
                assert report.files == report.adopted == len({name for k in kept for name, _ in k.manifest})
            assert (await rebuilt(home)) == RebuildReport(), "once is enough"
        print(what)
        await all_come_back(home, model, kept, **settings)


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("family", "table", "most"),
    [
        *(("gemma3", table, 2) for table in TABLES),
        *(pytest.param(name, table, 100, marks=pytest.mark.full) for name in ("llama", "gemma3") for table in TABLES),
    ],
)
async def test_any_single_row_is_found_again(models: Path, tmp_path: Path, family: str, table: str, most: int) -> None:
    model = model_folder(models, family)
    kept = await filled(tmp_path, model)
    rows = column(tmp_path / "home", f"SELECT rowid FROM {table} ORDER BY rowid")
    assert len(rows) >= 5
    for row in rows[1 :: max(1, len(rows) // most)] if most < len(rows) else rows:
        home = tmp_path / f"lost-{row}"
        shutil.copytree(tmp_path / "home", home)
        assert sql(home, f"DELETE FROM {table} WHERE rowid = {row}") == 1
        await all_come_back(home, model, kept)


async def test_shared_heads_are_found_again_for_each_of_their_users(models: Path, tmp_path: Path) -> None:
    model, home = chat_folder(models), tmp_path / "home"
    system = "You are Bolt, a terse assistant who looks things up before answering, and says where each comes from."
    async with opened(home, model) as kv:
        sessions = [await kv.sessions.create(system=system) for _ in range(3)]
        for i, session in enumerate(sessions):
            await session.send(f"Number {i}?", max_tokens=4)
            await session.suspend()
        before = [await stored(kv, session) for session in sessions]
        assert len({manifest[0] for manifest in before}) == 1
    for number, loss in enumerate(
        (
            [f"DELETE FROM agentkv_segments WHERE session_id = '{sessions[1].id}'"],
            [f"DELETE FROM agentkv_segments WHERE session_id = '{sessions[1].id}' AND start = 0"],
            [f"DELETE FROM agentkv_chunks WHERE id = '{before[0][0][0]}'"],
            ["DELETE FROM agentkv_segments", "DELETE FROM agentkv_chunks"],
        )
    ):
        lost = tmp_path / f"lost-{number}"
        shutil.copytree(home, lost)
        assert sql(lost, *loss) > 0
        async with opened(lost, model) as kv:
            for session, manifest in zip(sessions, before, strict=True):
                mine = await kv.sessions.get(session.id)
                assert await stored(kv, mine) == manifest
                report = await mine.resume()
                assert (report.source, report.reason, report.recomputed_tokens) == ("disk", None, 0)
            await check_home(kv)
            for session in sessions:
                await kv.sessions.delete(session.id)
            assert kv.sessions.tiers.blobs.used_bytes() == 0, "references were counted right"


async def test_a_hole_that_cannot_be_filled_ends_what_is_restored(models: Path, tmp_path: Path) -> None:
    """The row and the file of a chunk in the middle are gone: what lies behind it is no prefix of anything."""
    for family in ("llama", "gemma3"):
        model, root = model_folder(models, family), tmp_path / family
        kept = await filled(root, model)
        name, span = kept[0].manifest[1]
        sql(root / "home", f"DELETE FROM agentkv_segments WHERE chunk_id = '{name}'")
        sql(root / "home", f"DELETE FROM agentkv_chunks WHERE id = '{name}'")
        (root / "home" / "blobs" / name[:2] / name).unlink()
        async with opened(root / "home", model) as kv:
            session = await kv.sessions.get(kept[0].id)
            (reply,) = await said(session, [NEXT], 12)
            assert reply.ids == kept[0].after
            assert (reply.restore.tokens, (reply.restore.reason or "").split(":")[0]) == (span.start, "missing")
            await session.suspend()
            assert (await session.resume()).reason is None
            await check_session(kv, session)
            await check_home(kv)


# -- what does not come back -------------------------------------------------------------------------------------------


async def test_what_was_deleted_on_purpose_stays_deleted(models: Path, tmp_path: Path) -> None:
    model, home = model_folder(models), tmp_path / "home"
    kept = await filled(tmp_path, model)
    files = tmp_path / "backup"
    shutil.copytree(home / "blobs", files)
    async with opened(home, model) as kv:
        for before in kept[1:]:
            await kv.sessions.delete(before.id)
        buried = {name for k in kept[1:] for name, _ in k.manifest} - {name for name, _ in kept[0].manifest}
        assert len(buried) > 2
    shutil.rmtree(home / "blobs")
    shutil.copytree(files, home / "blobs")  # the files come back from a backup, the database does not
    report = await rebuilt(home)
    assert (report.files, report.deleted, report.adopted, report.aside) == (len(buried), len(buried), 0, 0)
    await all_come_back(home, model, kept[:1])
    async with opened(home, model) as kv:
        assert {name for name, _ in kv.sessions.tiers.blobs.list()} & buried == set()
        # The same tokens again: the same file, wanted now.
        session = await kv.sessions.create()
        await said(session, [prompt(300, 3), prompt(40, 4)])
        await session.suspend()
        assert {name for name, _ in await stored(kv, session)} <= buried
    sql(home, "DELETE FROM agentkv_chunks", "DELETE FROM agentkv_segments")
    async with opened(home, model) as kv:
        assert (await (await kv.sessions.get(session.id)).resume()).reason is None, "no tombstone is left of it"


Damage = Callable[[Path, bytes], None]
GARBAGE: dict[str, Damage] = {
    "noise": lambda path, data: path.write_bytes(bytes(range(256)) * 20) and None,
    "empty": lambda path, data: path.write_bytes(b"") and None,
    "truncated header": lambda path, data: path.write_bytes(data[:200]) and None,
    "truncated payload": lambda path, data: path.write_bytes(data[:-5]) and None,
    "flipped header": lambda path, data: path.write_bytes(data[:150] + bytes([data[150] ^ 1]) + data[151:]) and None,
    "under another name": lambda path, data: path.write_bytes(data + b"x") and None,
}


@pytest.mark.short(2)
@pytest.mark.parametrize("what", GARBAGE)
async def test_what_is_no_chunk_file_is_moved_aside(models: Path, tmp_path: Path, what: str) -> None:
    model, home = model_folder(models), tmp_path / "home"
    kept = await filled(tmp_path, model)
    name, span = kept[2].manifest[-1]
    path = home / "blobs" / name[:2] / name
    data = path.read_bytes()
    sql(home, f"DELETE FROM agentkv_segments WHERE chunk_id = '{name}'", "DELETE FROM agentkv_chunks WHERE refs = 0")
    sql(home, f"DELETE FROM agentkv_chunks WHERE id = '{name}'")
    GARBAGE[what](path, data)
    report = await rebuilt(home)
    assert (report.files, report.aside, report.adopted) == (1, 1, 0)
    assert quarantined(home) == [f"{name}.orphan"]
    async with opened(home, model) as kv:
        (reply,) = await said(await kv.sessions.get(kept[2].id), [NEXT], 12)
        assert reply.ids == kept[2].after
        assert (reply.restore.tokens, reply.restore.source) == (span.start, "disk")
        await check_home(kv)


async def test_a_payload_that_was_altered_is_found_out_when_it_is_read(models: Path, tmp_path: Path) -> None:
    """Rebuilding reads headers; the payload's digest is in it."""
    model, home = model_folder(models), tmp_path / "home"
    kept = await filled(tmp_path, model)
    sql(home, "DELETE FROM agentkv_chunks", "DELETE FROM agentkv_segments")
    name, span = kept[2].manifest[-1]
    path = home / "blobs" / name[:2] / name
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    async with opened(home, model) as kv:
        (reply,) = await said(await kv.sessions.get(kept[2].id), [NEXT], 12)
        assert reply.ids == kept[2].after
        assert (reply.restore.tokens, (reply.restore.reason or "").split(":")[0]) == (span.start, "checksum")


async def test_files_of_another_home_another_model_and_another_ledger_are_not_taken(
    models: Path, tmp_path: Path
) -> None:
    """Each of the same tokens at the same places, but of another secret, other weights, or with other tokens before."""
    model, other, home = model_folder(models), model_folder(models, seed=1), tmp_path / "home"
    kept = await filled(tmp_path, model)
    await filled(tmp_path, model, "elsewhere")
    (tmp_path / "weights").mkdir()
    shutil.copy(home / "secret", tmp_path / "weights")
    await filled(tmp_path, other, "weights")
    (tmp_path / "past").mkdir()
    shutil.copy(home / "secret", tmp_path / "past")
    async with opened(tmp_path / "past", model) as kv:
        # The second chunk of the third session has its very tokens, behind one token that differs.
        ledger = column(home, f"SELECT ids FROM agentkv_ledger WHERE session_id = '{kept[2].id}' ORDER BY start")
        ids = [int.from_bytes(all_[i : i + 4], "little") for all_ in ledger for i in range(0, len(all_), 4)]
        session = await kv.sessions.create()
        await session.append_tokens([(ids[0] + 1) % 100, *ids[1:-1]])
        await session.suspend()
        past = await stored(kv, session)
    sql(home, *LOSSES["everything"])
    for name, _ in kept[2].manifest[1:]:
        (home / "blobs" / name[:2] / name).unlink()
    assert past[1][1].start == kept[2].manifest[1][1].start == 256, "it would follow what is left"
    strangers = set()
    for root in ("elsewhere", "weights", "past"):
        for path in (tmp_path / root / "blobs").glob("??/*"):
            target = home / "blobs" / path.parent.name / path.name
            assert not target.exists()
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
            strangers.add(path.name)
    assert {name for name, _ in past} <= strangers
    report = await rebuilt(home)
    assert (report.aside, report.adopted) == (len(strangers), 1 + len({n for k in kept[:2] for n, _ in k.manifest}))
    async with opened(home, model) as kv:
        (reply,) = await said(await kv.sessions.get(kept[2].id), [NEXT], 12)
        assert (reply.ids, reply.restore.source, reply.restore.tokens) == (kept[2].after, "disk", 256)
        assert len(quarantined(home)) == len(strangers)
        for before in kept[:2]:
            assert (await (await kv.sessions.get(before.id)).resume()).reason is None


@pytest.mark.short(2)
@pytest.mark.parametrize(
    ("codec", "of", "taken"),
    [
        ("exact", "int8", False),
        ("raw", "int8", False),
        ("int4", "int8", False),
        ("int8", "exact", True),
        ("exact", "raw", True),
    ],
)
async def test_a_session_takes_nothing_that_another_lossy_codec_took_part_in(
    models: Path, tmp_path: Path, codec: str, of: str, taken: bool
) -> None:
    """A session and its double under another codec; only the double's files are left."""
    model, home = model_folder(models), tmp_path / "home"
    async with opened(home, model) as kv:
        mine = await kv.sessions.create(idle_codec=codec)
        double = await kv.sessions.create(idle_codec=of)
        for session in (mine, double):
            await said(session, [prompt(420, 1)])
            await session.suspend()
        gone = {name for name, _ in await stored(kv, mine)}
        left = {name for name, _ in await stored(kv, double)}
        codecs = {p.codec for n in left for p in read_header(kv.sessions.tiers.blobs.get(n), n).parts}
        assert of in codecs
        assert not gone & left
    shutil.copytree(home, tmp_path / "twin")
    async with opened(tmp_path / "twin", model) as kv:
        await kv.sessions.delete(double.id)
        session = await kv.sessions.get(mine.id)
        await kv.sessions.tiers._forget(session._core, 0)
        (twin,) = await said(session, [NEXT], 12)
    for name in gone:
        (home / "blobs" / name[:2] / name).unlink()
    sql(home, *LOSSES["everything"])
    report = await rebuilt(home)
    assert report.sessions == (2 if taken else 1)
    async with opened(home, model) as kv:
        (reply,) = await said(await kv.sessions.get(mine.id), [NEXT], 12)
        assert reply.restore.source == ("disk" if taken else "recompute")
        if taken:
            assert reply.restore.codec == of
        assert reply.ids == twin.ids
        await written(kv)
        await check_home(kv)


async def test_a_clean_home_is_not_touched(models: Path, tmp_path: Path) -> None:
    model, home = model_folder(models), tmp_path / "home"
    kept = await filled(tmp_path, model)
    dump = "SELECT group_concat(id || refs || deleting) FROM agentkv_chunks"
    before = column(home, dump)
    assert await rebuilt(home) == RebuildReport()
    assert column(home, dump) == before
    await all_come_back(home, model, kept)
