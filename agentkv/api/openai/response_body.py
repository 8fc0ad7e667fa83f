"""The body of a response: what of it is served, and what only may be left unsaid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, WithJsonSchema, field_validator

from agentkv.api.openai.fields import only
from agentkv.api.openai.response_items import messages_of
from agentkv.api.openai.translating import function_tools, sampling_of
from agentkv.api.shapes import Conversation, InputItem, NullsOnly, ResponseTool, ResponseToolChoice, TextFormatObject
from agentkv.api.strict import Whole, exactly
from agentkv.errors import InvalidRequest, Unsupported
from agentkv.schemas.fields import known_only
from agentkv.schemas.messages import Message
from agentkv.schemas.sampling import SamplingParams
from agentkv.sessions.continuing import Wanted

__all__ = ["LOGPROBS", "Counted", "ResponseBody", "TextFormat"]

_Object = dict[str, Any]
_HINT = Field(None, description="Taken, and says nothing here.")
_DEFAULT = Field(None, description="Only its default, which says nothing.")
LOGPROBS = "message.output_text.logprobs"


class ResponseStreamOptions(BaseModel):
    """What a stream has beside its events."""

    model_config = ConfigDict(extra="forbid")

    include_obfuscation: Annotated[bool | None, only(False, advice="events are sent as they are")] = _DEFAULT


class TextFormat(BaseModel):
    """What the answer's text looks like."""

    model_config = ConfigDict(extra="forbid")

    format: TextFormatObject | None = Field(None, description="`text`, `json_object` or `json_schema`.")
    verbosity: Annotated[str | None, only("medium", advice="say it in the instructions")] = _DEFAULT


class Asked(BaseModel):
    """What is answered, and behind what."""

    model_config = ConfigDict(extra="forbid")

    input: str | list[InputItem] | None = Field(
        None, description="A text, or items: messages, function calls and their outputs; text only."
    )
    instructions: str | None = Field(
        None, description="The system prompt. Left out, it is that of the conversation or response gone on from."
    )
    previous_response_id: str | None = Field(None, description="The response that this one goes on from.")
    conversation: str | Conversation | None = Field(
        None, description="The conversation that this is a part of: its id, or an object with it."
    )
    tools: list[ResponseTool] | None = Field(
        None,
        description="Functions. Left out, they are those of what is gone on from. `strict` holds where one is forced.",
    )
    tool_choice: ResponseToolChoice = Field(None, description="`auto`, `none`, `required`, or a function by its name.")
    parallel_tool_calls: bool | None = Field(None, description="`false` only without tools.")
    text: TextFormat | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="`auto` where the session's policy evicts, `disabled` where it does not; else refused."
    )
    reasoning: Annotated[
        _Object | None,
        only({}, advice="pass template_args to a session where the model's template reads an argument"),
        NullsOnly,
    ] = _DEFAULT

    @field_validator("reasoning", mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: said for name, said in value.items() if said is not None}
        return value

    @field_validator("input", "conversation", mode="before")
    @classmethod
    def _as_documented(cls, value: Any, info: ValidationInfo) -> Any:
        # A union's own error would name its members, not the field.
        other: type = list if info.field_name == "input" else dict
        if value is not None and not isinstance(value, str | other):
            raise InvalidRequest(
                f"{info.field_name}: must be a string or {'a list' if other is list else 'an object'}, "
                f"not {type(value).__name__}",
                param=info.field_name,
            )
        return value

    @property
    def conversation_id(self) -> str | None:
        """Of the conversation."""
        given = self.conversation
        if isinstance(given, Mapping):
            if given.keys() != {"id"} or not isinstance(given["id"], str):
                raise InvalidRequest("conversation: pass its id, or {'id': …}", param="conversation")
            given = given["id"]
        return given

    def messages(self) -> list[Message]:
        """Of the input. Raises ``InvalidRequest`` by the item's name."""
        return messages_of(self.input)

    def wanted(self) -> Wanted:
        """What it says of the head."""
        if self.tools is None:
            return Wanted(self.instructions)
        try:
            tools = function_tools([_chat_tool(tool) for tool in self.tools])
        except InvalidRequest as error:  # it speaks of the form that chat completions have
            error.args = (str(error).replace(".function", ""),)
            error.param = (error.param or "tools").replace(".function", "")
            raise
        return Wanted(self.instructions, tuple(tools or ()))

    def check(self) -> None:
        """Raise ``InvalidRequest`` for fields that do not go together."""
        if self.conversation is not None and self.previous_response_id is not None:
            raise InvalidRequest(
                "previous_response_id: a request goes on from a response or is a part of a conversation, not both",
                param="previous_response_id",
            )
        if self.parallel_tool_calls is False and self.tools:
            raise Unsupported(
                "parallel_tool_calls=False",
                "a reply calls as many tools as the model likes",
                param="parallel_tool_calls",
            )


