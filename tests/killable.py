"""A nursery of processes that tests kill: it imports the engine once, then forks a child for each script.

Run as ``python tests/killable.py``. It has no threads and has computed nothing, so that a child is as good as a fresh
process, seconds earlier. Commands and answers are JSON lines on stdin and stdout; a child reports into a FIFO.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

__all__ = ["Nursery", "Victim"]


@dataclass(frozen=True)
class Victim:
    """A running child; ``reports`` yields what it says until it is dead."""

    pid: int
    reports: Iterator[Any]

    def kill(self) -> None:
        """SIGKILL, if it is still there: the nursery has not reaped it before it was asked to."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """The test's side."""

    def __init__(self) -> None:
        tests = Path(__file__).parent
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tests}:{tests.parent}"}
        self._process = subprocess.Popen(
            [sys.executable, str(tests / "killable.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=tests.parent,
        )
        assert self._answer() == "ready"

    def _answer(self) -> Any:
        assert self._process.stdout
        return json.loads(self._process.stdout.readline())

    def start(self, fifo: Path, fault: str = "", **script: Any) -> Victim:
        """Fork a child that runs ``script`` with ``fault`` armed."""
        os.mkfifo(fifo)
        assert self._process.stdin
        print(json.dumps({"fifo": str(fifo), "fault": fault, "script": script}), file=self._process.stdin, flush=True)
        pid = self._answer()
        return Victim(pid, reports_of(fifo))

    def reap(self) -> int:
        """Wait for the child's end: its exit status, negative for a signal."""
        status: int = self._answer()
        return status

    def close(self) -> None:
        """End the nursery."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        assert self._process.wait(60) == 0
        self._process.stdout.close()


def reports_of(fifo: Path) -> Iterator[Any]:
    """Until the writer is dead, which ends the pipe. A torn last line was never said."""
    with fifo.open() as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


def main() -> None:
    import agentkv.engine.loading
    import agentkv.sessions.manager
    import agentkv.sessions.runtime  # noqa: F401

    say(sys.stdout, "ready")
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os._exit(child(order))
        say(sys.stdout, pid)
        _, status = os.waitpid(pid, 0)
        say(sys.stdout, os.waitstatus_to_exitcode(status))


def child(order: dict[str, Any]) -> int:
    from agentkv.storage import faultpoints

    os.environ["AGENTKV_FAULT"] = order["fault"]
    importlib.reload(faultpoints)  # it reads the environment once; its functions keep their module's globals
    out = open(order["fifo"], "w")  # noqa: SIM115, PTH123
    try:
        asyncio.run(run(out, **order["script"]))
    except BaseException:
        say(out, {"error": traceback.format_exc()})
        return 1
    return 0


async def run(
    out: IO[str],
    home: str,
    model: str,
    session: str,
    inputs: list[list[int]],
    max_tokens: int,
    suspend_after: list[int],
    doomed: str | None = None,
    file: str | None = None,
) -> None:
    """Turns on an existing session, each reported once it is told; suspends after some; at last deletes ``doomed``.

    ``file``: imported first, and the session then.
    """
    from homes import opened

    async with opened(Path(home), model) as kv:
        if file is not None:
            session = (await kv.sessions.import_(file)).id
            say(out, {"imported": session})
        talk = await kv.sessions.get(session)
        say(out, {"open": True})
        for i, ids in enumerate(inputs):
            reply = await talk.generate_tokens(ids, max_tokens=max_tokens)
            say(out, {"turn": i, "ids": reply.ids})
            if i in suspend_after:
                report = await talk.suspend()
                say(out, {"suspended": report.tier})
        if doomed is not None:
            await kv.sessions.delete(doomed)
            say(out, {"deleted": doomed})
    say(out, {"closed": True})


def say(out: IO[str], what: Any) -> None:
    print(json.dumps(what), file=out, flush=True)


if __name__ == "__main__":
    main()
