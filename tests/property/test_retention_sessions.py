"""Retention policies over random sessions: budget, promises, whole items, the same cuts however it is fed; text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from agentkv.errors import InvalidRequest
from agentkv.policies.retention import (
    RETENTION,
    Full,
    ItemView,
    RetentionPolicy,
    SessionView,
    SinkWindow,
    SlidingWindow,
    TurnWindow,
    check_fits,
    kept_by,
    parse_policy,
    policy_text,
)
from agentkv.types import Span

CONTEXT = 1 << 20


@dataclass(frozen=True)
class Conversation:
    """A whole ledger: its items (with gaps before some), its pinned span, its length (tokens may follow the items)."""

    items: tuple[ItemView, ...]
    pinned: Span
    length: int

    def view(self, length: int, retained: tuple[Span, ...]) -> SessionView:
        """What a policy sees once ``length`` tokens are there."""
        items = tuple(
            ItemView(Span(item.span.start, min(item.span.stop, length)), item.role, item.kind, item.turn)
            for item in self.items
            if item.span.start < length
        )
        return SessionView(length, retained, self.pinned, items)

    def units(self, length: int, pinned_tokens: int) -> list[tuple[ItemView, range]]:
        """Items beyond the pinned prefix with the positions that count with them, at ``length``."""
        found: list[tuple[ItemView, range]] = []
        start = pinned_tokens
        for item in self.view(length, ()).items:
            if item.span.stop > start:
                found.append((item, range(start, item.span.stop)))
                start = item.span.stop
        if found and length > start:
            item, positions = found[-1]
            found[-1] = item, range(positions.start, length)
        return found


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    sizes = st.one_of(st.integers(1, 8), st.integers(1, 60))
    gaps = st.sampled_from([0, 0, 0, 1, 3])
    items: list[ItemView] = []
    at = head = draw(st.sampled_from([0, 0, 1, 3, 5, 12]))
    if head and draw(st.booleans()):
        items.append(ItemView(Span(0, head), "system", "message", 0))
    for turn in range(1, draw(st.sampled_from([0, 1, 3, 6, 9, 12])) + 1):
        kinds = draw(st.lists(st.sampled_from(["message", "tool_call", "tool_result"]), min_size=1, max_size=5))
        for kind in kinds:
            at += draw(gaps)
            items.append(ItemView(Span(at, at + draw(sizes)), "any", kind, turn))
            at = items[-1].span.stop
    return Conversation(tuple(items), Span(0, head), at + draw(st.sampled_from([0, 1, 4, 100])))


@st.composite
def windowed(draw: st.DrawFn) -> RetentionPolicy:
    window = draw(st.integers(16, 120))
    slack = draw(st.integers(1, window // 2))
    match draw(st.sampled_from(["sliding", "sink", "sinks", "turns"])):
        case "sliding":
            return SlidingWindow(window, slack=slack)
        case "sink":
            return SinkWindow(window, slack=slack)
        case "sinks":
            assume(window - 2 * slack >= 1)
            return SinkWindow(window, sinks=draw(st.integers(1, window - 2 * slack)), slack=slack)
        case _:
            return TurnWindow(window, draw(st.booleans()), draw(st.integers(1, 4)), slack)


turn_windows = st.builds(
    lambda window, drop, turns, share: TurnWindow(window, drop, turns, window // share),
    st.integers(24, 80),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from([8, 4, 3]),
)


@dataclass(frozen=True)
class Eviction:
    before: SessionView
    kept: tuple[Span, ...]


def fits(policy: RetentionPolicy, pinned: Span) -> bool:
    try:
        check_fits(policy, pinned, CONTEXT)
    except InvalidRequest:
        return False
    return True


def total(spans: tuple[Span, ...]) -> int:
    return sum(len(span) for span in spans)


def positions(spans: tuple[Span, ...]) -> set[int]:
    return {i for span in spans for i in range(*span)}


def feed(policy: RetentionPolicy, talk: Conversation, pieces: list[int]) -> Iterator[Eviction]:
    """A session's life: pieces of the ledger are computed, as much as fits; what is full evicts before it goes on."""
    length, retained = 0, ()
    for piece in pieces:
        end = min(talk.length, length + piece)
        while length < end:
            free = end if policy.window is None else policy.window - total(retained)
            assert free >= 0
            if free == 0:
                view = talk.view(length, retained)
                retained = kept_by(policy, view)
                yield Eviction(view, retained)
                continue
            stop = min(end, length + free)
            if retained and retained[-1].stop == length:
                retained = (*retained[:-1], Span(retained[-1].start, stop))
            else:
                retained = (*retained, Span(length, stop))
            length = stop