class Counted(Asked):
    """A request whose tokens are counted."""

    model_config = exactly({"input": "Hello!", "instructions": "You are Bolt."})

    model: str | None = Field(None, description="A name that `GET /v1/models` lists.")
    personality: Annotated[str | None, only(advice="say it in the instructions")] = _DEFAULT


class ResponseBody(Asked):
    """A response. Without a temperature decoding is greedy."""

    model_config = exactly(
        {"model": "smollm2-135m", "input": "Hello!", "max_output_tokens": 64},
        {
            "model": "smollm2-135m",
            "input": [{"role": "user", "content": "Hello!"}],
            "instructions": "You are Bolt.",
            "stream": True,
            "max_output_tokens": 64,
            "include": ["message.output_text.logprobs"],
        },
    )

    model: str = Field(description="A name that `GET /v1/models` lists.")
    session_id: str | None = Field(
        None, description="The session that answers: an id, or a name of your own, as for chat completions."
    )
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = Field(None, description="Whether it can be retrieved, and gone on from, by its id.")
    max_output_tokens: Whole | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: Whole | None = Field(None, ge=0, le=20, description=f"Goes with `include: [{LOGPROBS}]`.")
    include: list[Annotated[str, WithJsonSchema({"const": LOGPROBS})]] | None = Field(None, description=f"`{LOGPROBS}`")
    metadata: dict[str, str] | None = Field(None, description="Comes back with the response.")
    prompt_cache_key: str | None = Field(
        None, max_length=200, description="Of equally long conversations that of the same key is gone on with."
    )

    user: str | None = _HINT
    safety_identifier: str | None = _HINT

    background: Annotated[bool | None, only(False, advice="stream it, or ask from a task of your own")] = _DEFAULT
    service_tier: Annotated[str | None, only("auto", "default", advice="there is one tier")] = _DEFAULT
    max_tool_calls: Annotated[Whole | None, only(advice="functions are called by the client")] = _DEFAULT
    prompt: Annotated[Any, only(advice="say it in instructions and input")] = _DEFAULT
    context_management: Annotated[Any, only([], advice="choose a policy for the session")] = _DEFAULT
    moderation: Annotated[Any, only()] = _DEFAULT
    prompt_cache_options: Annotated[
        _Object | None, only({}, {"mode": "implicit"}, advice="everything known is reused")
    ] = _DEFAULT
    prompt_cache_retention: Annotated[
        str | None, only("24h", advice="conversations are kept on disk; delete the session instead")
    ] = _DEFAULT

    @field_validator("include")
    @classmethod
    def _included(cls, value: list[str] | None) -> list[str] | None:
        for name in value or ():
            if name != LOGPROBS:
                raise Unsupported(f"include={name!r}", f"only {LOGPROBS!r} can be", param="include")
        return value

    @property
    def logprobs(self) -> int | None:
        """Alternatives that are told of each token; ``None``: nothing is."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: goes with stream: true", param="stream_options")
        if self.top_logprobs and self.logprobs is None:
            raise InvalidRequest(f"top_logprobs: goes with include: [{LOGPROBS!r}]", param="top_logprobs")

    def sampling(self) -> SamplingParams:
        """How the answer is sampled. Raises ``InvalidRequest`` by the field's name."""
        return sampling_of(
            {
                "temperature": self.temperature,
                "top_p": self.top_p,
                "max_tokens": self.max_output_tokens,
                "logprobs": self.logprobs,
                "tool_choice": _choice(self.tool_choice),
                "response_format": _format(self.text),
            },
            {
                "logprobs": "top_logprobs",
                "max_tokens": "max_output_tokens",
                "schema": "text.format",
                "response_format": "text.format",
            },
        )


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function as chat completions define it."""
    said = {name: value for name, value in tool.items() if value is not None}
    kind = said.pop("type", None)
    if kind != "function":
        raise Unsupported(f"tool type {kind!r}", "only functions can be called", param="tools")
    if "function" in said:
        raise InvalidRequest(
            "tools: pass {'type': 'function', 'name': …, 'parameters': …}, with no `function` in it", param="tools"
        )
    return {"type": "function", "function": said}


def _choice(choice: Any) -> Any:
    if isinstance(choice, Mapping):
        if choice.get("type") != "function":
            raise Unsupported(f"tool_choice of type {choice.get('type')!r}", "name a function", param="tool_choice")
        return {name: value for name, value in choice.items() if name != "type"}
    return choice


def _format(text: TextFormat | None) -> Any:
    if text is None or text.format is None:
        return None
    given = dict(text.format)
    if given.pop("type", None) != "json_schema":
        return text.format
    known_only(given, ("name", "schema", "strict", "description"), "text.format")
    return {"type": "json_schema", "json_schema": given}
