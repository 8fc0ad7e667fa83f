"""OpenAI-style chat messages: checked once at the door, frozen afterwards.

``normalise`` takes what clients send (a string, one message, a list, SDK objects) and either returns ``Message``
values or raises an error that names the message and the field. What cannot be honoured is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

from agentkv.errors import InvalidRequest, Unsupported
from agentkv.schemas.fields import known_only

__all__ = ["Identities", "Message", "MessageInput", "MessageKind", "Role", "ToolCall", "identities", "normalise"]

Role = Literal["system", "developer", "user", "assistant", "tool"]
MessageKind = Literal["message", "tool_call", "tool_result"]

_ROLES: tuple[str, ...] = get_args(Role)
_TEXT_PARTS = ("text", "input_text", "output_text")
_PART_FIELDS = ("type", "text", "annotations", "logprobs")
"""Those of an answer's part that clients send back with it."""
_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
# Clients send the assistant message they received back as it was, unset fields included. Empty, they say nothing.
_EMPTY_ONLY = ("refusal", "audio", "annotations", "function_call")
_REASONING = re.compile(r"\s*(?:<think>)?(?:(?!</?think>).)*</think>", re.DOTALL)
"""What a reply begins with; where the prompt opens it, only its end is there."""
_FROZEN = ConfigDict(frozen=True, extra="forbid", strict=True)


class ToolCall(BaseModel):
    """One function call of an assistant message. ``arguments`` is a JSON object, or the text when it is not one."""

    model_config = _FROZEN

    id: str
    name: str
    arguments: dict[str, Any] | str

    @property
    def arguments_text(self) -> str:
        """The arguments as JSON text, or as the text that is none."""
        if isinstance(self.arguments, str):
            return self.arguments
        return json.dumps(self.arguments, ensure_ascii=False)

    def canonical(self) -> dict[str, Any]:
        """A JSON-able dict with all fields."""
        return {"id": self.id, "name": self.name, "arguments": self.arguments}


class Message(BaseModel):
    """One message with its content parts joined to a text.

    ``reasoning_content`` reaches the template where the client sends it; it is no part of what is stored or compared.
    """

    model_config = _FROZEN

    role: Role
    content: str | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        """The content; empty where there is none."""
        return self.content or ""

    @property
    def kind(self) -> MessageKind:
        """``tool_call`` for an assistant message that calls, ``tool_result`` for role ``tool``, else ``message``."""
        if self.role == "tool":
            return "tool_result"
        return "tool_call" if self.tool_calls else "message"

    @property
    def template_role(self) -> str:
        """The role that chat templates know: ``developer`` is rendered as ``system``."""
        return "system" if self.role == "developer" else self.role

    def canonical(self) -> dict[str, Any]:
        """The JSON-able form that is stored with an item; ``from_canonical`` reads it back. No nulls, no reasoning."""
        stored: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.name is not None:
            stored["name"] = self.name
        if self.tool_calls:
            stored["tool_calls"] = [call.canonical() for call in self.tool_calls]
        if self.tool_call_id is not None:
            stored["tool_call_id"] = self.tool_call_id
        return stored

    @classmethod
    def from_canonical(cls, stored: Mapping[str, Any]) -> Message:
        """The message whose ``canonical()`` this is."""
        calls = tuple(ToolCall(**call) for call in stored.get("tool_calls", ()))
        return cls(**{**stored, "tool_calls": calls})


MessageInput = str | Mapping[str, Any] | Message | Sequence[Mapping[str, Any] | Message]
"""What callers may pass for ``messages``; objects with pydantic's ``model_dump`` count as mappings."""


