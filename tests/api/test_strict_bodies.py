"""Bodies, queries and headers that the document does not allow are refused by name: never served as something else,
never 500."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
from asking import MODEL, quiet
from homes import chat_folder
from served import Served

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = {"model": MODEL, "messages": HELLO, "max_tokens": 2}
ODD: list[Any] = [[], {}]
"""What no dictionary can be asked for."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with quiet(tmp_path_factory.mktemp("home") / "home", chat_folder(tmp_path_factory.mktemp("models"))) as running:
        yield running


def refused(served: Served, path: str, body: Any, param: str | None, status: int = 400, **more: Any) -> None:
    answer = requests.post(f"{served.url}{path}", json=body, timeout=30, **more)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_no_text_and_no_truth_stands_for_a_number(served: Served) -> None:
    refused(served, "/v1/chat/completions", {**CHAT, "max_tokens": "2"}, "max_tokens")
    refused(served, "/v1/chat/completions", {**CHAT, "temperature": True}, "temperature")
    refused(served, "/v1/chat/completions", {**CHAT, "stream": 1}, "stream")
    whole = requests.post(
        f"{served.url}/v1/chat/completions", json={**CHAT, "max_tokens": 2.0, "top_k": 1.0}, timeout=30
    )
    assert whole.status_code == 200, "some clients have no other numbers"


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_a_kind_that_is_no_text_is_refused(served: Served, odd: Any) -> None:
    item = {"type": odd, "call_id": "c", "output": ""}
    refused(served, "/v1/conversations", {"items": [item]}, "items[0].type")
    refused(served, "/v1/responses", {"model": MODEL, "input": [{**item, "type": [odd]}]}, "input[0].type")
    wanted = {"type": [odd], "json_schema": {"schema": {}}}
    refused(served, "/v1/chat/completions", {**CHAT, "response_format": wanted}, "response_format")


def test_what_would_be_ignored_is_refused(served: Served) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    part = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    formats: list[tuple[dict[str, Any], str]] = [
        ({"type": "text", "schema": {}}, "response_format.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}, "response_format.json_schema.x"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}, "response_format.json_schema.strict"),
    ]
    for wanted, param in formats:
        refused(served, "/v1/chat/completions", {**CHAT, "response_format": wanted}, param)
    messages = [{"role": "user", "content": [part]}]
    refused(served, "/v1/chat/completions", {**CHAT, "messages": messages}, "messages[0].content[0].cache_control")
    for name, value in (("description", 1), ("parameters", []), ("strict", "no")):
        broken = {**tool, "function": {"name": "f", name: value}}
        refused(served, "/v1/chat/completions", {**CHAT, "tools": [broken]}, f"tools[0].function.{name}")
        refused(served, "/v1/sessions", {"tools": [broken]}, f"tools[0].function.{name}")
    refused(served, "/v1/sessions?limit=5", {}, "limit")
    refused(served, "/v1/chat/completions", CHAT, None, 415, headers={"Content-Encoding": "gzip"})
    answer = requests.get(f"{served.url}/v1/sessions", params={"before": "sess_none"}, timeout=30)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "before"


def test_the_document_says_what_headers_there_are_and_whether_a_key_is_needed(served: Served) -> None:
    paths = requests.get(f"{served.url}/openapi.json", timeout=30).json()["paths"]
    chat = paths["/v1/chat/completions"]["post"]
    assert [each["name"] for each in chat["parameters"] if each["in"] == "header"] == ["X-Session-ID"]
    assert chat["responses"]["200"]["headers"].keys() == {
        "X-AgentKV-Session",
        "X-AgentKV-Cache",
        "X-AgentKV-Diverged",
    }
    for status in ("409", "429", "503"):
        assert "Retry-After" in chat["responses"][status]["headers"]
    assert chat["security"] == [], "there are no keys"


def test_a_path_of_its_own_says_its_own_methods(served: Served) -> None:
    answer = requests.delete(f"{served.url}/v1/sessions/import", timeout=30)
    assert answer.status_code == 405 and answer.headers["Allow"] == "POST"
