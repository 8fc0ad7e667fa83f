"""Running one job in a child process that can be watched, limited and killed.

Downloads and conversions run apart from the caller: whatever they print, warn about or leak stays there, their memory
is given back, and a hung name look-up can be ended. A child ends itself when its parent dies, even by ``kill -9``: its
standard input is a pipe from the parent, and end of file means that nobody waits for the result any more.
"""

from __future__ import annotations

import importlib
import os
import runpy
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Protocol

__all__ = ["ChildFailed", "Progress", "run_child", "tree_bytes"]

_POLL_SECONDS = 0.2


class Progress(Protocol):
    """Called from the pulling thread: ``done`` of ``total`` (``None``: not known) units of ``stage``, mostly bytes."""

    def __call__(self, stage: str, done: int, total: int | None, /) -> None: ...


class ChildFailed(Exception):
    """The child ended badly, stalled or ran out of time. ``output`` is what it wrote to standard error."""

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.output = output


def run_child(
    target: str,
    args: list[str],
    *,
    workdir: Path,
    progress: Progress,
    stage: str,
    total: int | None,
    stall_seconds: float | None,
    limit_seconds: float,
) -> str:
    """Run ``target`` (``module:function``, or a module as with ``python -m``) with ``args``; return what it printed.

    The growth of ``workdir``, where the child also keeps its temporary files, is reported as progress. ``ChildFailed``
    when it exits with an error, when nothing grows for ``stall_seconds``, or after ``limit_seconds``.
    """
    scratch = workdir / "scratch"
    scratch.mkdir(mode=0o700, exist_ok=True)
    root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    env = os.environ | {
        "PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else root,
        "PYTHONWARNINGS": "ignore",
        "TMPDIR": str(scratch),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    out, err = scratch / "stdout", scratch / "stderr"
    with out.open("wb") as out_file, err.open("wb") as err_file:
        child = subprocess.Popen(
            [sys.executable, "-m", __name__, target, *args],
            cwd=scratch,
            env=env,
            stdin=subprocess.PIPE,
            stdout=out_file,
            stderr=err_file,
        )
        try:
            _watch(child, workdir, progress, stage, total, stall_seconds, limit_seconds)
        finally:
            child.kill()
            child.wait()
            assert child.stdin is not None
            child.stdin.close()
    errors = err.read_text(errors="replace")
    if child.returncode:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        raise ChildFailed(lines[-1] if lines else f"exit status {child.returncode}", errors)
    return out.read_text(errors="replace")


def tree_bytes(folder: Path) -> int:
    """Bytes of all files under ``folder``; files that vanish meanwhile count nothing."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                size += (Path(parent) / name).lstat().st_size
            except FileNotFoundError:
                continue
    return size


def _watch(
    child: subprocess.Popen[bytes],
    workdir: Path,
    progress: Progress,
    stage: str,
    total: int | None,
    stall_seconds: float | None,
    limit_seconds: float,
) -> None:
    began = grown_at = time.monotonic()
    before = seen = tree_bytes(workdir)
    progress(stage, 0, total)
    while True:
        try:
            child.wait(_POLL_SECONDS)
            break
        except subprocess.TimeoutExpired:
            pass
        now = time.monotonic()
        if (size := tree_bytes(workdir)) != seen:
            seen, grown_at = size, now
            done = max(0, size - before)
            progress(stage, done if total is None else min(done, total), total)
        if stall_seconds is not None and now - grown_at > stall_seconds:
            raise ChildFailed(f"nothing arrived for {stall_seconds:.0f} s")
        if now - began > limit_seconds:
            raise ChildFailed(f"not finished after {limit_seconds:.0f} s")


def _end_with_parent() -> None:
    # os.read, not sys.stdin: a daemon thread inside a buffered reader aborts the interpreter at shutdown.
    while os.read(0, 1024):
        pass
    os._exit(1)


def _main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    target, *args = sys.argv[1:]
    module, _, function = target.partition(":")
    sys.argv = [module, *args]
    if function:
        getattr(importlib.import_module(module), function)(*args)
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
