"""A real engine over every layout says the same: in company, after evictions, after a rollback."""

from __future__ import annotations

import asyncio

import pytest
import torch
from driving import Gate, Hooked, adapted, assert_same, generating, prompt, snapshot
from families import family

from agentkv.engine.adapter import ModelAdapter
from agentkv.engine.engine import Engine
from agentkv.kv.contract import LAYOUTS, Layout
from agentkv.kv.offloaded import OffloadedLayout
from agentkv.kv.paged import PagedLayout
from agentkv.types import Span

CPU = torch.device("cpu")


class SmallPages(PagedLayout):
    page_tokens = 16


def layout_of(name: str, adapter: ModelAdapter) -> Layout:
    if name == "paged":
        return SmallPages(adapter.geometry, CPU)
    if name == "offloaded:paged":
        return OffloadedLayout(adapter.geometry, CPU, SmallPages)
    return LAYOUTS.get(name)(adapter.geometry, CPU)


async def conversation(adapter: ModelAdapter, layout: Layout) -> list[tuple[int, ...]]:
    """Two sessions of three turns each side by side; one evicts, forks, and has a turn cancelled."""
    layout.rebase_at = 60
    engine = Engine(adapter, layout, joint_rows=16)
    engine.start()
    said: list[tuple[int, ...]] = []
    try:
        states = [layout.open(0, 400), layout.open(0, 400)]
        for turn in range(3):
            jobs = [generating(kv, prompt(20 + 9 * turn, i), 12, piece=7)[0] for i, kv in enumerate(states)]
            for result in await asyncio.gather(*(engine.submit(job).finished() for job in jobs)):
                assert result is not None
                said.append(result.tokens)
            kv = states[0]
            kv.settle()
            kv.keep([Span(0, 4), Span(kv.length - 20, kv.length)])
            before, gate = snapshot(kv), Gate()
            handle = engine.submit(generating(kv, prompt(11), 100, sink=Hooked({30: gate}))[0])
            await gate.reached()
            handle.cancel()
            gate.open()
            assert await handle.finished() is None
            assert_same(snapshot(kv), before)
        twin = states[0].fork()
        for kv in (states[0], twin):
            result = await engine.submit(generating(kv, prompt(5), 10)[0]).finished()
            assert result is not None
            said.append(result.tokens)
        assert said[-1] == said[-2]
        for kv in (*states, twin):
            kv.close()
    finally:
        await engine.stop()
    return said


@pytest.mark.short(2)
@pytest.mark.parametrize("model", ["gemma3", "gpt_oss", "cohere2", "glm"])
async def test_every_layout_says_the_same(model: str) -> None:
    adapter = adapted(family(model))
    expected = await conversation(adapter, layout_of("dynamic", adapter))
    assert len({token for tokens in expected for token in tokens}) > 10
    for name in LAYOUTS:
        assert await conversation(adapter, layout_of(name, adapter)) == expected, name
