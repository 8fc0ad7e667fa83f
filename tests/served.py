"""A server as a user starts it: ``agentkv serve`` in a process of its own, on a free port."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

__all__ = ["Served"]

_ENVIRONMENT = {"AGENTKV_DISK_MARGIN": "0", "AGENTKV_PREFILL_TOKENS": "32", "OMP_NUM_THREADS": "1"}


class Served:
    """Running from ``start`` to ``stop`` or ``kill``; can be started again on the same home."""

    def __init__(self, home: Path, model: Path, **settings: Any) -> None:
        self.home = home
        self.command = [sys.executable, "-m", "agentkv.cli.main", "serve", "--port", "0"]
        self.command += ["--home", str(home), "--model", str(model)]
        self.environment = {**os.environ, **_ENVIRONMENT}
        self.environment |= {f"AGENTKV_{name.upper()}": str(value) for name, value in settings.items()}
        self.process: subprocess.Popen[str] | None = None
        self.said: list[str] = []
        self.url = ""
        self._reading: threading.Thread | None = None

    def start(self) -> Served:
        """Returns once it answers; ``AssertionError`` with what it said where it does not."""
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.environment
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            if found := re.search(r"serving .* at (http://\S+)", line):
                self.url = found[1]
                self._reading = threading.Thread(target=self.said.extend, args=(self.process.stdout,), daemon=True)
                self._reading.start()
                return self
        self.kill()
        raise AssertionError(f"no server: {''.join(self.said)}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask it to end, and wait. The exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        status = self.process.wait(60)
        self._ended()
        return status

    def kill(self) -> None:
        """``kill -9``."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)
        self._ended()

    def _ended(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        if self._reading is not None:
            self._reading.join(10)
        self.process.stdout.close()

    async def stopped(self) -> int:
        """``stop`` from a running loop."""
        return await asyncio.to_thread(self.stop)

    def __enter__(self) -> Served:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
