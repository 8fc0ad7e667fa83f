"""A server as a user starts it: ``agentkv serve`` in a process of its own, on a free port, with a tiny model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletion

__all__ = ["MODEL", "Asked", "Server", "serving", "sessions", "state", "until", "user"]

MODEL = "chat-llama-0"
"""What ``homes.chat_folder`` makes."""

_QUIET = {
    "AGENTKV_DISK_MARGIN": "0",
    "AGENTKV_PREFILL_TOKENS": "32",
    "AGENTKV_MAX_TOKENS": "16",
    "AGENTKV_IDLE_CODEC": "exact",
    "AGENTKV_RESTORE": "always",
}


@dataclass(frozen=True, slots=True)
class Server:
    """Where it answers, and its process."""

    url: str
    process: subprocess.Popen[str]


@contextmanager
def serving(home: Path, model: Path, **settings: object) -> Iterator[Server]:
    """Runs until the block ends; then it has to end well. ``settings``: those of the environment, in lower case."""
    named = {f"AGENTKV_{name.upper()}": str(value) for name, value in settings.items()}
    given = ["--home", str(home), "--model", str(model), "--device", "cpu", "--dtype", "float32", "--port", "0"]
    log = home.with_name(f"{home.name}.log")
    with log.open("a") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "agentkv.cli.main", "serve", *given],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **_QUIET, "PYTHONUNBUFFERED": "1", **named},
        )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None, log.read_text()
        yield Server(found[0], process)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def until(true: object, seconds: float = 20.0) -> None:
    """Wait until ``true()`` is."""
    end = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(0.05)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Asked:
    """A completion, and what its headers say."""

    def __init__(self, client: OpenAI, messages: list[Any], *, max_tokens: int | None = 8, **more: Any) -> None:
        given = {} if max_tokens is None else {"max_tokens": max_tokens}
        raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, **given, **more)
        self.answer: ChatCompletion = raw.parse()
        self.session = raw.headers["x-agentkv-session"]
        self.cache = dict(part.split("=") for part in raw.headers["x-agentkv-cache"].split(";"))
        self.message = self.answer.choices[0].message
        usage = self.answer.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        self.cached = usage.prompt_tokens_details.cached_tokens
        self.prompt, self.total = usage.prompt_tokens, usage.total_tokens
        assert int(self.cache["reused"]) == self.cached
        assert int(self.cache["computed"]) == self.prompt - (self.cached or 0)

    @property
    def text(self) -> str:
        return self.message.content or ""


def sessions(client: OpenAI) -> list[str]:
    """Ids of all that there are."""
    return [each["id"] for each in client.get("/sessions", cast_to=object)["data"]]  # type: ignore[index]


def state(client: OpenAI, session: str) -> dict[str, Any]:
    """What the server says of a session."""
    found: Any = client.get(f"/sessions/{session}", cast_to=object)
    return dict(found)
