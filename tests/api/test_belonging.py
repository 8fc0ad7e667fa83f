"""Which session a request belongs to: by id, by name, by cache key, by what was said; also after a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from asking import Asked, client_of, quiet, sessions, state, until, user
from homes import chat_folder
from openai import BadRequestError, NotFoundError
from served import Served

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
SAID = "<think>hm</think>Paris"
# Of earlier answers only what follows the reasoning is shown, as Qwen's templates do.
DROPS = (
    "{% for message in messages %}{% set said = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last %}{% set said = said.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + said + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = chat_folder(tmp_path_factory.mktemp("models"))
    (folder / "chat_template.jinja").write_text(DROPS)
    return folder


class Running:
    """A server, and a client that goes to it when it was started again, too."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.client = client_of(served.start())

    def again(self) -> None:
        self.stop()
        self.client = client_of(self.served.start())

    def stop(self) -> None:
        self.client.close()
        assert self.served.stop() == 0, "".join(self.served.said)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Running]:
    running = Running(quiet(tmp_path_factory.mktemp("belonging") / "home", model))
    yield running
    running.stop()


@pytest.fixture
def ask(running: Running) -> Callable[..., Asked]:
    return lambda messages, **more: Asked(running.client, messages, **more)


def test_everything_but_the_new_turn_is_reused_after_a_restart_and_where_the_template_drops_reasoning(
    running: Running,
) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"const": SAID}}}
    history: list[Any] = [SYSTEM, user("What do you think of?")]
    first = Asked(running.client, history, max_tokens=60, response_format=schema)
    assert SAID in first.text
    history += [first.message, user("Why?")]
    second = Asked(running.client, history)
    assert (second.session, second.cached) == (first.session, first.total - 1)
    edited = [*history[:3], user("Why that?")]
    branch = Asked(running.client, edited)
    running.again()
    third = Asked(running.client, [*history, second.message, user("And now?")])
    assert (third.session, third.cached) == (first.session, second.total - 1)
    assert third.cache["source"] == "disk"
    # The branch, too, and a new one from an old message.
    later = Asked(running.client, [*edited, branch.message, user("And now?")])
    assert (later.session, later.cached) == (branch.session, branch.total - 1)
    other = Asked(running.client, [*history[:3], user("How so?")])
    assert other.session not in (first.session, branch.session)
    assert other.cached == first.total - 1
    # Rendered anew, the same history is shorter: it is the reuse that keeps the reasoning.
    anew = Asked(running.client, [*history[:1], user("Something else first."), *history[1:]])
    assert anew.prompt - third.prompt < 0


def test_where_a_head_has_changed_is_said_and_where_none_has_nothing(ask: Callable[..., Asked]) -> None:
    def tool(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}

    def system(clock: str) -> dict[str, str]:
        return {"role": "system", "content": f"You tell the time. It is {clock}."}

    tools = {"tools": [tool("look"), tool("ask")]}
    history: list[Any] = [system("12:00"), user("What do you know of heads?")]
    first = ask(history, **tools)
    history += [first.message, user("And of tails?")]
    second = ask(history, **tools)
    assert (first.diverged, second.diverged) == (None, None)
    history += [second.message, user("And?")]
    assert ask([system("12:01"), *history[1:]], **tools).diverged == f"system:{len('You tell the time. It is 12:0')}"
    assert ask(history, tools=tools["tools"][::-1]).diverged == "tools:order"
    assert ask(history, tools=tools["tools"][:1]).diverged == "tools"
    edited = [*history[:3], user("And of sides?"), *history[4:]]
    assert ask(edited, **tools).diverged == "messages:3"
    assert ask([history[0], user("What of HEADS?"), *history[2:]], **tools).diverged == "messages:1"
    # A new conversation, an old message edited at the end, and what goes on: nothing is amiss.
    assert ask([system("12:02"), user("What do you know of heads?")], **tools).diverged is None
    assert ask([*history[:3], user("And of fins?")], **tools).diverged is None
    third = ask(history, **tools)
    assert (third.session, third.cached, third.diverged) == (first.session, second.total - 1, None)


