"""What `dynamic` and `static` promise beside the contract: copies that are not made, sizes that do not grow, misuse."""

from __future__ import annotations

import pytest
import torch

from agentkv.errors import CapacityExceeded
from agentkv.kv.contract import LAYOUTS
from agentkv.kv.dynamic import DynamicLayout
from agentkv.kv.static import StaticLayout
from agentkv.testing.layouts import GEOMETRY, same_block
from agentkv.testing.machine import State, packed_step
from agentkv.types import Placement, Span

CPU = torch.device("cpu")
GROUPS = GEOMETRY.groups


def opened(tokens: int = 0, room: int = 0) -> tuple[DynamicLayout, State]:
    layout = DynamicLayout(GEOMETRY, CPU)
    state = State(layout.open(room))
    if tokens:
        packed_step(layout, [state], [tokens], 1)
    return layout, state


def decode(layout: DynamicLayout, state: State, tokens: int) -> None:
    for seed in range(tokens):
        packed_step(layout, [state], [1], seed)


def check_visible(state: State) -> None:
    state.kv.check_integrity()
    for index, group in enumerate(GROUPS):
        for run in state.naive.runs(group):
            assert same_block(state.kv.read(index, run), state.naive.block(group, run)), group.name


def test_all_layouts_are_registered() -> None:
    assert {"dynamic", "static"} <= set(LAYOUTS)


def test_rollback_after_a_window_was_compacted_away() -> None:
    layout, state = opened(20)
    undo, before = state.kv.undo_record(), state.naive.copy()
    held = state.kv.buffers(1).base
    decode(layout, state, 120)
    assert state.kv.buffers(1).base > 20 > held, "the window was compacted past the undo record"
    state.kv.rollback(undo)
    state.naive = before
    packed_step(layout, [state], [7], 3)
    check_visible(state)


def test_rollback_of_one_side_of_a_fork_leaves_the_other_alone() -> None:
    layout, state = opened(20)
    undo, before = state.kv.undo_record(), state.naive.copy()
    while state.kv.buffers(1).base <= 20:  # until the window was moved to the front, where the record would go
        decode(layout, state, 1)
    twin = State(state.kv.fork(), state.naive.copy())
    state.kv.rollback(undo)
    state.naive = before
    check_visible(twin)
    check_visible(state)
    packed_step(layout, [state, twin], [3, 4], 9)


def test_a_fork_copies_nothing_until_one_side_writes() -> None:
    layout, state = opened(20)
    twin = State(state.kv.fork(), state.naive.copy())
    for index in range(len(GROUPS)):
        ours, theirs = state.kv.buffers(index).keys, twin.kv.buffers(index).keys
        assert [k.data_ptr() for k in ours] == [k.data_ptr() for k in theirs]
    packed_step(layout, [twin], [1], 2)
    assert state.kv.buffers(0).keys[0].data_ptr() != twin.kv.buffers(0).keys[0].data_ptr()


def test_a_token_is_not_paid_for_with_a_copy_of_the_cache() -> None:
    layout, state = opened(64)
    moves = 0
    before = [k.data_ptr() for i in range(3) for k in state.kv.buffers(i).keys]
    for _ in range(256):
        decode(layout, state, 1)
        now = [k.data_ptr() for i in range(3) for k in state.kv.buffers(i).keys]
        moves += now != before
        before = now
    assert moves <= 14


def test_sliding_groups_do_not_grow_with_the_session() -> None:
    layout, state = opened()
    for seed in range(12):
        packed_step(layout, [state], [50], seed)
    assert state.kv.length == 600
    assert state.kv.buffers(1).capacity <= 128
    assert state.kv.buffers(2).capacity <= 192
    assert layout.open(5000).buffers(2).capacity <= 192, "nor with the room a session is opened with"


def test_a_capture_is_a_view_and_outlives_a_crop() -> None:
    layout, state = opened(30)
    (part,) = state.kv.capture(Span(0, 30))
    expected = state.naive.block(GROUPS[0], Span(0, 30))
    assert part.block.keys[0].data_ptr() == state.kv.buffers(0).keys[0].data_ptr(), "no copy"
    packed_step(layout, [state], [5], 2)
    assert part.block.keys[0].data_ptr() == state.kv.buffers(0).keys[0].data_ptr(), "going on costs none either"
    state.kv.crop(28)
    state.naive.crop(28)
    packed_step(layout, [state], [5], 3)
    assert same_block(part.block, expected)
    check_visible(state)


def test_a_capture_outlives_a_rollback() -> None:
    layout, state = opened(30)
    undo = state.kv.undo_record()
    packed_step(layout, [state], [5], 2)
    (part,) = state.kv.capture(Span(30, 35))
    expected = state.naive.block(GROUPS[0], Span(30, 35))
    state.kv.rollback(undo)
    state.naive.crop(30)
    packed_step(layout, [state], [5], 3)
    assert same_block(part.block, expected)


