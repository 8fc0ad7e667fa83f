"""Bodies and answers of the session endpoints. Turns take sampling parameters by their usual names."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentkv.api.shapes import MessageObject, ResponseFormat, SessionTool, ToolChoiceObject
from agentkv.api.strict import Whole, exactly
from agentkv.schemas.replies import Item

__all__ = [
    "Created",
    "Deleted",
    "ForkBody",
    "HintBody",
    "ItemPage",
    "ListQuery",
    "NoBody",
    "RewindBody",
    "SendBody",
    "SessionCreate",
    "SessionPage",
    "SessionPatch",
    "SessionSummary",
    "SuspendBody",
    "VerifyBody",
]

Metadata = dict[str, Any]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SessionCreate(_Body):
    """A new session. System prompt, tools and template arguments are frozen with it."""

    model_config = exactly({"system": "You are Bolt.", "agent_id": "bolt"})

    system: str | None = None
    agent_id: str | None = Field(None, max_length=200)
    policy: str | None = Field(None, description="`full`, `sink:4096`, `turns:8192` …; default: the server's.")
    idle_codec: str | None = Field(None, description="Codec at rest: `exact`, `auto` …; default: the server's.")
    tools: list[SessionTool] | None = Field(None, description="Function definitions in OpenAI's form.")
    template_args: dict[str, Any] | None = None
    metadata: Metadata | None = None
    name: str | None = Field(
        None, description="What you call it: goes wherever its id does, and as `session_id`. One session each."
    )


class SessionPatch(_Body):
    """What of a session can be changed; what is left out stays."""

    policy: str | None = None
    agent_id: str | None = Field(None, max_length=200)
    metadata: Metadata | None = None


class Sampling(_Body):
    """How a turn is sampled: the fields of ``SamplingParams``."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Whole | None = Field(None, ge=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    seed: Whole | None = Field(None, ge=-(2**63), lt=2**64)
    stop: str | list[str] | None = None
    max_tokens: Whole | None = Field(None, ge=1)
    logprobs: Whole | None = Field(None, ge=0, le=20)
    ignore_eos: bool = False
    tool_choice: Literal["auto", "none", "required"] | ToolChoiceObject | None = None
    response_format: ResponseFormat | None = None

    def sampling(self) -> dict[str, Any]:
        """What was given, as ``session.send`` takes it."""
        return self.model_dump(include=set(Sampling.model_fields), exclude_unset=True, exclude_none=True)


class SendBody(Sampling):
    """A turn. Without ``messages`` it goes on where the last reply was cut, or answers what was appended."""

    model_config = exactly(
        {"messages": "Hello!", "max_tokens": 64},
        {"messages": [{"role": "user", "content": "Hello!"}], "stream": True, "temperature": 0.7, "seed": 1},
        {"messages": [{"role": "user", "content": "Hello!"}], "generate": False},
    )

    messages: str | MessageObject | list[MessageObject] | None = None
    stream: bool = False
    wait: bool = Field(False, description="Wait while another turn runs, instead of 409.")
    generate: bool = Field(True, description="`false`: commit the messages, compute their KV, and answer nothing.")


class NoBody(_Body):
    """There is nothing to say."""


class SuspendBody(_Body):
    """Where the KV goes."""

    tier: Literal["host", "disk"] = "disk"


class ForkBody(_Body):
    """Where the new session leaves this one: behind an item, or some turns before the end."""

    at_item: str | None = None
    turns: Whole = Field(0, ge=0)
    agent_id: str | None = Field(None, max_length=200)
    metadata: Metadata | None = None


class RewindBody(_Body):
    """How far back: to the end of an item, or by some turns. ``dry_run``: only say what it would cost."""

    model_config = exactly({"turns": 1}, {"turns": 1, "dry_run": True})

    to_item: str | None = None
    turns: Whole | None = Field(None, ge=1)
    dry_run: bool = False


class HintBody(_Body):
    """What is known of the session's future. ``seconds`` goes with ``expect`` and ``pin``."""

    model_config = exactly({"kind": "expect", "seconds": 30}, {"kind": "close"})

    kind: Literal["expect", "prefetch", "pin", "close"]
    seconds: float | None = Field(None, ge=0, allow_inf_nan=False)


class VerifyBody(_Body):
    """How many of its first tokens are computed again."""

    tokens: Whole = Field(512, ge=1, le=1_000_000)


class Created(_Body):
    """A session that is new here."""

    id: str
    agent_id: str | None
    parent_id: str | None
    policy: str
    ledger_tokens: int
    metadata: Metadata


class SessionSummary(_Body):
    """A session in a list. Times in unix seconds."""

    id: str
    agent_id: str | None
    model: str
    policy: str
    turns: int
    ledger_tokens: int
    created_at: float
    updated_at: float
    metadata: Metadata


class SessionPage(_Body):
    """Newest first. ``last_id`` is the next page's ``before``."""

    data: list[SessionSummary]
    has_more: bool
    last_id: str | None


class ItemPage(_Body):
    """All items of a session, the system prompt first."""

    data: list[Item]


class Deleted(_Body):
    """It is gone."""

    id: str
    deleted: Literal[True] = True
    freed_bytes: int


class ListQuery(_Body):
    """Which page of sessions."""

    agent_id: str | None = None
    limit: int = Field(100, ge=1, le=1000)
    before: str | None = None
