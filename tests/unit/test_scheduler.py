"""Which jobs share a step."""

from __future__ import annotations

import pytest
import torch
from driving import CPU, Hooked
from hypothesis import given
from hypothesis import strategies as st

from agentkv.engine.job import Generation, Job
from agentkv.engine.sampling import Sampler
from agentkv.engine.scheduler import Scheduler
from agentkv.kv.dynamic import DynamicKV
from agentkv.schemas.sampling import SamplingParams
from agentkv.types import KVGeometry, LayerGroup, Span

GEOMETRY = KVGeometry((LayerGroup((0,), None, 1, 2, 2),), "float32")
GREEDY = SamplingParams.build()


def job(feed: int, piece: int = 8, *, held: int = 0, points: tuple[int, ...] = (), tokens: int = 4) -> Job:
    kv = DynamicKV(GEOMETRY, CPU, held)
    kv.advance(range(held))
    generation = Generation(Sampler(GREEDY, CPU), tokens, Hooked()) if tokens else None
    made = Job(kv, list(range(100, 100 + feed)), piece, points, generation)
    made.begin()
    return made


def compute(scheduler: Scheduler, batch: list[Job]) -> None:
    """What a step does to the jobs, without a model."""
    for each in batch:
        each.kv.advance(each.next_ids())
        if each.pieces:
            each.pieces.pop(0)
            if not each.pieces:
                scheduler.prefilled(each)
        if each.decoding:
            each.tokens.append(7)


def scheduled(*jobs: Job, rows: int = 16) -> Scheduler:
    scheduler = Scheduler(rows)
    for each in jobs:
        scheduler.add(each)
    return scheduler


def test_a_piece_is_never_cut_even_where_it_exceeds_the_batch() -> None:
    long = job(100, piece=40)
    assert scheduled(long, rows=16).plan() == [long]
    assert len(long.next_ids()) == 40


def test_prefilling_jobs_take_turns() -> None:
    a, b, c = job(24), job(24), job(24)
    scheduler = scheduled(a, b, c, rows=16)
    seen = []
    for _ in range(3):
        batch = scheduler.plan()
        seen.append(batch)
        compute(scheduler, batch)
    assert seen == [[a, b], [c, a], [b, c]]


def test_a_piece_that_does_not_fit_alternates_with_the_decodes() -> None:
    decoding = [job(1) for _ in range(4)]
    scheduler = scheduled(*decoding, rows=16)
    while not all(each.decoding for each in decoding):
        compute(scheduler, scheduler.plan())
    long = job(60, piece=20)
    scheduler.add(long)
    seen = []
    for _ in range(4):
        batch = scheduler.plan()
        seen.append(batch)
        compute(scheduler, batch)
    assert seen == [[long], decoding, [long], decoding], "its bits would depend on how many decode beside it"


def test_a_piece_that_fits_joins_the_decodes() -> None:
    decoding = [job(1) for _ in range(4)]
    scheduler = scheduled(*decoding, rows=16)
    compute(scheduler, scheduler.plan())
    short = job(12, piece=20)
    scheduler.add(short)
    assert scheduler.plan() == [*decoding, short]


def test_more_decodes_than_rows_take_turns() -> None:
    decoding = [job(1) for _ in range(20)]
    scheduler = scheduled(*decoding, rows=16)
    while not all(each.decoding for each in decoding):
        compute(scheduler, scheduler.plan())
    batches = [scheduler.plan() for _ in range(5)]
    assert all(len(batch) == 16 for batch in batches)
    assert [sum(each in batch for batch in batches) for each in decoding] == [4] * 20


def test_planning_twice_changes_nothing_but_whose_turn_it_is() -> None:
    a, b = job(24), job(24)
    scheduler = scheduled(a, b, rows=8)
    assert [scheduler.plan(), scheduler.plan(), scheduler.plan()] == [[a], [b], [a]]
    assert len(scheduler) == 2


def test_removing_is_idempotent_and_leaves_the_others() -> None:
    a, b = job(24), job(24)
    scheduler = scheduled(a, b)
    scheduler.remove(a)
    scheduler.remove(a)
    assert scheduler.jobs() == [b]
    assert scheduler.plan() == [b]


