"""The advisor: what it says of a home, and that it says nothing where nothing is wrong."""

from __future__ import annotations

from dataclasses import replace

from agentkv.policies.advisor import Observed, advise
from agentkv.policies.retention import parse_policy
from agentkv.sessions.db.records import SessionRecord, TurnRecord
from agentkv.sessions.observed import Past, Reuse
from agentkv.types import Span

CALM = Observed(
    sessions=40,
    lengths=(800, 2000, 3000),
    gap=120.0,
    together=3,
    hit_rate=0.99,
    context=8192,
    token_bytes=23_040,
    device_budget=2**33,
    host_budget=2**32,
    disk_budget=2**38,
    stored_bytes=2**30,
    memory=2**34,
    full_share=1.0,
    layout="auto",
    idle_codec="auto",
    calibrated="compact+basis",
    live_gate=("quantized:int8",),
)


def said(**changes: object) -> dict[str | None, str]:
    return {advice.setting: advice.value for advice in advise(replace(CALM, **changes))}  # type: ignore[arg-type]


def test_a_home_that_is_well_served_is_told_nothing() -> None:
    assert said() == {}


def test_conversations_near_the_models_end_get_a_policy_that_exists_and_fits() -> None:
    found = said(lengths=(3000, 7000, 8100))
    assert list(found) == ["default_policy"]
    window = parse_policy(found["default_policy"].strip('"')).window
    assert window is not None
    assert window <= CALM.context
    assert found["default_policy"].startswith('"sink:')
    with_tools = said(lengths=(3000, 7000, 8100), tool_share=0.7)
    assert with_tools == {"default_policy": found["default_policy"].replace("sink", "turns")}
    assert said(lengths=(3000, 7000, 8100), full_share=0.0) == {}
    assert said(lengths=(3000, 7000, 8100), sessions=2) == {}


def test_sessions_that_drive_each_other_out_get_a_measured_layout_or_more_memory() -> None:
    crowded = {"together": 40, "device_budget": 2**30}
    assert said(**crowded) == {"layout": '"quantized:int8"'}
    unmeasured = said(**crowded, live_gate=())
    assert int(unmeasured["device_budget"].strip('"')) == 40 * 2000 * CALM.token_bytes
    assert said(**crowded, live_gate=(), memory=2**30) == {}


def test_codecs_go_by_calibration() -> None:
    assert "calibrate" in advise(replace(CALM, calibrated=None))[0].why
    assert said(idle_codec="exact") == {"idle_codec": '"auto"'}
    assert said(idle_codec="exact", calibrated="exact") == {}


def test_a_full_disk_and_low_reuse_are_seen() -> None:
    assert "disk_budget" in said(stored_bytes=2**38)
    assert None in said(hit_rate=0.5)


def turn(at: float, start: int, stop: int, cached: int) -> TurnRecord:
    known = max(0, start - 1)
    restore = {"source": "disk", "tokens": cached, "recomputed_tokens": known - cached, "reason": "checksum: x"}
    return TurnRecord(0, Span(start, stop), "send", "stop", stop - 5, 5, cached, None, restore, at)


def record(name: str, tokens: int, policy: str = "full") -> SessionRecord:
    return SessionRecord(
        name, "default", None, "m", "k", "s", policy, "auto", None, None, {}, {}, 0, tokens, tokens, 2, 0.0, 0.0
    )


def test_the_past_is_summed_up_from_turns() -> None:
    evicting = turn(9100, 1000, 1100, 200)
    evicting = replace(evicting, restore={**(evicting.restore or {}), "recomputed_tokens": 0, "reason": None})
    turns = [
        [turn(0, 0, 100, 0), turn(100, 100, 200, 90), turn(400, 200, 300, 199)],
        [turn(50, 0, 50, 0), turn(90, 50, 80, 49)],
        [turn(9000, 0, 1000, 0), evicting],
    ]
    past = Past([record("a", 300), record("b", 80), record("c", 1000, "sink:256")], turns)
    assert (past.sessions, past.lengths[0], past.lengths[2]) == (3, 300, 1000)
    assert past.gap == 100
    assert past.together == 2
    assert past.hit_rate == (90 + 199 + 49 + 200) / (99 + 199 + 49 + 200)
    assert past.full_share == 2 / 3
    empty = Past([], [])
    assert (empty.lengths, empty.gap, empty.hit_rate, empty.together) == ((0, 0, 0), None, None, 0)


def test_what_was_computed_since_that_is_faster_is_neither_reused_nor_lost() -> None:
    def told(tokens: int, again: int, reason: str | None) -> TurnRecord:
        restore = {"source": "disk", "tokens": tokens, "recomputed_tokens": again, "reason": reason}
        return replace(turn(0, 0, 9, tokens), restore=restore)

    lost = [told(0, 30, "checksum: a file"), told(10, 40, "unstored: a kill"), told(0, 60, "unstored: a kill")]
    seen = Reuse.of([*lost, told(100, 0, None), told(0, 500, "cheaper: 500 tokens"), told(0, 0, None)])
    assert (seen.turns, seen.known_tokens, seen.reused_tokens) == (4, 240, 110)
    assert list(seen.computed_again.items()) == [("unstored", 100), ("checksum", 30)]
    assert seen.rate == 110 / 240
    assert Reuse.of([]).rate is None
