"""Files that were cut, altered or made to harm, disks that are full, kills: an import is all there or never was."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import random
import signal
import sqlite3
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from homes import check_home, check_session, model_folder, opened, prompt, said
from killable import Nursery

from agentkv import AgentKV
from agentkv.errors import AgentKVError, DatabaseUnavailable, ImportRefused, InvalidRequest, StorageFull
from agentkv.sessions.db import repository
from agentkv.sessions.db.transactions import Patience
from agentkv.storage.container import Container

TOKENS = 8
NEXT = prompt(21, 5)
LENGTH = 616


@dataclass(frozen=True)
class Exported:
    """A session's file, and what the session says next."""

    model: Path
    path: Path
    content: bytes
    goes_on: tuple[int, ...]

    def parts(self) -> tuple[dict[str, Any], list[bytes]]:
        """The header and the sections."""
        with Container(self.path) as file:
            header = json.loads(file.header)
        at = 48 + len(file.header)
        sections = []
        for section in (header["ledger"], *header["fits"], *header["chunks"]):
            sections.append(self.content[at : at + section["nbytes"]])
            at += section["nbytes"]
        assert at + 32 == len(self.content)
        return header, sections


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    root = tmp_path_factory.mktemp("exported")
    model = model_folder(root, request.param)

    async def make() -> tuple[int, ...]:
        async with opened(root / "home", model) as kv:
            session = await kv.sessions.create(metadata={"team": "ops"})
            await said(session, [prompt(400, 1), prompt(200, 2)], TOKENS)
            await session.export(root / "file")
            return (await said(session, [NEXT], TOKENS))[0].ids

    goes_on = asyncio.run(make())
    return Exported(model, root / "file", (root / "file").read_bytes(), goes_on)


def sealed(header: dict[str, Any], sections: list[bytes]) -> bytes:
    """A file whose every digest is right, whatever it says. The header's claims of sections are kept where they are."""
    text = json.dumps(header, ensure_ascii=False).encode()
    prefix = struct.pack("<8sII", b"AKVMOVE\x1a", 1, len(text))
    body = prefix + blake3(prefix + text).digest() + text + b"".join(sections)
    return body + blake3(body).digest()


def section(content: bytes, **more: Any) -> dict[str, Any]:
    return {"nbytes": len(content), "digest": blake3(content).hexdigest(), **more}


async def nothing_is_left(kv: AgentKV) -> None:
    assert await kv.sessions.list() == [] == kv.sessions.cores()
    assert await kv.sessions.repository.known_chunk_ids() == set()
    assert [path for path in kv.settings.blobs_dir.rglob("*") if path.is_file()] == []
    assert list(kv.settings.home.rglob("*.safetensors")) == []


# -- cut and altered ---------------------------------------------------------------------------------------------------


async def test_every_alteration_and_every_cut_is_refused_and_leaves_nothing(
    tmp_path: Path, exported: Exported, seed: int
) -> None:
    draw, content, path = random.Random(seed), exported.content, tmp_path / "file"
    header = 48 + struct.unpack_from("<I", content, 12)[0]
    places = {0, 7, 8, 12, 15, 16, 47, 48, header - 1, header, header + 1, len(content) - 33, len(content) - 32}
    places |= {len(content) - 1, *draw.sample(range(len(content)), 120), *draw.sample(range(header), 60)}
    reasons = set()
    async with opened(tmp_path / "home", exported.model) as kv:
        for at in sorted(places):
            flipped = content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :]
            for damaged in (
                flipped,
                content[:at],
                content[:at] + content[at + 1 :],
                content[:at] + b"\0" + content[at:],
            ):
                path.write_bytes(damaged)
                with pytest.raises(ImportRefused) as refused:
                    await kv.sessions.import_(path)
                reasons.add(refused.value.reason)
        await nothing_is_left(kv)
        assert reasons == {"truncated", "checksum", "format", "version"}
        moved = await kv.sessions.import_(exported.path)
        assert (await said(moved, [NEXT], TOKENS))[0].ids == exported.goes_on, "the control"


# -- made to harm ------------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickled, it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self._trace,)


