"""Responses as they go out: whole, and as typed events with sequence numbers."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from agentkv.api.errors import envelope
from agentkv.api.openai.response_items import call_item, message_item
from agentkv.api.openai.translating import token_logprobs
from agentkv.api.streams import ServerEvent
from agentkv.engine.tokenbytes import TokenBytes
from agentkv.schemas.messages import ToolCall
from agentkv.schemas.replies import Begun, Done, Event, Logprob, Reply, TextDelta, ToolCallEvent
from agentkv.types import Usage

__all__ = ["ResponseAnswer", "ResponseEvent", "ResponseObject"]

_Object = dict[str, Any]
_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt", 404: "invalid_prompt"}


class InputTokensDetails(BaseModel):
    """``cached_tokens`` had their KV, and were not computed."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """Reasoning is not told apart."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """``input_tokens``: of the whole conversation."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(BaseModel):
    """A response. ``output``: a message, function calls, or both. What was asked for comes back with it."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: _Object | None
    incomplete_details: _Object | None
    instructions: str | None
    model: str
    output: list[_Object]
    previous_response_id: str | None
    conversation: _Object | None
    store: bool
    usage: ResponseUsage | None


class ResponseEvent(BaseModel):
    """One event of a stream. Its other fields follow from its type, as OpenAI documents them."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int


class ResponseAnswer:
    """One response on its way out. ``tokens``: where log-probabilities were asked for. ``echo``: what was asked for."""

    def __init__(self, echo: Mapping[str, Any], *, tokens: TokenBytes | None, end_ids: frozenset[int]) -> None:
        self.id = f"resp_{secrets.token_hex(16)}"
        self._name = secrets.token_hex(12)
        self._echo, self._tokens, self._end_ids = dict(echo), tokens, end_ids
        self._created = int(time.time())
        self._number = 0
        self._begun = False
        self._output: list[_Object] = []
        self._message: int | None = None
        self._text = ""
        self._logprobs: list[_Object] = []
        self._told = 0
        self._end: _Object = {"status": "in_progress", "usage": None}

    @property
    def item_id(self) -> str:
        """Of the session's item that the answer is going to be."""
        return f"item_{self._name}"

    @property
    def status(self) -> str:
        """As its object says."""
        return str(self._end["status"])

    def object(self) -> _Object:
        """As it is now."""
        same = {"id": self.id, "object": "response", "created_at": self._created, "error": None}
        return {**same, "incomplete_details": None, **self._echo, **self._end, "output": self._output}

    def events(self, event: Event) -> Iterator[ServerEvent]:
        """What a turn's event is in the stream; the response changes with it."""
        match event:
            case Begun():
                yield from self._begin()
            case TextDelta():
                self._told += len(event.logprobs)
                yield from self._say(event.text, event.logprobs)
            case ToolCallEvent():
                yield from self._call(event.call, event.index)
            case Done():
                yield from self._finish(event.reply)

    def failed(self, error: BaseException) -> Iterator[ServerEvent]:
        """What went wrong once there were events."""
        status, body, _ = envelope(error)
        told = {"code": _CODES.get(status, "server_error"), "message": body["error"]["message"]}
        yield from self._broken({"status": "failed", "error": told})

    def cancelled(self) -> Iterator[ServerEvent]:
        """Somebody has asked for its end: nothing of it was committed."""
        yield from self._broken({"status": "cancelled"})

    def _broken(self, end: _Object) -> Iterator[ServerEvent]:
        if not self._begun:
            yield from self._begin()
        self._output = []
        self._end = {"usage": None, **end}
        yield self._event("response.failed", response=self.object())

    def _begin(self) -> Iterator[ServerEvent]:
        self._begun = True
        yield self._event("response.created", response=self.object())
        yield self._event("response.in_progress", response=self.object())

    def _opened(self) -> Iterator[ServerEvent]:
        if self._message is None:
            self._message = len(self._output)
            item = {**message_item(self._name, "", status="in_progress"), "content": []}
            self._output.append(item)
            yield self._event("response.output_item.added", output_index=self._message, item=item)
            part = message_item(self._name, "")["content"][0]
            yield self._event("response.content_part.added", **self._place, part=part)

    def _say(self, text: str, logprobs: Sequence[Logprob]) -> Iterator[ServerEvent]:
        yield from self._opened()
        told = self._shown(logprobs)
        self._text += text
        self._logprobs += told
        yield self._event("response.output_text.delta", **self._place, delta=text, logprobs=told)

    def _call(self, call: ToolCall, index: int) -> Iterator[ServerEvent]:
        at, item = len(self._output), call_item(self._name, index, call)
        self._output.append(item)
        empty = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=at, item=empty)
        place = {"item_id": item["id"], "output_index": at}
        yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
        yield self._event(
            "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
        )
        yield self._event("response.output_item.done", output_index=at, item=item)

    def _finish(self, reply: Reply) -> Iterator[ServerEvent]:
        status = "incomplete" if reply.finish_reason == "length" else "completed"
        if self._message is not None or not self._output:
            yield from self._opened()
            self._logprobs += self._shown((reply.logprobs or ())[self._told :])
            item = message_item(self._name, self._text, status=status, logprobs=self._logprobs)
            assert self._message is not None
            self._output[self._message] = item
            part = item["content"][0]
            yield self._event("response.output_text.done", **self._place, text=self._text, logprobs=part["logprobs"])
            yield self._event("response.content_part.done", **self._place, part=part)
            yield self._event("response.output_item.done", output_index=self._message, item=item)
        self._end = {"status": status, "usage": _usage(reply.usage), "completed_at": int(time.time())}
        if status == "incomplete":
            self._end["incomplete_details"] = {"reason": "max_output_tokens"}
        yield self._event(f"response.{status}", response=self.object())

    @property
    def _place(self) -> _Object:
        return {"item_id": f"msg_{self._name}", "output_index": self._message, "content_index": 0}

    def _shown(self, logprobs: Sequence[Logprob]) -> list[_Object]:
        return [] if self._tokens is None else token_logprobs(self._tokens, logprobs, self._end_ids)

    def _event(self, kind: str, **fields: Any) -> ServerEvent:
        text = json.dumps({"type": kind, "sequence_number": self._number, **fields}, ensure_ascii=False)
        self._number += 1
        return ServerEvent(text, kind)


def _usage(usage: Usage) -> _Object:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }
