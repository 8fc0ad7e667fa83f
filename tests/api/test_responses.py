"""OpenAI's own client against a server in a process of its own: responses as it sends and reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from asking import MODEL, client_of, quiet, sessions
from homes import chat_folder
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.responses import Response
from pydantic import BaseModel
from served import Served

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("responses")
    with quiet(root / "home", chat_folder(root)) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with client_of(served) as client:
        yield client


class Answered:
    """A response, and what its headers say."""

    def __init__(self, client: OpenAI, said: Any, **more: Any) -> None:
        given = {"max_output_tokens": 8, **more}
        raw = client.responses.with_raw_response.create(model=MODEL, input=said, **given)
        self.response: Response = raw.parse()
        self.id, self.text = self.response.id, self.response.output_text
        self.session = raw.headers["x-agentkv-session"]
        cache = dict(part.split("=") for part in raw.headers["x-agentkv-cache"].split(";"))
        usage = self.response.usage
        assert usage is not None
        self.cached, self.prompt, self.total = (
            usage.input_tokens_details.cached_tokens,
            usage.input_tokens,
            usage.total_tokens,
        )
        assert (int(cache["reused"]), int(cache["computed"])) == (self.cached, self.prompt - self.cached)


def test_a_chain_of_responses_computes_its_new_turns_alone_and_an_older_one_is_forked(client: OpenAI) -> None:
    first = Answered(client, "How is the weather in Paris?", instructions="You are terse.")
    assert (first.response.status, first.response.object) == ("incomplete", "response")
    assert first.response.incomplete_details is not None
    assert first.response.incomplete_details.reason == "max_output_tokens"
    assert first.response.instructions == "You are terse."
    assert first.cached == 0
    second = Answered(client, "And here?", previous_response_id=first.id, instructions="You are terse.")
    assert (second.session, second.cached) == (first.session, first.total - 1)
    assert second.response.previous_response_id == first.id
    third = Answered(client, "And there?", previous_response_id=second.id)
    assert (third.session, third.cached) == (first.session, second.total - 1)
    assert third.response.instructions == "You are terse.", "left unsaid it is what the session has"
    branch = Answered(client, "And there?", previous_response_id=first.id)
    assert branch.session != first.session
    assert branch.cached == first.total - 1
    beyond = Answered(client, "And on?", previous_response_id=third.id)
    assert (beyond.session, beyond.cached) == (first.session, third.total - 1)


def test_other_instructions_are_another_session_with_the_same_history(client: OpenAI) -> None:
    first = Answered(client, "A bird?", instructions="You are a pirate.")
    other = Answered(client, "A fish?", previous_response_id=first.id, instructions="You are a poet.")
    assert other.session != first.session
    assert other.response.instructions == "You are a poet."
    items = client.responses.input_items.list(other.id, order="asc").data
    assert [item.content[0].text for item in items] == ["A bird?", first.text, "A fish?"]  # type: ignore[union-attr]
    again = Answered(client, "A dog?", previous_response_id=other.id)
    assert (again.session, again.cached) == (other.session, other.total - 1)
    tools = Answered(client, "A cat?", previous_response_id=again.id, tools=[WEATHER], tool_choice="none")
    assert tools.session != again.session and tools.prompt > again.total


def test_a_stream_says_the_same_in_typed_events(client: OpenAI) -> None:
    whole = Answered(client, "Tell me a story.", max_output_tokens=12)
    with client.responses.stream(model=MODEL, input="Tell me a story.", max_output_tokens=12) as stream:
        events = list(stream)
        final = stream.get_final_response() if events[-1].type == "response.completed" else events[-1].response  # type: ignore[union-attr]
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == whole.text == final.output_text
    assert final.usage is not None and final.usage.output_tokens == 12
    kept = client.responses.retrieve(final.id)
    assert kept.output_text == said and kept.usage == final.usage and kept.status == "incomplete"


def test_a_tool_is_called_and_its_output_answered(client: OpenAI) -> None:
    given: dict[str, Any] = {"tools": [WEATHER], "max_output_tokens": 150}
    forced = {"type": "function", "name": "weather"}
    called = Answered(client, "The weather?", tool_choice=forced, **given)
    [call] = called.response.output
    assert call.type == "function_call" and call.name == "weather" and called.response.status == "completed"
    assert json.loads(call.arguments) == {"city": "Paris"}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    answered = Answered(client, [output], previous_response_id=called.id, tools=[WEATHER], tool_choice="none")
    assert (answered.session, answered.cached) == (called.session, called.total - 1)
    # As a client does that keeps no state: everything again, with the ids and nulls that it was sent.
    whole = [{"role": "user", "content": "The weather?"}, call.model_dump(), output, *answered.response.output]
    later = Answered(client, [*whole, {"role": "user", "content": "Thanks."}], tools=[WEATHER], store=False)
    assert (later.session, later.cached) == (answered.session, answered.total - 1)
    kinds = [item.type for item in client.responses.input_items.list(answered.id).data]
    assert kinds == ["function_call_output", "function_call", "message"]
    with client.responses.stream(model=MODEL, input="It?", tool_choice="required", **given) as stream:
        events = list(stream)
    assert [event.type for event in events][2:-1] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    [streamed] = events[-1].response.output  # type: ignore[union-attr]
    assert streamed.type == "function_call" and json.loads(streamed.arguments) == {"city": "Paris"}


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    sunny: bool


def test_an_answer_follows_a_schema(client: OpenAI) -> None:
    parsed = client.responses.parse(model=MODEL, input="Where?", text_format=Place, max_output_tokens=60)
    assert isinstance(parsed.output_parsed, Place)
    assert parsed.text is not None and parsed.text.format is not None and parsed.text.format.type == "json_schema"


def test_log_probabilities_come_where_they_are_included(client: OpenAI) -> None:
    told = Answered(client, "Likely?", include=["message.output_text.logprobs"], top_logprobs=2)
    [message] = told.response.output
    assert message.type == "message"
    logprobs = message.content[0].logprobs  # type: ignore[union-attr]
    assert logprobs is not None and len(logprobs) == 8
    assert b"".join(bytes(each.bytes) for each in logprobs).decode(errors="replace") == told.text


def test_tokens_are_counted_as_they_are_used(client: OpenAI) -> None:
    def count(**given: Any) -> int:
        return client.responses.input_tokens.count(model=MODEL, **given).input_tokens

    before = sessions(client)
    alone = count(input="Count this.", instructions="You count.")
    assert sessions(client) == before
    first = Answered(client, "Count this.", instructions="You count.")
    assert first.prompt == alone
    behind = count(input="And this.", previous_response_id=first.id)
    other = count(input="And this.", previous_response_id=first.id, instructions="You count, and then some.")
    assert Answered(client, "And this.", previous_response_id=first.id).prompt == behind < other


def test_a_response_in_progress_is_cancelled_and_leaves_nothing(client: OpenAI) -> None:
    before = sessions(client)
    stream = client.responses.create(model=MODEL, input="A long one.", max_output_tokens=900, stream=True)
    begun = next(event for event in stream if event.type == "response.output_text.delta")
    assert begun.delta
    assert stream.response.headers["x-agentkv-session"] not in before
    running = sessions(client)
    assert len(running) == len(before) + 1
    name = "resp_"
    with client.responses.create(model=MODEL, input="Another.", max_output_tokens=900, stream=True) as other:
        for event in other:
            if event.type == "response.created":
                name = event.response.id
                assert client.responses.retrieve(name).status == "in_progress"
                assert client.responses.cancel(name).status == "cancelled"
        assert event.type == "response.failed" and event.response.status == "cancelled"
    assert client.responses.retrieve(name).status == "cancelled"
    stream.close()
    with pytest.raises(BadRequestError, match="is cancelled: only one in progress"):
        client.responses.cancel(name)
    with pytest.raises(BadRequestError, match="nothing to go on from"):
        client.responses.create(model=MODEL, input="On.", previous_response_id=name)


def test_a_deleted_response_and_one_that_was_not_stored_are_not_found(client: OpenAI) -> None:
    first = Answered(client, "Delete me.")
    unstored = Answered(client, "Forget me.", store=False)
    assert unstored.response.to_dict()["store"] is False
    assert client.responses.retrieve(first.id).id == first.id
    client.responses.delete(first.id)
    for name in (first.id, unstored.id, "resp_nobody"):
        with pytest.raises(NotFoundError):
            client.responses.retrieve(name)
        with pytest.raises(NotFoundError):
            client.responses.delete(name)
        with pytest.raises(NotFoundError):
            client.responses.cancel(name)
        with pytest.raises(NotFoundError) as missing:
            Answered(client, "On.", previous_response_id=name)
        assert missing.value.param == "previous_response_id"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("background", True),
        ("truncation", "auto"),
        ("reasoning", {"effort": "high"}),
        ("include", ["reasoning.encrypted_content"]),
        ("top_logprobs", 3),
        ("service_tier", "flex"),
        ("prompt", {"id": "pmpt_1"}),
        ("max_tool_calls", 1),
        ("context_management", [{"type": "compaction"}]),
        ("stream_options", {"include_obfuscation": False}),
        ("text", {"format": {"type": "json_schema", "name": "it", "schema": {"type": "thing"}}}),
        ("tools", [{"type": "web_search"}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": []}),
        ("max_output_tokens", 0),
        ("temperature", 3),
        ("conversation", {"name": "x"}),
        ("no_such_field", 1),
        ("input", []),
        ("input", [{"type": "item_reference", "id": "msg_1"}]),
        ("input", [{"type": "reasoning", "summary": []}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("input", [{"type": "function_call", "name": "f", "arguments": "{}"}]),
        ("input", [{"role": "user", "content": "x", "colour": "red"}]),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(client: OpenAI, field: str, value: Any) -> None:
    before = sessions(client)
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(extra_body={"model": MODEL, "input": "Hi", field: value})
    assert (caught.value.param or "").split("[")[0].split(".")[0] == field
    assert sessions(client) == before, "a refused request leaves a session"


def test_truncation_is_what_the_policy_does(tmp_path: Path) -> None:
    with (
        quiet(tmp_path / "home", chat_folder(tmp_path), default_policy="sink:64") as served,
        client_of(served) as client,
    ):
        assert Answered(client, "much " * 60, truncation="auto").response.truncation == "auto"
        with pytest.raises(BadRequestError, match="sink:64"):
            Answered(client, "much", truncation="disabled")
        assert len(sessions(client)) == 1


@pytest.mark.full
def test_responses_are_there_after_a_restart(tmp_path: Path) -> None:
    model = chat_folder(tmp_path)
    with quiet(tmp_path / "home", model) as served, client_of(served) as client:
        first = Answered(client, "Remember this.", metadata={"a": "b"})
        served.kill()
    with quiet(tmp_path / "home", model) as served, client_of(served) as client:
        kept = client.responses.retrieve(first.id)
        assert kept.to_dict() == first.response.to_dict() and kept.metadata == {"a": "b"}
        second = Answered(client, "And this.", previous_response_id=first.id)
        assert second.session == first.session
        assert served.stop() == 0
    with quiet(tmp_path / "home", model) as served, client_of(served) as client:
        third = Answered(client, "And that.", previous_response_id=second.id)
        assert (third.session, third.cached) == (first.session, second.total - 1)


def test_a_name_of_the_clients_own_takes_new_items(client: OpenAI) -> None:
    header = {"extra_headers": {"X-Session-ID": "responses-of-bolt"}}
    first = Answered(client, "One.", instructions="You are Bolt.", **header)
    second = Answered(client, "Two.", instructions="You are Bolt.", **header)
    assert (second.session, second.cached) == (first.session, first.total - 1)
