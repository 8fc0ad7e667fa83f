"""The Python of a page: runs its blocks one after the other in one namespace, told over standard input.

A block with ``await`` outside of a function is a fragment. Where it speaks of ``kv`` or ``session`` and no block has
made them, they are an open runtime on the reader's home and a conversation of one turn.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import json
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

__all__ = ["main"]


class _Page:
    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._names: dict[str, Any] = {"__name__": "__page__"}
        self._kv: Any = None
        self._session_id: str | None = None

    def run(self, code: str, file: str, line: int) -> None:
        """Raises what the block raises, with the page's own line numbers."""
        tree = ast.parse("\n" * (line - 1) + code, file)
        compiled = compile(tree, file, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        if not compiled.co_flags & inspect.CO_COROUTINE:
            exec(compiled, self._names)
            return
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        used, made = ({n.id for n in names if isinstance(n.ctx, kind)} for kind in (ast.Load, ast.Store))
        if {"kv", "session"} & used - made - self._names.keys():
            self._runner.run(self._open())
        self._runner.run(_awaited(eval(compiled, self._names)))

    async def _open(self) -> None:
        from agentkv import AgentKV

        self._kv = self._kv or await AgentKV.open()
        if self._session_id is None:
            session = await self._kv.sessions.create(system="You are Bolt.")
            await session.send("Hello!", max_tokens=8)
            self._session_id = session.id
            print(session.id)
        mine = {"kv": self._kv, "session": await self._kv.sessions.get(self._session_id)}
        self._names = {**mine, **self._names}

    def close(self) -> None:
        """The runtime lets the home go: a command is to have it."""
        if self._kv is not None:
            kv, self._kv = self._kv, None
            self._names = {name: value for name, value in self._names.items() if name not in ("kv", "session")}
            self._runner.run(kv.close())


async def _awaited(block: Any) -> None:
    await block


def main() -> None:
    """Answers each line with ``ok`` and what was printed."""
    sys.path.insert(0, str(Path.cwd()))
    with asyncio.Runner() as runner:
        page = _Page(runner)
        for asked in sys.stdin:
            what, printed, ok = json.loads(asked), io.StringIO(), True
            sys.argv = what.get("argv", ["page.py"])
            with redirect_stdout(printed), redirect_stderr(printed):
                try:
                    if what["do"] == "close":
                        page.close()
                    else:
                        page.run(what["code"], what["file"], what["line"])
                except BaseException:
                    ok = False
                    traceback.print_exc()
            print(json.dumps({"ok": ok, "printed": printed.getvalue()}), flush=True)
        page.close()


if __name__ == "__main__":
    main()
