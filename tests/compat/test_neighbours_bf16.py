"""A session's bits are its own: alone or in a crowd, the same tokens and the same log-probabilities (SmolLM2, bf16)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from agentkv import AgentKV
from agentkv.schemas.replies import Reply
from agentkv.sessions.session import Session

SYSTEM = "You are Bolt, a helpful assistant."
QUESTION = "Explain in a few sentences how the tides work, and name three harbours where they are high."
EARLIER = "I am sailing to Brittany next week."
SAMPLING: dict[str, Any] = {"max_tokens": 48, "logprobs": 5, "ignore_eos": True}

CROWD = (
    ("Hi.", 50),
    ("Write a poem about a lighthouse.", 50),
    (" ".join(f"Buoy {n} reports {n * 37 % 101} knots." for n in range(30)), 40),
    ("List the planets.", 3),
    (" ".join(f"At {n}:00 the level was {n * 53 % 89} cm." for n in range(24)) + " What is the mean?", 20),
    ("Why is the sky blue? " * 8, 30),
    (" ".join(f"Ship {n} left port {n * 29 % 31}." for n in range(40)), 5),
    ("Tell me a story.", 50),
)
"""Message and tokens to generate: prefills of 1 to 5 pieces, decodes that end before, during and after."""


@asynccontextmanager
async def opened(model: Path, home: Path) -> AsyncIterator[tuple[AgentKV, list[list[int]]]]:
    """A runtime in bf16, and the rows that each session had in each step, as they come."""
    async with AgentKV.open(model=str(model), home=home, dtype="bfloat16", idle_seconds=3600, idle_codec="exact") as kv:
        assert kv.model.adapter.model.dtype is torch.bfloat16
        engine, steps = kv.model.engine, list[list[int]]()
        plan = engine._scheduler.plan

        def watched() -> Sequence[Any]:
            batch = plan()
            steps.append([len(job.next_ids()) for job in batch])
            return batch

        engine._scheduler.plan = watched  # type: ignore[method-assign, assignment]
        yield kv, steps


async def crowd(kv: AgentKV, begun: asyncio.Event, talking: asyncio.Event) -> None:
    """Eight others: some have begun already, some join when the watched sessions talk, one gives up midway."""

    async def one(index: int, message: str, tokens: int) -> None:
        other = await kv.sessions.create(system=f"{SYSTEM} Number {index}.")
        if index % 2:
            await talking.wait()
        async for _ in other.stream(message, max_tokens=tokens, ignore_eos=True):
            begun.set()

    async def quitter() -> None:
        other = await kv.sessions.create(system=SYSTEM)
        await talking.wait()
        async with aclosing(other.stream("Count to one hundred.", max_tokens=200)) as events:
            async for event in events:
                if event.text:
                    break

    await asyncio.gather(quitter(), *(one(i, message, tokens) for i, (message, tokens) in enumerate(CROWD)))


async def spoken(session: Session, begun: asyncio.Event) -> Reply:
    reply: Reply | None = None
    async for event in session.stream(QUESTION, **SAMPLING):
        begun.set()
        reply = getattr(event, "reply", None)
    assert reply is not None
    return reply


async def in_the_crowd(kv: AgentKV, *sessions: Session) -> list[Reply]:
    """The sessions' replies while the crowd talks."""
    begun, talking = asyncio.Event(), asyncio.Event()
    others = asyncio.create_task(crowd(kv, begun, talking))
    await begun.wait()
    replies = await asyncio.gather(*(spoken(session, talking) for session in sessions))
    await others
    return list(replies)


def assert_same_bits(alone: Reply, crowded: Reply) -> None:
    assert len(alone.ids) == 48
    assert crowded.ids == alone.ids
    assert crowded.logprobs == alone.logprobs


async def slept(kv: AgentKV) -> Session:
    """A session with a past, on disk."""
    session = await kv.sessions.create(system=SYSTEM)
    await session.send(EARLIER, max_tokens=12)
    await session.suspend("disk")
    return session


@pytest.mark.full
async def test_alone_and_among_eight_others_new_or_resumed_the_same_bits(smollm2_path: Path, tmp_path: Path) -> None:
    async with opened(smollm2_path, tmp_path / "home") as (kv, steps):
        new = await (await kv.sessions.create(system=SYSTEM)).send(QUESTION, **SAMPLING)
        sleepers = [await slept(kv), await slept(kv)]
        resumed = await sleepers[0].send(QUESTION, **SAMPLING)
        assert {len(step) for step in steps} == {1}
        steps.clear()
        crowded = await in_the_crowd(kv, await kv.sessions.create(system=SYSTEM), sleepers[1])
    for reply in (resumed, crowded[1]):
        assert reply.restore.source == "disk"
        assert reply.restore.tokens == reply.usage.cached_tokens > 0
    assert_same_bits(new, crowded[0])
    assert_same_bits(resumed, crowded[1])
    assert new.ids != resumed.ids
    # The steps were mixed: many sessions, pieces of prefill beside decodes and between them.
    assert max(map(len, steps)) >= 7
    assert sum(len(step) > 3 for step in steps) >= 30
    assert sum(len(step) == 1 and step[0] > 32 for step in steps) >= 1
    assert sum(max(step) > 100 for step in steps) >= 3
