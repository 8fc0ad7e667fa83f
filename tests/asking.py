"""OpenAI's own client and a served tiny model: what is asked, and what the answer says of itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletion
from served import Served

__all__ = ["MODEL", "Asked", "client_of", "quiet", "sessions", "state", "until", "user"]

MODEL = "chat-llama-0"
"""What ``homes.chat_folder`` makes."""


def quiet(home: Path, model: Path, **settings: object) -> Served:
    """A server to start: float32 on the CPU, bit for bit, short answers."""
    exact = {"device": "cpu", "dtype": "float32", "idle_codec": "exact", "restore": "always", "max_tokens": 16}
    return Served(home, model, **{**exact, **settings})


def client_of(served: Served) -> OpenAI:
    """That tries once."""
    return OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until ``true()`` is."""
    end = time.monotonic() + seconds
    while not true():
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
        self.diverged = raw.headers.get("x-agentkv-diverged")
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