def life(policy: RetentionPolicy, talk: Conversation) -> list[Eviction]:
    assume(fits(policy, talk.pinned))
    return list(feed(policy, talk, [talk.length]))


@given(windowed(), conversations())
def test_every_eviction_frees_the_slack_and_keeps_what_was_promised(
    policy: RetentionPolicy, talk: Conversation
) -> None:
    for eviction in life(policy, talk):
        window = policy.window
        assert window is not None
        held, kept = positions(eviction.before.retained), positions(eviction.kept)
        assert len(held) == window
        assert kept < held
        assert len(kept) <= window - policy.slack
        assert kept >= set(range(policy.pinned_tokens(talk.pinned)))
        assert all(one.stop < other.start for one, other in pairwise(eviction.kept))


@given(windowed(), conversations(), st.lists(st.integers(1, 40), max_size=300))
def test_the_same_ledger_is_evicted_the_same_however_it_is_fed(
    policy: RetentionPolicy, talk: Conversation, pieces: list[int]
) -> None:
    evictions = life(policy, talk)
    assert list(feed(policy, talk, [*pieces, talk.length])) == evictions
    assert list(feed(policy, talk, [1] * talk.length)) == evictions


@given(windowed(), conversations())
def test_the_newest_token_is_always_kept(policy: RetentionPolicy, talk: Conversation) -> None:
    for eviction in life(policy, talk):
        assert eviction.kept[-1].stop == eviction.before.length


@given(st.integers(16, 120), conversations())
def test_sliding_and_sink_fill_the_window_up_to_their_slack(window: int, talk: Conversation) -> None:
    for policy in (SlidingWindow(window), SinkWindow(window), SinkWindow(window, sinks=2)):
        if not fits(policy, talk.pinned):
            continue
        for eviction in feed(policy, talk, [talk.length]):
            pinned = policy.pinned_tokens(talk.pinned)
            count, length = window - policy.slack - pinned, eviction.before.length
            assert positions(eviction.kept) == {*range(pinned), *range(length - count, length)}


@given(turn_windows, conversations())
def test_turns_cuts_inside_the_last_item_only_and_only_when_nothing_else_is_left(
    policy: TurnWindow, talk: Conversation
) -> None:
    for eviction in life(policy, talk):
        units = talk.units(eviction.before.length, policy.pinned_tokens(talk.pinned))
        held, kept = positions(eviction.before.retained), positions(eviction.kept)
        shares = [(held & set(part), kept & set(part)) for _, part in units]
        for before, after in shares[:-1]:
            assert after in (set(), before)
        if shares and shares[-1][1] != shares[-1][0]:
            assert not any(after for _, after in shares[:-1])
            assert len(kept) == policy.window - policy.slack
            assert shares[-1][1] == set(sorted(shares[-1][0])[-len(shares[-1][1]) :])


def order(policy: TurnWindow, i: int, item: ItemView, recent: set[int]) -> tuple[int, ...]:
    """When item ``i`` has to go: the lowest first, equal ones together."""
    result = item.kind == "tool_result" and policy.drop_tool_results_first
    if item.turn not in recent:
        return (0, i) if result else (1, item.turn)
    return (2, 0 if result else 1, i)


@given(turn_windows, conversations())
def test_turns_evicts_in_the_order_it_documents_and_no_group_more_than_needed(
    policy: TurnWindow, talk: Conversation
) -> None:
    for eviction in life(policy, talk):
        units = talk.units(eviction.before.length, policy.pinned_tokens(talk.pinned))
        turns = sorted({item.turn for item, _ in units})
        recent = set(turns[-policy.keep_last_turns :])
        held, kept = positions(eviction.before.retained), positions(eviction.kept)
        budget = policy.window - policy.slack

        ranks = [order(policy, i, item, recent) for i, (item, _) in enumerate(units)]
        whole = [i for i in range(len(units) - 1) if held & set(units[i][1])]
        gone = [i for i in whole if not kept & set(units[i][1])]
        stayed = [i for i in whole if i not in gone]
        if gone and stayed:
            assert max(ranks[i] for i in gone) < min(ranks[i] for i in stayed)
        if gone:
            final = max(ranks[i] for i in gone)
            back = sum(len(held & set(units[i][1])) for i in gone if ranks[i] == final)
            last_cut = held & set(units[-1][1]) - kept
            assert last_cut or len(kept) + back > budget