def normalise(messages: MessageInput) -> list[Message]:
    """Checked messages. A string is one user message.

    Raises ``InvalidRequest`` (``Unsupported`` for what is refused by name) with the index and the field.
    """
    if isinstance(messages, str):
        return [Message(role="user", content=_clean(messages, "messages"))]
    if isinstance(messages, Message):
        return [messages]
    if isinstance(messages, Mapping) or callable(getattr(messages, "model_dump", None)):
        return [_message(messages, "messages[0]")]
    listed: object = messages
    if not isinstance(listed, Sequence) or isinstance(listed, bytes | bytearray):
        raise InvalidRequest(
            f"messages must be a string, a message or a list of messages, not {type(messages).__name__}",
            param="messages",
        )
    if not messages:
        raise InvalidRequest("messages is empty; pass at least one message", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def identities(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """What makes two conversations the same, message by message: for recognising a client that sends everything again.

    Role, text stripped of outer whitespace, calls as name and parsed arguments, a tool result by the ordinal of the
    call it answers (-1: none in this list). Ids, nulls, names and reasoning do not count, be it a field or, between
    ``<think>`` tags, the beginning of a reply's text.
    """
    each = Identities()
    return [each.of(message) for message in messages]


class Identities:
    """``identities`` of a conversation's messages as they come: call ``of`` with each, in order."""

    def __init__(self) -> None:
        self._ordinals: dict[str, int] = {}
        self._calls = 0

    def copy(self) -> Identities:
        """One that goes on by itself from here."""
        other = Identities()
        other._ordinals, other._calls = dict(self._ordinals), self._calls
        return other

    def of(self, message: Message) -> dict[str, Any]:
        """The next message's."""
        text = message.text if message.role != "assistant" else _without_reasoning(message.text)
        identity: dict[str, Any] = {"role": message.template_role, "text": text.strip()}
        if message.tool_calls:
            identity["calls"] = [[call.name, call.arguments] for call in message.tool_calls]
            for call in message.tool_calls:
                self._ordinals[call.id] = self._calls
                self._calls += 1
        if message.tool_call_id is not None:
            identity["answers"] = self._ordinals.get(message.tool_call_id, -1)
        return identity


def _without_reasoning(text: str) -> str:
    found = _REASONING.match(text) if "</think>" in text else None
    return text if found is None else text[found.end() :]


def _message(value: Any, where: str) -> Message:
    if isinstance(value, Message):
        return value
    dump = getattr(value, "model_dump", None)
    if not isinstance(value, Mapping) and callable(dump):
        value = dump(exclude_none=True)
    if not isinstance(value, Mapping):
        raise InvalidRequest(
            f"{where} must be an object with role and content, not {type(value).__name__}", param=where
        )
    role = _role(value, where)
    _refuse_unknown(value, where)
    if value.get("tool_calls") and role != "assistant":
        raise InvalidRequest(f"{where}.tool_calls: only assistant messages call tools, this is {role!r}", param=where)
    if value.get("tool_call_id") is not None and role != "tool":
        raise InvalidRequest(
            f"{where}.tool_call_id: only tool messages answer a call, this is {role!r}", param=f"{where}.tool_call_id"
        )
    if role == "tool" and not value.get("tool_call_id"):
        raise InvalidRequest(
            f"{where}.tool_call_id is missing; a tool message names the call it answers", param=f"{where}.tool_call_id"
        )
    content = _content(value.get("content"), f"{where}.content")
    if content is None and role != "assistant":
        raise InvalidRequest(f"{where}.content is missing; a {role} message needs text", param=f"{where}.content")
    reasoning = _optional_text(value, "reasoning_content", where)
    if reasoning is not None and role != "assistant":
        raise InvalidRequest(
            f"{where}.reasoning_content: only assistant messages reason, this is {role!r}",
            param=f"{where}.reasoning_content",
        )
    return Message.model_validate(
        {
            "role": role,
            "content": content,
            "name": _optional_text(value, "name", where),
            "tool_calls": _tool_calls(value.get("tool_calls"), f"{where}.tool_calls"),
            "tool_call_id": _optional_text(value, "tool_call_id", where),
            "reasoning_content": reasoning,
        }
    )


def _role(value: Mapping[str, Any], where: str) -> str:
    role = value.get("role")
    if role == "function":
        raise Unsupported(
            "role 'function'",
            f"{where} uses the retired function-calling form; send role 'tool' with a tool_call_id",
            param=f"{where}.role",
        )
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}, got {role!r}", param=f"{where}.role")
    return role


def _refuse_unknown(value: Mapping[str, Any], where: str) -> None:
    for field, content in value.items():
        if field in _FIELDS:
            continue
        if field in _EMPTY_ONLY:
            if content:
                raise Unsupported(f"message field {field!r}", f"{where}.{field} is set", param=f"{where}.{field}")
            continue
        raise InvalidRequest(
            f"{where} has the unknown field {field!r}; known fields: {', '.join(_FIELDS)}", param=f"{where}.{field}"
        )


def _content(content: Any, where: str) -> str | None:
    if content is None:
        return None
    if isinstance(content, str):
        return _clean(content, where)
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
        raise InvalidRequest(f"{where} must be text or a list of parts, not {type(content).__name__}", param=where)
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return _clean(part, where)
    if not isinstance(part, Mapping):
        raise InvalidRequest(f"{where} must be a content part, not {type(part).__name__}", param=where)
    kind = part.get("type")
    if kind not in _TEXT_PARTS:
        raise Unsupported(f"content part {kind!r}", f"{where}: only text parts can be served", param=where)
    known_only(part, _PART_FIELDS, where)
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text must be a string, not {type(text).__name__}", param=f"{where}.text")
    return _clean(text, f"{where}.text")


def _tool_calls(calls: Any, where: str) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes | bytearray):
        raise InvalidRequest(f"{where} must be a list, not {type(calls).__name__}", param=where)
    return tuple(_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls))


