"""The body of a chat completion: what of it is served, and what only may be left unsaid."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from agentkv.api.openai.fields import only
from agentkv.api.openai.translating import sampling_of
from agentkv.api.shapes import MessageObject, ResponseFormat, Tool, ToolChoiceOrNull
from agentkv.api.strict import Whole, exactly
from agentkv.errors import InvalidRequest, Unsupported
from agentkv.schemas.sampling import SamplingParams

__all__ = ["ChatBody", "StreamOptions"]

_Object = dict[str, Any]
_HINT = Field(None, description="Taken, and says nothing here.")
_DEFAULT = Field(None, description="Only its default, which says nothing.")
_NO_AUDIO = "answers are text"
_NO_STORE = "chat completions are not kept under their ids; the session is (X-AgentKV-Session)"


class StreamOptions(BaseModel):
    """What a stream has beside its chunks."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = Field(None, description="A last chunk with the usage.")
    include_obfuscation: Annotated[bool | None, only(False, advice="chunks are sent as they are")] = _DEFAULT


class ChatBody(BaseModel):
    """A chat completion. Without a temperature decoding is greedy."""

    model_config = exactly(
        {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64},
        {
            "model": "smollm2-135m",
            "messages": [{"role": "system", "content": "You are Bolt."}, {"role": "user", "content": "Hello!"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 64,
            "logprobs": True,
        },
    )

    model: str = Field(description="A name that `GET /v1/models` lists.")
    messages: list[MessageObject] = Field(
        min_length=1, description="The whole conversation, in OpenAI's form; text only. See `session_id`."
    )
    session_id: str | None = Field(
        None,
        description="The session that answers: an id, or a name of your own, whose first request begins it. Messages "
        "without a system prompt and without answers are then new ones, behind what it holds.",
    )
    tools: list[Tool] | None = Field(None, description="Functions. `strict` holds for calls that are forced.")
    tool_choice: ToolChoiceOrNull = Field(None, description="`auto`, `none`, `required`, or a function by its name.")
    response_format: ResponseFormat | None = Field(None, description="`text`, `json_object` or `json_schema`.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: Whole | None = Field(None, ge=1)
    max_tokens: Whole | None = Field(None, ge=1, description="The same by its former name.")
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Whole | None = Field(None, ge=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    seed: Whole | None = Field(None, ge=-(2**63), lt=2**64)
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(None, ge=0, le=20)
    prompt_cache_key: str | None = Field(
        None,
        max_length=200,
        description="Conversations of the same key are gone on with first, and none of another.",
    )
    template_args: _Object | None = Field(None, description="Arguments of the chat template.")

    metadata: _Object | None = _HINT
    user: str | None = _HINT
    safety_identifier: str | None = _HINT

    n: Annotated[Whole | None, only(1, advice="send the request several times")] = _DEFAULT
    presence_penalty: Annotated[float | None, only(0.0, advice="use repetition_penalty")] = _DEFAULT
    frequency_penalty: Annotated[float | None, only(0.0, advice="use repetition_penalty")] = _DEFAULT
    logit_bias: Annotated[_Object | None, only({})] = _DEFAULT
    parallel_tool_calls: bool | None = Field(None, description="`false` only without tools.")
    store: Annotated[bool | None, only(False, advice=_NO_STORE)] = _DEFAULT
    service_tier: Annotated[str | None, only("auto", "default", advice="there is one tier")] = _DEFAULT
    modalities: Annotated[list[str] | None, only(["text"], advice=_NO_AUDIO)] = _DEFAULT
    audio: Annotated[Any, only(advice=_NO_AUDIO)] = _DEFAULT
    verbosity: Annotated[str | None, only("medium", advice="say it in the prompt")] = _DEFAULT
    reasoning_effort: Annotated[
        str | None, only(advice="pass template_args where the model's template reads an argument for it")
    ] = _DEFAULT
    prediction: Annotated[Any, only()] = _DEFAULT
    moderation: Annotated[Any, only()] = _DEFAULT
    web_search_options: Annotated[Any, only(advice="give the model a tool that searches")] = _DEFAULT
    functions: Annotated[Any, only([], advice="use tools")] = _DEFAULT
    function_call: Annotated[Any, only("none", "auto", advice="use tool_choice")] = _DEFAULT
    prompt_cache_options: Annotated[
        _Object | None, only({}, {"mode": "implicit"}, advice="everything known is reused")
    ] = _DEFAULT
    prompt_cache_retention: Annotated[
        str | None, only("24h", advice="conversations are kept on disk; delete the session instead")
    ] = _DEFAULT

    def sampling(self) -> SamplingParams:
        """How the answer is sampled. Raises ``InvalidRequest`` by the field's name."""
        limits = {limit for limit in (self.max_completion_tokens, self.max_tokens) if limit is not None}
        if len(limits) > 1:
            raise InvalidRequest(
                f"max_tokens: {self.max_tokens}, and max_completion_tokens {self.max_completion_tokens}: give one",
                param="max_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs: goes with logprobs: true", param="top_logprobs")
        return sampling_of(
            {
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": self.top_k,
                "min_p": self.min_p,
                "repetition_penalty": self.repetition_penalty,
                "seed": self.seed,
                "stop": self.stop,
                "max_tokens": next(iter(limits), None),
                "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
                "tool_choice": self.tool_choice,
                "response_format": self.response_format,
            },
            {"logprobs": "top_logprobs"},
        )

    def check(self) -> None:
        """Raise ``InvalidRequest`` for fields that do not go together."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: goes with stream: true", param="stream_options")
        if self.parallel_tool_calls is False and self.tools:
            raise Unsupported(
                "parallel_tool_calls=False",
                "a reply calls as many tools as the model likes",
                param="parallel_tool_calls",
            )
