"""Real agents' transcripts, those longer than the model's context included, replayed to their end inside a window.

Each recorded message is committed as given. Before each recorded answer the model gives its own, which is taken back.
"""

from __future__ import annotations

import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from test_traces import TRACES, Trace, _read

from agentkv import AgentKV, TextDelta
from agentkv.sessions.session import Session
from agentkv.types import Span

FAST = {"function-calling-simple"}


def _cases() -> list[Any]:
    if not TRACES.is_dir():
        return [pytest.param(None, "", id="none", marks=pytest.mark.skip(f"no transcripts: {TRACES} does not exist"))]
    cases = []
    for trace in map(_read, sorted(TRACES.glob("*.json"))):
        long = ("sink:4096", "turns:4096")
        cases += [pytest.param(trace, p, id=f"{trace.name}-{p}", marks=pytest.mark.full) for p in long]
        if trace.name in FAST:
            # Small enough that a short transcript outgrows it.
            cases += [pytest.param(trace, p, id=f"{trace.name}-{p}") for p in ("sink:2048", "turns:2048")]
    return cases


async def answers(session: Session) -> bool:
    """Whether the model says something; it is taken back as soon as it does."""
    async with aclosing(session.stream_continue(max_tokens=64, ignore_eos=True)) as events:
        async for event in events:
            assert isinstance(event, TextDelta), "it was taken back before it could be committed"
            return True
    return False


@pytest.mark.parametrize(("trace", "policy"), _cases())
async def test_a_transcript_replays_to_its_end(trace: Trace, policy: str, smollm2_path: Path, tmp_path: Path) -> None:
    window = int(policy.split(":")[1])
    async with AgentKV.open(model=str(smollm2_path), home=tmp_path, idle_seconds=3600, idle_codec="exact") as kv:
        session = await kv.sessions.create(system=trace.system, policy=policy)
        head = await session.token_ids()
        answered = 0
        for turn in trace.turns:
            if turn[0]["role"] == "assistant":
                assert await answers(session)
                answered += 1
            await session.append(turn)
            state = await session.state()
            assert state.kv_tokens <= window
            # Nothing of the system prompt is evicted, and it is the one that was given.
            assert state.kept[0].start == 0 and state.kept[0].stop >= state.pinned.stop == len(head)
            assert not any(len(span.intersect(state.pinned)) for span in state.evicted)
        assert answered == sum(turn[0]["role"] == "assistant" for turn in trace.turns) > 0
        ledger, items = await session.token_ids(), await session.items()
        assert ledger[: len(head)] == head
        assert json.loads(json.dumps(items[0].content))["content"] == (trace.system or "")
        if len(ledger) > window:
            assert state.evicted
            if policy.startswith("turns"):
                _whole_items(state.items, state.pinned)
        reply = await session.continue_(max_tokens=4, ignore_eos=True)
        assert len(reply.ids) == 4


def _whole_items(items: Any, pinned: Span) -> None:
    """At most one item is cut; a tool call stays longer than its result."""
    cut = [item for item in items if 0 < item.kept < len(item.span) and item.span.stop > pinned.stop]
    assert len(cut) <= 1, cut