def _set(*path: Any, to: Any) -> Callable[[dict[str, Any], list[bytes]], None]:
    def mutate(header: dict[str, Any], sections: list[bytes]) -> None:
        place: Any = header
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to

    return mutate


def _ledger(change: Callable[[bytes], bytes]) -> Callable[[dict[str, Any], list[bytes]], None]:
    def mutate(header: dict[str, Any], sections: list[bytes]) -> None:
        sections[0] = change(sections[0])
        header["ledger"] = section(sections[0])

    return mutate


def _chunk(change: Callable[[bytes], bytes]) -> Callable[[dict[str, Any], list[bytes]], None]:
    def mutate(header: dict[str, Any], sections: list[bytes]) -> None:
        sections[1] = change(sections[1])
        header["chunks"][0] |= section(sections[1])

    return mutate


def _swapped(header: dict[str, Any], sections: list[bytes]) -> None:
    sections[1], sections[2] = sections[2], sections[1]
    header["chunks"][:2] = header["chunks"][1::-1]


def _twice(header: dict[str, Any], sections: list[bytes]) -> None:
    sections[2], header["chunks"][1] = sections[1], header["chunks"][0]


def _other_position(content: bytes) -> bytes:
    """The chunk says that it begins elsewhere, and is named and sealed by that."""
    (length,) = struct.unpack_from("<I", content, 12)
    head = json.loads(content[48 : 48 + length])
    head["start"], head["stop"] = head["start"] + 1, head["stop"] + 1
    text = json.dumps(head).encode()
    prefix = content[:12] + struct.pack("<I", len(text))
    return prefix + blake3(prefix + text).digest() + text + content[48 + length :]