def _tool_call(call: Any, where: str) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    if not isinstance(call, Mapping):
        raise InvalidRequest(f"{where} must be an object, not {type(call).__name__}", param=where)
    kind = call.get("type", "function")
    if kind != "function":
        raise Unsupported(f"tool call type {kind!r}", f"{where}: only functions can be called", param=f"{where}.type")
    function = call.get("function")
    if function is None and "name" in call:
        # As an item's content has it.
        function = {name: call[name] for name in ("name", "arguments") if name in call}
        call = {name: value for name, value in call.items() if name not in function}
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{where}.function must be an object with name and arguments", param=f"{where}.function")
    _refuse_others(call, ("id", "type", "function", "index"), where)
    _refuse_others(function, ("name", "arguments"), f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{where}.function.name must be a non-empty string", param=f"{where}.function.name")
    identifier = call.get("id")
    if not isinstance(identifier, str) or not identifier:
        raise InvalidRequest(f"{where}.id must be a non-empty string", param=f"{where}.id")
    return ToolCall(
        id=_clean(identifier, f"{where}.id"),
        name=_clean(name, f"{where}.function.name"),
        arguments=_arguments(function.get("arguments"), f"{where}.function.arguments"),
    )


def _refuse_others(value: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for field in value:
        if field not in known:
            raise InvalidRequest(
                f"{where} has the unknown field {field!r}; known fields: {', '.join(known)}", param=f"{where}.{field}"
            )


def _arguments(arguments: Any, where: str) -> dict[str, Any] | str:
    """The JSON object. Text that is none is kept as it is: models do generate broken calls, and clients return them."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, Mapping):
        try:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{where} is not JSON: {error}", param=where) from error
    elif isinstance(arguments, str):
        text = arguments
    else:
        raise InvalidRequest(f"{where} must be a JSON text or an object, not {type(arguments).__name__}", param=where)
    _clean(text, where)
    try:
        parsed = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text
    if not isinstance(parsed, dict):
        return text
    _clean(json.dumps(parsed, ensure_ascii=False), where)
    return parsed


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _optional_text(value: Mapping[str, Any], field: str, where: str) -> str | None:
    text = value.get(field)
    if text is None:
        return None
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.{field} must be a string, not {type(text).__name__}", param=f"{where}.{field}")
    return _clean(text, f"{where}.{field}")


def _clean(text: str, where: str) -> str:
    """Half a surrogate pair is no text: JSON can carry it, tokenizers and databases cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{where} holds half a surrogate pair at character {error.start}, which is not valid text", param=where
        ) from error
    return str(text)
