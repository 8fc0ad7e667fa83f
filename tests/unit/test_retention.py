"""What each retention policy keeps, drawn; how policies are written as text; what a wrong policy is told."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import ClassVar

import pytest

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

KINDS = {"u": "message", "a": "message", "c": "tool_call", "r": "tool_result", "S": "message"}


def session(drawing: str, *, pinned: int = 0, held: str | None = None) -> SessionView:
    """One letter a token: ``SSSS|uuaa|uuccrrrraa`` has turns between bars, items as runs of a letter, ``.`` between.

    ``S`` is the head (turn 0, pinned where ``pinned`` is not given); ``held`` has a blank where a token is gone.
    """
    letters = drawing.replace("|", "")
    items: list[ItemView] = []
    at = 0
    first = 0 if drawing.startswith("S") else 1
    for turn, text in enumerate(drawing.split("|"), start=first):
        while text:
            run = len(text) - len(text.lstrip(text[0]))
            if text[0] != ".":
                items.append(ItemView(Span(at, at + run), "any", KINDS[text[0]], turn))
            at, text = at + run, text[run:]
    retained = [Span(i, i + 1) for i, letter in enumerate(held or letters) if letter != " "]
    return SessionView(len(letters), joined(retained), Span(0, pinned or letters.count("S")), tuple(items))


def joined(spans: list[Span]) -> tuple[Span, ...]:
    out: list[Span] = []
    for span in spans:
        if out and out[-1].stop == span.start:
            out[-1] = Span(out[-1].start, span.stop)
        else:
            out.append(span)
    return tuple(out)


def left(policy: RetentionPolicy, drawing: str, *, pinned: int = 0, held: str | None = None) -> str:
    """What is kept, drawn; a blank for each token that is gone."""
    kept = kept_by(policy, session(drawing, pinned=pinned, held=held))
    letters = drawing.replace("|", "")
    return "".join(c if any(s.start <= i < s.stop for s in kept) else " " for i, c in enumerate(letters))


def test_full_keeps_everything_and_has_no_window() -> None:
    assert Full().window is None
    assert left(Full(), "SSSS|uuuuuu|aaaaaa") == "SSSSuuuuuuaaaaaa"


def test_sliding_keeps_the_last_tokens_and_no_system_prompt() -> None:
    policy = SlidingWindow(16, slack=4)
    assert left(policy, "SSSS|uuuuuuaaaaaa") == "    uuuuuuaaaaaa"
    assert policy.pinned_tokens(Span(0, 100)) == 0


def test_sink_keeps_the_system_prompt_and_the_last_tokens() -> None:
    policy = SinkWindow(16, slack=4)
    assert left(policy, "SSSSSS|uuuuuaaaaa") == "SSSSSS    uaaaaa"
    # And again, once four more were computed: the gap grows, the head stays.
    assert left(policy, "SSSSSS|uuuuuaaaaa|uuuu", held="SSSSSS    uaaaaauuuu") == "SSSSSS        aauuuu"


def test_sink_keeps_four_tokens_where_nothing_is_pinned() -> None:
    assert left(SinkWindow(16, slack=4), "uuuuuuuuaaaaaaaa") == "uuuu    aaaaaaaa"


def test_sink_with_a_number_keeps_so_many_first_tokens_whatever_is_pinned() -> None:
    policy = SinkWindow(16, sinks=2, slack=4)
    assert policy.pinned_tokens(Span(0, 9)) == 2
    assert left(policy, "SSSSSS|uuuuuaaaaa") == "SS    uuuuuaaaaa"


def test_turns_drops_old_tool_results_first_the_oldest_of_them_first() -> None:
    policy = TurnWindow(20, slack=4, keep_last_turns=1)
    assert left(policy, "SSSS|ucrrrra|ucrrra|uaa") == "SSSSuc    aucrrrauaa"


def test_turns_drops_more_tool_results_while_still_over() -> None:
    policy = TurnWindow(20, slack=7, keep_last_turns=1)
    assert left(policy, "SSSS|ucrrrra|ucrrra|uaa") == "SSSSuc    auc   auaa"


def test_turns_spares_the_tool_results_of_the_last_turns() -> None:
    policy = TurnWindow(20, slack=4, keep_last_turns=1)
    assert left(policy, "SSSS|uuuaaa|ucrrrrrraa") == "SSSS      ucrrrrrraa"


def test_turns_drops_whole_old_turns_once_their_tool_results_are_gone() -> None:
    policy = TurnWindow(20, slack=10, keep_last_turns=1)
    assert left(policy, "SSSS|ucrrrra|ucrrra|uaa") == "SSSS       uc   auaa"


def test_turns_drops_all_that_an_earlier_eviction_left_of_a_turn() -> None:
    policy = TurnWindow(20, slack=3, keep_last_turns=1)
    drawing = "SSSS|ucrrrra|uuuuuuu|uaaaaa"
    assert left(policy, drawing, held="SSSSuc    auuuuuuuuaaaaa") == "SSSS       uuuuuuuuaaaaa"


def test_turns_without_preference_drops_whole_turns_from_the_start() -> None:
    policy = TurnWindow(20, slack=4, keep_last_turns=1, drop_tool_results_first=False)
    assert left(policy, "SSSS|ucrrrra|ucrrra|uaa") == "SSSS       ucrrrauaa"


def test_turns_goes_into_the_last_turns_item_by_item() -> None:
    drawing = "SSSS|uuuaa|ucrrrraaaaa"
    assert left(TurnWindow(20, slack=4), drawing) == "SSSSuuuaauc    aaaaa"
    assert left(TurnWindow(20, slack=5), drawing) == "SSSS   aauc    aaaaa"
    assert left(TurnWindow(20, slack=5, drop_tool_results_first=False), drawing) == "SSSS     ucrrrraaaaa"


def test_turns_cuts_the_last_item_only_when_it_is_alone() -> None:
    assert left(TurnWindow(20, slack=4), "SSSS|uuuaaaaaaaaaaaaa") == "SSSS    aaaaaaaaaaaa"
    assert left(TurnWindow(20, slack=3), "SSSS|uuuaaaaaaaaaaaaa") == "SSSS   aaaaaaaaaaaaa"


def test_turns_counts_tokens_between_items_with_the_item_after_them() -> None:
    policy = TurnWindow(20, slack=4, keep_last_turns=1)
    assert left(policy, "SSSS|..uu|..uuu|..aaaaa") == "SSSS    ..uuu..aaaaa"


def test_turns_counts_a_tool_result_once_when_its_turn_goes_too() -> None:
    policy = TurnWindow(24, slack=11, keep_last_turns=1)
    assert left(policy, "SSSS|urrrrra|uuaaa|uuuuaaaa") == "SSSS            uuuuaaaa"


def test_turns_ignores_an_item_that_has_no_token_yet() -> None:
    view = session("SSSS|uuuu|rrrrrrrrr...")
    empty = ItemView(Span(20, 20), "assistant", "message", 3)
    policy = TurnWindow(20, slack=4, keep_last_turns=1)
    grown = replace(view, items=(*view.items, empty))
    assert kept_by(policy, grown) == kept_by(policy, view) == (Span(0, 4), Span(8, 20))


def test_turns_keeps_what_follows_the_last_item_with_it() -> None:
    policy = TurnWindow(20, slack=4)
    assert left(policy, "SSSS|rrrrrrrrrrrrr...") == "SSSS    rrrrrrrrr..."


@pytest.mark.parametrize("drop", [True, False])
def test_turns_works_without_items(drop: bool) -> None:
    policy = TurnWindow(20, slack=4, drop_tool_results_first=drop)
    view = SessionView(20, (Span(0, 20),), Span(0, 0), ())
    assert kept_by(policy, view) == (Span(0, 4), Span(8, 20))
    assert kept_by(policy, SessionView(20, (Span(0, 20),), Span(0, 6), ())) == (Span(0, 6), Span(10, 20))


def test_turns_works_with_a_pinned_span_that_no_item_covers() -> None:
    items = (ItemView(Span(8, 12), "user", "message", 1), ItemView(Span(12, 20), "user", "message", 2))
    view = SessionView(20, (Span(0, 20),), Span(0, 8), items)
    assert kept_by(TurnWindow(20, slack=4, keep_last_turns=1), view) == (Span(0, 8), Span(12, 20))


def test_turns_does_not_count_a_pinned_head_as_a_turn() -> None:
    # With the head counted, turn 1 would be one of the last three and go item by item.
    policy = TurnWindow(20, slack=4, keep_last_turns=2)
    assert left(policy, "SSSS|uuuuaaaa|uuaa|uuaa") == "SSSS        uuaauuaa"


def test_no_policy_needs_an_eviction_to_be_exactly_full() -> None:
    for policy in (SlidingWindow(16), SinkWindow(16), TurnWindow(16)):
        assert left(policy, "SSSS|uuaa") == "SSSSuuaa"


def test_slack_is_an_eighth_of_the_window_unless_chosen() -> None:
    assert SinkWindow(4096).slack == 512
    assert SinkWindow(4096) == SinkWindow(4096, slack=512)
    assert SlidingWindow(16).slack == 2
    assert TurnWindow(4096, slack=1).slack == 1


def test_policies_are_values() -> None:
    assert len({SinkWindow(64), SinkWindow(64), SlidingWindow(64), TurnWindow(64), Full(), Full()}) == 4
    with pytest.raises((FrozenInstanceError, AttributeError)):
        SinkWindow(64).window = 32  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (lambda: SlidingWindow(15), ["16", "15"]),
        (lambda: SlidingWindow(True), ["16", "True"]),
        (lambda: SlidingWindow(64, slack=33), ["1 to 32", "64", "33"]),
        (lambda: SlidingWindow(64, slack=0), ["1 to 32", "64", "not 0"]),
        (lambda: SinkWindow(64, sinks=49), ["64", "1 to 48", "49"]),
        (lambda: SinkWindow(64, sinks=0), ["1 to 48", "not 0"]),
        (lambda: SinkWindow(64, sinks="first"), ["'system'", "'first'"]),  # type: ignore[arg-type]
        (lambda: TurnWindow(64, keep_last_turns=0), ["1 last turn", "not 0"]),
        (lambda: TurnWindow(64, drop_tool_results_first=1), ["true or false", "not 1"]),  # type: ignore[arg-type]
    ],
)
def test_impossible_numbers_are_refused_with_what_is_possible(make, numbers) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert caught.value.param == "policy"
    assert all(number in str(caught.value) for number in numbers)


def test_a_window_beyond_the_models_context_does_not_fit() -> None:
    check_fits(SinkWindow(8192), Span(0, 100), 8192)
    with pytest.raises(InvalidRequest, match=r"window of 8,192 tokens.*limit is 2,048.*at most 2,048"):
        check_fits(SinkWindow(8192), Span(0, 100), 2048)


def test_a_pinned_prefix_that_leaves_no_room_does_not_fit() -> None:
    policy = SinkWindow(1024, slack=128)
    check_fits(policy, Span(0, 768), 4096)
    with pytest.raises(InvalidRequest, match=r"769 pinned.*window of 1,024.*slack of 128.*at least 1,025") as caught:
        check_fits(policy, Span(0, 769), 4096)
    assert caught.value.param == "policy"
    check_fits(SinkWindow(1024, sinks=4), Span(0, 769), 4096)
    check_fits(SlidingWindow(1024), Span(0, 2000), 4096)
    check_fits(Full(), Span(0, 10**9), 1)


@dataclass(frozen=True, slots=True)
class Answers(RetentionPolicy):
    """A policy that returns what it is told to, whatever the view."""

    name: ClassVar[str] = "answers"

    window: int
    answer: object

    def keep(self, view: SessionView) -> tuple[Span, ...]:
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (None, "not a sequence of spans"),
        ((3, 4), "not a sequence of spans"),
        ([(0, 4, 5)], "not a sequence of spans"),
        ([("a", "b")], "at least one token"),
        ([Span(0, 4), Span(7, 7)], r"\[7, 7\).*at least one token"),
        ([Span(0, 4), Span(9, 8)], "at least one token"),
        ([Span(10, 12), Span(0, 4)], "out of order"),
        ([Span(0, 8), Span(6, 12)], "overlapping"),
        ([Span(0, 4), Span(4, 12)], "adjacent and not merged"),
        ([Span(0, 4), Span(18, 24)], r"\[18, 24\), of which only 4 tokens"),
        ([Span(0, 14)], r"\[0, 14\), of which only 12 tokens"),
        ([Span(0, 12), Span(14, 22)], "kept 20 of 20 tokens where its window of 20"),
        ([Span(14, 22)], "evicted 4 of the 4 tokens it promised"),
        ([Span(0, 3), Span(14, 22)], "evicted 1 of the 4 tokens it promised"),
    ],
)
def test_a_policy_that_breaks_its_contract_is_named(answer: object, fault: str) -> None:
    view = SessionView(22, (Span(0, 12), Span(14, 22)), Span(0, 4), ())
    with pytest.raises(InvalidRequest, match=f"'answers'.*{fault}") as caught:
        kept_by(Answers(20, answer), view)
    assert caught.value.param == "policy"


def test_a_policy_may_answer_with_any_sequence_of_pairs() -> None:
    view = SessionView(22, (Span(0, 12), Span(14, 22)), Span(0, 4), ())
    kept = kept_by(Answers(20, [(0, 4), (16, 22)]), view)
    assert kept == (Span(0, 4), Span(16, 22))
    assert all(isinstance(span, Span) for span in kept)


def test_what_was_gone_before_a_change_of_policy_is_not_held_against_the_new_one() -> None:
    view = SessionView(40, (Span(10, 40),), Span(0, 4), ())
    assert kept_by(SinkWindow(20, slack=4), view) == (Span(24, 40),)


def test_a_policy_without_window_must_not_evict() -> None:
    @dataclass(frozen=True)
    class Forgetful(Full):
        def keep(self, view: SessionView) -> tuple[Span, ...]:
            return (Span(0, 2),)

    with pytest.raises(InvalidRequest, match="no window, yet kept 2 of 4 tokens"):
        kept_by(Forgetful(), session("uuaa"))


def test_a_policy_of_ones_own_needs_a_window_and_keep() -> None:
    @dataclass(frozen=True, slots=True)
    class Halves(RetentionPolicy):
        name: ClassVar[str] = "halves"

        window: int

        def keep(self, view: SessionView) -> tuple[Span, ...]:
            return (*[s for s in view.retained if s.stop <= view.pinned.stop], Span(view.length - 2, view.length))

    with pytest.raises(TypeError, match="window"):
        Halves()  # type: ignore[call-arg]
    assert (Halves(64).slack, Halves(4).slack) == (8, 1)
    assert Halves(64).pinned_tokens(Span(0, 7)) == 7
    assert kept_by(Halves(8), session("uuuuaaaa")) == (Span(6, 8),)


@pytest.mark.parametrize(
    ("text", "policy", "canonical"),
    [
        ("full", Full(), "full"),
        ("sliding:4096", SlidingWindow(4096), "sliding:4096"),
        ("sliding:4096:512", SlidingWindow(4096), "sliding:4096"),
        ("sink:4096", SinkWindow(4096), "sink:4096"),
        ("sink:4096:4", SinkWindow(4096, sinks=4), "sink:4096,sinks=4"),
        ("sink:4096:system:64", SinkWindow(4096, slack=64), "sink:4096,slack=64"),
        ("sink:4k", SinkWindow(4096), "sink:4096"),
        ("sink:4K,slack=1_000", SinkWindow(4096, slack=1000), "sink:4096,slack=1000"),
        ("sink:window=4096", SinkWindow(4096), "sink:4096"),
        (" sink : 4096 , sinks = 4 ", SinkWindow(4096, sinks=4), "sink:4096,sinks=4"),
        ("turns:8k", TurnWindow(8192), "turns:8192"),
        (
            "turns:8192,keep_last_turns=3,drop_tool_results_first=False",
            TurnWindow(8192, drop_tool_results_first=False, keep_last_turns=3),
            "turns:8192,drop_tool_results_first=false,keep_last_turns=3",
        ),
    ],
)
def test_policies_are_read_from_text_and_written_short(text: str, policy: RetentionPolicy, canonical: str) -> None:
    assert parse_policy(text) == policy
    assert policy_text(policy) == canonical
    assert parse_policy(policy) is policy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "known: .*full, .*sink, sliding, turns"),
        ("lru", "unknown retention policy 'lru'; known: .*full, .*sink, sliding, turns"),
        ("sink", "lacks window; for example sink:4096"),
        ("sink:", "'' for window, which is a number; for example sink:4096"),
        ("sink:many", "'many' for window, which is a number"),
        ("sink:4.5k", "'4.5k' for window"),
        ("sink:4__0", "'4__0' for window"),
        ("sink:" + "9" * 5000, "for window, which is a number"),
        ("sink:64:some", "'some' for sinks, which is system or a number"),
        ("sink:64:none", "'none' for sinks"),
        ("turns:64:1", "'1' for drop_tool_results_first, which is true or false"),
        ("turns:64,keep=3", "'keep=3' where turns takes window, drop_tool_results_first, keep_last_turns, slack"),
        ("full:64", "'64' where full takes no arguments; for example full"),
        ("sink:64:4:8:9", "'9' where sink takes"),
        ("sink:64,window=32", "gives window twice"),
        ("sink:window=64,4", "'4' after a named argument"),
        ('sink:"64', "quotation mark"),
        ("sink:8", "at least 16 tokens, not 8"),
        (64, "not 64"),
        (None, "not None"),
    ],
)
def test_text_that_is_no_policy_is_refused_with_an_example(text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        parse_policy(text)
    assert caught.value.param == "policy"


def test_a_policy_that_is_not_registered_has_no_text() -> None:
    with pytest.raises(InvalidRequest, match="answers"):
        policy_text(Answers(64, None))


def test_a_subclass_under_its_parents_name_has_no_text() -> None:
    @dataclass(frozen=True)
    class Other(SinkWindow):
        pass

    with pytest.raises(InvalidRequest, match="registered as 'sink'"):
        policy_text(Other(64))


def test_every_registered_policy_is_known_by_its_own_name() -> None:
    assert {"full", "sink", "sliding", "turns"} <= set(RETENTION)
    assert all(RETENTION.get(name).name == name for name in RETENTION)


def test_retention_imports_no_torch() -> None:
    code = "import sys, agentkv.policies.retention; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
