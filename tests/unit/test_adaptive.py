"""What the adaptive policy decides at a turn's start: a function of the ledger, its items and settings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.errors import InvalidRequest
from agentkv.policies.retention import (
    Adaptive,
    Ahead,
    Full,
    ItemView,
    SessionView,
    SinkWindow,
    TurnWindow,
    check_fits,
    parse_policy,
    policy_text,
    suited,
    tool_share,
)
from agentkv.types import Span

KINDS = ("message", "tool_call", "tool_result", "tokens")


def items_of(pinned: int, *sizes: tuple[str, int]) -> tuple[ItemView, ...]:
    """A head of ``pinned`` tokens, then an item for each kind and size."""
    views = [ItemView(Span(0, pinned), "system", "message", 0)] if pinned else []
    at = pinned
    for turn, (kind, size) in enumerate(sizes, start=1):
        views.append(ItemView(Span(at, at + size), "any", kind, turn))
        at += size
    return tuple(views)


@st.composite
def aheads(draw: st.DrawFn, *, whole: bool | None = None) -> Ahead:
    context = draw(st.integers(32, 20_000))
    pinned = draw(st.integers(0, context))
    sizes = draw(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 5000)), max_size=8))
    return Ahead(
        tokens=draw(st.integers(0, 50_000)),
        pinned=Span(0, pinned),
        items=items_of(pinned, *sizes),
        whole=draw(st.booleans()) if whole is None else whole,
        context=context,
        share=draw(st.integers(0, 40_000)),
    )


POLICIES = st.one_of(
    st.just(Adaptive()),
    st.builds(
        lambda kind, window: Adaptive(f"{kind}:{window}"), st.sampled_from(["sink", "turns"]), st.integers(16, 40_000)
    ),
)
AHEAD = Ahead(
    tokens=500, pinned=Span(0, 50), items=items_of(50, ("message", 300)), whole=True, context=1000, share=2000
)


# -- examples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "now"),
    [
        ({}, "full"),
        ({"tokens": 1000}, "full"),
        ({"tokens": 1001}, "sink:1000"),
        ({"share": 400}, "sink:400"),
        ({"share": 500}, "full"),
        ({"tokens": 1001, "items": items_of(50, ("message", 100), ("tool_result", 101))}, "turns:1000"),
        ({"tokens": 1001, "items": items_of(50, ("message", 100), ("tool_result", 100))}, "sink:1000"),
        ({"tokens": 1001, "pinned": Span(0, 800)}, "sink:1000,slack=50"),
        ({"share": 60}, "full"),  # what is pinned leaves no room there: the context is the limit
        ({"share": 60, "tokens": 1001}, "sink:1000"),
        ({"tokens": 1001, "pinned": Span(0, 999)}, "full"),  # no policy would help
        ({"tokens": 1001, "whole": False}, "sink:1000"),
        ({"whole": False}, "full"),
    ],
)
def test_a_session_is_full_until_its_turn_does_not_fit(changes: dict[str, object], now: str) -> None:
    assert Adaptive().at_turn(replace(AHEAD, **changes)).now == now  # type: ignore[arg-type]


def test_what_was_evicted_is_not_promised_again_and_a_window_shrinks_only_where_it_must() -> None:
    under, gone = Adaptive("turns:800"), replace(AHEAD, whole=False)
    assert under.at_turn(gone) is under, "neither full nor wider nor of another kind"
    assert under.at_turn(replace(gone, tokens=10**6)) is under
    assert under.at_turn(replace(gone, share=600)).now == "sink:600"
    assert under.at_turn(AHEAD).now == "full", "as long as nothing is evicted each turn decides anew"


def test_the_share_of_tool_results_is_of_what_was_said() -> None:
    assert tool_share(items_of(1000, ("message", 30), ("tool_result", 60), ("tool_call", 10)), Span(0, 1000)) == 0.6
    assert tool_share(items_of(1000), Span(0, 1000)) == tool_share((), Span(0, 0)) == 0


# -- laws -------------------------------------------------------------------------------------------------------------


@given(POLICIES, aheads())
def test_the_policy_in_force_can_go_on_for_ever_or_there_is_none_that_could(policy: Adaptive, ahead: Ahead) -> None:
    after = policy.at_turn(ahead)
    assert after.in_force.name in ("full", "sink", "turns")
    if suited("sink", ahead.pinned, ahead.context) is None:
        assert after is policy
    elif after.window is not None and after != policy:
        check_fits(after.in_force, ahead.pinned, ahead.context)
        assert after.window == ahead.context or after.window == ahead.share < ahead.context


@given(POLICIES, aheads())
def test_the_same_ledger_items_and_settings_give_the_same_policy_and_it_stays(policy: Adaptive, ahead: Ahead) -> None:
    after = policy.at_turn(ahead)
    assert policy.at_turn(ahead) == after
    assert after.at_turn(ahead) == after


@given(POLICIES, aheads(whole=True))
def test_before_anything_is_evicted_it_is_full_exactly_as_long_as_that_fits(policy: Adaptive, ahead: Ahead) -> None:
    widest = suited("sink", ahead.pinned, min(ahead.context, ahead.share), ahead.context)
    if widest is not None and widest.window is not None:
        after = policy.at_turn(ahead)
        assert (after.window is None) == (ahead.tokens <= widest.window)
        assert after == Adaptive().at_turn(ahead), "whatever it was under"


@given(POLICIES.filter(lambda policy: policy.window is not None), aheads(whole=False))
def test_once_something_is_evicted_a_window_never_grows(policy: Adaptive, ahead: Ahead) -> None:
    after = policy.at_turn(ahead)
    assert after.window is not None and policy.window is not None
    assert after is policy or after.window < policy.window


@given(aheads(whole=True))
def test_turns_is_chosen_exactly_where_tool_results_are_more_than_half(ahead: Ahead) -> None:
    after = Adaptive().at_turn(ahead)
    if after.window is not None:
        said = [item for item in ahead.items if item.turn > 0]
        results = sum(len(item.span) for item in said if item.kind == "tool_result")
        dominate = 2 * results > sum(len(item.span) for item in said)
        assert isinstance(after.in_force, TurnWindow if dominate else SinkWindow)


@given(POLICIES)
def test_its_text_says_that_it_is_adaptive_and_what_it_is_under(policy: Adaptive) -> None:
    text = policy_text(policy)
    assert text.startswith("adaptive")
    assert policy.now == "full" or policy.now in text
    assert parse_policy(text) == policy
    assert parse_policy(policy.now) == policy.in_force


# -- as a policy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [Full(), SinkWindow(64), TurnWindow(64)])
def test_it_keeps_what_the_policy_in_force_keeps(inner: Full | SinkWindow | TurnWindow) -> None:
    policy = Adaptive(policy_text(inner))
    view = SessionView(64, (Span(0, 64),), Span(0, 8), items_of(8, ("message", 20), ("tool_result", 36)))
    assert policy.keep(view) == inner.keep(view)
    assert (policy.window, policy.slack) == (inner.window, inner.slack)
    assert policy.pinned_tokens(Span(0, 8)) == inner.pinned_tokens(Span(0, 8)) == 8
    assert policy.evicts
    assert inner.evicts == (inner.window is not None)


@pytest.mark.parametrize("now", ["adaptive", 'adaptive:now="sink:64"', "rolling:64", "sink"])
def test_it_is_refused_what_is_no_policy_to_be_under(now: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Adaptive(now)
    assert caught.value.param == "policy"


def test_other_spellings_of_one_policy_are_one() -> None:
    assert Adaptive("sink:4k") == Adaptive("sink:4096,slack=512") == parse_policy('adaptive:"sink:4k"')
    assert policy_text(Adaptive("sink:4k")) == 'adaptive:now="sink:4096"'
    assert policy_text(Adaptive("full")) == "adaptive"