def test_there_is_no_way_back_behind_an_eviction_but_the_undo_record() -> None:
    _, state = opened(50)
    state.kv.keep([Span(0, 5), Span(20, 50)])
    with pytest.raises(ValueError, match="evicted or moved"):
        state.kv.crop(30)  # [5, 20) was held when the ledger ended there
    state.kv.crop(50)


def test_positions_that_do_not_jump_are_one_run() -> None:
    layout = DynamicLayout(GEOMETRY, CPU)
    layout.rebase_at = 10
    kv = layout.open()
    state = State(kv)
    packed_step(layout, [state], [50], 1)
    kv.keep([Span(0, 50)])
    assert kv.placement.bases == (), "nothing moved"
    kv.keep([Span(20, 50)])
    kv.keep([Span(30, 50)])
    assert kv.placement.bases == ((50, 30),), "one base for one index"
    assert kv.visible(0) == (Span(30, 50),)


def test_misuse_is_told() -> None:
    layout, state = opened(50)
    packed_step(layout, [state], [50], 2)
    kv = state.kv
    with pytest.raises(ValueError, match="only an empty state"):
        kv.place(Placement.whole(5))
    with pytest.raises(ValueError, match="100 tokens were seen"):
        kv.capture(Span(90, 101))
    with pytest.raises(ValueError, match="has nothing before"):
        kv.crop(20)
    with pytest.raises(ValueError, match="is not held"):
        kv.read(1, Span(0, 3))
    empty = DynamicLayout(GEOMETRY, CPU).open()
    with pytest.raises(ValueError, match="is not held"):
        empty.target(0, Span(0, 10))
    with pytest.raises(ValueError, match="call place"):
        empty.restored([1, 2, 3])
    with pytest.raises(ValueError, match="cannot roll forward"):
        empty.rollback(kv.undo_record())


def test_fewer_ids_than_were_placed() -> None:
    layout = DynamicLayout(GEOMETRY, CPU)
    kv = layout.open()
    kv.place(Placement.whole(5))
    kv.restored([1, 2, 3])
    assert list(kv.ids) == [1, 2, 3]
    kv.check_integrity()


def test_static_tensors_stay_where_they_are() -> None:
    layout = StaticLayout(GEOMETRY, CPU)
    layout.rebase_at = 40
    kv = layout.open(0, limit=64)
    state = State(kv)

    def addresses() -> list[int]:
        return [t.data_ptr() for i in range(3) for t in (*kv.buffers(i).keys, *kv.buffers(i).values)]

    before, nbytes = addresses(), kv.nbytes
    assert nbytes == layout.bytes_needed(None, 0, 64)
    for seed in range(40):
        packed_step(layout, [state], [4], seed)
        kv.capture(Span(kv.length - 2, kv.length))
        if kv.tokens > 50:
            first = state.naive.kept[0].start
            spans = [Span(first, first + 2), Span(kv.length - 20, kv.length)]
            kv.keep(spans)
            state.naive.keep(spans, 40)
    assert kv.length == 160 and addresses() == before
    check_visible(state)


def test_a_static_state_says_when_it_is_full() -> None:
    kv = StaticLayout(GEOMETRY, CPU).open(0, limit=64)
    kv.reserve(64)
    with pytest.raises(CapacityExceeded, match=r"opened for 64 tokens and now needs 65"):
        kv.reserve(65)


def test_integrity_is_checked_for_real() -> None:
    _, state = opened(10)
    state.kv.buffers(0).keys[0] = state.kv.buffers(0).keys[0][:, :5]
    with pytest.raises(AssertionError):
        state.kv.check_integrity()
    _, state = opened(10)
    state.kv.buffers(1).base = 9
    with pytest.raises(AssertionError):
        state.kv.check_integrity()
    _, state = opened(10)
    state.kv.advance(range(1000))
    with pytest.raises(AssertionError):
        state.kv.check_integrity()
    _, state = opened(10)
    state.kv.keep([Span(0, 2), Span(5, 10)])
    state.kv.buffers(0).moved = 0
    with pytest.raises(AssertionError):
        state.kv.check_integrity()


def test_a_window_that_was_made_smaller_gives_memory_back_with_its_next_eviction() -> None:
    layout, state = opened(300)
    before, state.kv.limit = state.kv.nbytes, 100
    state.kv.keep([Span(0, 4), Span(250, 300)])
    full = [i for i, group in enumerate(GROUPS) if group.window is None]
    assert {state.kv.buffers(i).capacity for i in full} == {128}
    assert state.kv.nbytes < before
    state.naive.keep([Span(0, 4), Span(250, 300)], layout.rebase_at)
    packed_step(layout, [state], [40], 2)
    check_visible(state)