def test_a_session_id_takes_whole_histories_and_new_messages(running: Running, ask: Callable[..., Asked]) -> None:
    made: Any = running.client.post("/sessions", body={"system": SYSTEM["content"]}, cast_to=object)
    name = made["id"]
    first = ask([user("By id?")], extra_body={"session_id": name})
    assert first.session == name
    new = ask([user("And new?")], extra_headers={"X-Session-ID": name})
    assert (new.session, new.cached) == (name, first.total - 1)
    history: list[Any] = [SYSTEM, user("By id?"), first.message, user("And new?"), new.message, user("Whole?")]
    whole = ask(history, extra_headers={"X-Session-ID": name})
    assert (whole.session, whole.cached) == (name, new.total - 1)
    without_system = [*history[1:], whole.message, user("Still?")]
    still = ask(without_system, extra_body={"session_id": name})
    assert (still.session, still.cached) == (name, whole.total - 1)
    # The last answer again, in its place.
    again = ask(without_system, extra_body={"session_id": name}, temperature=1.0, seed=3)
    assert again.session == name
    assert state(running.client, name)["ledger_tokens"] == again.total
    # Another past: a branch, while the session stays as it is. Its id finds the branch again.
    edited = [SYSTEM, user("By id?"), first.message, user("And edited?")]
    branch = ask(edited, extra_body={"session_id": name})
    assert branch.session != name
    assert branch.cached == first.total - 1
    on = ask([*edited, branch.message, user("On?")], extra_body={"session_id": name})
    assert (on.session, on.cached) == (branch.session, branch.total - 1)
    assert state(running.client, name)["ledger_tokens"] == again.total
    # Who sends no id never changes it.
    stranger = ask([*without_system, again.message, user("Who?")])
    other = ask([SYSTEM, *without_system, again.message, user("Who?")])
    assert name not in (stranger.session, other.session)
    assert other.cached == again.total - 1


def test_an_id_that_there_is_not_and_tools_that_a_session_has_not(running: Running, ask: Callable[..., Asked]) -> None:
    with pytest.raises(NotFoundError) as caught:
        ask([user("Hi")], extra_body={"session_id": "sess_none"})
    assert caught.value.code == "session_not_found"
    first = ask([user("Hi there")])
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(BadRequestError) as refused:
        ask([user("And now?")], extra_body={"session_id": first.session}, tools=[tool])
    assert refused.value.param == "tools"


def test_a_name_of_the_clients_own_begins_a_session_and_finds_it_again(
    running: Running, ask: Callable[..., Asked]
) -> None:
    headers = {"X-Session-ID": "agent-7/ä"}
    first = ask([SYSTEM, user("Named?")], extra_body={"session_id": "agent-7"})
    second = ask([user("More?")], extra_body={"session_id": "agent-7"})
    assert (second.session, second.cached) == (first.session, first.total - 1)
    running.again()
    third = ask([user("And more?")], extra_headers={"X-Session-ID": "agent-7"})
    assert (third.session, third.cached) == (first.session, second.total - 1)
    # The body comes before the header.
    other = ask(
        [user("Other?")], extra_body={"session_id": "agent-8"}, extra_headers=headers | {"X-Session-ID": "agent-7"}
    )
    assert other.session not in (first.session,)


def test_a_name_can_be_given_before_the_first_request_and_goes_wherever_the_id_does(
    running: Running, ask: Callable[..., Asked]
) -> None:
    client = running.client
    made: Any = client.post(
        "/sessions", body={"name": "mine/ä", "system": "You are a helpful assistant."}, cast_to=object
    )
    first = ask([user("By its name?")], extra_body={"session_id": "mine/ä"})
    assert first.session == made["id"]
    path = "/sessions/mine%2F%C3%A4"
    found: Any = client.get(path, cast_to=object)
    assert (found["id"], found["ledger_tokens"]) == (made["id"], first.total)
    for taken, complaint in (("mine/ä", "already"), ("sess_mine", "does not begin"), ("", "1 to 200"), ("..", "is no")):
        with pytest.raises(BadRequestError, match=complaint) as refused:
            client.post("/sessions", body={"name": taken}, cast_to=object)
        assert refused.value.param == "name"
    deleted: Any = client.delete(path, cast_to=object)
    assert deleted["id"] == made["id"]
    with pytest.raises(NotFoundError) as caught:
        client.get(path, cast_to=object)
    assert caught.value.code == "session_not_found"


