"""Real agents' transcripts, replayed turn by turn, with a restart in the middle.

Each recorded message is committed as given. Behind the last one 8 tokens are generated, after a replay in one process
and after one that slept on disk and went on in another: they are the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from worker_replay import in_new_process

TRACES = Path(os.environ.get("AGENTKV_TRACES") or Path(__file__).parents[2].parent / "shared" / "traces")
CONTEXT = 8192
MARGIN = 256
"""For the template's own tokens, and those that are generated."""
SHORT = 3000
"""Tokens of a transcript that is replayed in the fast suite."""
GENERATED = 8


@dataclass(frozen=True)
class Trace:
    """A transcript: its system prompt, and the turns, each ending where the agent's side or the world's is complete."""

    name: str
    tokens: int
    system: str | None
    turns: list[list[dict[str, Any]]]

    def __repr__(self) -> str:
        return self.name

    @property
    def called(self) -> bool:
        return any("tool_calls" in message for turn in self.turns for message in turn)


def _read(path: Path) -> Trace:
    recorded = json.loads(path.read_text())
    messages = recorded["messages"]
    system = messages.pop(0)["content"] if messages[0]["role"] == "system" else None
    turns: list[list[dict[str, Any]]] = []
    for message in messages:
        if turns and (turns[-1][-1]["role"] == "assistant") == (message["role"] == "assistant"):
            turns[-1].append(message)
        else:
            turns.append([message])
    return Trace(path.stem, recorded["tokens_smollm2"], system, turns)


def _traces() -> list[Any]:
    if not TRACES.is_dir():
        return [pytest.param(None, id="none", marks=pytest.mark.skip(f"no transcripts: {TRACES} does not exist"))]
    fitting = [trace for trace in map(_read, sorted(TRACES.glob("*.json"))) if trace.tokens + MARGIN <= CONTEXT]
    assert fitting, f"{TRACES} holds no transcript that fits {CONTEXT} tokens"
    marks = {trace.name: [pytest.mark.full] if trace.tokens > SHORT else [] for trace in fitting}
    return [pytest.param(trace, id=trace.name, marks=marks[trace.name]) for trace in fitting]


@dataclass(frozen=True)
class Replay:
    """``whole``: in one process; ``before`` and ``after`` the restart. A result for each step."""

    whole: list[Any]
    before: list[Any]
    after: list[Any]


@pytest.fixture(scope="module", params=_traces())
def trace(request: pytest.FixtureRequest) -> Trace:
    found: Trace = request.param
    return found


@pytest.fixture(scope="module")
def replay(trace: Trace, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replay]:
    opened: Mapping[str, Any] = {
        "model": smollm2_path,
        "home": tmp_path_factory.mktemp("home"),
        "dtype": "bfloat16",
        "idle_seconds": 3600,
        "idle_codec": "exact",
    }
    create = {"system": trace.system, "agent_id": trace.name}
    turns = [["append", turn] for turn in trace.turns]
    middle = len(turns) // 2
    end = [["continue", {"max_tokens": GENERATED, "logprobs": 3, "ignore_eos": True}], ["items"], ["ledger"]]
    first = in_new_process(opened, {"cut": {"create": create, "steps": [*turns[:middle], ["suspend", "disk"]]}})
    second = in_new_process(
        opened,
        {
            "whole": {"create": create, "steps": [*turns, *end]},
            "cut": {"id": first["cut"]["id"], "steps": [["resume"], *turns[middle:], *end]},
        },
    )
    yield Replay(second["whole"]["results"], first["cut"]["results"], second["cut"]["results"])


@pytest.mark.full
def test_after_a_restart_in_the_middle_the_same_tokens_follow(replay: Replay) -> None:
    whole, _, whole_ledger = replay.whole[-3:]
    cut, _, ledger = replay.after[-3:]
    assert len(cut["ids"]) == GENERATED
    assert (cut["ids"], cut["logprobs"]) == (whole["ids"], whole["logprobs"])
    assert ledger == whole_ledger


def test_what_was_said_before_the_restart_is_not_computed_again(replay: Replay) -> None:
    suspended, resumed, reply = replay.before[-1], replay.after[0], replay.after[-3]
    assert suspended["tokens"] > 0
    assert (resumed["source"], resumed["tokens"], resumed["reason"]) == ("disk", suspended["tokens"], None)
    assert reply["restore"]["source"] == "device"
    assert reply["usage"]["cached_tokens"] > suspended["tokens"]
    assert reply["usage"]["prompt_tokens"] - reply["usage"]["cached_tokens"] < 16


def test_every_message_is_an_item_as_it_was_recorded(trace: Trace, replay: Replay) -> None:
    items = replay.after[-2]
    messages = [message for turn in trace.turns for message in turn]
    spoken = items[:-1]
    if trace.system is not None:
        assert (spoken[0]["role"], spoken[0]["content"]["content"]) == ("system", trace.system)
        spoken = spoken[1:]
    assert [item["role"] for item in spoken] == [message["role"] for message in messages]
    assert [item["content"]["content"] for item in spoken] == [message["content"] or "" for message in messages]
    for item, message in zip(spoken, messages, strict=True):
        calls = [(call["name"], call["arguments"]) for call in item["content"].get("tool_calls", ())]
        assert calls == [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls", ())
        ]
    # Their spans tile the ledger.
    assert [item["span"][0] for item in items] == [0, *(item["span"][1] for item in items[:-1])]
    assert items[-1]["span"][1] == len(replay.after[-1])
    assert items[-1]["generated"]
