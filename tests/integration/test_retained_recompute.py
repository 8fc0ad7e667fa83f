"""What a state is worth that was computed anew from its retained tokens alone: real model, real text."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from agentkv import AgentKV
from agentkv.bench.setup import documentation_ids
from agentkv.bench.stream import step
from agentkv.engine.retention import Retention
from agentkv.kv.contract import SequenceKV
from agentkv.policies.retention import SinkWindow
from agentkv.sessions.rates import Rates
from agentkv.sessions.recompute import recompute_retained
from agentkv.types import Span

WINDOW, FED, SCORED = 1024, 6000, 512


@pytest.mark.full
async def test_perplexity_after_a_retained_recompute_is_near_that_of_the_lost_state(
    smollm2_path: Path, tmp_path: Path
) -> None:
    async with AgentKV.open(model=str(smollm2_path), home=tmp_path, idle_seconds=3600, idle_codec="exact") as kv:
        head = await (await kv.sessions.create(system="You are a patient assistant.")).token_ids()
        ids = [*head, *documentation_ids(kv, FED + SCORED + 1)]
        model, layout = kv.model, kv.model.layout
        retention = Retention(SinkWindow(WINDOW), Span(0, len(head)))

        def feed(state: SequenceKV, stop: int) -> list[float]:
            losses: list[float] = []
            while state.length < stop:
                if retention.full(state.tokens):
                    state.keep(retention.kept(state.length, state.placement.kept))
                at = state.length
                n = min(128, WINDOW - state.tokens, stop - at)
                losses += step(model, layout, state, ids[at : at + n], ids[at + n])
            return losses

        lost = layout.open(0, WINDOW)
        await model.engine.call(lambda: feed(lost, FED))
        again = layout.open(0, WINDOW)
        await recompute_retained(again, lost.ids[:], lost.placement, len(head), model, Rates())
        assert again.placement.kept == lost.placement.kept
        assert again.length == lost.length == FED
        found = []
        for state in (lost, again):
            losses = await model.engine.call(lambda state=state: feed(state, FED + SCORED))
            assert len(losses) == SCORED
            found.append(math.exp(sum(losses) / SCORED))
        ours, anew = found
        assert abs(anew - ours) / ours < 0.15, found
        assert anew != ours, "window keys had seen what is gone"
