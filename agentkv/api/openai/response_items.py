"""Items as responses and conversations have them, and the messages that they are here.

One message of a session can be several of OpenAI's items: its text and each of its calls. Ids say which::

    item_3f…  ─▶  msg_3f…  (its text)   fc_3f…_0, fc_3f…_1  (its calls)   fco_3f…  (a call's result)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentkv.errors import InvalidRequest, Unsupported
from agentkv.schemas.messages import Message, ToolCall, normalise
from agentkv.sessions.continuing import beside
from agentkv.sessions.db.records import ItemRecord, SessionRecord
from agentkv.sessions.heads import behind_head

__all__ = [
    "call_item",
    "items_of",
    "listed",
    "message_item",
    "messages_of",
    "opening_and_rest",
    "without_item",
]

_ANY = ("id", "status", "type")
_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
_TEXTS = ("text", "input_text", "output_text")
_PART = ("type", "text", "annotations", "logprobs")


def messages_of(given: str | Sequence[Any] | None, where: str = "input") -> list[Message]:
    """A request's items as messages; a text is one of the user's. Raises ``InvalidRequest`` by the item's name."""
    if given is None:
        return []
    if isinstance(given, str):
        return normalise(given)
    found: list[Message] = []
    calling = False  # whether the item before is one that calls belong to
    for index, item in enumerate(given):
        at = f"{where}[{index}]"
        if not isinstance(item, Mapping):
            raise InvalidRequest(f"{at} must be an item, not {type(item).__name__}", param=at)
        kind = item.get("type")
        kind = "message" if kind is None or kind == "" else kind
        _check_fields(kind, item, at)
        message = _message(kind, item, at)
        if kind == "function_call" and calling:
            before = found.pop()
            message = before.model_copy(update={"tool_calls": (*before.tool_calls, *message.tool_calls)})
        found.append(message)
        calling = message.role == "assistant"
    return found


def opening_and_rest(messages: Sequence[Message]) -> tuple[str | None, list[Message]]:
    """What a conversation's system prompt is where it begins with these, and the messages behind it."""
    count = next((i for i, m in enumerate(messages) if m.template_role != "system"), len(messages))
    return "\n\n".join(message.text for message in messages[:count]) or None, list(messages[count:])


def items_of(item: ItemRecord) -> list[dict[str, Any]]:
    """One of a session's items as OpenAI's; none where it is raw tokens, or says nothing."""
    if item.kind == "tokens":
        return []
    message, name = Message.from_canonical(item.content), item.id.removeprefix("item_")
    if message.role == "tool":
        result = {"id": f"fco_{name}", "type": "function_call_output", "call_id": message.tool_call_id}
        return [{**result, "output": message.text, "status": "completed"}]
    if message.role != "assistant":
        return [_given_item(name, message.role, message.text)]
    calls = [call_item(name, index, call) for index, call in enumerate(message.tool_calls)]
    if message.text or not calls:
        return [message_item(name, message.text), *calls]
    return calls


def listed(record: SessionRecord, items: Iterable[ItemRecord], instructions: str | None = None) -> list[dict[str, Any]]:
    """All items of a conversation in order. What of its system prompt is no ``instructions`` (by default the session's)
    was said as a message, and is one."""
    stored = list(items)
    opening = beside(record.system, instructions or record.instructions)
    found = []
    if opening is not None and stored and record.pinned:
        found = [_given_item(stored[0].id.removeprefix("item_"), "system", opening)]
    return found + [each for item in behind_head(record, stored) for each in items_of(item)]


def without_item(item: ItemRecord, name: str) -> Message | None:
    """The message without the one of its items that is called so; ``None`` where nothing of it is left."""
    message, own = Message.from_canonical(item.content), item.id.removeprefix("item_")
    if name in (f"msg_{own}", f"fco_{own}"):
        return message.model_copy(update={"content": ""}) if message.tool_calls else None
    calls = tuple(call for index, call in enumerate(message.tool_calls) if name != f"fc_{own}_{index}")
    if len(calls) == len(message.tool_calls):
        return message
    return message.model_copy(update={"tool_calls": calls}) if calls or message.text else None


def message_item(
    name: str, text: str, *, status: str = "completed", logprobs: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """An answer's text."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    return _text_item(name, "assistant", part, status)


def call_item(name: str, index: int, call: ToolCall, *, status: str = "completed") -> dict[str, Any]:
    """An answer's call."""
    said = {"call_id": call.id, "name": call.name, "arguments": call.arguments_text}
    return {"id": f"fc_{name}_{index}", "type": "function_call", "status": status, **said}


def _given_item(name: str, role: str, text: str) -> dict[str, Any]:
    return _text_item(name, role, {"type": "input_text", "text": text}, "completed")


def _text_item(name: str, role: str, part: Mapping[str, Any], status: str) -> dict[str, Any]:
    return {"id": f"msg_{name}", "type": "message", "role": role, "status": status, "content": [part]}


def _check_fields(kind: Any, item: Mapping[str, Any], at: str) -> None:
    known = _FIELDS.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise Unsupported(
            f"input item {kind!r}", f"{at}: messages, function calls and their outputs are served", param=f"{at}.type"
        )
    for field, value in item.items():
        if field not in (*known, *_ANY) and value is not None:
            raise Unsupported(f"field {at}.{field}", "leave it out", param=f"{at}.{field}")


def _message(kind: str, item: Mapping[str, Any], at: str) -> Message:
    if kind == "message":
        said: dict[str, Any] = {"role": item.get("role"), "content": _content(item.get("content"), f"{at}.content")}
        if said["role"] == "tool":
            raise InvalidRequest(f"{at}.role: a tool's result is an item of type function_call_output", param=at)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        said = {"role": "assistant", "content": None}
        said["tool_calls"] = [{"id": item.get("call_id"), "type": "function", "function": function}]
    else:
        said = {"role": "tool", "tool_call_id": item.get("call_id")}
        said["content"] = _content(item.get("output"), f"{at}.output")
    try:
        return normalise(said)[0]
    except InvalidRequest as error:
        raise _renamed(error, at) from None


def _content(content: Any, at: str) -> Any:
    """Parts without what clients send back empty."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return content
    parts = []
    for index, part in enumerate(content):
        if isinstance(part, Mapping):
            if part.get("type") not in _TEXTS:
                raise Unsupported(
                    f"content part {part.get('type')!r}",
                    f"{at}[{index}]: only text parts can be served",
                    param=f"{at}[{index}]",
                )
            for field, value in part.items():
                if field not in _PART and value is not None:
                    raise Unsupported(f"field {at}[{index}].{field}", "leave it out", param=f"{at}[{index}].{field}")
            part = {"type": "text", "text": part.get("text")}
        parts.append(part)
    return parts


_NAMES = {"tool_calls[0].id": "call_id", "tool_calls[0].function.": "", "tool_call_id": "call_id"}


def _renamed(error: InvalidRequest, at: str) -> InvalidRequest:
    """The error as it is called in a request's items."""

    def named(text: str) -> str:
        text = text.replace("messages[0]", at)
        for ours, theirs in _NAMES.items():
            text = text.replace(ours, theirs)
        return text

    error.args = (named(str(error)),)
    error.param = named(error.param or at)
    return error
