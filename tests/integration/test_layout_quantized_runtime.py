"""Sessions whose older tokens are quantised live: suspended and resumed they go on as if they had never stopped."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import check_session, model_folder, opened, turns

from agentkv import AgentKV
from agentkv.kv import quantized
from agentkv.kv.quantized import QuantizedKV
from agentkv.sessions.session import Session
from agentkv.types import Span, Tier


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def live(session: Session) -> QuantizedKV:
    kv = session._core.kv
    assert isinstance(kv, QuantizedKV)
    return kv


async def side_by_side(kv: AgentKV, policy: str) -> AsyncIterator[tuple[Session, Session]]:
    """Two sessions of the same seven turns, after each; the second one sleeps on disk between them."""
    awake, sleeper = await kv.sessions.create(policy=policy), await kv.sessions.create(policy=policy)
    for ids in turns(7, tokens=90):
        replies = [await s.generate_tokens(ids, max_tokens=8, ignore_eos=True) for s in (awake, sleeper)]
        assert replies[1].restore.recomputed_tokens == 0
        assert replies[0].ids == replies[1].ids or policy != "full"
        await check_session(kv, sleeper)
        yield awake, sleeper
        await sleeper.suspend(Tier.DISK)


@pytest.mark.parametrize(
    ("family", "layout"),
    [("llama", "quantized:int4"), ("qwen2", "quantized:int8:paged"), ("gpt_neox", "quantized:int8:static")],
)
async def test_a_session_that_sleeps_after_each_turn_says_what_one_that_does_not_says(
    models: Path, tmp_path: Path, family: str, layout: str
) -> None:
    async with opened(tmp_path / "home", model_folder(models, family), layout=layout) as kv:
        async for sessions in side_by_side(kv, "full"):
            one, two = map(live, sessions)
            assert one.lossy == two.lossy
            for run in one.visible(0):
                a, b = one.read(0, run), two.read(0, run)
                assert all(torch.equal(x, y) for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True))
        assert one.lossy == (Span(16, 576),) and one.length == 706


@pytest.mark.parametrize(
    ("family", "policy", "layout"),
    [
        ("llama", "sink:352", "quantized:int8"),
        ("gemma3", "turns:352", "quantized:int4:paged"),
        ("qwen2", "sliding:320", "quantized:int4"),
    ],
)
async def test_sessions_that_evict_hold_the_same_within_a_step(
    models: Path, tmp_path: Path, family: str, policy: str, layout: str
) -> None:
    """What an eviction leaves of a group is quantised while its session lives, and exact once it was restored."""
    async with opened(tmp_path / "home", model_folder(models, family), layout=layout) as kv:
        quantised = 0
        async for sessions in side_by_side(kv, policy):
            one, two = map(live, sessions)
            assert one.placement.kept == two.placement.kept
            quantised = max(quantised, sum(len(span) for span in two.lossy))
            group = next(i for i, g in enumerate(one.geometry.groups) if g.window is None)
            for run in one.visible(group):
                a, b = (state.read(group, run).values[0].double() for state in (one, two))
                off = one.bound(group, run).values[0] + two.bound(group, run).values[0]
                if one.geometry.groups[group].layers[0] == 0:  # deeper ones depend on what was attended
                    assert bool(((a - b).abs() <= off + 1e-5).all())
        assert quantised >= 64 and one.tokens < one.length


async def test_no_event_loop_quantises_a_session_that_comes_back(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds of it for a long history: those who decode its chunks do that, or the model's thread."""
    threads: list[str] = []
    quantised = quantized.quantised

    def watched(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return quantised(*args)

    monkeypatch.setattr(quantized, "quantised", watched)
    async with opened(tmp_path / "home", model_folder(models), layout="quantized:int8") as kv:
        session = await kv.sessions.create()
        for ids in turns(3, tokens=200):
            await session.generate_tokens(ids, max_tokens=4)
        assert set(threads) == {"agentkv-model"}
        for tier in (Tier.HOST, Tier.DISK):
            await session.suspend(tier)
            threads.clear()
            await session.resume()
            assert len(live(session).lossy) == 1
            assert threads and all(name.startswith("agentkv-io") for name in threads)
