"""OpenAI's own client, and what others have built on it, against a server: conversations, which are sessions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asking import MODEL, client_of, quiet, sessions, state
from homes import chat_folder
from openai import BadRequestError, ConflictError, NotFoundError, OpenAI
from served import Served
from test_responses import WEATHER, Answered


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("conversations")
    with quiet(root / "home", chat_folder(root)) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with client_of(served) as client:
        yield client


def message(role: str, text: str) -> Any:
    return {"type": "message", "role": role, "content": text}


def texts(client: OpenAI, conversation: str, **query: Any) -> list[str]:
    found = client.conversations.items.list(conversation, order="asc", **query)
    return [item.content[0].text for item in found]  # type: ignore[union-attr]


def test_a_conversation_is_a_session(client: OpenAI) -> None:
    made = client.conversations.create(metadata={"topic": "birds"})
    assert (made.object, made.metadata) == ("conversation", {"topic": "birds"})
    first = Answered(client, "A bird?", conversation=made.id, instructions="You are terse.")
    assert first.session == made.id.replace("conv_", "sess_")
    assert first.response.conversation is not None and first.response.conversation.id == made.id
    second = Answered(client, "Another?", conversation={"id": made.id}, instructions="You are terse.")
    assert (second.session, second.cached) == (first.session, first.total - 1)
    assert texts(client, made.id) == ["A bird?", first.text, "Another?", second.text]
    assert client.conversations.update(made.id, metadata={"topic": "fish"}).metadata == {"topic": "fish"}
    assert client.conversations.retrieve(made.id).metadata == {"topic": "fish"}
    assert state(client, first.session)["metadata"] == {"topic": "fish"}
    # Its session goes on, and so does the conversation.
    client.post(f"/sessions/{first.session}/messages", cast_to=object, body={"messages": "A third?", "max_tokens": 4})
    assert texts(client, made.id)[4] == "A third?"
    assert client.conversations.delete(made.id).deleted
    assert first.session not in sessions(client)
    for gone in (
        lambda: client.conversations.retrieve(made.id),
        lambda: client.conversations.delete(made.id),
        lambda: client.responses.retrieve(first.id),
        lambda: Answered(client, "On?", conversation=made.id),
    ):
        with pytest.raises(NotFoundError):
            gone()


def test_items_are_created_listed_retrieved_and_deleted(client: OpenAI) -> None:
    made = client.conversations.create(
        items=[message("system", "You are kind."), message("user", "One."), message("assistant", "Two.")]
    )
    added = client.conversations.items.create(made.id, items=[message("user", "Three."), message("assistant", "Four.")])
    assert [item.type for item in added.data] == ["message", "message"]
    assert texts(client, made.id) == ["You are kind.", "One.", "Two.", "Three.", "Four."]
    assert texts(client, made.id, limit=2) == texts(client, made.id), "page by page"
    page = client.conversations.items.list(made.id, limit=2)
    assert [item.content[0].text for item in page.data] == ["Four.", "Three."]  # type: ignore[union-attr]
    three = added.data[0].id  # type: ignore[union-attr]
    assert client.conversations.items.retrieve(three, conversation_id=made.id).to_dict() == added.data[0].to_dict()
    first = Answered(client, "Five.", conversation=made.id)
    # The last item: what comes before keeps its KV.
    last = client.conversations.items.list(made.id, limit=1).data[0]
    client.conversations.items.delete(last.id, conversation_id=made.id)  # type: ignore[arg-type, union-attr]
    assert texts(client, made.id)[-1] == "Five."
    again = Answered(client, [], conversation=made.id)
    assert again.text == first.text and again.cached > 0
    # One in the middle: it was never said.
    client.conversations.items.delete(three, conversation_id=made.id)  # type: ignore[arg-type]
    assert texts(client, made.id) == ["You are kind.", "One.", "Two.", "Four.", "Five.", again.text]
    with pytest.raises(NotFoundError):
        client.conversations.items.retrieve(three, conversation_id=made.id)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError):
        client.conversations.items.delete(three, conversation_id=made.id)  # type: ignore[arg-type]
    whole = Answered(
        client,
        [
            message("system", "You are kind."),
            *(
                message(r, t)
                for r, t in zip(
                    ["user", "assistant", "assistant", "user", "assistant"],
                    ["One.", "Two.", "Four.", "Five.", again.text],
                    strict=True,
                )
            ),
            message("user", "Six."),
        ],
        store=False,
    )
    after = Answered(client, "Six.", conversation=made.id)
    assert after.text == whole.text, "as one that never had it"


def test_other_instructions_are_said_anew_in_the_same_conversation(client: OpenAI) -> None:
    made = client.conversations.create(items=[message("system", "Be brief."), message("user", "One.")])
    first = Answered(client, "Two.", conversation=made.id, instructions="You are a pirate.")
    second = Answered(client, "Three.", conversation=made.id, instructions="You are a poet.", tools=[WEATHER])
    assert first.session == second.session
    assert second.cached == 0
    assert texts(client, made.id)[:5] == ["Be brief.", "One.", "Two.", first.text, "Three."]
    found: Any = client.get(f"/sessions/{first.session}/items", cast_to=object)
    assert found["data"][0]["content"]["content"] == "You are a poet.\n\nBe brief."
    third = Answered(client, "Four.", conversation=made.id)
    assert third.cached == second.total - 1
    assert third.response.instructions == "You are a poet." and len(third.response.tools) == 1


def test_a_conversation_that_answers_is_busy(client: OpenAI) -> None:
    made = client.conversations.create()
    with client.responses.create(
        model=MODEL, input="Long.", conversation=made.id, max_output_tokens=900, stream=True
    ) as stream:
        next(iter(stream))
        with pytest.raises(ConflictError) as caught:
            Answered(client, "Beside.", conversation=made.id)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        with pytest.raises(ConflictError):
            client.conversations.items.create(made.id, items=[message("user", "Beside.")])
        stream.close()
    assert texts(client, made.id) == []


def test_what_does_not_go_together_is_refused(client: OpenAI) -> None:
    made = client.conversations.create()
    first = Answered(client, "One.")
    with pytest.raises(BadRequestError) as caught:
        Answered(client, "Two.", conversation=made.id, previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"
    with pytest.raises(BadRequestError, match="nothing to answer"):
        Answered(client, [], conversation=made.id)
    with pytest.raises(BadRequestError) as caught:
        client.conversations.create(items=[{"type": "item_reference", "id": "x"}])
    assert (caught.value.param or "").startswith("items[0]")
    with pytest.raises(BadRequestError):
        client.conversations.create(extra_body={"colour": "red"})


@pytest.mark.full
def test_conversations_are_there_after_a_restart(tmp_path: Path) -> None:
    model = chat_folder(tmp_path)
    with quiet(tmp_path / "home", model) as served, client_of(served) as client:
        made = client.conversations.create(items=[message("user", "One."), message("assistant", "Two.")])
        first = Answered(client, "Three.", conversation=made.id)
        assert served.stop() == 0
    with quiet(tmp_path / "home", model) as served, client_of(served) as client:
        assert texts(client, made.id) == ["One.", "Two.", "Three.", first.text]
        second = Answered(client, "Four.", conversation=made.id)
        assert (second.session, second.cached) == (first.session, first.total - 1)
