"""A research agent that sleeps between tool calls: its KV waits with it, on the device, in memory or on disk.

    python examples/research_agent.py [--model smollm2-135m] [--home ./state] [--pause 2]

The tool is real: it reads the documentation of a module of Python's library. What the agent asks for next is in this
script, since the smallest models do not plan; the answers are the model's own.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
from pathlib import Path

from agentkv import AgentKV

SYSTEM = (
    "You are a careful research assistant. You read documentation and answer in one or two sentences, from what you "
    "have read alone."
)
TASK = "Which modules of Python's library help with running things at the same time? Read first, then compare."
READ = ["asyncio", "threading", "concurrent.futures", "multiprocessing"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_documentation",
            "description": "Read what a module says of itself.",
            "parameters": {"type": "object", "properties": {"module": {"type": "string"}}, "required": ["module"]},
        },
    }
]


def read_documentation(module: str, characters: int = 1500) -> str:
    """The tool: the module's docstring, and those of its first classes."""
    found = importlib.import_module(module)
    texts = [inspect.getdoc(found) or ""]
    texts += [f"{name}: {inspect.getdoc(each) or ''}" for name, each in inspect.getmembers(found, inspect.isclass)[:8]]
    return "\n\n".join(texts)[:characters]


async def main(model: str, home: Path, pause: float) -> None:
    async with AgentKV.open(model=model, home=home, idle_seconds=pause / 2) as kv:
        session = await kv.sessions.create(SYSTEM, tools=TOOLS, agent_id="researcher")
        await session.append(TASK)
        for module in READ:
            # A tool runs, for seconds or for hours. The hint says how long that takes as a rule, so that the memory
            # can be somebody else's meanwhile and the KV is back just in time.
            async with session.tool_wait(expected=pause) as outcome:
                await asyncio.sleep(pause)
                said = await asyncio.to_thread(read_documentation, module)
            note = f"read_documentation({module!r}) says:\n{said}\n\nSum that up in one sentence."
            reply = await session.send(note, max_tokens=40)
            usage = reply.usage
            print(
                f"\n[{module}] hint {outcome.outcome}; KV from {reply.restore.source}; first token after "
                f"{reply.ttft_seconds:.2f} s; {usage.cached_tokens} of {usage.prompt_tokens} tokens not computed"
            )
            print(reply.text.strip())
        await session.suspend("disk")
        reply = await session.send("So which one for many network connections?", max_tokens=60)
        print(f"\n[from {reply.restore.source}] {reply.text.strip()}")
        total = session.usage()
        print(f"\n{total.cached_tokens} tokens were not computed again; session {session.id} is kept in {home}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--home", type=Path, default=Path("state"))
    parser.add_argument("--pause", type=float, default=2.0, help="seconds that each tool takes")
    given = parser.parse_args()
    asyncio.run(main(given.model, given.home, given.pause))
