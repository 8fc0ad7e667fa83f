"""Items as OpenAI's clients send them, and the messages that they are here."""

from __future__ import annotations

from typing import Any

import pytest

from agentkv.api.openai.response_items import items_of, messages_of, opening_and_rest, without_item
from agentkv.errors import InvalidRequest
from agentkv.schemas.messages import Message, ToolCall
from agentkv.sessions.db.records import ItemRecord
from agentkv.types import Span

CALLS = {"type": "function_call", "name": "weather", "arguments": '{"city": "Paris"}'}


def test_calls_belong_to_the_answer_before_them() -> None:
    said = messages_of(
        [
            {"role": "user", "content": "The weather?"},
            {**CALLS, "id": "fc_1", "call_id": "c1", "status": "completed", "caller": None},
            {"type": "function_call_output", "call_id": "c1", "output": "Sunny."},
            {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "It is.", "annotations": [], "logprobs": []}],
                "phase": None,
            },
            {**CALLS, "call_id": "c2"},
            {**CALLS, "call_id": "c3"},
        ]
    )
    assert [message.role for message in said] == ["user", "assistant", "tool", "assistant"]
    assert [[call.id for call in message.tool_calls] for message in said] == [[], ["c1"], [], ["c2", "c3"]]
    assert said[1].tool_calls[0].arguments == {"city": "Paris"}
    assert (said[2].tool_call_id, said[3].text) == ("c1", "It is.")


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "item_reference", "id": "x"}, "input[0].type"),
        ({"type": "reasoning", "summary": []}, "input[0].type"),
        (CALLS, "input[0].call_id"),
        ({"type": "function_call_output", "output": "x"}, "input[0].call_id"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input[0].content[0]"),
        ({"role": "user", "content": "x", "colour": "red"}, "input[0].colour"),
        ({"role": "user"}, "input[0].content"),
        ({"role": "tool", "content": "x"}, "input[0]"),
        ("x", "input[0]"),
    ],
)
def test_what_is_no_item_here_is_refused_by_its_place(item: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        messages_of([item])
    assert caught.value.param == param
    assert "messages[0]" not in str(caught.value)


def test_a_message_is_its_text_and_its_calls_and_can_lose_each() -> None:
    call = ToolCall(id="c", name="f", arguments={"a": 1})
    message = Message(role="assistant", content="hi", tool_calls=(call,))
    item = ItemRecord("item_abc", 1, 1, "assistant", "tool_call", message.canonical(), Span(0, 1), True)
    text, called = items_of(item)
    assert (text["id"], text["content"][0]["text"]) == ("msg_abc", "hi")
    assert (called["id"], called["call_id"], called["arguments"]) == ("fc_abc_0", "c", '{"a": 1}')
    assert without_item(item, "msg_abc") == message.model_copy(update={"content": ""})
    assert without_item(item, "fc_abc_0") == message.model_copy(update={"tool_calls": ()})
    assert without_item(item, "fc_abc_1") == message
    alone = ItemRecord("item_abc", 1, 1, "user", "message", {"role": "user", "content": "x"}, Span(0, 1), False)
    assert without_item(alone, "msg_abc") is None


def test_leading_system_messages_are_the_system_prompt() -> None:
    roles = ["system", "developer", "user", "system"]
    opening, rest = opening_and_rest(messages_of([{"role": role, "content": role} for role in roles]))
    assert opening == "system\n\ndeveloper"
    assert [message.role for message in rest] == ["user", "system"]
