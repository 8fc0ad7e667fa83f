"""A session that slept on disk goes on in another process exactly as if it had never stopped.

One conversation, one session for each place where it may be cut. All of them begin in a first process, where one more
lives through it all; the others are suspended at their cut, and a second process goes on with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from worker_replay import in_new_process

WEATHER = {
    "type": "function",
    "function": {
        "name": "tide",
        "description": "Time of the next high tide",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "tide", "arguments": '{"place": "Brest"}'}}
REPORT = "".join(
    f"{hour:02d}:{minute:02d} buoy {7 * hour % 13}, swell {1.1 + hour * minute % 17 / 10:.1f} m from "
    f"{('north', 'west', 'south-west')[hour % 3]}, {('steady', 'rising', 'falling fast')[(hour + minute) % 3]}. "
    for hour in range(10)
    for minute in (5, 25, 45)
)
"""About 700 tokens: three chunks, and six pieces of prefill."""


@dataclass(frozen=True)
class Step:
    """One turn of the conversation. ``cut`` names what a session that stops after it has just been through."""

    cut: str | None
    verb: str
    arguments: tuple[Any, ...]

    @property
    def call(self) -> list[Any]:
        return [self.verb, *self.arguments]


def _sampled(tokens: int, **more: Any) -> dict[str, Any]:
    return {"max_tokens": tokens, "logprobs": 1, **more}


def _talkative(tokens: int, **more: Any) -> dict[str, Any]:
    return _sampled(tokens, ignore_eos=True, **more)


STEPS = (
    Step("natural stop", "send", ("What is the capital of France?", _sampled(40))),
    Step("length", "send", ("Tell me how rivers are born.", _sampled(9))),
    Step("continued", "continue", (_sampled(7),)),
    Step("stop string", "send", ("And where do they end?", _talkative(40, stop=["."]))),
    Step(
        "append only",
        "append",
        ([{"role": "user", "content": "High tide?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}],),
    ),
    Step("tool result", "append", ([{"role": "tool", "tool_call_id": "call_1", "content": "18:42, 6.1 m"}],)),
    Step("answer to a tool", "continue", (_talkative(12),)),
    Step("long message", "send", (REPORT + "\nWhich hour had the highest swell?", _talkative(16))),
    Step(None, "send", ("Describe that day as an old sailor would.", _talkative(16))),
)
CUTS = {step.cut: number for number, step in enumerate(STEPS, 1) if step.cut is not None}
CONTROL = "continued"
CREATE = {"system": "You are Bolt, a harbour pilot's assistant.", "tools": [WEATHER]}


def _remainder(cut: int) -> list[Step]:
    """The steps after ``cut``, up to the first that generates: what a resumed session is asked to do."""
    rest = STEPS[cut:]
    generating = next(number for number, step in enumerate(rest, 1) if step.verb != "append")
    return list(rest[:generating])


@dataclass(frozen=True)
class Run:
    """What both processes returned. ``whole``: of the session that was never suspended, a result for each step."""

    whole: list[Any]
    ledger: list[int]
    before: Mapping[str, list[Any]]
    after: Mapping[str, list[Any]]
    damaged: list[Any]


def _run(model: Path, home: Path, dtype: str, codec: str) -> Run:
    opened = {"model": model, "home": home, "dtype": dtype, "idle_codec": codec, "idle_seconds": 3600}
    first: dict[str, Any] = {"whole": {"create": CREATE, "steps": [*(s.call for s in STEPS), ["ledger"]]}}
    for cut, number in (*CUTS.items(), ("control", CUTS[CONTROL])):
        first[cut] = {"create": CREATE, "steps": [*(s.call for s in STEPS[:number]), ["suspend", "disk"]]}
    begun = in_new_process(opened, first)
    second: dict[str, Any] = {
        cut: {"id": begun[cut]["id"], "steps": [*(s.call for s in _remainder(number)), ["ledger"]]}
        for cut, number in CUTS.items()
    }
    second["control"] = {
        "id": begun["control"]["id"],
        "steps": [["resume"], ["reverse keys"], _remainder(CUTS[CONTROL])[0].call],
    }
    resumed = in_new_process(opened, second)
    whole = begun["whole"]["results"]
    return Run(
        whole[:-1],
        whole[-1],
        {cut: begun[cut]["results"] for cut in CUTS},
        {cut: resumed[cut]["results"] for cut in CUTS},
        resumed["control"]["results"],
    )


@pytest.fixture(scope="module")
def run(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Run:
    dtype, codec = request.param
    return _run(smollm2_path, tmp_path_factory.mktemp("home"), dtype, codec)


every_kind = pytest.mark.parametrize(
    "run",
    [
        ("bfloat16", "exact"),
        pytest.param(("float32", "raw"), marks=pytest.mark.full),
        pytest.param(("bfloat16", "raw"), marks=pytest.mark.full),
        pytest.param(("float32", "exact"), marks=pytest.mark.full),
    ],
    ids="-".join,
    indirect=True,
)


def _equal(mine: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for field in ("ids", "text", "finish_reason"):
        assert mine[field] == other[field]
    assert mine["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]
    for a, b in zip(mine["logprobs"], other["logprobs"], strict=True):
        assert a["logprob"] == pytest.approx(b["logprob"], abs=1e-4)


@pytest.mark.short(2)
@every_kind
@pytest.mark.parametrize("cut", CUTS)
def test_resumed_in_a_new_process_a_session_goes_on_token_for_token(
    run: Run, cut: str, request: pytest.FixtureRequest
) -> None:
    codec = request.node.callspec.params["run"][1]
    suspended = run.before[cut][-1]
    *turns, ledger = run.after[cut]
    reply = turns[-1]
    expected = run.whole[CUTS[cut] + len(turns) - 1]
    _equal(reply, expected)
    assert ledger == run.ledger[: len(ledger)]

    # It was the stored KV that was used, all of it: only the pending token and the new ones were computed.
    assert suspended["tier"] == "disk"
    assert suspended["tokens"] > 0
    if len(turns) == 1:
        restore = reply["restore"]
        assert (restore["source"], restore["codec"], restore["reason"]) == ("disk", codec, None)
        assert restore["tokens"] == suspended["tokens"] == reply["usage"]["cached_tokens"]
    else:
        assert reply["restore"]["source"] == "device"
    assert reply["usage"]["cached_tokens"] == expected["usage"]["cached_tokens"]


@every_kind
def test_the_cuts_are_of_different_kinds(run: Run) -> None:
    replies = {cut: run.whole[number - 1] for cut, number in CUTS.items()}
    assert len(CUTS) >= 6
    assert replies["natural stop"]["finish_reason"] == "stop"
    assert replies["length"]["finish_reason"] == replies["continued"]["finish_reason"] == "length"
    stopped = replies["stop string"]
    assert stopped["finish_reason"] == "stop"
    assert len(stopped["ids"]) < 40
    assert len(run.ledger) > 900


@every_kind
def test_control_reversed_keys_do_not_go_on_the_same(run: Run) -> None:
    resumed, _, reply = run.damaged
    assert resumed["source"] == "disk"
    assert reply["ids"] != run.whole[CUTS[CONTROL]]["ids"]
