"""Scripted sessions in a process of their own: ``in_new_process`` hands a script over, this file as a program runs it.

A script is JSON::

    {"open": {…settings…}, "sessions": {name: {"id": … | "create": {…}, "steps": [[verb, …], …]}}}

The sessions run concurrently, each one's steps in order. The answer maps each name to ``{"id": …, "results": […]}``.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

__all__ = ["in_new_process"]

PATIENCE = 600
"""Seconds that a worker may take."""


def in_new_process(settings: Mapping[str, Any], sessions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Run the sessions' steps in a new interpreter in which warnings are errors; what each step returned."""
    script = json.dumps({"open": dict(settings), "sessions": dict(sessions)}, default=str)
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__],
        input=script,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    )
    assert done.returncode == 0, f"the worker failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer.pop("pid") != os.getpid()
    return dict(answer["sessions"])


async def _run(script: Mapping[str, Any]) -> dict[str, Any]:
    from agentkv import AgentKV

    async with AgentKV.open(**script["open"]) as kv:
        names = list(script["sessions"])
        answers = await asyncio.gather(*(_session(kv, script["sessions"][name]) for name in names))
    return dict(zip(names, answers, strict=True))


async def _session(kv: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    session = await kv.sessions.get(wanted["id"]) if "id" in wanted else await kv.sessions.create(**wanted["create"])
    results = []
    for verb, *arguments in wanted["steps"]:
        results.append(await _step(session, verb, arguments))
        if (state := session._core.kv) is not None:
            state.check_integrity()
            assert list(state.ids) == (await session.token_ids())[: state.length]
    return {"id": session.id, "results": results}


async def _step(session: Any, verb: str, arguments: list[Any]) -> Any:
    match verb, arguments:
        case "send", [messages, sampling]:
            return asdict(await session.send(messages, **sampling))
        case "continue", [sampling]:
            return asdict(await session.continue_(**sampling))
        case "append", [messages]:
            return [asdict(item) for item in await session.append(messages)]
        case "suspend", [tier]:
            return asdict(await session.suspend(tier))
        case "resume", []:
            return asdict(await session.resume())
        case "ledger", []:
            return await session.token_ids()
        case "items", []:
            return [asdict(item) for item in await session.items()]
        case "reverse keys", []:
            _reverse_keys(session._core.kv)
            return None
    raise ValueError(f"unknown step {verb} {arguments}")


def _reverse_keys(kv: Any) -> None:
    """Damage that no checksum sees: the right keys, in the wrong order."""
    for group in range(len(kv.geometry.groups)):
        for run in kv.visible(group):
            for keys in kv.read(group, run).keys:
                keys.copy_(keys.flip(1))


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))  # a program imports what is installed, not the tests' modules
    answer = asyncio.run(_run(json.load(sys.stdin)))
    print(json.dumps({"pid": os.getpid(), "sessions": answer}))
