"""What `paged` promises beside the contract: what is shared, what is freed, and that other threads may take part."""

from __future__ import annotations

import gc
import random
import threading

import pytest
import torch

from agentkv.kv.dynamic import DynamicLayout
from agentkv.kv.paged import PagedKV, PagedLayout
from agentkv.testing.layouts import GEOMETRY, NaiveKV, same_block
from agentkv.testing.machine import State, packed_step
from agentkv.types import Placement, Span

CPU = torch.device("cpu")
GROUPS = GEOMETRY.groups
PAGE = 8


def opened(tokens: int = 0) -> tuple[PagedLayout, State]:
    layout = PagedLayout(GEOMETRY, CPU, page_tokens=PAGE)
    state = State(layout.open())
    if tokens:
        packed_step(layout, [state], [tokens], 1)
    return layout, state


def used(layout: PagedLayout, group: int = 0) -> int:
    pool = layout.pools[group]
    return pool.nbytes // pool.page_nbytes - pool.free


def pages(state: State, group: int = 0) -> list[int]:
    return state.kv.table(group).pages


def check_visible(state: State) -> None:
    state.kv.check_integrity()
    for index, group in enumerate(GROUPS):
        for run in state.naive.runs(group):
            assert same_block(state.kv.read(index, run), state.naive.block(group, run)), group.name


def test_a_fork_shares_pages_until_one_side_writes_and_then_all_but_one() -> None:
    layout, state = opened(20)
    before = layout.nbytes
    twin = State(state.kv.fork(), state.naive.copy())
    assert layout.nbytes == before and pages(twin) == pages(state)
    packed_step(layout, [twin], [1], 2)
    assert pages(twin)[:2] == pages(state)[:2] and pages(twin)[2] != pages(state)[2]
    packed_step(layout, [state], [1], 3)
    assert used(layout) == 4, "the other side is the last one's only user now and writes in place"
    check_visible(state)
    check_visible(twin)
    twin.kv.close()
    assert used(layout) == 3


def test_an_eviction_frees_whole_pages_and_copies_nothing() -> None:
    layout, state = opened(40)
    first, last = pages(state)[0], pages(state)[4]
    keys = layout.pools[0]._of[first].keys[0]
    state.kv.keep([Span(0, 3), Span(5, 6), Span(33, 40)])
    state.naive.keep([Span(0, 3), Span(5, 6), Span(33, 40)], 10**6)
    assert pages(state) == [first, last] and used(layout) == 2
    assert layout.pools[0]._of[first].keys[0] is keys
    packed_step(layout, [state], [9], 2)
    check_visible(state)


def test_an_undo_record_holds_pages_instead_of_copies() -> None:
    layout, state = opened(40)
    undo = state.kv.undo_record()
    before, nbytes, there = state.naive.copy(), state.kv.nbytes, pages(state)
    assert undo.nbytes > 0 and not undo.evicted and not undo.windows
    state.kv.keep([Span(0, 3), Span(36, 40)])
    state.naive.keep([Span(0, 3), Span(36, 40)], 10**6)
    assert used(layout) == 5 and state.kv.nbytes == nbytes, "held pages count"
    packed_step(layout, [state], [9], 2)
    state.kv.rollback(undo)
    state.naive = before
    assert pages(state) == there
    check_visible(state)
    state.kv.keep([Span(0, 3), Span(36, 40)])
    state.naive.keep([Span(0, 3), Span(36, 40)], 10**6)
    state.kv.settle()
    assert used(layout) == 2 and state.kv.nbytes < nbytes
    packed_step(layout, [state], [2], 4)


def test_what_an_undo_record_holds_is_not_written_over() -> None:
    layout, state = opened(6)
    undo, before = state.kv.undo_record(), state.naive.copy()
    twin = State(state.kv.fork(), state.naive.copy())
    packed_step(layout, [state], [1], 2)  # on a copy of the page: the twin has it too
    twin.kv.crop(2)
    twin.naive.crop(2)
    packed_step(layout, [twin], [3], 3)  # its only user now, but the record wants slots 2 to 5
    state.kv.keep([Span(0, 1)])
    state.kv.rollback(undo)
    state.naive = before.copy()
    check_visible(state)
    check_visible(twin)
    state.kv.keep([Span(0, 4)])
    state.naive.keep([Span(0, 4)], 10**6)
    packed_step(layout, [state], [2], 4)
    state.kv.rollback(undo)
    state.naive = before.copy()
    check_visible(state)


def test_a_record_that_is_gone_gives_its_pages_back() -> None:
    layout, state = opened(40)
    undo = state.kv.undo_record()
    for seed in range(5):
        packed_step(layout, [state], [9], seed)
    state.kv.settle()
    windows = used(layout, 1)
    del undo
    gc.collect()
    assert used(layout, 1) < windows
    state.kv.close()
    gc.collect()
    assert [used(layout, i) for i in range(3)] == [0, 0, 0] and layout.nbytes == 0


def test_pages_behind_the_window_are_freed() -> None:
    layout, state = opened()
    for seed in range(30):
        packed_step(layout, [state], [10], seed)
    assert used(layout, 1) <= 3 and used(layout, 2) <= 6
    assert used(layout, 0) == 38