@given(windowed(), conversations(), st.data())
def test_a_policy_taken_over_in_mid_session_brings_any_state_under_its_window(
    policy: RetentionPolicy, talk: Conversation, data: st.DataObject
) -> None:
    assume(policy.window is not None and fits(policy, talk.pinned))
    cuts = sorted(data.draw(st.sets(st.integers(0, talk.length), max_size=12)))
    retained = tuple(Span(*pair) for pair in list(pairwise(cuts))[::2])
    kept = kept_by(policy, talk.view(talk.length, retained))
    assert total(kept) <= policy.window - policy.slack
    if total(retained) <= policy.window - policy.slack:
        assert positions(kept) == positions(retained)


@given(windowed())
def test_text_and_back_is_the_same_policy(policy: RetentionPolicy) -> None:
    text = policy_text(policy)
    assert parse_policy(text) == policy
    assert policy_text(parse_policy(text)) == text
    assert parse_policy(policy_text(Full())) == Full()


@pytest.fixture(scope="module", autouse=True)
def _own_policy() -> Iterator[None]:
    RETENTION._known.setdefault("own", Own)
    yield
    del RETENTION._known["own"]


@dataclass(frozen=True, slots=True)
class Own(RetentionPolicy):
    """A third party's policy with a field of every type that has a text."""

    name: ClassVar[str] = "own"

    window: int
    label: str
    limit: int | None = None
    mode: str | int | bool | None = "auto"
    strict: bool = True
    note: str = ""

    def keep(self, view: SessionView) -> tuple[Span, ...]:
        return view.retained


texts = st.one_of(st.text(), st.sampled_from(["none", "True", "4k", "a=b", "a:b,c", '"', "\\", " x ", "4", "\n"]))


@given(
    st.builds(
        Own,
        st.integers(),
        texts,
        st.none() | st.integers(),
        st.none() | st.integers() | st.booleans() | texts,
        st.booleans(),
        texts,
    )
)
@example(Own(64, "none", None, "none"))
@example(Own(64, "4k", 4, "True"))
def test_text_and_back_is_the_same_for_a_policy_of_any_fields(policy: Own) -> None:
    again = parse_policy(policy_text(policy))
    assert again == policy
    assert isinstance(again, Own)
    if isinstance(policy.mode, str):
        assert isinstance(again.mode, str)


@given(st.text(alphabet='sinkturlg:,=0129k_" \\-', max_size=30).map(lambda tail: "sink" + tail) | st.text(max_size=12))
def test_no_text_does_worse_than_invalid_request(text: str) -> None:
    try:
        policy = parse_policy(text)
    except InvalidRequest as error:
        assert error.param == "policy"
    else:
        assert parse_policy(policy_text(policy)) == policy


@dataclass(frozen=True, slots=True)
class Fickle(RetentionPolicy):
    """Keeps the spans it was given."""

    name: ClassVar[str] = "fickle"

    window: int
    kept: tuple[Span, ...]

    def keep(self, view: SessionView) -> tuple[Span, ...]:
        return self.kept


spans = st.builds(Span, st.integers(-1, 20), st.integers(0, 20))


@given(st.lists(spans, max_size=4).map(tuple), st.integers(0, 6))
def test_kept_by_lets_through_exactly_what_the_contract_allows(kept: tuple[Span, ...], pinned: int) -> None:
    retained = (Span(0, 7), Span(9, 18))
    view = SessionView(20, retained, Span(0, pinned), ())
    starts = [span.start for span in kept]
    allowed = (
        all(span.start < span.stop for span in kept)
        and all(one.stop < other.start for one, other in pairwise(kept))
        and positions(kept) < positions(retained)
        and positions(kept) >= set(range(pinned))
        and starts == sorted(starts)
    )
    try:
        assert kept_by(Fickle(16, kept), view) == kept
    except InvalidRequest:
        assert not allowed
    else:
        assert allowed


@given(conversations())
def test_full_never_evicts(talk: Conversation) -> None:
    assert list(feed(Full(), talk, [7] * talk.length)) == []
