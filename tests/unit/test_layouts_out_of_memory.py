"""An allocation that fails, wherever in a turn, leaves a state that goes back to its undo record or says it cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from agentkv.kv.contract import LAYOUTS, AttentionTraits, Layout, SequenceKV, Slot
from agentkv.kv.paged import PagedLayout
from agentkv.testing.naive import GEOMETRY, QUERY_HEADS
from agentkv.types import Span

CPU = torch.device("cpu")
IMPOSSIBLE = 2**56
"""More bytes than any machine has: torch's allocator refuses them itself."""
MOST = 25
"""Places at which memory runs out in one test."""


class Fails(TorchDispatchMode):
    """The ``nth`` operation of this thread that makes a new tensor asks for too much. Counts all of them."""

    def __init__(self, nth: int = 0) -> None:
        super().__init__()
        self._nth = nth
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if all(value.alias_info is None for value in func._schema.returns):
            self.seen += 1
            if self.seen == self._nth:
                torch.ops.aten.empty.memory_format([IMPOSSIBLE], dtype=torch.uint8, device=CPU)
        return func(*args, **(kwargs or {}))


def made(name: str) -> Layout[Any]:
    layout = PagedLayout(GEOMETRY, CPU, 16) if name == "paged" else LAYOUTS.get(name)(GEOMETRY, CPU)
    layout.rebase_at = 60
    return layout


def step(layout: Layout[Any], kv: SequenceKV, tokens: int, seed: int, mode: Fails) -> None:
    """One step as an engine does it. What changes the state runs under ``mode``; the pass itself leaves it alone."""
    generator = torch.Generator().manual_seed(seed)
    with mode:
        kv.reserve(tokens)
    meta = layout.plan([Slot(kv, 0, tokens)])
    groups = {layer: group for group in GEOMETRY.groups for layer in group.layers}
    for layer, group in sorted(groups.items()):
        keys, values, queries = (
            torch.randn(heads, tokens, dim, generator=generator)
            for heads, dim in (
                (group.kv_heads, group.key_dim),
                (group.kv_heads, group.value_dim),
                (QUERY_HEADS, group.key_dim),
            )
        )
        layout.write(layer, keys, values, meta)
        layout.attend(layer, queries, meta, AttentionTraits(0.7))
    with mode:
        kv.advance(range(tokens))


def keep_sink_and_window(kv: SequenceKV, sink: int, window: int, mode: Fails) -> None:
    held = [i for span in kv.placement.kept for i in range(*span)]
    with mode:
        kv.keep([Span(i, i + 1) for i in held[:sink] + held[len(held) - window :]])


def lived(layout: Layout[Any]) -> SequenceKV:
    """A state with some turns behind it, of which one evicted."""
    kv = layout.open(0, 400)
    for seed, tokens in enumerate((90, 80)):
        step(layout, kv, tokens, seed, Fails())
    keep_sink_and_window(kv, 4, 150, Fails())
    step(layout, kv, 3, 9, Fails())
    kv.settle()
    return kv


def grows(layout: Layout[Any], kv: SequenceKV, mode: Fails) -> None:
    """A turn that only adds: full groups grow, sliding ones move their window to the front, tokens are quantised."""
    for seed, tokens in enumerate((90, 1, 30)):
        step(layout, kv, tokens, seed, mode)


def evicts(layout: Layout[Any], kv: SequenceKV, mode: Fails) -> None:
    """A turn that evicts twice."""
    step(layout, kv, 20, 5, mode)
    keep_sink_and_window(kv, 4, 140, mode)
    step(layout, kv, 30, 6, mode)
    keep_sink_and_window(kv, 2, 30, mode)
    step(layout, kv, 1, 7, mode)


def content(kv: SequenceKV) -> tuple[Any, ...]:
    """All that later queries can see, copied."""
    kv.check_integrity()
    blocks = [kv.read(i, run) for i in range(len(GEOMETRY.groups)) for run in kv.visible(i)]
    return list(kv.ids), kv.placement, [t.clone() for block in blocks for t in (*block.keys, *block.values)]


def assert_equal(a: tuple[Any, ...], b: tuple[Any, ...]) -> None:
    assert a[:2] == b[:2]
    assert len(a[2]) == len(b[2]) and all(torch.equal(x, y) for x, y in zip(a[2], b[2], strict=True))


@pytest.mark.short(4)
@pytest.mark.parametrize("turn", [grows, evicts])
@pytest.mark.parametrize("name", ["dynamic", "static", "paged", "quantized:int8", "quantized:int4:paged", "offloaded"])
def test_wherever_memory_runs_out_in_a_turn_it_is_undone_and_can_be_taken_again(
    name: str, turn: Callable[[Layout[Any], SequenceKV, Fails], None]
) -> None:
    for _ in range(2):  # the first fills tables that all layouts share
        layout, mode = made(name), Fails()
        whole = lived(layout)
        before = content(whole)
        whole.undo_record()
        turn(layout, whole, mode)
        after = content(whole)
    outcomes: Counter[str] = Counter()
    for nth in range(1, mode.seen + 1, -(-mode.seen // MOST)):
        layout = made(name)
        kv = lived(layout)
        undo = kv.undo_record()
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            turn(layout, kv, Fails(nth))
        try:
            kv.rollback(undo)
        except MemoryError:
            outcomes["lost"] += 1
            kv.close()
            assert (kv.closed, kv.nbytes) == (True, 0)
            continue
        outcomes["undone"] += 1
        assert_equal(content(kv), before)
        kv.undo_record()
        turn(layout, kv, Fails())
        assert_equal(content(kv), after)
    moves_rows = turn is evicts and name in ("dynamic", "static", "offloaded")
    assert bool(outcomes["lost"]) == moves_rows, outcomes
    assert outcomes["undone"] or (turn is grows and name == "static") or name == "paged", outcomes


@pytest.mark.parametrize("name", ["dynamic", "static"])
def test_a_rollback_that_finds_no_memory_raises(name: str) -> None:
    layout, mode = made(name), Fails()

    def evicted() -> tuple[SequenceKV, Any]:
        kv = lived(layout)
        undo = kv.undo_record()
        evicts(layout, kv, Fails())
        return kv, undo

    kv, undo = evicted()
    with mode:
        kv.rollback(undo)
    assert mode.seen
    for nth in range(1, mode.seen + 1, -(-mode.seen // MOST)):
        kv, undo = evicted()
        with pytest.raises(RuntimeError, match="can't allocate memory"), Fails(nth):
            kv.rollback(undo)
        kv.close()
        assert kv.closed


def test_what_a_growth_that_failed_half_way_has_taken_is_counted() -> None:
    kv, mode = lived(made("dynamic")), Fails()
    before = kv.nbytes
    with mode:
        kv.reserve(300)
    whole, partial = kv.nbytes, set()
    for nth in range(1, mode.seen + 1, -(-mode.seen // MOST)):
        kv = lived(made("dynamic"))
        undo = kv.undo_record()
        with pytest.raises(RuntimeError, match="can't allocate memory"), Fails(nth):
            kv.reserve(300)
        partial.add(kv.nbytes - undo.nbytes)
        kv.rollback(undo)
        kv.settle()
        kv.check_integrity()
        kv.reserve(300)
        assert kv.nbytes == whole
    assert before in partial and len(partial) > 2, "a layer has grown and another has not"
    assert before <= min(partial) <= max(partial) < whole