def test_restored_spans_lie_in_one_view_even_in_a_pool_full_of_holes() -> None:
    layout, state = opened()
    others = [State(layout.open()) for _ in range(6)]
    for seed, other in enumerate(others):
        packed_step(layout, [other], [9], seed)
    for other in others[::2]:
        other.kv.close()
    packed_step(layout, [state], [60], 9)
    twin = layout.open()
    twin.place(state.kv.placement)
    for part in (*state.kv.capture(Span(0, 60)), *state.kv.window_snapshot()):
        target = twin.target(part.group, part.span)
        for a, b in zip((*part.block.keys, *part.block.values), (*target.keys, *target.values), strict=True):
            b.copy_(a)
    twin.restored(state.naive.ids)
    check_visible(State(twin, state.naive))


def test_the_pinned_prefix_can_end_its_own_page() -> None:
    layout, state = opened(11)
    state.kv.end_page()
    packed_step(layout, [state], [10], 2)
    assert state.kv.table(0).pieces[1][2] == 3 and state.kv.table(0).pieces[2][1] == 0
    check_visible(state)


def test_bits_do_not_depend_on_where_pages_lie_nor_on_the_layout() -> None:
    def run(layout: object, kv: object) -> list[torch.Tensor]:
        outputs, attend = [], layout.attend
        layout.attend = lambda *a: outputs.append(attend(*a)) or outputs[-1]
        state = State(kv)
        packed_step(layout, [state], [30], 4)
        kv.keep([Span(0, 5), Span(9, 11), Span(20, 30)])
        state.naive.keep([Span(0, 5), Span(9, 11), Span(20, 30)], 10**6)
        for seed in range(4, 40, 4):
            packed_step(layout, [state], [1], seed)
        return outputs

    plain = PagedLayout(GEOMETRY, CPU, page_tokens=PAGE)
    holes = PagedLayout(GEOMETRY, CPU, page_tokens=PAGE)
    others = [State(holes.open()) for _ in range(6)]
    for seed, other in enumerate(others):
        packed_step(holes, [other], [12], seed)
    for other in others[::2]:
        other.kv.close()
    expected = run(plain, plain.open())
    assert all(torch.equal(a, b) for a, b in zip(expected, run(holes, holes.open()), strict=True))
    dynamic = DynamicLayout(GEOMETRY, CPU)
    for a, b in zip(expected, run(dynamic, dynamic.open()), strict=True):
        torch.testing.assert_close(a, b)


def test_no_session_is_refused_or_disturbed_while_other_threads_open_fork_restore_and_close() -> None:
    layout, state = opened(30)
    stop, errors = threading.Event(), []

    def busy(seed: int) -> None:
        rng = random.Random(seed)
        held: list[PagedKV] = []
        try:
            while not stop.is_set():
                n = rng.randint(1, 60)
                kv = layout.open()
                kv.place(Placement.whole(n))
                for index in range(3):
                    for run in kv.visible(index):
                        target = kv.target(index, run)
                        for tensor in (*target.keys, *target.values):
                            tensor.fill_(seed)
                kv.restored(range(n))
                held += [kv, kv.fork()]
                rng.shuffle(held)
                while len(held) > 5:
                    other = held.pop()
                    for index in range(3):
                        for run in other.visible(index):
                            block = other.read(index, run)
                            assert all(bool((t == seed).all()) for t in (*block.keys, *block.values))
                    other.close()
        except BaseException as error:
            errors.append(error)
        for kv in held:
            kv.close()

    threads = [threading.Thread(target=busy, args=(i + 1,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for seed in range(40):
        packed_step(layout, [state], [3], seed)
        if seed % 9 == 0:
            undo, before = state.kv.undo_record(), state.naive.copy()
            spans = [Span(state.naive.held[0], state.naive.held[0] + 1), Span(state.kv.length - 2, state.kv.length)]
            state.kv.keep(spans)
            twin = State(state.kv.fork(), _after(state, spans))
            packed_step(layout, [twin], [2], seed)
            twin.kv.close()
            state.kv.rollback(undo)
            state.naive = before
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors, errors
    check_visible(state)
    state.kv.close()


def _after(state: State, spans: list[Span]) -> NaiveKV:
    naive = state.naive.copy()
    naive.keep(spans, 10**6)
    return naive


def test_misuse_is_told() -> None:
    layout, state = opened(100)
    with pytest.raises(ValueError, match="is not held"):
        state.kv.read(0, Span(90, 101))
    with pytest.raises(ValueError, match="only an empty state"):
        state.kv.place(Placement.whole(3))
    with pytest.raises(ValueError, match="cannot roll forward"):
        layout.open().rollback(state.kv.undo_record())


def test_integrity_is_checked_for_real() -> None:
    layout, state = opened(20)
    state.kv.table(0).tokens = 19
    with pytest.raises(AssertionError):
        state.kv.check_integrity()
    layout, state = opened(20)
    layout.pools[0]._users[pages(state)[0]] = 0
    with pytest.raises(AssertionError):
        state.kv.check_integrity()
