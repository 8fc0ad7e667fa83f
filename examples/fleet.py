"""A hundred agents, device memory for a few: who is not at work sleeps, and nobody's conversation is computed twice.

    python examples/fleet.py [--model smollm2-135m] [--home ./state] [--agents 100] [--memory 6]

Each agent watches one buoy, hears from it three times, and is asleep in between. All share their system prompt, which
is computed and stored once.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from pathlib import Path

from agentkv import AgentKV

SYSTEM = (
    "You watch one buoy of a harbour's weather service. You are told what it measures. Answer with the word CALM where "
    "wind stays under twenty knots and waves under one metre, and with ROUGH where they do not; then say why in a few "
    "words. Never mention other buoys, and never guess what was not measured."
)
ROUNDS = 3
AT_ONCE = 8


async def watch(kv: AgentKV, number: int, places: asyncio.Semaphore) -> tuple[int, int]:
    """One agent's work: how many tokens of its turns were known, and how many of them were not computed again."""
    dice = random.Random(number)
    session = await kv.sessions.create(SYSTEM, agent_id=f"buoy-{number:03}")
    known = cached = 0
    for round_number in range(ROUNDS):
        await asyncio.sleep(dice.expovariate(1 / 2))
        told = (
            f"Buoy {number}, report {round_number + 1}: wind {dice.randrange(5, 40)} knots, "
            f"waves {dice.randrange(1, 25) / 10} m."
        )
        before = len(await session.token_ids())
        async with places:
            reply = await session.send(told, max_tokens=10, wait=True)
        known += before
        cached += reply.usage.cached_tokens
    return known, cached


async def main(model: str, home: Path, agents: int, memory: float) -> None:
    # Memory for so many sessions of 400 tokens, of which a fifth is kept free.
    async with AgentKV.open(model=model, home=home / "measure") as kv:
        budget = int(memory * kv.model.layout.bytes_needed(None, 400, kv.model.context_limit))
    async with AgentKV.open(model=model, home=home, device_budget=budget) as kv:
        await kv.sessions.prewarm(SYSTEM)
        places = asyncio.Semaphore(AT_ONCE)
        done = await asyncio.gather(*(watch(kv, number, places) for number in range(agents)))
        known, cached = (sum(column) for column in zip(*done, strict=True))
        stats = kv.stats()
        device = stats.tiers["device"]
        print(f"{agents} agents, {stats.turns} turns, {device.used:,} of {device.budget:,} bytes on the device")
        print("where they are now:", ", ".join(f"{count} {state}" for state, count in stats.sessions.items() if count))
        print("restored:", dict(stats.restores) or "nothing")
        print(f"{cached:,} of {known:,} known tokens were not computed again: {cached / known:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--home", type=Path, default=Path("state"))
    parser.add_argument("--agents", type=int, default=100)
    parser.add_argument("--memory", type=float, default=6.0, help="device memory, in conversations' worth")
    given = parser.parse_args()
    asyncio.run(main(given.model, given.home, given.agents, given.memory))
