"""Lossy codecs at rest: what is sealed, what stays lossless, and that a token is encoded with loss once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import family
from homes import check_home, check_session, model_folder, opened, prompt, said, written

from agentkv import AgentKV
from agentkv.codecs import CODECS
from agentkv.codecs.spared import LOSSLESS_TAIL, SINKS
from agentkv.sessions.session import Session
from agentkv.storage.chunkfile import ChunkHeader, read_header
from agentkv.types import Span

LOSSY = ("int8", "int4", "compact")


async def headers(kv: AgentKV, session: Session) -> list[tuple[Span, ChunkHeader]]:
    """The session's segments with their chunks' headers."""
    manifest = await kv.sessions.repository.manifest(session.id)
    blobs = kv.sessions.tiers.blobs
    return [(s.span, read_header(blobs.get(s.chunk_id), s.chunk_id)) for s in manifest.segments]


def full_keys(kv: AgentKV, session: Session, spans: Iterable[Span]) -> list[torch.Tensor]:
    """Copies of the live keys and values of full-attention layers at these ledger positions."""
    live = session._core.kv
    assert live is not None
    group = next(i for i, g in enumerate(kv.model.adapter.geometry.groups) if g.window is None)
    blocks = [live.read(group, span) for span in spans]
    return [t.clone() for block in blocks for t in (*block.keys, *block.values)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("codec", LOSSY)
async def test_old_tokens_are_sealed_and_the_rest_stays_lossless(tmp_path: Path, codec: str) -> None:
    async with opened(tmp_path / "home", model_folder(tmp_path), idle_codec=codec) as kv:
        session = await kv.sessions.create()
        (reply,) = await said(session, [prompt(700, 1)])
        length = session._core.record.kv_length
        stored = Span(0, SINKS), Span(512, length)
        sealed = Span(SINKS, 512)
        before = full_keys(kv, session, stored), full_keys(kv, session, [sealed])
        await session.suspend()
        found = await headers(kv, session)
        assert [(span, header.codec) for span, header in found] == [
            (Span(0, 256), codec),
            (Span(256, 512), codec),
            (Span(512, length), "exact"),
        ]
        assert length - 512 >= LOSSLESS_TAIL
        parts = [(part.span, part.codec) for _, header in found for part in header.parts]
        assert parts[:2] == [(Span(0, SINKS), "exact"), (Span(SINKS, 256), codec)]
        report = await session.resume()
        assert (report.source, report.tokens, report.reason) == ("disk", length, None)
        assert set((report.codec or "").split("+")) == {codec, "exact"}
        assert same(full_keys(kv, session, stored), before[0])
        restored = full_keys(kv, session, [sealed])
        assert not same(restored, before[1]), "the control: nothing was lost, so nothing was encoded with loss"
        assert max(float((a - b).abs().max()) for a, b in zip(restored, before[1], strict=True)) < 2.0
        assert len((await said(session, [prompt(5, 2)]))[0].ids) == len(reply.ids)
        await check_session(kv, session)
        await check_home(kv)


async def test_lossless_segments_are_replaced_once_they_are_far_enough_behind(tmp_path: Path) -> None:
    """Turn by turn: each adds a lossless segment, and now and then one chunk takes the place of several."""
    async with opened(tmp_path / "home", model_folder(tmp_path), idle_codec="int8") as kv:
        session = await kv.sessions.create()
        sealed: dict[str, Span] = {}
        for turn in range(15):
            await said(session, [prompt(60, turn)], 4)
            await written(kv)
            found = await headers(kv, session)
            length = session._core.record.kv_length
            assert [span.start for span, _ in found] == [0, *(span.stop for span, _ in found)][:-1]
            assert found[-1][0].stop == length
            lossy = {header.chunk_id: span for span, header in found if header.codec == "int8"}
            assert sealed.items() <= lossy.items(), "what is sealed stays"
            sealed = lossy
            end = max((span.stop for span in lossy.values()), default=0)
            assert end % 256 == 0
            assert LOSSLESS_TAIL <= length - end < LOSSLESS_TAIL + 256 or (end == 0 and length < LOSSLESS_TAIL + 256)
        assert len(sealed) == 3
        await check_home(kv)
        before = session._core.kv
        assert before is not None
        await session.suspend()
        assert (await session.resume()).tokens == session._core.record.kv_length


@pytest.mark.parametrize("codec", LOSSY)
async def test_fifty_suspends_leave_old_chunks_and_their_numbers_as_they_were(tmp_path: Path, codec: str) -> None:
    async with opened(tmp_path / "home", model_folder(tmp_path), idle_codec=codec) as kv:
        session = await kv.sessions.create()
        await said(session, [prompt(420, 3)])
        await session.suspend()
        first = [header.chunk_id for _, header in await headers(kv, session) if header.codec == codec]
        assert len(first) == 1
        bytes_before = [bytes(kv.sessions.tiers.blobs.get(name)) for name in first]
        await session.resume()
        once = full_keys(kv, session, [Span(0, 256)])
        for turn in range(50):
            await session.suspend()
            if turn % 5 == 0:
                await said(session, [prompt(8, turn)], 2)
            else:
                await session.resume()
            assert same(full_keys(kv, session, [Span(0, 256)]), once), turn
        await session.suspend()
        now = [header.chunk_id for _, header in await headers(kv, session) if header.codec == codec]
        assert now[:1] == first
        assert [bytes(kv.sessions.tiers.blobs.get(name)) for name in first] == bytes_before
        await check_home(kv)


@pytest.mark.short(5)
@pytest.mark.parametrize("name", ["gemma3", "mistral", "gpt2", "glm", "qwen3_next"])
@pytest.mark.parametrize("policy", ["full", "sink:480", "sliding:512"])
async def test_every_family_goes_on_from_sealed_chunks(tmp_path: Path, name: str, policy: str) -> None:
    """Sliding windows and recurrent states stay exact, learned positions are left alone, eviction drops sealed chunks
    too."""
    model = model_folder(tmp_path, name)
    if policy != "full" and not family(name).movable:
        pytest.skip("nothing can be evicted")
    async with opened(tmp_path / "home", model, idle_codec="int8", default_policy=policy) as kv:
        session = await kv.sessions.create()
        live = await kv.sessions.create()
        for turn in range(9):
            ids = prompt(90, turn)
            (reply,) = await said(session, [ids], 3)
            (twin,) = await said(live, [ids], 3)
            assert (len(reply.ids), reply.restore.reason) == (len(twin.ids), None)
            core = session._core
            windows = core.kv.window_snapshot() if core.kv else ()
            await session.suspend()
            report = await session.resume()
            assert (report.reason, report.recomputed_tokens) == (None, 0), turn
            assert report.tokens == core.record.held.tokens
            assert core.kv is not None
            for a, b in zip(windows, core.kv.window_snapshot(), strict=True):
                assert (a.group, a.span) == (b.group, b.span)
                assert same([*a.block.keys, *a.block.values], [*b.block.keys, *b.block.values])
            await check_session(kv, session)
        codecs = {header.codec for _, header in await headers(kv, session)}
        full = any(group.window is None for group in kv.model.adapter.geometry.groups)
        assert ("int8" in codecs) == full
        await check_home(kv)


async def test_a_killed_write_of_a_sealed_chunk_is_made_good(tmp_path: Path) -> None:
    """Another process, another start: the manifest says what is sealed, and it goes on from there."""
    model, home = model_folder(tmp_path), tmp_path / "home"
    async with opened(home, model, idle_codec="int8") as kv:
        session = await kv.sessions.create()
        await said(session, [prompt(300, 1)])
    for turn in range(6):
        async with opened(home, model, idle_codec="int8") as kv:
            session = await kv.sessions.get(session.id)
            (reply,) = await said(session, [prompt(70, turn)])
            assert (reply.restore.source, reply.restore.reason) == ("disk", None)
            await written(kv)
            await check_home(kv)
            await check_session(kv, session)
    async with opened(home, model, idle_codec="int8") as kv:
        found = await headers(kv, await kv.sessions.get(session.id))
        assert [header.codec for _, header in found][:2] == ["int8", "int8"]


async def test_auto_is_resolved_and_named(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"idle_codec": "auto"}
    async with opened(tmp_path / "home", model_folder(tmp_path), **settings) as kv:
        session = await kv.sessions.create()
        await said(session, [prompt(500, 1)])
        await session.suspend()
        assert {header.codec for _, header in await headers(kv, session)} == {"int8", "exact"}
        (reply,) = await said(session, [prompt(4, 2)])
        assert reply.restore.codec == "exact+int8"
    async with opened(tmp_path / "other", model_folder(tmp_path, "qwen2"), **settings) as kv:
        session = await kv.sessions.create()
        await said(session, [prompt(500, 1)])
        await session.suspend()
        assert {header.codec for _, header in await headers(kv, session)} == {"exact"}, "a fragile family, not measured"


async def test_a_codec_can_change_under_a_session(tmp_path: Path) -> None:
    """What was stored losslessly is sealed later; what was sealed stays."""
    model, home = model_folder(tmp_path), tmp_path / "home"
    async with opened(home, model) as kv:
        session = await kv.sessions.create(idle_codec="exact")
        await said(session, [prompt(420, 1)])
        await kv.sessions.repository.update_session(session.id, idle_codec="int8")
    async with opened(home, model) as kv:
        session = await kv.sessions.get(session.id)
        (reply,) = await said(session, [prompt(30, 2)])
        assert reply.restore.codec == "exact"
        await session.suspend()
        assert [header.codec for _, header in await headers(kv, session)] == ["int8", "exact", "exact"]
        assert (await session.resume()).reason is None
        await check_home(kv)
    assert CODECS.get("int8").exact is False
