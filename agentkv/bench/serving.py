"""Traffic meets a server: agents that wait for a free place, ask, and go away while their tools run."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from agentkv.bench.traffic import Conversation, Turn
from agentkv.errors import AgentKVError

__all__ = ["Agent", "Answer", "Served", "Server", "serve"]

_LOOK_SECONDS = 0.02
"""How often the bytes in use are looked at."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One turn's. Seconds and tokens.

    ``known``: in the ledger when the turn began, ``reused`` of them were not computed. ``ttft``: from the request,
    a new session's creation included, to the first token. ``source``: where its KV came from; ``fallback``: why some of
    it had to be computed, ``None`` if none.
    """

    ttft: float
    known: int
    reused: int
    prompt: int
    completion: int
    source: str
    fallback: str | None = None


class Agent(Protocol):
    """Holds one conversation with a server."""

    async def pause(self, seconds: float) -> None:
        """Let the agent's tools run for so long."""

    async def turn(self, turn: Turn) -> Answer:
        """Say the turn's messages and have the answer generated. Raises what the server raises."""


class Server(Protocol):
    """Whoever serves the traffic."""

    def agent(self, conversation: Conversation) -> Agent:
        """A new agent, who has not said anything yet."""

    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes in use now."""


@dataclass(slots=True)
class Served:
    """What happened. ``queued``: seconds that each answered turn waited for a place, in no particular order."""

    answers: list[Answer] = field(default_factory=list)
    firsts: list[Answer] = field(default_factory=list)
    queued: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    peak: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def look(self, server: Server) -> None:
        """Note the bytes in use, where they are more than ever before."""
        for tier, nbytes in server.bytes_by_tier().items():
            self.peak[tier] = max(self.peak.get(tier, 0), nbytes)

    def figures(self) -> dict[str, Any]:
        """As the benchmark prints them."""
        ttft = sorted(answer.ttft for answer in self.answers)
        known = sum(answer.known for answer in self.answers)
        reused = sum(answer.reused for answer in self.answers)
        return {
            "turns": len(self.answers),
            "errors": self.errors.total(),
            "errors_by_kind": dict(self.errors),
            "ttft_p50_s": _at(ttft, 0.5),
            "ttft_p95_s": _at(ttft, 0.95),
            "ttft_sum_s": sum(ttft),
            "queue_p50_s": median(self.queued) if self.queued else 0.0,
            "reused_share": reused / known if known else 0.0,
            "known_tokens": known,
            "reused_tokens": reused,
            "prompt_tokens": sum(answer.prompt for answer in self.answers),
            "completion_tokens": sum(answer.completion for answer in self.answers),
            "heads_computed": sum(not answer.reused for answer in self.firsts),
            "restores": dict(Counter(answer.source for answer in self.answers)),
            "fallbacks": dict(Counter(answer.fallback for answer in self.answers if answer.fallback is not None)),
            "bytes_by_tier": self.peak,
            "total_s": self.seconds,
        }


def _at(ordered: Sequence[float], share: float) -> float:
    """The smallest value that so many are not above."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


async def serve(server: Server, conversations: Sequence[Conversation], in_flight: int) -> Served:
    """All conversations at once, at most ``in_flight`` turns at a time, first come, first served.

    A turn that the server refuses counts as an error, and its agent goes on with the next.
    """
    served = Served()
    places = asyncio.Semaphore(in_flight)

    async def work(conversation: Conversation) -> None:
        agent = server.agent(conversation)
        for index, turn in enumerate(conversation.turns):
            await agent.pause(turn.gap_seconds)
            wanted = time.perf_counter()
            async with places:
                waited = time.perf_counter() - wanted
                try:
                    answer = await agent.turn(turn)
                except AgentKVError as error:
                    served.errors[type(error).__name__] += 1
                    continue
            served.look(server)
            served.queued.append(waited)
            served.answers.append(answer)
            if not index:
                served.firsts.append(answer)

    async def look() -> None:
        while True:
            served.look(server)
            await asyncio.sleep(_LOOK_SECONDS)

    looking = asyncio.create_task(look())
    started = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for conversation in conversations:
                group.create_task(work(conversation))
        served.seconds = time.perf_counter() - started
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking
    return served
