"""Chat completions as they go out: whole, and in chunks."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from agentkv.api.errors import envelope
from agentkv.api.openai.translating import TokenLogprob, token_logprobs, usage_of
from agentkv.api.streams import ServerEvent
from agentkv.engine.tokenbytes import TokenBytes
from agentkv.schemas.messages import ToolCall
from agentkv.schemas.replies import Begun, Done, Event, Logprob, Reply, TextDelta, ToolCallEvent

__all__ = ["Answer", "ChatCompletion", "ChatCompletionChunk"]

FinishReason = Literal["stop", "length", "tool_calls"]


class Function(BaseModel):
    """``arguments``: JSON text, or what the model wrote in its place."""

    name: str
    arguments: str


class FunctionCall(BaseModel):
    """A call. The result goes back as a message of role ``tool`` with its ``id``."""

    id: str
    type: Literal["function"] = "function"
    function: Function


class FunctionCallDelta(FunctionCall):
    """A whole call, the answer's ``index``-th."""

    index: int


class ChatAnswer(BaseModel):
    """``content``: null where there are calls alone."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[FunctionCall] | None = None


class Logprobs(BaseModel):
    """Of all tokens of the answer, be they text or calls."""

    content: list[TokenLogprob]
    refusal: None = None


class Choice(BaseModel):
    """The one answer."""

    index: Literal[0] = 0
    message: ChatAnswer
    logprobs: Logprobs | None
    finish_reason: FinishReason


class PromptDetails(BaseModel):
    """``cached_tokens`` had their KV, and were not computed."""

    cached_tokens: int


class ChatUsage(BaseModel):
    """``prompt_tokens``: of the whole conversation."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class ChatCompletion(BaseModel):
    """An answer. ``system_fingerprint``: of the model's weights and how they are run."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: ChatUsage
    system_fingerprint: str


class Delta(BaseModel):
    """What is new."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[FunctionCallDelta] | None = None


class ChunkChoice(BaseModel):
    """``logprobs``: of the tokens since the chunk before."""

    index: Literal[0] = 0
    delta: Delta
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None


class ChatCompletionChunk(BaseModel):
    """A part of an answer. ``usage``: of the last one, where it was asked for; that one has no choices."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str
    usage: ChatUsage | None = None


class Answer:
    """One answer on its way out. ``tokens``: where log-probabilities were asked for."""

    def __init__(
        self, model: str, fingerprint: str, *, tokens: TokenBytes | None, end_ids: frozenset[int], usage: bool
    ) -> None:
        self._same = {
            "id": f"chatcmpl-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"fp_{fingerprint[:12]}",
        }
        self._tokens, self._end_ids, self._usage = tokens, end_ids, usage
        self._told = 0

    def whole(self, reply: Reply) -> str:
        """As JSON."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
        if reply.tool_calls:
            message["content"] = reply.text or None
            message["tool_calls"] = [_call(call) for call in reply.tool_calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(reply.logprobs or ()),
            "finish_reason": reply.finish_reason,
        }
        return _json({**self._same, "object": "chat.completion", "choices": [choice], "usage": usage_of(reply.usage)})

    def chunks(self, event: Event) -> Iterator[ServerEvent]:
        """What a turn's event is in the stream."""
        match event:
            case Begun():
                yield self._chunk({"role": "assistant", "content": ""})
            case TextDelta():
                self._told += len(event.logprobs)
                yield self._chunk({"content": event.text}, event.logprobs)
            case ToolCallEvent():
                yield self._chunk({"tool_calls": [{"index": event.index, **_call(event.call)}]})
            case Done():
                reply = event.reply
                yield self._chunk({}, (reply.logprobs or ())[self._told :], reply.finish_reason)
                if self._usage:
                    yield ServerEvent(_json({**self._chunk_head(), "choices": [], "usage": usage_of(reply.usage)}))

    @staticmethod
    def failed(error: BaseException) -> Iterator[ServerEvent]:
        """What went wrong once there were chunks, in the form that OpenAI's clients raise."""
        yield ServerEvent(_json(envelope(error)[1]))

    def _chunk(self, delta: dict[str, Any], logprobs: Sequence[Logprob] = (), finish: str | None = None) -> ServerEvent:
        told = self._logprobs(logprobs) if logprobs else None
        choice = {"index": 0, "delta": delta, "logprobs": told, "finish_reason": finish}
        unused = {"usage": None} if self._usage else {}
        return ServerEvent(_json({**self._chunk_head(), "choices": [choice], **unused}))

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._same, "object": "chat.completion.chunk"}

    def _logprobs(self, logprobs: Sequence[Logprob]) -> dict[str, Any] | None:
        if self._tokens is None:
            return None
        return {"content": token_logprobs(self._tokens, logprobs, self._end_ids), "refusal": None}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_text}}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
