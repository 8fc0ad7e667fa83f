"""Traffic of agents: drawn from its seed alone, with the lengths, pauses and shared heads that its parameters say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean, median, pstdev
from typing import Any

import pytest

from agentkv.bench.serving import Answer, Served
from agentkv.bench.traffic import Conversation, Traffic, gap_of, written
from agentkv.bench.transcripts import read_transcripts, replayed
from agentkv.errors import InvalidRequest
from agentkv.schemas.messages import normalise

MANY = Traffic(sessions=400, turns=6, result_most_tokens=10**6)


def words(place: int, tokens: int) -> str:
    """A token is a word here."""
    return " ".join(f"w{place + i}" for i in range(tokens))


def results(conversations: list[Conversation]) -> list[int]:
    return [len(m["content"].split()) for c in conversations for turn in c.turns for m in turn.messages]


# -- made traffic ------------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_traffic_and_another_seed_another() -> None:
    assert written(MANY, words) == written(MANY, words)
    assert written(replace(MANY, seed=1), words) != written(MANY, words)


def test_more_sessions_leave_the_others_as_they_are() -> None:
    assert written(MANY, words)[:7] == written(replace(MANY, sessions=7), words)


def test_agents_of_a_kind_share_their_head_and_nothing_else() -> None:
    conversations = written(Traffic(sessions=12, kinds=3), words)
    heads = {(c.kind, c.system, json.dumps(c.tools)) for c in conversations}
    assert len(heads) == len({c.kind for c in conversations}) == len({c.system for c in conversations}) == 3
    said = [m["content"] for c in conversations for turn in c.turns for m in turn.messages]
    assert len(set(said)) == len(said)
    assert all(1200 <= len((c.system or "").split()) <= 1220 for c in conversations)


def test_results_are_lognormal_about_their_median() -> None:
    from math import log

    logs = [log(n) for n in results(written(MANY, words))]
    assert median(logs) == pytest.approx(log(190), abs=0.1)
    assert pstdev(logs) == pytest.approx(1.1, abs=0.1)


def test_long_results_are_cut() -> None:
    lengths = results(written(Traffic(sessions=200, result_most_tokens=300), words))
    assert max(lengths) == 300 and min(lengths) >= 8
    assert lengths.count(300) > 100


def test_gaps_are_exponential_about_the_pace_of_the_kind_and_compressed() -> None:
    for kind in range(4):
        gaps = [turn.gap_seconds for c in written(MANY, words) if c.kind == f"agent-{kind}" for turn in c.turns]
        usual = 300 / 20 * (0.25, 0.5, 1.0, 2.0)[kind]
        assert usual == gap_of(MANY, kind)
        assert mean(gaps) == pytest.approx(usual, rel=0.15)
        assert pstdev(gaps) == pytest.approx(usual, rel=0.2)
    faster = written(replace(MANY, compression=200), words)
    for a, b in zip(written(MANY, words), faster, strict=True):
        assert [t.gap_seconds for t in b.turns] == pytest.approx([t.gap_seconds / 10 for t in a.turns])


def test_a_task_is_followed_by_tool_results() -> None:
    for conversation in written(Traffic(sessions=3), words):
        roles = [turn.messages[0]["role"] for turn in conversation.turns]
        assert roles == ["user", *["tool"] * 5]
        for turn in conversation.turns:
            normalise(list(turn.messages))


@pytest.mark.parametrize("wrong", [{"sessions": 0}, {"turns": 0}, {"kinds": -1}, {"in_flight": 0}, {"compression": 0}])
def test_traffic_that_cannot_be_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Traffic(**wrong)
    assert refused.value.param == next(iter(wrong))


# -- transcripts -------------------------------------------------------------------------------------------------------

CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "."}'}}
RECORDED = [
    {"role": "system", "content": "You fix bugs."},
    {"role": "user", "content": "Fix it."},
    {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
    {"role": "user", "content": "Hurry."},
    {"role": "assistant", "content": "Done."},
    {"role": "user", "content": "Thanks."},
]


def test_a_transcript_is_what_the_world_said_and_how_long_the_answers_were(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps({"name": "b", "messages": RECORDED}))
    (tmp_path / "a.json").write_text(json.dumps(RECORDED[1:]))
    a, b = read_transcripts(tmp_path)
    assert (a.name, a.system, b.name, b.system) == ("a", None, "b", "You fix bugs.")
    made = replayed([a, b], Traffic(sessions=3, turns=2), lambda said: len(said.split()))
    assert [c.kind for c in made] == ["a", "b", "a"]
    first, second = made[1].turns
    assert list(first.messages) == RECORDED[1:2] and list(second.messages) == RECORDED[3:5]
    assert first.answer_tokens > second.answer_tokens == 1
    assert len(replayed([a], Traffic(sessions=1, turns=1), len)[0].turns) == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "JSONDecodeError"),
        ("{}", "messages"),
        ("[]", "empty"),
        ('[{"role": "user"}]', "content"),
        ('[{"role": "user", "content": "x"}]', "nobody is answered"),
    ],
)
def test_a_file_that_is_no_transcript_is_named(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "odd.json").write_text(content)
    with pytest.raises(InvalidRequest, match=r"odd\.json") as refused:
        read_transcripts(tmp_path)
    assert says in str(refused.value)


def test_a_folder_without_transcripts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="holds no transcript"):
        read_transcripts(tmp_path)


# -- figures -----------------------------------------------------------------------------------------------------------


def test_figures_of_known_answers() -> None:
    served = Served(queued=[0.0, 3.0, 1.0], seconds=9.0)
    served.answers = [Answer(float(n), 100, 90 + n, 150, 5, "host") for n in (3, 1, 2)]
    served.answers[1] = replace(served.answers[1], source="disk", fallback="checksum")
    served.errors["CapacityExceeded"] = 2
    figures = served.figures()
    assert (figures["ttft_p50_s"], figures["ttft_p95_s"], figures["ttft_sum_s"]) == (2.0, 3.0, 6.0)
    assert figures["reused_share"] == pytest.approx((93 + 91 + 92) / 300)
    assert figures["restores"] == {"host": 2, "disk": 1} and figures["fallbacks"] == {"checksum": 1}
    assert (figures["errors"], figures["turns"], figures["queue_p50_s"]) == (2, 3, 1.0)
    assert Served().figures()["reused_share"] == 0.0