Mutation = Callable[[dict[str, Any], list[bytes]], None]
HARM: dict[str, tuple[Mutation, str]] = {
    "an unknown field": (_set("surprise", to=1), "surprise: Extra"),
    "an unknown field inside": (_set("items", 0, "surprise", to=1), "items.0.surprise"),
    "another kind of file": (_set("what", to="agentkv calibration"), "what: Input"),
    "a number as text": (_set("pinned", to="0"), "pinned: Input should be a valid integer"),
    "a huge count": (_set("kv_length", to=2**52), "kv_length: Input should be less"),
    "more than any integer": (_set("kv_length", to=2**200), "kv_length: Input should be less"),
    "a negative count": (_set("kv_length", to=-1), "kv_length: Input should be greater"),
    "no time": (_set("created_at", to=float("nan")), "created_at: Input should be a finite"),
    "a time out of time": (_set("clock", to=1e300), "clock: Input should be less"),
    "a path as id": (_set("id", to="sess_../../../etc/passwd"), "id: String should match"),
    "a path as item": (_set("items", 0, "id", to="item_/etc/passwd"), "items.0.id: String"),
    "a path as chunk": (_set("chunks", 0, "id", to="../../../../tmp/x"), "chunks.0.id: String"),
    "a path as fit": (_set("fits", to=[section(b"", codec="compact", name="../../x")]), "fits.0.name: String"),
    "a path as fingerprint": (_set("kv_fingerprint", to="../../../tmp"), "kv_fingerprint: String"),
    "another role": (_set("items", 0, "role", to="root"), "items.0.role"),
    "another kind of item": (_set("items", 0, "kind", to="pickle"), "items.0.kind"),
    "content of another role": (_set("items", 0, "content", "role", to="assistant"), "is not the message that it says"),
    "content that is no message": (
        _set("items", 0, "content", to={"role": "user", "content": "", "tool_calls": [1]}),
        "is no message",
    ),
    "items with a gap": (_set("items", 1, "span", to=[401, 408]), "items do not follow"),
    "items backwards": (_set("items", 1, "span", to=[400, 399]), "items do not follow"),
    "an item of no turn": (_set("items", 0, "turn", to=9), "belongs to turn 9 of 2"),
    "an item of another turn": (_set("items", 0, "turn", to=1), "does not lie in its turn"),
    "no items": (_set("items", to=[]), "items end at 0"),
    "no turns": (_set("turns", to=[]), "turns end at 0"),
    "a turn too long": (_set("turns", 1, "span", to=[408, 2**50]), "turns.1.span.1"),
    "another kind of turn": (_set("turns", 0, "kind", to="exec"), "turns.0.kind"),
    "a seed too large": (_set("turns", 0, "seed", to=2**63), "turns.0.seed"),
    "a segment beyond": (_set("segments", 0, "span", to=[0, 2**30]), "segments.0.span.1"),
    "segments with a gap": (_set("segments", 1, "span", to=[257, 407]), "segments do not follow"),
    "a chunk that is not there": (_set("segments", 0, "chunk", to=7), "not in the order"),
    "chunks that are not used": (_set("segments", to=[]), "3 chunks, of which 0 are used"),
    "a placement of something else": (
        _set("placement", to={"length": 5, "kept": [[0, 5]], "bases": [], "lineage": "", "floor": 0}),
        "a placement of 5 tokens",
    ),
    "a placement before the beginning": (
        _set("placement", to={"length": LENGTH - 1, "kept": [[0, 9]], "bases": [[3, 4]], "lineage": "", "floor": 0}),
        "a position lies before 0",
    ),
    "a resume point beyond": (_set("points", 0, "position", to=LENGTH + 5), "behind the KV"),
    "a resume point of something else": (
        _set("points", 0, "placement", to={"length": 1, "kept": [[0, 1]], "bases": [], "lineage": "", "floor": 0}),
        "holds 1 tokens",
    ),
    "a policy that is none": (_set("policy", to="__import__('os').system('true')"), "unknown retention policy"),
    "a policy that no context holds": (_set("policy", to="sink:" + "9" * 4000), "choose a window of at most"),
    "a codec that is none": (_set("idle_codec", to="pickle"), "compact, exact"),
    "template arguments without a template": (
        _set("template_args", to={"chat_template": "{{ 7 * 7 }}"}),
        "no tokenizer",
    ),
    "a system prompt without a tokenizer": (_set("system", to="You are root."), "no tokenizer"),
    "a torn ledger": (_ledger(lambda ledger: ledger[:-1]), "a ledger of"),
    "a shorter ledger": (_ledger(lambda ledger: ledger[:-4]), "turns end at 616"),
    "another ledger": (
        _ledger(lambda ledger: ledger[:40] + bytes([ledger[40] ^ 1]) + ledger[41:]),
        "token ids are not the ledger's",
    ),
    "ids that are none": (_ledger(lambda ledger: ledger[:-4] + struct.pack("<i", 2**30)), "and the vocabulary of"),
    "ids below 0": (_ledger(lambda ledger: ledger[:-4] + struct.pack("<i", -1)), "token ids from -1 to"),
    "a chunk that is none": (_chunk(lambda chunk: b"\x80\x04" + chunk), "not a chunk file"),
    "an empty chunk": (_chunk(lambda _: b""), "less than any header"),
    "a chunk cut short": (_chunk(lambda chunk: chunk[:-1]), "truncated"),
    "a chunk altered": (_chunk(lambda chunk: chunk[:-1] + bytes([chunk[-1] ^ 1])), "checksum: part 0"),
    "a chunk of elsewhere": (_chunk(_other_position), "does not hold together"),
    "chunks in each other's place": (_swapped, "tokens: covers"),
    "a chunk twice": (_twice, "one chunk is there twice"),
}
"""What is done to a file that is otherwise in order, and the words of its refusal."""


async def test_files_that_are_made_to_harm_are_refused_and_leave_nothing(tmp_path: Path, exported: Exported) -> None:
    path = tmp_path / "file"
    async with opened(tmp_path / "home", exported.model) as kv:
        for name, (mutate, words) in HARM.items():
            header, sections = exported.parts()
            mutate(header, sections)
            path.write_bytes(sealed(header, sections))
            with pytest.raises(InvalidRequest) as refused:
                await kv.sessions.import_(path)
            assert words in str(refused.value), name
            await nothing_is_left(kv)
        path.write_bytes(sealed(*exported.parts()))
        moved = await kv.sessions.import_(path)
        assert (await said(moved, [NEXT], TOKENS))[0].ids == exported.goes_on, "the control"


