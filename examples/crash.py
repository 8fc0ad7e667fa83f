"""A run that is killed in the middle, and goes on: what was said is there, and its KV too.

    python examples/crash.py [--model smollm2-135m] [--home ./state]

A worker process talks; this one kills it with ``kill -9`` in the middle of a turn, starts another one, and shows what
the second one finds.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
from pathlib import Path

from agentkv import AgentKV

SYSTEM = "You are Bolt, who keeps a ship's log. Answer in one short sentence."
LIGHTS = ("Ouessant", "Sein", "Penmarch", "Groix", "Belle-Ile", "Noirmoutier", "Yeu", "Re")
ENTRIES = [f"Entry {n}: at {6 + n}:00 we passed the light of {name}." for n, name in enumerate(LIGHTS, 1)]


async def work(model: str, home: Path) -> None:
    """One entry after the other, in the session that is there, or in a new one."""
    async with AgentKV.open(model=model, home=home) as kv:
        listed = await kv.sessions.list(agent_id="bolt")
        if listed:
            session = await kv.sessions.get(listed[0].id)
        else:
            session = await kv.sessions.create(SYSTEM, agent_id="bolt")
        said = sum(item.role == "user" for item in await session.items())
        print(f"session {session.id}: {said} of {len(ENTRIES)} entries are in the log", flush=True)
        for entry in ENTRIES[said:]:
            print("turn", flush=True)
            reply = await session.send(entry, max_tokens=24, ignore_eos=True)
            print(
                f"{entry} KV from {reply.restore.source}, {reply.usage.cached_tokens} of {reply.usage.prompt_tokens} "
                f"tokens not computed",
                flush=True,
            )
        print("all entries are in the log", flush=True)


def start(model: str, home: Path) -> subprocess.Popen[str]:
    """The worker, in a process of its own."""
    command = [sys.executable, __file__, "--model", model, "--home", str(home), "--work"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def main(model: str, home: Path) -> int:
    worker = start(model, home)
    assert worker.stdout is not None
    turns = 0
    for line in worker.stdout:
        print("  first: ", line, end="")
        turns += line == "turn\n"
        if turns == 5:
            worker.send_signal(signal.SIGKILL)
            print("  kill -9, in the middle of a turn")
            break
    worker.wait()
    worker.stdout.close()
    second = start(model, home)
    assert second.stdout is not None
    for line in second.stdout:
        print("  second:", line, end="")
    second.stdout.close()
    return second.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--home", type=Path, default=Path("state"))
    parser.add_argument("--work", action="store_true", help="be the worker")
    given = parser.parse_args()
    if given.work:
        asyncio.run(work(given.model, given.home))
    else:
        sys.exit(main(given.model, given.home))