def test_an_empty_scheduler_plans_nothing() -> None:
    assert Scheduler(16).plan() == []


@pytest.mark.parametrize(
    ("feed", "held", "points", "spans"),
    [
        (20, 0, (), [(0, 8), (8, 16), (16, 20)]),
        (20, 5, (), [(5, 13), (13, 21), (21, 25)]),
        (20, 0, (3,), [(0, 3), (3, 11), (11, 20)]),  # a rest of one token joins the piece before it
        (20, 5, (15, 9), [(5, 9), (9, 15), (15, 23), (23, 25)]),
        (20, 5, (0, 5, 25, 99), [(5, 13), (13, 21), (21, 25)]),
        (20, 0, (8, 8), [(0, 8), (8, 16), (16, 20)]),
        (1, 0, (), [(0, 1)]),
    ],
)
def test_cuts_are_counted_from_the_turn_and_made_at_resume_points(
    feed: int, held: int, points: tuple[int, ...], spans: list[tuple[int, int]]
) -> None:
    assert job(feed, held=held, points=points).pieces == [Span(*s) for s in spans]


def test_a_job_without_input_or_with_empty_pieces_is_refused() -> None:
    kv = DynamicKV(GEOMETRY, CPU, 0)
    with pytest.raises(ValueError, match="at least one token"):
        Job(kv, [], 8)
    with pytest.raises(ValueError, match="at least one token, got 0"):
        Job(kv, [1], 0)


def test_only_the_last_piece_is_sampled() -> None:
    made = job(20)
    wanted = []
    while made.pieces:
        wanted.append(made.wants_logits())
        made.pieces.pop(0)
    assert wanted == [False, False, True]
    assert made.wants_logits()
    silent = job(20, tokens=0)
    silent.pieces[1:] = []
    assert not silent.wants_logits()


@given(
    sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20), st.integers(0, 12)), min_size=1, max_size=8),
    rows=st.integers(1, 40),
    others=st.integers(0, 5),
)
def test_cuts_depend_on_the_turn_alone_and_nobody_starves(
    sizes: list[tuple[int, int, int]], rows: int, others: int
) -> None:
    jobs = [job(feed, piece, points=(point,)) for feed, piece, point in sizes]
    alone = [[len(piece) for piece in each.pieces] for each in jobs]
    scheduler = scheduled(*(job(30, 4) for _ in range(others)), *jobs, rows=rows)
    seen: dict[Job, list[int]] = {each: [] for each in jobs}
    fed: dict[Job, list[int]] = {each: [] for each in jobs}
    waited: dict[Job, int] = {}
    had_piece = True
    limit = 2 * len(scheduler.jobs()) * (sum(map(len, alone)) + others * 8) + 1
    for _ in range(limit):
        prefilling = [each for each in scheduler.jobs() if each.pieces]
        if not prefilling:
            break
        batch = scheduler.plan()
        assert len(set(batch)) == len(batch)
        assert batch
        assert len(batch) == 1 or sum(len(each.next_ids()) for each in batch) <= rows
        assert had_piece or any(each.pieces for each in batch), "a prefill goes on in every other step"
        had_piece = any(each.pieces for each in batch)
        for each in scheduler.jobs():
            waited[each] = 0 if each in batch else waited.get(each, 0) + 1
        assert max(waited.values()) <= 2 * len(scheduler.jobs()), "nobody waits longer than everybody's turn"
        for each in batch:
            if each in seen and each.pieces:
                seen[each].append(len(each.next_ids()))
                fed[each].extend(each.next_ids())
        compute(scheduler, batch)
    assert list(seen.values()) == alone
    assert list(fed.values()) == [list(each.feed) for each in jobs]


def test_a_generated_token_is_what_a_decoding_job_feeds() -> None:
    made = job(3)
    scheduler = scheduled(made)
    compute(scheduler, scheduler.plan())
    assert list(made.next_ids()) == [7]
    assert torch.tensor(made.next_ids()).shape == (1,)
