"""Every layout passes the conformance suite, and the suite fails what is broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from agentkv.codecs import KVBlock
from agentkv.kv.contiguous import ContiguousKV
from agentkv.kv.contract import Layout, Undo
from agentkv.kv.dynamic import DynamicKV, DynamicLayout
from agentkv.kv.offloaded import OffloadedLayout
from agentkv.kv.offloaded_staging import Prefetcher
from agentkv.kv.paged import PagedKV, PagedLayout
from agentkv.kv.paged_pool import PagePool
from agentkv.kv.paged_step import Turns
from agentkv.kv.paged_table import PageTable
from agentkv.kv.quantized import QuantizedLayout
from agentkv.kv.quantized_grids import Format
from agentkv.kv.quantized_segments import Segment
from agentkv.kv.quantized_step import Piece
from agentkv.kv.static import StaticLayout
from agentkv.testing.layouts import MakeLayout, layout_machine
from agentkv.types import KVGeometry, Placement, Span

SETTINGS = settings(max_examples=50, stateful_step_count=25)

TestDynamic = layout_machine(DynamicLayout).TestCase
TestDynamic.settings = SETTINGS

TestStatic = layout_machine(StaticLayout).TestCase
TestStatic.settings = SETTINGS


def paged(geometry: KVGeometry, device: torch.device) -> PagedLayout:
    return PagedLayout(geometry, device, page_tokens=8)


class PagedMachine(layout_machine(paged)):  # type: ignore[misc]
    def teardown(self) -> None:
        """Once all states are closed and all records gone, no page is in use."""
        super().teardown()
        self.live.clear()
        assert self.layout.nbytes == sum(pool.free for pool in self.layout.pools) == 0


TestPaged = PagedMachine.TestCase
TestPaged.settings = SETTINGS

TestOffloaded = layout_machine(OffloadedLayout).TestCase
TestOffloaded.settings = SETTINGS

TestOffloadedPaged = layout_machine(lambda geometry, device: OffloadedLayout(geometry, device, paged)).TestCase
TestOffloadedPaged.settings = SETTINGS


def quantized(bits: int, inner: MakeLayout, kind: type[QuantizedLayout] = QuantizedLayout) -> MakeLayout:
    """So few recent tokens and so small groups that a run of the machine quantises, cuts and merges many."""

    class Small(kind):  # type: ignore[misc, valid-type]
        name = lossy = f"quantized:int{bits}"
        format = Format(bits, group_tokens=8, segment_tokens=32)
        sink_tokens, recent_tokens = 4, 16

    return lambda geometry, device: Small(geometry, device, inner)


class QuantizedPagedMachine(layout_machine(quantized(4, paged))):  # type: ignore[misc]
    def teardown(self) -> None:
        super().teardown()
        self.live.clear()
        self.layout.sweep()
        assert self.layout.inner.nbytes == 0


TestQuantizedInt8 = layout_machine(quantized(8, DynamicLayout)).TestCase
TestQuantizedInt8.settings = settings(SETTINGS, max_examples=15)
TestQuantizedInt4 = layout_machine(quantized(4, DynamicLayout)).TestCase
TestQuantizedInt4.settings = settings(SETTINGS, max_examples=15)
TestQuantizedStatic = layout_machine(quantized(4, StaticLayout)).TestCase
TestQuantizedStatic.settings = settings(SETTINGS, max_examples=15)
TestQuantizedPaged = QuantizedPagedMachine.TestCase
TestQuantizedPaged.settings = settings(SETTINGS, max_examples=15)


def test_parts_of_groups_that_stay_exact_are_foretold() -> None:
    """An eviction, or positions that count anew, cut a group before it is old: the rest of it is not quantised."""
    machine = layout_machine(quantized(4, DynamicLayout))()
    state = machine.first(tokens=95)
    machine.foretold_turn(state=state, counts=[62], room=49, sinks=None, slack=1, seed=0, back=False)
    machine.foretold_turn(state=state, counts=[60, 61], room=0, sinks=0, slack=1, seed=0, back=False)
    machine.states_equal_their_naive_ones()


# -- controls: each breaks one promise, and must be found --------------------------------------------------------------


class KeysNotTurned(DynamicKV):
    def _deltas(self, placement: Placement, held: Sequence[Span]) -> list[tuple[int, int]]:
        return [(tokens, 0) for tokens, _ in super()._deltas(placement, held)]


class WritesIntoTheFork(DynamicKV):
    def fork(self) -> ContiguousKV:
        twin = super().fork()
        for side in (self, twin):
            for buffers in side._groups:
                buffers.shared = False
        return twin


class ForgetsWhatWasEvicted(DynamicKV):
    def rollback(self, undo: Undo) -> None:
        for part in undo.evicted:
            for tensor in (*part.block.keys, *part.block.values):
                tensor.zero_()
        super().rollback(undo)


class WritesIntoCaptures(DynamicKV):
    def _take_back(self) -> None:
        pass


class ReadsTurnedKeys(DynamicKV):
    def read(self, group: int, span: Span) -> KVBlock:
        block, held = super().read(group, span), self.placement.kept
        buffers = self.buffers(group)
        if buffers.group.window is None and held:
            lo = sum(len(h) for h in held if h.stop <= span.start)
            lo += sum(span.start - h.start for h in held if h.start <= span.start < h.stop)
            return KVBlock(tuple(k[:, lo : lo + len(span)] for k in buffers.keys), block.values)
        return block


class NeverRebases(DynamicKV):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._rebase_at = 10**9


class WindowBehindTheFloor(DynamicKV):
    def skip(self, ids: Sequence[int]) -> None:
        super().skip(ids)
        for buffers in self._groups:
            if buffers.group.window is not None:
                buffers.base = max(0, self.length - 1)


class WritesIntoTheSharedPage(PageTable):
    def reserve(self, tokens: int) -> None:
        writable, self.pool.writable = self.pool.writable, lambda page, slot: True
        super().reserve(tokens)
        self.pool.writable = writable


class RecordsThatHoldNothing(PagePool):
    def hold(self, pages: Sequence[int], fill: int) -> None:
        pass

    def drop(self, pages: Sequence[int]) -> None:
        pass


def broken_paged(
    table: type[PageTable] = PageTable, pool: type[PagePool] = PagePool, step: type[PagedLayout] = PagedLayout
) -> MakeLayout:
    class Broken(step):  # type: ignore[misc, valid-type]
        def open(self, tokens: int = 0, limit: int | None = None) -> PagedKV:
            kv: PagedKV = super().open(tokens, limit)
            kv._tables = [table(each) for each in self.pools]
            return kv

    def make(geometry: KVGeometry, device: torch.device) -> Layout[Any]:
        layout = Broken(geometry, device, page_tokens=8)
        layout.pools = [pool(group, torch.float32, device, 8) for group in geometry.groups]
        return layout

    return make


class TurnsTooFar(PagedLayout):
    def _turns(self, index: int, deltas: list[tuple[int, int]]) -> tuple[int, Turns]:
        return super()._turns(index, [(tokens, delta + 1 if delta else 0) for tokens, delta in deltas])


class SeesOlderTokensTooFarOn(QuantizedLayout):
    def expand(self, layer: int, pieces: Sequence[Piece], *out: torch.Tensor) -> None:
        super().expand(layer, [replace(p, position=p.position + 1) if p.segment.lossy else p for p in pieces], *out)


class DropsTheZero(QuantizedLayout):
    def expand(self, layer: int, pieces: Sequence[Piece], *out: torch.Tensor) -> None:
        super().expand(layer, [replace(p, segment=self._dropped(p.segment)) for p in pieces], *out)

    @staticmethod
    def _dropped(segment: Segment) -> Segment:
        if not segment.lossy:
            return segment
        parts = [replace(p, key_grid=(p.key_grid[0], torch.zeros_like(p.key_grid[1]))) for p in segment.parts]
        return replace(segment, parts=tuple(parts))


class MovesSinksWithTheRest(QuantizedLayout):
    """Exact segments are where they were computed: evictions turn them on."""

    def expand(self, layer: int, pieces: Sequence[Piece], *out: torch.Tensor) -> None:
        super().expand(layer, [replace(p, deltas=()) for p in pieces], *out)


class FetchesIntoOneBuffer(Prefetcher):
    def _of(self, layer: int) -> Any:
        return self._buffers[0]


def broken_staging(geometry: KVGeometry, device: torch.device) -> Layout[Any]:
    layout = OffloadedLayout(geometry, device)
    layout._prefetcher = FetchesIntoOneBuffer(torch.float32, device)
    return layout


def broken(kind: type[DynamicKV]) -> MakeLayout:
    class Broken(DynamicLayout):
        def open(self, tokens: int = 0, limit: int | None = None) -> DynamicKV:
            return kind(self.geometry, self.device, self.rebase_at, tokens, limit)

    def make(geometry: KVGeometry, device: torch.device) -> Layout[Any]:
        return Broken(geometry, device)

    return make


CONTROLS = (
    {
        kind.__name__: broken(kind)
        for kind in (
            KeysNotTurned,
            WritesIntoTheFork,
            ForgetsWhatWasEvicted,
            WritesIntoCaptures,
            ReadsTurnedKeys,
            NeverRebases,
            WindowBehindTheFloor,
        )
    }
    | {
        "WritesIntoTheSharedPage": broken_paged(table=WritesIntoTheSharedPage),
        "RecordsThatHoldNothing": broken_paged(pool=RecordsThatHoldNothing),
        "FetchesIntoOneBuffer": broken_staging,
        "TurnsTooFar": broken_paged(step=TurnsTooFar),
    }
    | {
        kind.__name__: quantized(8, DynamicLayout, kind)
        for kind in (SeesOlderTokensTooFarOn, DropsTheZero, MovesSinksWithTheRest)
    }
)


@pytest.mark.parametrize("name", sorted(CONTROLS))
def test_the_suite_finds(name: str) -> None:
    quick = settings(
        max_examples=200,
        stateful_step_count=25,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, IndexError)):  # a pool that was told lies may run out of its own list first
        run_state_machine_as_test(layout_machine(CONTROLS[name]), settings=quick)
