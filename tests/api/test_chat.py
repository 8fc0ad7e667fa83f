"""OpenAI's own client against a server in a process of its own: chat completions as it sends and reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
from asking import MODEL, Asked, client_of, quiet, sessions, state, until, user
from homes import chat_folder
from openai import APIError, BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    root = tmp_path_factory.mktemp("chat")
    with quiet(root / "home", chat_folder(root)) as served, client_of(served) as client:
        yield client


def test_models_are_those_that_are_served(client: OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "agentkv")
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(NotFoundError) as caught:
        client.models.retrieve("gpt-5")
    assert caught.value.code == "model_not_found"
    with pytest.raises(NotFoundError, match="it serves 'chat-llama-0'"):
        client.chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": "Hi"}])


def test_a_client_without_an_id_that_sends_everything_again_computes_its_new_turn_alone(client: OpenAI) -> None:
    history = [SYSTEM, user("How is the weather in Paris?")]
    first = Asked(client, history)
    assert first.answer.object == "chat.completion"
    assert first.answer.choices[0].finish_reason == "length"
    assert first.cached == 0
    known = first.total
    for text in ("And here?", "Paris", "And there, said the user?"):
        history += [first.message, user(text)]
        later = Asked(client, history)
        assert later.session == first.session
        assert later.cached == known - 1, "the last generated token has its KV with the next turn"
        assert later.cache["source"] == "device"
        known, first = later.total, later


def test_a_stream_says_the_same_in_chunks(client: OpenAI) -> None:
    messages = [SYSTEM, user("Tell me a story.")]
    whole = Asked(client, messages, max_tokens=12)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
    )
    *said, last, usage = chunks
    assert said[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in said) == whole.text
    assert last.choices[0].finish_reason == "length"
    assert usage.choices == []
    assert usage.usage is not None and usage.usage.completion_tokens == 12
    assert usage.usage.prompt_tokens_details is not None
    cached = usage.usage.prompt_tokens_details.cached_tokens or 0
    assert 0 < whole.prompt - cached <= 6, "computed is what opens the answer, and the token before it"
    assert all(chunk.usage is None for chunk in (*said, last))
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_has_its_headers_and_goes_on_like_any_other(client: OpenAI) -> None:
    messages: list[Any] = [SYSTEM, user("A stream, please.")]
    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=messages, max_tokens=4, stream=True
    ) as raw:
        assert raw.headers["x-agentkv-cache"].startswith("reused=0;")
        assert raw.headers["content-type"].startswith("text/event-stream")
        session = raw.headers["x-agentkv-session"]
        lines = [line for line in raw.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    parts = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    text = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
    later = Asked(client, [*messages, {"role": "assistant", "content": text}, user("More.")])
    assert later.session == session


def test_log_probabilities_come_with_the_text_they_belong_to(client: OpenAI) -> None:
    messages: list[Any] = [user("How likely?")]
    told = Asked(client, messages, max_tokens=6, logprobs=True, top_logprobs=3).answer.choices[0].logprobs
    assert told is not None and told.content is not None
    assert len(told.content) == 6
    for token in told.content:
        assert math.isclose(token.logprob, token.top_logprobs[0].logprob), "greedy: the likeliest"
        assert len(token.top_logprobs) == 3
    said = b"".join(bytes(token.bytes or ()) for token in told.content)
    with client.chat.completions.stream(
        model=MODEL, messages=messages, max_tokens=6, logprobs=True, top_logprobs=3
    ) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        final = stream.current_completion_snapshot
    assert final.choices[0].logprobs is not None
    assert final.choices[0].logprobs.content == told.content
    assert final.choices[0].message.content == said.decode(errors="replace")
    with_text = [chunk for chunk in chunks if chunk.choices[0].delta.content]
    assert len(with_text) > 1 and all(chunk.choices[0].logprobs for chunk in with_text)


def test_the_same_seed_says_the_same_and_others_something_else(client: OpenAI) -> None:
    drawn = [Asked(client, [user("Dice?")], temperature=1.5, seed=seed).text for seed in (1, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 1
    # Without a temperature nothing is drawn, but top_p says that something is to be.
    assert Asked(client, [user("Dice?")], seed=5).text == Asked(client, [user("Dice?")], seed=6).text
    assert len({Asked(client, [user("Dice?")], top_p=0.99, seed=seed).text for seed in range(3)}) > 1


def test_a_stop_string_ends_the_answer(client: OpenAI) -> None:
    whole = Asked(client, [user("Stop?")], max_completion_tokens=16, max_tokens=None).text
    stop = whole[4]
    cut = Asked(client, [user("Stop?")], stop=[stop], max_tokens=16)
    assert cut.text == whole[: whole.index(stop)]
    assert cut.answer.choices[0].finish_reason == "stop"


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    sunny: bool


def test_an_answer_follows_a_schema(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model=MODEL, messages=[user("Where?")], response_format=Place, max_completion_tokens=60
    )
    assert isinstance(parsed.choices[0].message.parsed, Place)
    whole = Asked(client, [user("JSON?")], max_tokens=200, response_format={"type": "json_object"})
    if whole.answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(whole.text), dict)
    else:
        assert whole.text.startswith("{")
    with pytest.raises(BadRequestError) as caught:
        wrong = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "thing"}}}
        Asked(client, [user("JSON?")], response_format=wrong)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_is_called_and_its_result_answered(client: OpenAI, choice: Any) -> None:
    history: list[Any] = [SYSTEM, user(f"The weather, by {choice}?")]
    given: dict[str, Any] = {"tools": [WEATHER], "max_tokens": 150}
    called = Asked(client, history, tool_choice=choice, **given)
    assert called.answer.choices[0].finish_reason == "tool_calls"
    assert called.message.content is None
    [call] = called.message.tool_calls or ()
    assert call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    history += [called.message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}]
    answered = Asked(client, history, tools=[WEATHER], tool_choice="none")
    assert (answered.session, answered.cached) == (called.session, called.total - 1)
    # As a client that stores calls under ids of its own has them, and as one that edits the result does.
    renamed = json.loads(json.dumps([*history[:2], called.message.to_dict(), history[3]]).replace(call.id, "mine"))
    other = Asked(client, [*renamed[:3], {**renamed[3], "content": "Rain."}], tools=[WEATHER], tool_choice="none")
    assert other.session != called.session
    assert (other.cached or 0) >= called.prompt


def test_a_called_tool_is_streamed(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=[user("Weather?")], tools=[WEATHER], tool_choice="required", max_tokens=150
    ) as stream:
        final = stream.get_final_completion()
    [call] = final.choices[0].message.tool_calls or ()
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert final.choices[0].finish_reason == "tool_calls"


def test_an_old_message_that_is_edited_makes_a_branch_that_reuses_what_comes_before(client: OpenAI) -> None:
    history: list[Any] = [SYSTEM, user("A long beginning, which stays as it is.")]
    first = Asked(client, history)
    history += [first.message, user("This one is edited later.")]
    second = Asked(client, history)
    edited = [*history[:3], user("And here it is.")]
    branch = Asked(client, edited)
    assert branch.session != first.session == second.session
    assert branch.cached == first.total - 1
    # Both go on, each in its own session.
    for asked, before in ((second, history), (branch, edited)):
        later = Asked(client, [*before, asked.message, user("Go on.")])
        assert (later.session, later.cached) == (asked.session, asked.total - 1)
    # An answer that the client made up is input like any other.
    made_up = Asked(client, [*history[:2], {"role": "assistant", "content": "Nobody said this."}, user("Go on.")])
    assert made_up.session not in (first.session, branch.session)
    assert 0 < (made_up.cached or 0) < first.total - 1


def test_the_same_prompt_twice_at_once_is_answered_twice(client: OpenAI) -> None:
    history: list[Any] = [SYSTEM, user("Twice at once?")]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda _: Asked(client, history, max_tokens=60), range(4)))
    assert len({asked.text for asked in together}) == 1
    assert len({asked.session for asked in together}) == 4
    later = [*history, together[0].message, user("And on?")]
    with ThreadPoolExecutor(4) as pool:
        again = list(pool.map(lambda _: Asked(client, later, max_tokens=100), range(4)))
    assert len({asked.text for asked in again}) == 1
    assert len({asked.session for asked in again}) == 4
    # One that comes once another has been answered finds its own question there too, and takes it along.
    assert all(together[0].total - 1 <= (asked.cached or 0) < asked.prompt for asked in again)


def test_a_session_that_runs_is_forked_and_never_refused(client: OpenAI) -> None:
    history: list[Any] = [SYSTEM, user("Who is busy?")]
    first = Asked(client, history)
    history += [first.message, user("Still?")]
    stream = client.chat.completions.create(model=MODEL, messages=history, max_tokens=400, stream=True)
    next(iter(stream))
    beside = Asked(client, history)
    stream.close()
    assert beside.session != first.session
    assert beside.cached == first.total - 1
    until(lambda: not state(client, first.session)["busy"])
    assert state(client, first.session)["ledger_tokens"] == first.total, "whoever disconnects has the turn rolled back"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("logit_bias", {"5": 1}),
        ("store", True),
        ("service_tier", "flex"),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("verbosity", "low"),
        ("reasoning_effort", "high"),
        ("prediction", {"type": "content", "content": "x"}),
        ("web_search_options", {}),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("prompt_cache_retention", "in_memory"),
        ("top_logprobs", 2),
        ("stream_options", {"include_usage": True}),
        ("tool_choice", "required"),
        ("temperature", 3),
        ("max_tokens", 0),
        ("no_such_field", 1),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("tools", [{"type": "custom", "custom": {"name": "f"}}]),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(client: OpenAI, field: str, value: Any) -> None:
    given = {"model": MODEL, "messages": [user("Hi")], field: value}
    before = sessions(client)
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model="", messages=[], extra_body=given)
    assert (caught.value.param or "").split("[")[0] == field
    assert caught.value.type == "invalid_request_error"
    assert sessions(client) == before, "a refused request leaves a session"


def test_parallel_tool_calls_cannot_be_forbidden(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        Asked(client, [user("Hi")], tools=[WEATHER], parallel_tool_calls=False)
    assert caught.value.param == "parallel_tool_calls"


def test_fields_that_say_nothing_are_taken(client: OpenAI) -> None:
    nothing = {
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": None,
        "logit_bias": {},
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "modalities": ["text"],
        "safety_identifier": "x",
        "tool_choice": "auto",
        "tools": [],
        "response_format": {"type": "text"},
        "stream": False,
        "logprobs": False,
        "reasoning_effort": None,
    }
    assert Asked(client, [user("Nothing?")], extra_body=nothing).text


def test_a_failure_in_a_stream_is_raised_by_the_client(tmp_path: Path) -> None:
    with (
        quiet(tmp_path / "home", chat_folder(tmp_path), server_grace_seconds=0.0) as served,
        client_of(served) as client,
    ):
        stream = client.chat.completions.create(model=MODEL, messages=[user("much " * 3000)], stream=True)
        with pytest.raises(APIError, match="the limit is 1,024") as caught:
            list(stream)
        assert caught.value.code == "context_length_exceeded"
        assert sessions(client) == []
