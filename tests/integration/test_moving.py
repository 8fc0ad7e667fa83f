"""Conversations as files: what is exported from one home goes on in another as it would have in the first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from homes import chat_folder, check_home, check_session, model_folder, opened, prompt, said

from agentkv import AgentKV, SinkWindow
from agentkv.codecs.compact_fit import fit_compact
from agentkv.errors import InvalidRequest
from agentkv.models.calibrations import fit_path, save_calibration
from agentkv.models.gate import Calibration, CodecResult, TextFacts
from agentkv.sessions.exported import ExportedSession, parse_header
from agentkv.storage.chunkfile import ChunkHeader, verify
from agentkv.storage.container import Container
from agentkv.storage.naming import ids_bytes

TOKENS = 8
NEXT = prompt(21, 5)
KEY = "5a" * 32


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def contents(path: Path) -> tuple[ExportedSession, list[bytes], list[ChunkHeader]]:
    """Of an exported file: its header, all its sections, and the headers of its chunks, which are intact."""
    with Container(path) as file:
        header = parse_header(file.header)
        file.check(header.sections, lambda: None)
        sections = [file.content(number) for number in range(len(header.sections))]
    chunks = sections[1 + len(header.fits) :]
    return header, sections, [verify(chunk, it.id) for chunk, it in zip(chunks, header.chunks, strict=True)]


async def nothing_is_left(kv: AgentKV, sessions: int = 0) -> None:
    """No more sessions than those, and no file, row or fit of another."""
    await check_home(kv)
    repository, blobs = kv.sessions.repository, kv.sessions.tiers.blobs
    assert await repository.count_sessions() == sessions
    assert {name for name, _ in blobs.list()} == await repository.known_chunk_ids()
    assert await repository.loose_chunks() == []
    if not sessions:
        assert list(blobs.list()) == []
        assert list(kv.settings.home.rglob("*.safetensors")) == []


# -- with its KV -------------------------------------------------------------------------------------------------------


@pytest.mark.short(3)
@pytest.mark.parametrize(
    ("family", "created", "settings"),
    [
        ("llama", {}, {}),
        ("llama", {"policy": "sink:200"}, {"layout": "paged"}),
        ("gemma3", {}, {}),
        ("gemma3", {"policy": "turns:220"}, {}),
        ("mistral", {}, {}),
        ("llama", {"idle_codec": "raw"}, {"dtype": "bfloat16"}),
        ("llama", {}, {"layout": "quantized:int8"}),
    ],
)
async def test_it_goes_on_elsewhere_token_for_token_with_its_kv(
    tmp_path: Path, models: Path, family: str, created: dict[str, Any], settings: dict[str, Any]
) -> None:
    model = model_folder(models, family)
    inputs = [prompt(150, 1), prompt(90, 2), prompt(70, 3)]
    async with opened(tmp_path / "here", model, **settings) as kv:
        session = await kv.sessions.create(**created)
        await said(session, inputs, TOKENS)
        report = await session.export(tmp_path / "file")
        held = session._core.record.held.tokens
        assert (report.tokens, report.kv_tokens, report.reason) == (len(await session.token_ids()), held, None)
        assert report.nbytes == (tmp_path / "file").stat().st_size
        goes_on = [reply.ids for reply in await said(session, [NEXT, NEXT], TOKENS)]
    async with opened(tmp_path / "there", model, **settings) as kv:
        moved = await kv.sessions.import_(tmp_path / "file")
        assert moved.imported is not None
        assert (moved.imported.kv_tokens, moved.imported.reason) == (held, None)
        assert moved.imported.chunks == report.chunks > 0
        await check_session(kv, moved)
        await check_home(kv)
        first, second = await said(moved, [NEXT, NEXT], TOKENS)
        assert [first.ids, second.ids] == goes_on
        assert (first.restore.source, first.restore.reason) == ("disk", None)
        assert first.usage.cached_tokens == held >= 0.99 * (first.usage.prompt_tokens - len(NEXT))
        await moved.suspend()
        await check_session(kv, moved)
        await check_home(kv)
        await moved.delete()
        await nothing_is_left(kv)


async def test_all_that_the_conversation_is_comes_along_under_new_ids(tmp_path: Path, models: Path) -> None:
    tool = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {"at": [1, None, "ü"]}}}
    async with (
        opened(tmp_path / "here", chat_folder(models)) as kv,
        opened(tmp_path / "there", chat_folder(models)) as other,
    ):
        session = await kv.sessions.create(
            "You are helpful.",
            agent_id="bolt",
            policy=SinkWindow(600, slack=50),
            tools=[tool],
            metadata={"team": "ops", "nested": [{"a": 1.5}, None, float("inf")]},
        )
        await session.send("How is the weather?", max_tokens=5)
        await session.append([{"role": "assistant", "content": None, "tool_calls": [call]}])
        await session.append([{"role": "tool", "content": "\0 fine \u2028", "tool_call_id": "call_1"}])
        await session.continue_(max_tokens=5, seed=3, temperature=1.0)
        await session.export(tmp_path / "file")
        moved = await other.sessions.import_(tmp_path / "file")
        old, new = session._core.record, moved._core.record
        assert moved.metadata == {**session.metadata, "imported_from": session.id}
        assert new == replace(
            old,
            id=moved.id,
            metadata=dict(moved.metadata),
            state="disk",
            updated_at=new.updated_at,
            clock=old.created_at,
        )
        assert await other.sessions.repository.get_session(moved.id) == new
        assert new.updated_at >= old.updated_at
        assert [i.id for i in await other.sessions.list()] == [moved.id] != [session.id]
        mine, theirs = await session.items(), await moved.items()
        assert not {item.id for item in mine} & {item.id for item in theirs}
        assert [replace(item, id="") for item in mine] == [replace(item, id="") for item in theirs]
        assert await session.token_ids() == await moved.token_ids()
        assert await kv.sessions.repository.turns(session.id) == await other.sessions.repository.turns(moved.id)
        replies = [await s.send("And tomorrow?", max_tokens=9) for s in (session, moved)]
        assert replies[0].text == replies[1].text
        # The database holds what this process holds.
        fresh = (await other.sessions.repository.items(moved.id))[: len(mine)]
        assert [item.content for item in fresh] == [item.content for item in mine]


async def test_a_session_that_has_said_nothing_yet_moves_too(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path / "home", chat_folder(models)) as kv:
        session = await kv.sessions.create("You are helpful.")
        report = await session.export(tmp_path / "file")
        assert (report.kv_tokens, report.chunks, report.reason) == (0, 0, None)
        moved = await kv.sessions.import_(tmp_path / "file")
        assert moved.imported is not None and moved.imported.reason is None
        assert (await moved.send("Hello", max_tokens=6)).text == (await session.send("Hello", max_tokens=6)).text
        empty = await (await kv.sessions.create()).export(tmp_path / "empty")
        assert empty.tokens == len(await (await kv.sessions.import_(tmp_path / "empty")).token_ids())


@pytest.mark.parametrize("codec", ["int8", "compact"])
async def test_what_a_lossy_codec_has_made_is_never_encoded_again(tmp_path: Path, models: Path, codec: str) -> None:
    model = model_folder(models)
    async with opened(tmp_path / "here", model, idle_codec=codec) as kv:
        session = await kv.sessions.create()
        await said(session, [prompt(700, 1)], TOKENS)
        await session.export(tmp_path / "file")
        await session.suspend()
        goes_on = (await said(session, [NEXT], TOKENS))[0].ids
    _, sections, headers = contents(tmp_path / "file")
    assert [header.codec for header in headers] == [codec, codec, "exact"]
    async with opened(tmp_path / "there", model, idle_codec="exact") as kv:
        moved = await kv.sessions.import_(tmp_path / "file")
        assert moved._core.record.idle_codec == codec
        manifest = await kv.sessions.repository.manifest(moved.id)
        blobs = [bytes(kv.sessions.tiers.blobs.get(segment.chunk_id)) for segment in manifest.segments]
        for blob, section, header in zip(blobs, sections[1:], headers, strict=True):
            assert blob[-header.payload_nbytes :] == section[-header.payload_nbytes :], "encoded once"
        assert (await said(moved, [NEXT], TOKENS))[0].ids == goes_on
        await moved.suspend()
        after = (await kv.sessions.repository.manifest(moved.id)).segments
        assert after[:2] == manifest.segments[:2], "a second loss"
        await moved.export(tmp_path / "again")
    _, again, _ = contents(tmp_path / "again")
    assert again[1][-headers[0].payload_nbytes :] == sections[1][-headers[0].payload_nbytes :]


async def test_nobody_else_ever_reads_kv_that_came_from_elsewhere(tmp_path: Path, models: Path) -> None:
    """A new session with the same head computes it, and so does the same session imported once more."""
    system = "You are helpful. " * 20
    async with opened(tmp_path / "here", chat_folder(models)) as kv:
        session = await kv.sessions.create(system)
        await session.send("Hello", max_tokens=4)
        await session.export(tmp_path / "file")
    async with opened(tmp_path / "there", chat_folder(models)) as kv:
        moved = await kv.sessions.import_(tmp_path / "file")
        reply = await (await kv.sessions.create(system)).send("Hello", max_tokens=4)
        assert (reply.restore.source, reply.usage.cached_tokens) == ("new", 0)
        control = await (await kv.sessions.create(system)).send("Hi", max_tokens=4)
        assert control.usage.cached_tokens > 64, "the control: its own head is shared"
        twice = await kv.sessions.import_(tmp_path / "file")
        repository = kv.sessions.repository
        names = [{s.chunk_id for s in (await repository.manifest(s.id)).segments} for s in (moved, twice)]
        assert names[0] and names[1] and not names[0] & names[1]
        await check_home(kv)


async def test_under_its_own_id_where_that_is_free(tmp_path: Path, models: Path) -> None:
    model = model_folder(models)
    async with opened(tmp_path / "here", model) as kv:
        session = await kv.sessions.create()
        await said(session, [prompt(200, 1)], TOKENS)
        await session.export(tmp_path / "file")
        items = [item.id for item in await session.items()]
        with pytest.raises(InvalidRequest, match="exists here already"):
            await kv.sessions.import_(tmp_path / "file", keep_id=True)
        await nothing_is_left(kv, sessions=1)
        assert (await said(session, [NEXT], TOKENS))[0].restore.source == "device"
    async with opened(tmp_path / "there", model) as kv:
        for _ in range(2):  # a second time after it was deleted: its chunks are called as before
            moved = await kv.sessions.import_(tmp_path / "file", keep_id=True)
            assert moved.id == session.id
            assert [item.id for item in await moved.items()] == items
            assert (await said(moved, [NEXT], TOKENS))[0].restore.source == "disk"
            assert (await kv.sessions.get(session.id))._core is moved._core
            await check_home(kv)
            await moved.delete()
        await nothing_is_left(kv)


# -- without it --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["full", "sink:200"])
async def test_under_another_dtype_the_ledger_is_computed_and_says_the_same(
    tmp_path: Path, models: Path, policy: str
) -> None:
    model = model_folder(models)
    async with opened(tmp_path / "bf16", model, dtype="bfloat16") as kv:
        session = await kv.sessions.create(policy=policy)
        await said(session, [prompt(150, 1), prompt(90, 2)], TOKENS)
        await session.export(tmp_path / "file")
        ledger = await session.token_ids()
    async with opened(tmp_path / "fp32", model) as kv:
        moved = await kv.sessions.import_(tmp_path / "file")
        assert moved.imported is not None and moved.imported.reason is not None
        assert moved.imported.reason.startswith("fingerprint")
        assert (moved.imported.kv_tokens, moved.imported.chunks, moved.imported.tokens) == (0, 0, len(ledger))
        assert list(kv.sessions.tiers.blobs.list()) == []
        reply, later = await said(moved, [NEXT, NEXT], TOKENS)
        assert (reply.restore.source, reply.usage.cached_tokens) == ("recompute", 0)
        assert reply.restore.recomputed_tokens == len(ledger) - 1
        assert (reply.restore.reason or "").startswith("fingerprint")
        twin = await kv.sessions.create(policy=policy)
        expected = await said(twin, [[*ledger, *NEXT], NEXT], TOKENS)
        assert [reply.ids, later.ids] == [each.ids for each in expected]
        await moved.suspend()
        await check_session(kv, moved)
        await check_home(kv)


async def test_what_this_runtime_cannot_go_on_with_is_refused_by_name(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path / "here", chat_folder(models)) as kv:
        session = await kv.sessions.create("You are helpful.", policy="sink:800")
        await session.send("Hello", max_tokens=4)
        await session.export(tmp_path / "file")
    for model, match in (
        (chat_folder(models, extra="Tokens, tokens. "), "the tokenizer of"),
        (model_folder(models), "the tokenizer of"),
        (chat_folder(models, "gpt2"), "nothing can be evicted"),
    ):
        async with opened(tmp_path / model.name, model) as kv:
            with pytest.raises(InvalidRequest, match=match):
                await kv.sessions.import_(tmp_path / "file")
            await nothing_is_left(kv)


async def test_a_chunk_that_is_bad_here_is_not_exported_and_the_report_says_so(tmp_path: Path, models: Path) -> None:
    async with opened(tmp_path / "here", model_folder(models)) as kv:
        session = await kv.sessions.create()
        await said(session, [prompt(600, 1)], TOKENS)
        await session.suspend()
        bad = (await kv.sessions.repository.manifest(session.id)).segments[1].chunk_id
        path = kv.settings.blobs_dir / bad[:2] / bad
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        report = await session.export(tmp_path / "file")
        assert (report.kv_tokens, report.chunks) == (256, 1)
        assert report.reason is not None and report.reason.startswith(f"checksum: chunk {bad}")
        moved = await kv.sessions.import_(tmp_path / "file")
        assert moved.imported is not None and moved.imported.kv_tokens == 256
        assert moved.imported.reason == f"unstored: the file has no KV of the last {607 - 256:,} tokens"
        replies = [(await said(each, [NEXT], TOKENS))[0] for each in (session, moved)]
        assert replies[0].ids == replies[1].ids
        assert replies[1].usage.cached_tokens == 256


async def test_kv_that_no_disk_has_taken_is_exported_from_host_memory(tmp_path: Path, models: Path) -> None:
    async with (
        opened(tmp_path / "here", model_folder(models)) as kv,
        opened(tmp_path / "b", model_folder(models)) as other,
    ):
        session = await kv.sessions.create()
        await said(session, [prompt(100, 1)], TOKENS)
        await session.suspend()
        await session.resume()
        blobs: Any = kv.sessions.tiers.blobs
        blobs.budget_bytes = blobs.used_bytes() + 50
        await said(session, [prompt(120, 2)], TOKENS)
        live = await session.export(tmp_path / "live")
        assert (live.kv_tokens, live.reason) == (107, "unstored: 128 tokens had not reached the disk")
        assert (await session.suspend()).tier == "host"
        report = await session.export(tmp_path / "file")
        assert (report.kv_tokens, report.reason) == (235, None)
        goes_on = (await said(session, [NEXT], TOKENS))[0].ids
        for name, cached in (("live", 107), ("file", 235)):
            reply = (await said(await other.sessions.import_(tmp_path / name), [NEXT], TOKENS))[0]
            assert (reply.ids, reply.usage.cached_tokens) == (goes_on, cached)
        blobs.budget_bytes = 2**40


# -- what stays here ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["exact", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
async def test_what_a_branch_shares_with_others_leaves_without_their_words(
    tmp_path: Path, models: Path, family: str, codec: str
) -> None:
    """A fork uses the beginning of a chunk, and so does a session that went back: the rest is no part of the file."""
    model, secret = model_folder(models, family), prompt(300, 9)
    async with opened(tmp_path / "here", model, idle_codec=codec) as kv:
        session = await kv.sessions.create()
        await session.append_tokens(prompt(100, 1))
        await session.append_tokens(secret)
        await session.suspend()
        common = (await session.items())[0].id
        fork = await session.fork(common)
        await session.rewind(common)
        for branch in (fork, session):
            await said(branch, [prompt(400, 2)], TOKENS)
            await branch.suspend()
            report = await branch.export(tmp_path / branch.id)
            length = branch._core.record.kv_length
            assert (report.kv_tokens, report.reason) == (length, None)
            _, sections, headers = contents(tmp_path / branch.id)
            ledger = await branch.token_ids()
            for header in headers:
                assert header.token_ids == ids_bytes(ledger[header.start : header.stop])
            assert not any(ids_bytes(secret[:8]) in section for section in sections)
        goes_on = [(await said(branch, [NEXT], TOKENS))[0] for branch in (fork, session)]
    async with opened(tmp_path / "there", model, idle_codec=codec) as kv:
        for branch, expected in zip((fork, session), goes_on, strict=True):
            moved = await kv.sessions.import_(tmp_path / branch.id)
            assert moved.imported is not None and moved.imported.kv_tokens == length
            (reply,) = await said(moved, [NEXT], TOKENS)
            assert (reply.ids, reply.usage.cached_tokens) == (expected.ids, length)
            await check_session(kv, moved)
        await check_home(kv)


async def test_numbers_taken_out_of_a_lossy_chunk_count_as_lossy(tmp_path: Path, models: Path) -> None:
    model = model_folder(models)
    async with opened(tmp_path / "here", model, idle_codec="int8") as kv:
        session = await kv.sessions.create()
        await session.append_tokens(prompt(100, 1))
        await session.append_tokens(prompt(500, 2))
        await session.suspend()
        fork = await session.fork((await session.items())[0].id)
        await fork.append_tokens(prompt(20, 3))
        await fork.export(tmp_path / "file")
        _, _, headers = contents(tmp_path / "file")
        assert [(h.span, h.codec, h.ancestors) for h in headers[:1]] == [((0, 99), "int8", ("int8",))]
        assert {part.codec for part in headers[0].parts} == {"exact"}
    async with opened(tmp_path / "there", model, idle_codec="int8") as kv:
        moved = await kv.sessions.import_(tmp_path / "file")
        before = (await kv.sessions.repository.manifest(moved.id)).segments[0]
        await moved.append_tokens(prompt(600, 4))
        await moved.suspend()
        assert (await kv.sessions.repository.manifest(moved.id)).segments[0] == before, "a second loss"


async def test_from_an_encrypted_home_only_where_it_is_said_to_be_plain(tmp_path: Path, models: Path) -> None:
    model = model_folder(models)
    async with opened(tmp_path / "here", model, encryption_key=KEY) as kv, opened(tmp_path / "there", model) as other:
        session = await kv.sessions.create()
        await said(session, [prompt(300, 1)], TOKENS)
        with pytest.raises(InvalidRequest, match="allow_plain=True") as refused:
            await session.export(tmp_path / "file")
        assert refused.value.param == "allow_plain"
        assert not (tmp_path / "file").exists()
        await session.export(tmp_path / "file", allow_plain=True)
        goes_on = (await said(session, [NEXT], TOKENS))[0].ids
        for runtime in (kv, other):
            moved = await runtime.sessions.import_(tmp_path / "file")
            reply = (await said(moved, [NEXT], TOKENS))[0]
            assert (reply.ids, reply.restore.source) == (goes_on, "disk")
    payload = contents(tmp_path / "file")[1][1][-500:]
    for home, plain in (("here", False), ("there", True)):
        files = [path.read_bytes() for path in (tmp_path / home / "blobs").glob("??/*")]
        assert any(payload in file for file in files) is plain


# -- fits --------------------------------------------------------------------------------------------------------------


async def fitted_home(home: Path, model: Path) -> None:
    """``home``, whose codec ``compact`` encodes with a fit to KV of the model."""
    async with opened(home, model) as kv:
        session = await kv.sessions.create()
        await session.append_tokens(prompt(900, 3))
        live, geometry = session._core.kv, kv.model.adapter.geometry
        assert live is not None
        blocks = []
        for index in range(len(geometry.groups)):
            runs = live.visible(index)  # type: ignore[attr-defined]
            blocks += [live.read(index, run).of(geometry, index, run.start) for run in runs]
        fit = fit_compact(blocks)
        fingerprint = kv.model.fingerprints.kv
        await session.delete()
    result = CodecResult(
        codec="compact+basis",
        encoder="compact",
        fit=fit.digest,
        ratio=6.0,
        session_ratio=5.0,
        mean_kl=0.001,
        p99_kl=0.01,
        top1=1.0,
        bytes_per_token=100.0,
        session_bytes_per_token=120.0,
        encode_mb_s=500.0,
        decode_mb_s=900.0,
        encode_mb_s_one_thread=300.0,
        decode_mb_s_one_thread=500.0,
    )
    report = Calibration(
        agentkv="1.0",
        kv_fingerprint=fingerprint,
        model="tiny",
        model_type="llama",
        dtype="float32",
        date="2031-04-12T06:00:00+00:00",
        machine={},
        text=TextFacts(source="test", digest="", tokens=900),
        fit_text=None,
        prefix_tokens=900,
        scored_tokens=10,
        lossy_tokens=700,
        needles=0,
        max_kl=0.005,
        codecs=(result,),
    )
    save_calibration(home, report, [fit])


async def test_the_fit_that_chunks_were_encoded_with_travels_with_them(tmp_path: Path, models: Path) -> None:
    model = model_folder(models)
    await fitted_home(tmp_path / "here", model)
    async with opened(tmp_path / "here", model, idle_codec="compact") as kv:
        session = await kv.sessions.create()
        await said(session, [prompt(600, 1)], TOKENS)
        await session.export(tmp_path / "file")
        await session.suspend()
        goes_on = (await said(session, [NEXT], TOKENS))[0].ids
        fingerprint = kv.model.fingerprints.kv
    header, _, headers = contents(tmp_path / "file")
    (fit,) = header.fits
    assert {p.parameters.get("fit") for h in headers for p in h.parts if p.codec == "compact"} == {fit.name}
    for round_ in range(2):  # the second time the fit is there
        async with opened(tmp_path / "there", model) as kv:
            assert fit_path(kv.settings.home, fingerprint, fit.name).exists() is bool(round_)
            moved = await kv.sessions.import_(tmp_path / "file")
            assert moved.imported is not None and moved.imported.reason is None
            reply = (await said(moved, [NEXT], TOKENS))[0]
            assert (reply.ids, reply.restore.reason) == (goes_on, None)
            assert "compact" in (reply.restore.codec or "")
    async with opened(tmp_path / "there", model) as kv:  # found again at the next start
        again = await kv.sessions.get(moved.id)
        assert (await again.resume()).reason is None
        assert kv.sessions.tiers.writer.codec("compact").parameters() == {}, (
            "it encodes nothing with a fit from elsewhere"
        )


async def test_a_fit_that_is_missing_or_another_of_its_name_costs_a_recompute(tmp_path: Path, models: Path) -> None:
    model = model_folder(models)
    await fitted_home(tmp_path / "here", model)
    async with opened(tmp_path / "here", model, idle_codec="compact") as kv:
        session = await kv.sessions.create()
        await said(session, [prompt(600, 1)], TOKENS)
        await session.export(tmp_path / "file")
        fingerprint = kv.model.fingerprints.kv
        mine = fit_path(kv.settings.home, fingerprint, contents(tmp_path / "file")[0].fits[0].name)
        twin = await kv.sessions.create()
        expected = await said(twin, [[*await session.token_ids(), *NEXT]], TOKENS)
        kept = mine.read_bytes()
        mine.unlink()
        await session.export(tmp_path / "without")
    assert contents(tmp_path / "without")[0].fits == []

    from safetensors import safe_open

    from agentkv.codecs import Fit
    from agentkv.models import calibrations

    # Another fit, whole, that is called as the one in the file: somebody's who wants chunks to be read through it.
    with safe_open(mine.with_name("x") if mine.exists() else _put(tmp_path / mine.name, kept), framework="pt") as file:
        tensors = {name: file.get_tensor(name) * 1.5 for name in file.keys()}  # noqa: SIM118
    forged = calibrations._packed(Fit("compact", mine.name.removesuffix(".safetensors"), tensors, {}))
    for name, here in (("without", None), ("file", forged)):
        home = tmp_path / f"to-{name}"
        async with opened(home, model) as kv:
            place = fit_path(home, fingerprint, mine.name.removesuffix(".safetensors"))
            if here is not None:
                place.parent.mkdir(parents=True)
                place.write_bytes(here)
            moved = await kv.sessions.import_(tmp_path / name)
            assert moved.imported is not None and moved.imported.kv_tokens == 0
            assert (moved.imported.reason or "").startswith("fit: chunk ")
            assert not place.exists() if here is None else place.read_bytes() == here
            reply = (await said(moved, [NEXT], TOKENS))[0]
            assert (reply.ids, reply.restore.source) == (expected[0].ids, "recompute")


def _put(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
