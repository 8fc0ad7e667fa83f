"""A process that runs traffic until it is killed, and says which turns it was told.

``python -m soaking.victim`` imports the engine, then waits for its orders: a line of JSON. Each later line that it
prints is a turn whose reply it had: session, number, generated ids.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Victim"]


@dataclass
class Victim:
    """The test's side: started early, sent to work, killed."""

    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        tests = Path(__file__).parent.parent
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tests}:{tests.parent}"}
        command = [sys.executable, "-m", "soaking.victim"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=tests.parent
        )

    def killed(self, after: float, **order: Any) -> list[tuple[str, int, tuple[int, ...]]]:
        """Let it work, kill it ``after`` seconds from its first turn; the turns that it told. Blocking."""
        import threading

        assert self.process.stdin and self.process.stdout
        print(json.dumps(order), file=self.process.stdin, flush=True)
        timer = threading.Timer(after, self.process.kill)
        told = []
        for line in self.process.stdout:
            if timer.ident is None:
                timer.start()
            if line.endswith("\n") and line.startswith("["):
                session, turn, ids = json.loads(line)
                if session is not None:
                    told.append((session, turn, tuple(ids)))
        if timer.ident is not None:
            timer.join()
        self.process.wait()
        if self.process.returncode != -9:
            raise RuntimeError(f"the victim died by itself: {self.process.returncode}")
        return told

    def close(self) -> None:
        """End it, wherever it is."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


async def run(home: str, model: str, sessions: dict[str, bool], seed: int, settings: dict[str, Any]) -> None:
    """``sessions``: whether each one is of chat."""
    from homes import opened

    draw = random.Random(seed)
    async with opened(Path(home), model, **settings) as kv:
        print(json.dumps([None, 0, []]), flush=True)
        await asyncio.gather(*(_agent(kv, sessions, random.Random(draw.random())) for _ in range(4)))


async def _agent(kv: Any, sessions: dict[str, bool], draw: random.Random) -> None:
    from agentkv.errors import AgentKVError

    while True:
        name = draw.choice(sorted(sessions))
        try:
            if draw.random() < 0.05:
                doomed = await kv.sessions.create()
                await doomed.append_tokens([7] * draw.randrange(1, 300)) if draw.random() < 0.7 else None
                await doomed.delete()
                continue
            session = await kv.sessions.get(name)
            if draw.random() < 0.3:
                await session.suspend(draw.choice(["host", "disk"]))
                continue
            task = asyncio.create_task(_said(session, sessions[name], draw))
            if draw.random() < 0.2:
                await asyncio.wait([task], timeout=draw.expovariate(30))
                task.cancel()
            turn, reply = await task
            print(json.dumps([name, turn, reply.ids]), flush=True)
        except asyncio.CancelledError:
            continue
        except AgentKVError:
            await asyncio.sleep(0.01)


async def _said(session: Any, chat: bool, draw: random.Random) -> tuple[int, Any]:
    if chat:
        reply = await session.send("How is the weather in Paris?", max_tokens=draw.choice([1, 4, 12]))
    else:
        ids = [draw.randrange(1, 256) for _ in range(draw.choice([1, 20, 60]))]
        reply = await session.generate_tokens(ids, max_tokens=draw.choice([1, 4, 12]))
    # Without wait=True a busy session refuses: nobody else can have had a turn since.
    return session._core.record.turns - 1, reply


def main() -> None:
    import logging

    import agentkv.engine.loading
    import agentkv.sessions.manager
    import agentkv.sessions.runtime  # noqa: F401

    logging.disable(logging.ERROR)
    if line := sys.stdin.readline():
        asyncio.run(run(**json.loads(line)))


if __name__ == "__main__":
    main()
