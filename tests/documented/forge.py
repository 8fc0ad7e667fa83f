"""A process that has imported what agentkv imports, and forks for every command of a page: each runs at once.

It speaks over a Unix socket: a JSON object with ``argv``, ``cwd`` and ``env`` comes with the three standard
descriptors; the child's pid goes back, and its exit status when it ends.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["main"]

_WARM = (
    "agentkv.sessions.runtime",
    "agentkv.sessions.manager",
    "agentkv.engine.loading",
    "agentkv.engine.engine",
    "agentkv.models",
    "agentkv.api.app",
    "agentkv.client",
    "agentkv.cli.main",
    "agentkv.cli.chat",
    "agentkv.cli.serve",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "openai",
)


def main(path: str) -> NoReturn:
    """Until its parent ends it."""
    for name in _WARM:
        import_module(name)
    gc.freeze()  # what is imported is never collected: its memory stays shared with the forks
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        asked, _ = listener.accept()
        first, descriptors, _, _ = socket.recv_fds(asked, 1 << 16, 3)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            while part := asked.recv(1 << 16):
                first += part
            _command(asked, json.loads(first), descriptors)
        asked.close()
        for descriptor in descriptors:
            os.close(descriptor)


def _command(asked: socket.socket, what: dict[str, Any], descriptors: list[int]) -> NoReturn:
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(what["cwd"])
    os.environ.clear()
    os.environ.update(what["env"])
    sys.path[:0] = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    asked.sendall(b"%d\n" % os.getpid())
    status = _run(what["argv"])
    # Taking down all that was imported would take longer than the command.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    asked.sendall(b"%d\n" % status)
    os._exit(status)


def _run(argv: list[str]) -> int:
    name, *arguments = argv
    try:
        if name == "python" and arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif name == "python" and arguments[0] == "-c":
            sys.argv = arguments
            exec(arguments[1], {"__name__": "__main__"})
        elif name == "python":
            sys.argv = arguments
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_path(arguments[0], run_name="__main__")
        else:
            from agentkv.cli.main import app

            sys.argv = argv
            app()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main(sys.argv[1])