async def test_nothing_in_a_file_is_executed_nor_used_as_a_path(tmp_path: Path, exported: Exported) -> None:
    trace = tmp_path / "trace"
    bomb = pickle.dumps(Bomb(trace))
    header, sections = exported.parts()
    header["model"] = str(trace)
    header["fits"] = [section(bomb, codec="compact", name="ab" * 16)]
    sections.insert(1, bomb)
    (tmp_path / "file").write_bytes(sealed(header, sections))
    async with opened(tmp_path / "home", exported.model) as kv:
        moved = await kv.sessions.import_(tmp_path / "file")
        assert moved._core.record.model == kv.model.name
        assert (await said(moved, [NEXT], TOKENS))[0].ids == exported.goes_on
        sections[2] = bomb
        header["chunks"][0] |= section(bomb)
        (tmp_path / "file").write_bytes(sealed(header, sections))
        with pytest.raises(ImportRefused, match="not a chunk file"):
            await kv.sessions.import_(tmp_path / "file")
    assert not [name for name in files(tmp_path) if name == "trace" or name.endswith(".safetensors")]
    pickle.loads(bomb)
    assert "trace" in files(tmp_path), "the control"


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*")}


@pytest.mark.parametrize("exported", ["llama"], indirect=True)
async def test_whatever_a_header_says_it_is_refused_or_a_session_that_holds_together(
    tmp_path: Path, exported: Exported, seed: int
) -> None:
    draw, path = random.Random(seed), tmp_path / "file"
    values: list[Any] = [None, True, 0, 1, -1, 255, 256, LENGTH, 2**31, 2**63, 2**70, 0.5, float("inf"), "", "x" * 70]
    values += ["full", "sink:64", "user", [], {}, [[]], [0, 256], [256, 0], {"length": 0}]
    taken = refused = 0
    async with opened(tmp_path / "home", exported.model) as kv:
        for _ in range(250):
            header, sections = exported.parts()
            for _ in range(draw.choice((1, 1, 1, 2, 4))):
                place: Any = header
                while True:
                    key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
                    if not isinstance(place[key], dict | list) or not place[key] or draw.random() < 0.2:
                        break
                    place = place[key]
                if draw.random() < 0.2:
                    del place[key]
                else:
                    place[key] = draw.choice(values)
                if not header:
                    break
            path.write_bytes(sealed(header, sections))
            try:
                moved = await kv.sessions.import_(path)
            except AgentKVError as error:
                refused += 1
                assert isinstance(error, InvalidRequest), error
            else:
                taken += 1
                await check_session(kv, moved)
                assert len((await said(moved, [NEXT], 1))[0].ids) == 1
                await moved.delete()
            await nothing_is_left(kv)
    print(f"{taken} taken, {refused} refused")
    assert taken > 10 and refused > 100


@pytest.mark.parametrize("exported", ["llama"], indirect=True)
async def test_a_file_costs_no_more_memory_than_its_parts_may_have(tmp_path: Path, exported: Exported) -> None:
    """A chunk of 64 MiB, where this model's have a hundredth of that: it is read in pieces, and never whole."""
    header, sections = exported.parts()
    huge = bytes(2**26)
    header["chunks"][0] |= section(huge)
    sections[1] = huge
    (tmp_path / "file").write_bytes(sealed(header, sections))
    del huge, sections
    async with opened(tmp_path / "home", exported.model) as kv:
        tracemalloc.start()
        try:
            with pytest.raises(ImportRefused, match="the limit is"):
                await kv.sessions.import_(tmp_path / "file")
            assert tracemalloc.get_traced_memory()[1] < 2**24
        finally:
            tracemalloc.stop()
        await nothing_is_left(kv)


_IN_LITTLE_MEMORY = """
import resource, sys
from agentkv.errors import ChunkFault
from agentkv.sessions.exported import parse_header
from agentkv.storage.chunkfile import read_header

pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 2**28
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
content = sys.stdin.buffer.read()
try:
    parse_header(content) if sys.argv[1] == "session" else read_header(content, "ab" * 20)
except (ValueError, ChunkFault) as error:
    print(str(error)[:200])
"""


