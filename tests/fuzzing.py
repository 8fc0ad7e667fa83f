"""What schemathesis is told of the server beside its document: hooks, which its command line loads.

Its names are random: without help most calls would end at 404. Each second call goes to something that is there, made
anew where a call before may have deleted it. Answers are kept short, and a stream without an end gets one.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import requests
import schemathesis
from schemathesis.core.parameters import ParameterLocation

_MOST_TOKENS = 8
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_SPENDING = ("/events", "/rewind")
_USER = {"role": "user", "content": "Hello"}
_url = os.environ["FUZZED_URL"]
_key = os.environ["FUZZED_KEY"]
_http = requests.Session()
_http.headers["Authorization"] = f"Bearer {_key}"
_seen: Counter[str] = Counter()
_calls: Counter[str] = Counter()
_there: dict[str, dict[str, str]] = {}
_lock = threading.Lock()


def _asked(path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = _http.post(f"{_url}{path}", json=body, timeout=30)
    assert answer.ok, answer.text
    return dict(answer.json())


def _session() -> dict[str, str]:
    made = _asked("/v1/sessions", {"system": "You are a helpful assistant."})
    _asked(f"/v1/sessions/{made['id']}/messages", {"messages": "Hello", "max_tokens": 2})
    return {"session_id": made["id"]}


def _conversation() -> dict[str, str]:
    made = _asked("/v1/conversations", {"items": [_USER, {"role": "assistant", "content": "Hi"}, _USER]})
    items = _http.get(f"{_url}/v1/conversations/{made['id']}/items", timeout=30).json()
    return {"conversation_id": made["id"], "item_id": items["data"][0]["id"]}


def _response() -> dict[str, str]:
    made = _asked("/v1/responses", {"model": _model(), "input": "Hello", "max_output_tokens": 2})
    return {"response_id": made["id"]}


def _model() -> str:
    return str(_known("model", False)["model"])


_MAKERS = {
    "session_id": _session,
    "conversation_id": _conversation,
    "response_id": _response,
    "model": lambda: {"model": _http.get(f"{_url}/v1/models", timeout=30).json()["data"][0]["id"]},
}


def _known(name: str, spent: bool) -> dict[str, str]:
    """Path parameters of something that is there. ``spent``: the call that gets it may delete it."""
    if name not in _there:
        _there[name] = _MAKERS[name]()
    found = _there[name]
    if spent:
        del _there[name]
    return found


def _meant(case: Any, location: ParameterLocation) -> bool:
    """Whether that part of the call is as the document allows it."""
    part = case.meta.components.get(location) if case.meta is not None else None
    return part is None or part.mode.is_positive


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Names that are there, and short answers."""
    with _lock:
        label = case.operation.label
        _calls[label] += 1
        names = [name for name in _MAKERS if name in (case.path_parameters or {})]
        if names and _calls[label] % 2 and _meant(case, ParameterLocation.PATH):
            found = _known(names[0], spent=case.method == "DELETE" or label.endswith(_SPENDING))
            case.path_parameters.update({name: found.get(name, value) for name, value in case.path_parameters.items()})
        if label == "POST /v1/sessions/import" and _calls[label] % 4 == 1 and _meant(case, ParameterLocation.BODY):
            path = f"/v1/sessions/{_known('session_id', spent=False)['session_id']}/export"
            case.body = _http.get(f"{_url}{path}", timeout=30).content
        if isinstance(case.body, dict):
            if isinstance(case.body.get("model"), str) and _calls[label] % 8:
                case.body["model"] = _model()
            for name in _LIMITS:
                limit = case.body.get(name)
                if isinstance(limit, int) and not isinstance(limit, bool) and limit > _MOST_TOKENS:
                    case.body[name] = _MOST_TOKENS
    if label == "GET /v1/sessions/{session_id}/events":
        # It lasts as long as its session.
        path = f"{_url}/v1/sessions/{case.path_parameters.get('session_id')}"
        ending = threading.Timer(0.2, _http.delete, (path,), {"timeout": 30})
        ending.daemon = True
        ending.start()


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """What each operation answered."""
    with _lock:
        _seen[f"{response.status_code} {case.operation.label}"] += 1


@atexit.register
def _told() -> None:
    Path(os.environ["FUZZED_TOLD"]).write_text(json.dumps(_seen))