@pytest.mark.parametrize("system", [[SYSTEM], []], ids=["system", "none"])
def test_a_session_in_which_nothing_was_answered_takes_the_head_of_its_first_conversation(
    running: Running, ask: Callable[..., Asked], system: list[Any]
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    made: Any = running.client.post("/conversations", body={"items": [user("Noted?")]}, cast_to=object)
    name = made["id"].replace("conv_", "sess_")
    first = ask([*system, user("Noted?")], extra_body={"session_id": name}, tools=[tool])
    assert first.session == name
    items: Any = running.client.get(f"/sessions/{name}/items", cast_to=object)
    said = [item["content"]["content"] for item in items["data"] if item["role"] in ("user", "assistant")]
    assert said[0] == "Noted?" and len(said) == 2, "the question is there once"
    listed: Any = running.client.get(f"/conversations/{made['id']}/items?order=asc", cast_to=object)
    assert [item["role"] for item in listed["data"]] == ["user", "assistant"]
    # It is frozen now: who says something else is answered elsewhere, and what is new comes behind.
    history: list[Any] = [*system, user("Noted?"), first.message, user("And now?")]
    second = ask(history, extra_body={"session_id": name}, tools=[tool])
    assert (second.session, second.cached) == (name, first.total - 1)
    other = ask([{"role": "system", "content": "You are."}, *history[len(system) :]], extra_body={"session_id": name})
    assert other.session != name


def test_a_session_that_was_begun_with_a_system_prompt_keeps_it(running: Running, ask: Callable[..., Asked]) -> None:
    made: Any = running.client.post("/sessions", body={"system": "You are Bolt."}, cast_to=object)
    other = ask([SYSTEM, user("Who are you?")], extra_body={"session_id": made["id"]})
    assert other.session != made["id"]
    assert state(running.client, made["id"])["turns"] <= 1


def test_a_cache_key_keeps_equal_conversations_apart(ask: Callable[..., Asked]) -> None:
    history: list[Any] = [SYSTEM, user("Keyed?")]
    ones = [ask(history, extra_body={"prompt_cache_key": key}) for key in ("a", "b")]
    assert len({one.text for one in ones}) == 1
    history += [ones[0].message, user("Go on?")]
    for one, key in zip(ones, ("a", "b"), strict=True):
        later = ask(history, extra_body={"prompt_cache_key": key})
        assert (later.session, later.cached) == (one.session, one.total - 1)
    third = ask(history, extra_body={"prompt_cache_key": "c"})
    assert third.session not in {one.session for one in ones}
    assert third.cached is not None and third.cached >= ones[0].total - 1


def test_other_tools_another_system_prompt_and_other_template_arguments_are_other_conversations(
    ask: Callable[..., Asked],
) -> None:
    history: list[Any] = [SYSTEM, user("Same?")]
    first = ask(history)
    history += [first.message, user("And?")]
    tool = {
        "type": "function",
        "function": {"name": "of_other_tools", "parameters": {"type": "object", "properties": {}}},
    }
    for changed in (
        ask([{"role": "system", "content": "You are."}, *history[1:]]),
        ask(history, tools=[tool]),
        ask(history[1:]),
    ):
        assert changed.session != first.session
        assert (changed.cached or 0) < first.prompt


@pytest.mark.full
def test_sessions_that_nobody_has_named_go_and_the_others_stay(tmp_path: Path, model: Path) -> None:
    with (
        quiet(tmp_path / "home", model, server_anonymous_seconds=8.0, server_anonymous_sessions=2) as served,
        client_of(served) as client,
    ):
        asked = [Asked(client, [user(f"Who are you, {name}?")]) for name in "abcd"]
        kept = Asked(client, [user("And you?")], extra_body={"session_id": "mine"})
        Asked(client, [user("Stay.")], extra_body={"session_id": asked[3].session})
        until(lambda: len(sessions(client)) <= 4)
        assert set(sessions(client)) <= {asked[1].session, asked[2].session, asked[3].session, kept.session}
        until(lambda: set(sessions(client)) == {asked[3].session, kept.session}, 40)
