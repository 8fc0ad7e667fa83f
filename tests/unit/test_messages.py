"""What is accepted as a message or a sampling parameter, and how refusals read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from agentkv.errors import InvalidRequest, Unsupported
from agentkv.schemas.messages import Message, identities, normalise
from agentkv.schemas.sampling import SamplingParams

CALLING: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "refusal": None,
    "annotations": [],
    "reasoning_content": "the user wants weather",
    "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}


def test_a_string_is_one_user_message() -> None:
    assert normalise("Hi") == [Message(role="user", content="Hi")]
    assert normalise({"role": "user", "content": "Hi"}) == normalise("Hi") == normalise(normalise("Hi"))


def test_parts_are_joined_line_by_line() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, {"type": "output_text", "text": "c"}]
    assert normalise({"role": "user", "content": parts})[0].text == "a\nb\nc"


def test_sdk_objects_are_read_like_their_dicts() -> None:
    class Reply(BaseModel):
        role: str = "assistant"
        content: str | None = "Hi"
        refusal: str | None = None
        tool_calls: list[Any] | None = None

    assert normalise([Reply()]) == normalise({"role": "assistant", "content": "Hi"}) == normalise(Reply())  # type: ignore[arg-type,list-item]


def test_kinds_and_roles() -> None:
    kinds = [message.kind for message in normalise([{"role": "user", "content": "x"}, CALLING, RESULT])]
    assert kinds == ["message", "tool_call", "tool_result"]
    assert normalise({"role": "developer", "content": "x"})[0].template_role == "system"


def test_what_is_stored_reads_back_and_holds_no_reasoning() -> None:
    call, result = normalise([CALLING, RESULT])
    for message in (call, result):
        stored = json.loads(json.dumps(message.canonical()))
        assert "reasoning" not in json.dumps(stored)
        assert Message.from_canonical(stored).canonical() == stored
    assert call.canonical()["tool_calls"] == [{"id": "call_1", "name": "f", "arguments": {"x": 1}}]
    assert call.reasoning_content == "the user wants weather"


def test_identity_ignores_ids_whitespace_reasoning_and_argument_spelling() -> None:
    other_call = {
        "role": "assistant",
        "content": " ",
        "tool_calls": [{"id": "z", "function": {"name": "f", "arguments": {"x": 1}}}],
    }
    other_result = {"role": "tool", "tool_call_id": "z", "content": "\nsunny "}
    assert identities(normalise([CALLING, RESULT])) == identities(normalise([other_call, other_result]))
    unlinked = {**other_result, "tool_call_id": "y"}
    assert identities(normalise([CALLING, RESULT])) != identities(normalise([other_call, unlinked]))


def test_broken_arguments_are_kept_as_text() -> None:
    for text in ('{"x": ', "[1]", '{"x": NaN}', "[" * 100_000):
        call = {"id": "a", "function": {"name": "f", "arguments": text}}
        message = normalise({"role": "assistant", "tool_calls": [call]})[0]
        assert message.tool_calls[0].arguments == text


def test_messages_are_frozen() -> None:
    with pytest.raises(ValidationError):
        normalise("x")[0].content = "y"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("bad", "param", "words"),
    [
        ([], "messages", "empty"),
        (5, "messages", "int"),
        (b"x", "messages", "bytes"),
        (["x"], "messages[0]", "str"),
        ({"content": "x"}, "messages[0].role", "None"),
        ({"role": "robot", "content": "x"}, "messages[0].role", "robot"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "messages[1].content", "missing"),
        ({"role": "user", "content": 5}, "messages[0].content", "int"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text", "string"),
        ({"role": "user", "content": [3]}, "messages[0].content[0]", "int"),
        ({"role": "user", "content": "x", "colour": 1}, "messages[0].colour", "colour"),
        ({"role": "user", "content": "\ud800"}, "messages[0].content", "surrogate"),
        ({"role": "user", "content": "x", "name": 3}, "messages[0].name", "int"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id", "missing"),
        ({"role": "user", "content": "x", "tool_call_id": "a"}, "messages[0].tool_call_id", "tool"),
        ({"role": "user", "content": "x", "reasoning_content": "a"}, "messages[0].reasoning_content", "assistant"),
        ({**CALLING, "role": "user", "content": "x"}, "messages[0]", "assistant"),
        ({"role": "assistant", "tool_calls": "f"}, "messages[0].tool_calls", "str"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function", "function"),
        (
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": 3}}]},
            "messages[0].tool_calls[0].function.arguments",
            "int",
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"a":"\\ud800"}'}}],
            },
            "messages[0].tool_calls[0].function.arguments",
            "surrogate",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            "messages[0].tool_calls[0].id",
            "non-empty",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "args": {}}}]},
            "messages[0].tool_calls[0].function.args",
            "args",
        ),
    ],
)
def test_bad_messages_are_refused_with_index_and_field(bad: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        normalise(bad)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("bad", "feature"),
    [
        ({"role": "function", "name": "f", "content": "x"}, "role 'function'"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "content part 'image_url'"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "content part 'input_audio'"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "message field 'audio'"),
        ({"role": "assistant", "content": "x", "refusal": "no"}, "message field 'refusal'"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "tool call type 'custom'"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(bad: Any, feature: str) -> None:
    with pytest.raises(Unsupported) as caught:
        normalise([{"role": "user", "content": "x"}, bad])
    assert caught.value.feature == feature
    assert caught.value.param is not None and caught.value.param.startswith("messages[1]")


def test_sampling_is_greedy_unless_there_is_a_temperature() -> None:
    assert SamplingParams().greedy and SamplingParams.build(temperature=0).greedy
    assert not SamplingParams.build(temperature=0.7).greedy
    assert SamplingParams.build(stop="a").stop == ("a",) and SamplingParams.build(stop=None).stop == ()
    assert SamplingParams.build(stop=["a", "b"], presence_penalty=0, frequency_penalty=None).stop == ("a", "b")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", 0),
        ("top_k", 1.5),
        ("min_p", -1),
        ("repetition_penalty", 0),
        ("seed", "1"),
        ("seed", 2**64),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", 5),
        ("stop", [5]),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("logprobs", 21),
        ("logprobs", True),
        ("ignore_eos", 1),
    ],
)
def test_sampling_ranges_are_checked_and_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        SamplingParams.build(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_that_do_not_exist_are_refused_by_name(name: str) -> None:
    with pytest.raises(Unsupported, match=f"{name}=0.5") as caught:
        SamplingParams.build(**{name: 0.5})
    assert caught.value.param == name


def test_an_unknown_sampling_parameter_suggests_the_nearest() -> None:
    with pytest.raises(InvalidRequest, match=r"did you mean 'temperature'.*known: .*top_p") as caught:
        SamplingParams.build(temprature=1)
    assert caught.value.param == "temprature"


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("<think>\nhm\n</think>\n\nParis", "Paris"),
        ("hm\n</think>\n\nParis", "Paris"),  # the prompt has opened it
        ("<think></think>", ""),
        ("Paris", "Paris"),
        ("<think>never closed", "<think>never closed"),
        ("In XML: <think>a</think>", "In XML: <think>a</think>"),
    ],
)
def test_reasoning_at_the_beginning_of_an_answer_does_not_count(text: str, rest: str) -> None:
    mine, theirs = (normalise([{"role": "assistant", "content": each}]) for each in (text, rest))
    assert identities(mine) == identities(theirs)
    asked = normalise([{"role": "user", "content": text}])
    assert identities(asked)[0]["text"] == text.strip()