@pytest.mark.short(2)
@pytest.mark.parametrize(("kind", "values"), [("session", 500_000), ("chunk", 30_000), ("chunk", 300_000)])
@pytest.mark.parametrize("value", ["[]", "{}"])
def test_a_header_of_many_values_costs_little_memory_however_much_is_wrong_with_it(
    kind: str, values: int, value: str
) -> None:
    """Nearly all fields are missing, and each missing one is an error that speaks of the whole."""
    key = "metadata" if kind == "session" else "parameters"
    text = f'{{"what":"agentkv session","format":2,"{key}":{{"a":[{",".join([value] * values)}]}}}}'.encode()
    prefix = struct.pack("<8sII", b"AGENTKV\x1a", 2, len(text))
    content = text if kind == "session" else prefix + blake3(prefix + text).digest() + text
    done = subprocess.run(
        [sys.executable, "-c", _IN_LITTLE_MEMORY, kind], input=content, capture_output=True, timeout=200
    )
    assert done.returncode == 0, done.stderr.decode()[-500:]
    assert b"Field required" in done.stdout or b"values; the limit" in done.stdout, done.stdout


# -- a home that cannot take it ----------------------------------------------------------------------------------------


@pytest.mark.short(2)
@pytest.mark.parametrize("chunks", [0, 1, 2])
async def test_a_disk_that_is_full_leaves_nothing(
    tmp_path: Path, exported: Exported, monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    monkeypatch.setattr("agentkv.sessions.importing._BATCH", 1)
    room = sum(chunk["nbytes"] for chunk in exported.parts()[0]["chunks"][:chunks]) + 100
    async with opened(tmp_path / "home", exported.model) as kv:
        blobs: Any = kv.sessions.tiers.blobs
        blobs.budget_bytes = room
        with pytest.raises(StorageFull):
            await kv.sessions.import_(exported.path)
        await nothing_is_left(kv)
        assert blobs.used_bytes() == 0
        blobs.budget_bytes = 2**40
        moved = await kv.sessions.import_(exported.path)
        assert (await said(moved, [NEXT], TOKENS))[0].ids == exported.goes_on
        await check_home(kv)


async def test_a_database_that_is_locked_leaves_nothing(
    tmp_path: Path, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository, "Patience", lambda: Patience(attempts=2, pause_seconds=0.01, busy_seconds=0.05))
    async with opened(tmp_path / "home", exported.model) as kv:
        with contextlib.closing(sqlite3.connect(tmp_path / "home" / "agentkv.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(DatabaseUnavailable):
                await kv.sessions.import_(exported.path)
            other.execute("ROLLBACK")
        await nothing_is_left(kv)


# -- kill -9 -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.mark.short(3)
@pytest.mark.parametrize(
    "fault",
    ["blob.before_write", "blob.mid_write:2", "blob.after_rename:2", "import.before_commit", "turn.before_commit"],
)
def test_a_kill_during_an_import_leaves_no_half_session(
    tmp_path: Path, exported: Exported, nursery: Nursery, fault: str
) -> None:
    home = tmp_path / "home"
    victim = nursery.start(
        tmp_path / "fifo",
        fault,
        home=str(home),
        model=str(exported.model),
        session="",
        inputs=[NEXT],
        max_tokens=TOKENS,
        suspend_after=[],
        file=str(exported.path),
    )
    reports = list(victim.reports)
    assert nursery.reap() == -signal.SIGKILL, reports
    imported = [report["imported"] for report in reports if "imported" in report]
    assert bool(imported) is (fault == "turn.before_commit"), reports

    async def afterwards() -> None:
        async with opened(home, exported.model) as kv:
            await check_home(kv)
            assert [record.id for record in await kv.sessions.list()] == imported
            assert await kv.sessions.repository.loose_chunks() == []
            known = await kv.sessions.repository.known_chunk_ids()
            assert {name for name, _ in kv.sessions.tiers.blobs.list()} == known
            again = await kv.sessions.import_(exported.path)
            for session in [again, *[await kv.sessions.get(name) for name in imported]]:
                assert (await said(session, [NEXT], TOKENS))[0].ids == exported.goes_on
                await check_session(kv, session)
            await check_home(kv)

    asyncio.run(afterwards())
