"""Residency policies: who leaves first, and plans that are carried out whole or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.errors import InvalidRequest
from agentkv.policies.residency import RESIDENCY, ResidencyPolicy, SessionFacts, parse_residency, plan

BASE = SessionFacts("s", nbytes=100, idle=10.0, gap=None, uses=1.0, expected=None, restore=0.1)


def first(policy: str, *candidates: SessionFacts) -> str:
    """Who leaves first."""
    found = plan(parse_residency(policy), candidates, 1)
    assert found is not None
    return found.sessions[0]


def test_four_policies_are_known_and_an_unknown_one_is_refused_with_their_names() -> None:
    assert {"cost", "lfu", "lru", "ttl"} <= set(RESIDENCY)
    with pytest.raises(InvalidRequest, match="cost, lfu, lru, ttl"):
        parse_residency("fifo")
    for wrong in ("ttl:-1", "ttl:soon", "lru:3", "ttl:inf"):
        with pytest.raises(InvalidRequest, match="ttl:600"):
            parse_residency(wrong)


def test_lru_takes_the_longest_idle() -> None:
    assert first("lru", replace(BASE, id="new", idle=1), replace(BASE, id="old", idle=99)) == "old"


def test_lfu_takes_the_least_used_and_among_equals_the_longest_idle() -> None:
    assert first("lfu", replace(BASE, id="busy", uses=5, idle=99), replace(BASE, id="rare", uses=2, idle=1)) == "rare"
    assert first("lfu", replace(BASE, id="new", idle=1), replace(BASE, id="old", idle=99)) == "old"


def test_ttl_takes_the_largest_of_those_whose_time_is_over() -> None:
    small, large = replace(BASE, id="small", idle=700, nbytes=10), replace(BASE, id="large", idle=650, nbytes=1000)
    young = replace(BASE, id="young", idle=500, nbytes=10**6)
    assert first("ttl:600", small, large, young) == "large"
    assert first("ttl:1000", small, large, young) == "small"


def test_cost_keeps_what_is_dear_small_and_wanted_soon() -> None:
    assert first("cost", replace(BASE, id="cheap", restore=0.01), replace(BASE, id="dear", restore=1.0)) == "cheap"
    assert first("cost", replace(BASE, id="small", nbytes=10), replace(BASE, id="large", nbytes=1000)) == "large"
    assert first("cost", replace(BASE, id="soon", expected=1), replace(BASE, id="late", expected=500)) == "late"
    assert first("cost", replace(BASE, id="quick", gap=1), replace(BASE, id="slow", gap=500)) == "slow"
    assert first("cost", replace(BASE, id="new", idle=1), replace(BASE, id="old", idle=99)) == "old"
    hinted, silent = replace(BASE, id="hinted", expected=300.0, idle=0.0), replace(BASE, id="silent", idle=60.0)
    assert first("cost", hinted, silent) == "hinted", "a hint counts for more than how lately it was used"


def test_a_hint_that_has_passed_fades() -> None:
    passed, waiting = replace(BASE, id="passed", expected=-400.0), replace(BASE, id="waiting", expected=100.0)
    assert first("cost", passed, waiting) == "passed"


facts = st.builds(
    SessionFacts,
    id=st.uuids().map(str),
    nbytes=st.integers(1, 10**9),
    idle=st.floats(0, 1e6),
    gap=st.none() | st.floats(0, 1e6),
    uses=st.floats(0, 1e3),
    expected=st.none() | st.floats(-1e6, 1e6),
    restore=st.floats(0, 1e3),
)


@pytest.mark.parametrize("name", ["cost", "lfu", "lru", "ttl"])
@given(candidates=st.lists(facts, max_size=20, unique_by=lambda f: f.id), needed=st.integers(1, 10**10))
def test_a_plan_frees_enough_with_nobody_superfluous_or_is_none(
    name: str, candidates: list[SessionFacts], needed: int
) -> None:
    policy: ResidencyPolicy = parse_residency(name)
    found = plan(policy, candidates, needed)
    total = sum(f.nbytes for f in candidates)
    if total < needed:
        assert found is None
        return
    assert found is not None
    sizes = {f.id: f.nbytes for f in candidates}
    assert found.nbytes == sum(sizes[name] for name in found.sessions) >= needed
    assert all(found.nbytes - sizes[name] < needed for name in found.sessions), "one could have stayed"
    assert plan(policy, candidates[::-1], needed) == found, "the order they are given in does not count"
