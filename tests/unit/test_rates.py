"""Rates as they are measured, and what is chosen by them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentkv.sessions.choosing import Choice, Choosing
from agentkv.sessions.rates import Rates
from agentkv.types import RestoreReport


def measured(*, prefill: float, restore: float, tokens: int = 1000, source: str = "disk") -> Rates:
    """A machine that takes so many seconds for so many tokens."""
    rates = Rates()
    rates.prefilled(tokens, prefill)
    rates.restored(source, tokens, restore)
    return rates


def restored(choosing: Choosing, choice: Choice, seconds: float, tokens: int = 1000) -> None:
    """The choice was followed, and the restore took so long."""
    assert choice.reason is None
    choosing.restored(choice.told(RestoreReport("disk", tokens, seconds)))


def passes_over(choosing: Choosing, tokens: int = 1000, source: str = "disk") -> bool:
    """Whether such a session is computed."""
    return choosing.choose(source, tokens).reason is not None


def choices(choosing: Choosing, count: int, seconds: float) -> str:
    """What happens to ``count`` sessions that come back one after the other, where a restore takes so long.

    ``c``: computed, ``r``: restored."""
    seen = ""
    for _ in range(count):
        choice = choosing.choose("disk", 1000)
        seen += "r" if choice.reason is None else "c"
        if choice.reason is None:
            restored(choosing, choice, seconds)
    return seen


# -- rates -------------------------------------------------------------------------------------------------------------


def test_what_was_measured_at_one_length_counts_by_the_token() -> None:
    rates = measured(prefill=2.0, restore=0.1)
    for _ in range(5):
        rates.restored("disk", 1000, 0.1)
    found = rates.estimate("disk", 250)
    assert (found.restore, found.recompute) == (pytest.approx(0.025), pytest.approx(0.5))
    assert rates.estimate("host", 250).restore is None
    assert rates.told(1000) == {"prefill": pytest.approx(2.0), "disk": pytest.approx(0.1)}


def test_fixed_cost_and_cost_by_the_token_are_told_apart_once_lengths_differ() -> None:
    rates = Rates()
    for tokens in (100, 8000, 200, 6000, 100, 8000):
        rates.restored("disk", tokens, 0.02 + tokens * 1e-5)
    for tokens in (100, 1000, 8000):
        assert rates.estimate("disk", tokens).restore == pytest.approx(0.02 + tokens * 1e-5, rel=0.2)
    by_the_token = Rates()
    for tokens in (100, 8000, 200, 6000, 100, 8000):
        by_the_token.restored("disk", tokens, tokens * 1e-5)
    assert by_the_token.estimate("disk", 100).restore == pytest.approx(0.001, rel=0.01)


@pytest.mark.parametrize(("short", "long"), [(3.0, 0.1), (0.1, 60.0)])
def test_no_measurement_makes_an_estimate_negative_or_more_than_by_the_token(short: float, long: float) -> None:
    rates = Rates()
    for _ in range(3):
        rates.restored("disk", 100, short)
        rates.restored("disk", 2000, long)
    each = max(short / 100, long / 2000)
    for tokens in (1, 100, 2000, 50_000):
        found = rates.estimate("disk", tokens).restore
        assert found is not None
        assert 0 <= found <= max(short, long, each * tokens)


def test_short_ones_are_not_measured() -> None:
    rates = measured(prefill=1.0, restore=1.0, tokens=31)
    assert (rates.estimate("disk", 31).restore, rates.told(31)) == (None, {})


# -- choices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", ["nothing", "prefill", "restore"])
def test_until_both_are_measured_what_is_stored_is_restored(known: str) -> None:
    rates = Rates()
    if known == "prefill":
        rates.prefilled(1000, 1e-6)
    if known == "restore":
        rates.restored("disk", 1000, 1e6)
    choosing = Choosing(rates)
    for tokens in (1, 64, 1000):
        assert choosing.choose("disk", tokens).reason is None


@pytest.mark.parametrize(
    ("prefill", "restore", "recompute"),
    [
        (1.0, 0.1, False),
        (1.0, 1.1, False),
        (1.0, 1.3, True),
        (0.01, 0.025, False),
        (0.01, 0.05, True),
    ],
    ids=["faster", "not clearly slower", "slower", "by less than anybody notices", "by more"],
)
def test_what_is_clearly_slower_is_passed_over(prefill: float, restore: float, recompute: bool) -> None:
    choice = Choosing(measured(prefill=prefill, restore=restore)).choose("disk", 1000)
    report = choice.told(RestoreReport("disk", 1000))
    assert report.estimated_restore_seconds == pytest.approx(restore)
    assert report.estimated_recompute_seconds == pytest.approx(prefill)
    said = f"computing 1,000 tokens is expected to take {prefill:.3f} s, restoring them from disk {restore:.3f} s"
    assert choice.reason == (f"cheaper: {said}" if recompute else None)
    assert replace(report, source="recompute", reason=choice.reason).chosen == recompute
    assert not replace(report, reason="checksum: of a chunk").chosen


def test_each_tier_has_its_own_rate() -> None:
    rates = measured(prefill=1.0, restore=5.0)
    rates.restored("host", 1000, 0.1)
    choosing = Choosing(rates)
    assert [passes_over(choosing, source=source) for source in ("disk", "host")] == [True, False]


def test_a_session_much_longer_than_what_was_measured_is_restored() -> None:
    """A tenth of a second for 100 tokens may be a tenth of a second for 10,000."""
    rates = Rates()
    rates.prefilled(1000, 0.1)
    rates.restored("disk", 100, 0.1)
    choosing = Choosing(rates)
    assert passes_over(choosing, 400)
    assert not passes_over(choosing, 401)
    rates.restored("disk", 1000, 1.0)
    assert passes_over(choosing, 401)


def test_a_source_that_is_passed_over_is_tried_again_ever_more_seldom() -> None:
    choosing = Choosing(measured(prefill=1.0, restore=5.0))
    seen = choices(choosing, 300, 5.0)
    assert [len(run) for run in seen.split("r")][:8] == [2, 4, 8, 16, 32, 64, 64, 64]


def test_a_trial_that_finds_it_fast_again_is_believed_at_once() -> None:
    """However slow it had been: a mean would take a dozen trials to forget that."""
    choosing = Choosing(measured(prefill=1.0, restore=900.0))
    assert choices(choosing, 30, 0.1) == "cc" + "r" * 28
    assert choosing.choose("disk", 1000).estimate.restore == pytest.approx(0.1)


def test_one_slow_restore_costs_two_recomputes() -> None:
    choosing = Choosing(measured(prefill=1.0, restore=0.1))
    assert choices(choosing, 5, 0.1) == "rrrrr"
    restored(choosing, choosing.choose("disk", 1000), 60.0)
    assert choices(choosing, 10, 0.1) == "cc" + "r" * 8


def test_a_restore_that_nobody_chose_is_a_trial_too() -> None:
    """A prefetch; a session that is restored whatever it takes."""
    choosing = Choosing(measured(prefill=1.0, restore=900.0))
    assert passes_over(choosing)
    restored(choosing, choosing.restore("disk", 1000), 0.1)
    assert not passes_over(choosing)


def test_a_part_that_came_back_quickly_proves_nothing() -> None:
    choosing = Choosing(measured(prefill=1.0, restore=900.0))
    report = choosing.restore("disk", 1000).told(RestoreReport("disk", 100, 0.1, reason="checksum: of a chunk"))
    choosing.restored(report)
    assert passes_over(choosing)
