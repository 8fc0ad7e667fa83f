"""Stored KV that cannot be used: the right answer, recomputed, and the reply, the log and the quarantine say why."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from homes import chat_folder, check_home, check_session, model_folder, opened, prompt, said, turns

from agentkv import AgentKV
from agentkv.errors import InvalidRequest
from agentkv.schemas.replies import Reply
from agentkv.storage.chunkfile import read_header
from agentkv.types import Span

PLACES = ("first", "middle", "last")
INPUTS = {place: turns(3, seed=i) for i, place in enumerate((*PLACES, "other"))}
NEXT = prompt(11, 77)
TOKENS = 12


@dataclass(frozen=True)
class Chunk:
    """One chunk of a closed home, and what a bad one may be made of."""

    home: Path
    name: str
    span: Span
    foreign: Path
    """The chunk of the same ledger and span that another model computed."""
    neighbour: Path
    """The chunk of another session."""

    @property
    def path(self) -> Path:
        return blob(self.home, self.name)

    def flip(self, at: int) -> None:
        data = bytearray(self.path.read_bytes())
        data[at] ^= 0x10
        self.path.write_bytes(data)


def blob(home: Path, name: str) -> Path:
    return home / "blobs" / name[:2] / name


def flipped_header_bit(chunk: Chunk) -> None:
    chunk.flip(16 + 32 + 100)


def flipped_payload_bit(chunk: Chunk) -> None:
    data = chunk.path.read_bytes()
    header = read_header(data, chunk.name)
    part = max(header.parts, key=lambda part: len(part.span))  # a part that every restore needs: full attention's
    chunk.flip(len(data) - header.payload_nbytes + part.offset + part.length // 2)


def truncated(chunk: Chunk) -> None:
    chunk.path.write_bytes(chunk.path.read_bytes()[:-7])


def empty(chunk: Chunk) -> None:
    chunk.path.write_bytes(b"")


def missing(chunk: Chunk) -> None:
    chunk.path.unlink()


def a_directory(chunk: Chunk) -> None:
    chunk.path.unlink()
    chunk.path.mkdir()


def of_another_model(chunk: Chunk) -> None:
    shutil.copyfile(chunk.foreign, chunk.path)


def of_another_session(chunk: Chunk) -> None:
    shutil.copyfile(chunk.neighbour, chunk.path)


def row_of_another_model(chunk: Chunk) -> None:
    name = chunk.foreign.name
    blob(chunk.home, name).parent.mkdir(exist_ok=True)
    shutil.copyfile(chunk.foreign, blob(chunk.home, name))
    with sqlite3.connect(chunk.home / "agentkv.db") as db:
        db.execute(
            "INSERT INTO agentkv_chunks SELECT ?, lookup_key, tenant, kv_fingerprint, start, stop, codec, nbytes, 1, 0 "
            "FROM agentkv_chunks WHERE id = ?",
            (name, chunk.name),
        )
        db.execute("UPDATE agentkv_segments SET chunk_id = ? WHERE chunk_id = ?", (name, chunk.name))
        db.execute("UPDATE agentkv_chunks SET refs = 0 WHERE id = ?", (chunk.name,))
    db.close()


DAMAGE: dict[Callable[[Chunk], None], str] = {
    flipped_header_bit: "checksum",
    flipped_payload_bit: "checksum",
    truncated: "truncated",
    empty: "truncated",
    missing: "missing",
    a_directory: "unreadable",
    of_another_model: "checksum",
    of_another_session: "checksum",
    row_of_another_model: "fingerprint",
}


@dataclass(frozen=True)
class Prepared:
    """A home at rest with a session of three chunks for each place, the same of another model, and what comes next."""

    family: str
    model: Path
    home: Path
    foreign: Path
    sessions: dict[str, str]
    chunks: dict[str, list[tuple[str, Span]]]
    foreign_chunks: dict[str, list[tuple[str, Span]]]
    twins: dict[str, list[tuple[int, ...]]]

    @property
    def read(self) -> tuple[str, ...]:
        """Where a bad chunk is noticed: models that only see a window read the last chunks alone."""
        return PLACES[-1:] if self.family == "mistral" else PLACES


async def converse(home: Path, model: Path) -> tuple[dict[str, str], dict[str, list[tuple[str, Span]]]]:
    sessions, chunks = {}, {}
    async with opened(home, model) as kv:
        for place, inputs in INPUTS.items():
            session = await kv.sessions.create()
            await said(session, inputs)
            await session.suspend()
            sessions[place] = session.id
            manifest = await kv.sessions.repository.manifest(session.id)
            chunks[place] = [(s.chunk_id, s.span) for s in manifest.segments]
            assert len(chunks[place]) == 3
    return sessions, chunks


async def prepare(root: Path, family: str) -> Prepared:
    model, other = model_folder(root, family), model_folder(root, family, seed=1)
    sessions, chunks = await converse(root / "home", model)
    (root / "foreign").mkdir()
    shutil.copy(root / "home" / "secret", root / "foreign")  # the same tenant: only the weights differ
    _, foreign_chunks = await converse(root / "foreign", other)
    twins = {}
    async with opened(root / "twin", model) as kv:
        for place, inputs in INPUTS.items():
            twin = await kv.sessions.create()
            await said(twin, inputs)
            twins[place] = [(await go_on(kv, twin.id)).ids, (await go_on(kv, twin.id)).ids]
    return Prepared(family, model, root / "home", root / "foreign", sessions, chunks, foreign_chunks, twins)


async def go_on(kv: AgentKV, session_id: str) -> Reply:
    session = await kv.sessions.get(session_id)
    return await session.generate_tokens(NEXT, max_tokens=TOKENS)


@pytest.fixture(scope="module", params=["llama", "gemma3", pytest.param("mistral", marks=pytest.mark.full)])
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return asyncio.run(prepare(tmp_path_factory.mktemp(request.param), request.param))


@pytest.mark.short(6)
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
async def test_a_bad_chunk_costs_a_recompute_and_never_the_answer(
    prepared: Prepared, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Chunk], None]
) -> None:
    kind, home = DAMAGE[damage], tmp_path / "home"
    shutil.copytree(prepared.home, home)
    bad: dict[str, Chunk] = {}
    for index, place in enumerate(PLACES):
        if place not in prepared.read:
            continue
        name, span = prepared.chunks[place][index]
        neighbour = prepared.chunks["other"][index][0]
        foreign = prepared.foreign_chunks[place][index][0]
        bad[place] = Chunk(home, name, span, blob(prepared.foreign, foreign), blob(home, neighbour))
        damage(bad[place])

    async with opened(home, prepared.model) as kv:
        for place, chunk in bad.items():
            with caplog.at_level(logging.WARNING, logger="agentkv"):
                caplog.clear()
                reply = await go_on(kv, prepared.sessions[place])
            assert reply.ids == prepared.twins[place][0], place
            length = prepared.chunks[place][-1][1].stop
            restore = reply.restore
            assert restore.tokens + restore.recomputed_tokens == length
            assert reply.usage.cached_tokens == restore.tokens
            assert restore.reason is not None
            assert restore.reason.startswith(kind + ": ")
            assert restore.tokens == chunk.span.start, "what lies before the bad chunk is still good"
            assert restore.source == ("recompute" if place == "first" else "disk")
            warning = next(r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
            assert prepared.sessions[place] in warning
            assert restore.reason in warning
            moved = [p for p in (home / "blobs" / "quarantine").iterdir() if p.name.endswith(f"-{chunk.name}.{kind}")]
            assert len(moved) == (0 if kind in ("missing", "fingerprint") else 1)
        for place in PLACES[: len(PLACES) - len(bad)]:
            await go_on(kv, prepared.sessions[place])
        other = await go_on(kv, prepared.sessions["other"])
        assert (other.restore.source, other.restore.reason) == ("disk", None)
        assert other.ids == prepared.twins["other"][0]
        for place in PLACES:
            session = await kv.sessions.get(prepared.sessions[place])
            report = await session.suspend()
            assert (report.tier, report.details) == ("disk", {})
            await check_session(kv, session)
        await check_home(kv)

    async with opened(home, prepared.model) as kv:
        for place in INPUTS:
            reply = await go_on(kv, prepared.sessions[place])
            assert reply.ids == prepared.twins[place][1]
            assert (reply.restore.source, reply.restore.reason) == ("disk", None)
            assert reply.restore.recomputed_tokens == 0
        await check_home(kv)


async def test_resume_says_why_and_so_does_the_turn_that_recomputes(prepared: Prepared, tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(prepared.home, home)
    name, _ = prepared.chunks["last"][2]
    blob(home, name).unlink()
    async with opened(home, prepared.model) as kv:
        session = await kv.sessions.get(prepared.sessions["last"])
        report = await session.resume()
        assert report.reason is not None
        assert report.reason.startswith("missing")
        running = asyncio.create_task(session.generate_tokens(NEXT, max_tokens=400))
        await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.wait([running])
        reply = await session.generate_tokens(NEXT, max_tokens=TOKENS)
        assert (reply.restore.source, reply.restore.reason) == ("device", report.reason)
        assert reply.restore.recomputed_tokens == report.recomputed_tokens > 0
        assert reply.ids == prepared.twins["last"][0]
        assert (await session.generate_tokens(NEXT, max_tokens=TOKENS)).restore.reason is None


async def test_bad_chunks_of_several_sessions_that_come_back_at_once(prepared: Prepared, tmp_path: Path) -> None:
    """All at once: restores run in parallel and share the executor."""
    home = tmp_path / "home"
    shutil.copytree(prepared.home, home)
    for index, place in enumerate(PLACES):
        if place in prepared.read:
            truncated(Chunk(home, *prepared.chunks[place][index], home, home))
    async with opened(home, prepared.model) as kv:
        replies = await asyncio.gather(*(go_on(kv, prepared.sessions[place]) for place in INPUTS))
        assert [reply.ids for reply in replies] == [prepared.twins[place][0] for place in INPUTS]
        assert kv.sessions.tiers.fallbacks == {"truncated": len(prepared.read)}


# -- another model behind the same name --------------------------------------------------------------------------------


async def fresh(root: Path, model: Path, ledger: list[int], dtype: str = "float32") -> tuple[int, ...]:
    """What a model says after a ledger that is given to it as input."""
    async with opened(root, model, dtype=dtype) as kv:
        session = await kv.sessions.create()
        await session.append_tokens(ledger)
        return (await go_on(kv, session.id)).ids


async def test_other_weights_under_the_same_path_recompute(tmp_path: Path) -> None:
    one, two = model_folder(tmp_path, "gemma3"), model_folder(tmp_path, "gemma3", seed=1)
    model, home = tmp_path / "model", tmp_path / "home"
    shutil.copytree(one, model)
    async with opened(home, model) as kv:
        session = await kv.sessions.create()
        await said(session, turns(2))
        ledger = await session.token_ids()
    for round_, weights in enumerate((two, one)):
        shutil.rmtree(model)
        shutil.copytree(weights, model)
        async with opened(home, model) as kv:
            session = await kv.sessions.get(session.id)
            reply = await go_on(kv, session.id)
            assert reply.restore.source == "recompute"
            assert reply.restore.reason is not None
            assert reply.restore.reason.startswith("fingerprint")
            assert reply.usage.cached_tokens == 0
            assert reply.ids == await fresh(tmp_path / f"fresh{round_}", weights, ledger)
            await session.suspend()
            ledger = await session.token_ids()
            assert (await session.resume()).reason is None, "its own KV is stored now"
            await check_session(kv, session)
            await check_home(kv)
        async with opened(home, model) as kv:
            session = await kv.sessions.get(session.id)
            report = await session.resume()
            assert (report.source, report.reason) == ("disk", None)


async def test_another_dtype_recomputes(tmp_path: Path) -> None:
    model, home = model_folder(tmp_path), tmp_path / "home"
    async with opened(home, model) as kv:
        session = await kv.sessions.create()
        await said(session, turns(2))
        ledger = await session.token_ids()
    async with opened(home, model, dtype="bfloat16") as kv:
        reply = await go_on(kv, session.id)
        assert reply.restore.source == "recompute"
        assert reply.restore.reason is not None
        assert reply.restore.reason.startswith("fingerprint")
        assert len(reply.ids) == TOKENS
        await check_home(kv)
    assert ledger


async def test_another_tokenizer_is_refused_and_another_template_is_not(tmp_path: Path) -> None:
    model, home = chat_folder(tmp_path), tmp_path / "home"
    async with opened(home, model) as kv:
        session = await kv.sessions.create(system="You are helpful.")
        await session.send("How is the weather?", max_tokens=5)
    other = chat_folder(tmp_path, extra="Sphinx of black quartz, judge my vow; ")
    async with opened(home, other) as kv:
        with pytest.raises(InvalidRequest, match="tokenizer") as caught:
            await kv.sessions.get(session.id)
        assert session.id in str(caught.value)
        assert model.name in str(caught.value)
    same = tmp_path / "same"
    shutil.copytree(model, same)
    template = same / "chat_template.jinja"
    template.write_text(template.read_text() + "{# another #}")
    async with opened(home, same) as kv:
        reply = await (await kv.sessions.get(session.id)).send("And in Paris?", max_tokens=5)
        assert reply.restore.source == "disk", "a template fix must not discard KV"
        assert reply.restore.reason is None


async def test_a_bad_chunk_in_host_memory_is_given_up_by_all_who_share_it(tmp_path: Path) -> None:
    """A fork finds it; the session that wants it there has no claim to it any more, and both say what they would."""
    model = model_folder(tmp_path, "llama")
    asked = INPUTS["first"]
    async with opened(tmp_path / "twin", model) as kv:
        twin = [reply.ids for reply in await said(await kv.sessions.create(), [*asked, NEXT], TOKENS)]
    async with opened(tmp_path / "home", model) as kv:
        session = await kv.sessions.create()
        await said(session, asked, TOKENS)
        await session.suspend()
        fork = await session.fork()
        for file in sorted((tmp_path / "home" / "blobs").glob("??/*")):
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 0x10
            file.write_bytes(data)
        core, host = session._core, kv.sessions.tiers.host
        await kv.sessions.tiers._hold(core)
        assert core.held.keys() == set(host._entries) != set(), "the control: its chunks are there, spoilt"
        for each in (fork, session):
            (reply,) = await said(each, [NEXT], TOKENS)
            assert reply.ids == twin[-1]
            assert (reply.restore.reason or "").startswith(("checksum", "missing"))
            held = {name for one in kv.sessions.cores() for name in one.held}
            assert held == set(host._entries)
        await check_home(kv)
