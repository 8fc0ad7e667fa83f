"""The ``paged`` layout: pages from one pool a layer group, block tables, forks that copy nothing until one side writes.

Pages hold keys as they were computed; attention turns them where evictions moved them. An eviction copies nothing: it
gives whole pages back, and what is kept of others stays where it is. An undo record holds pages, not copies.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from agentkv.codecs import KVBlock
from agentkv.kv.contiguous import to_cpu
from agentkv.kv.contract import LAYOUTS, CapturedPart, Evictions, SequenceKV, Undo
from agentkv.kv.foretelling import new_tokens
from agentkv.kv.paged_pool import PagePool
from agentkv.kv.paged_step import PagedStepping
from agentkv.kv.paged_table import PageTable, Piece, distinct
from agentkv.kv.placed import PlacedKV, merged, slices
from agentkv.types import KVGeometry, Placement, Span

__all__ = ["PagedKV", "PagedLayout", "PagedUndo"]


@dataclass(frozen=True, slots=True)
class _Held:
    """One group's table when the record was made; ``drop`` ends the hold on its pages."""

    pieces: tuple[Piece, ...]
    fill: int
    base: int
    page_nbytes: int
    drop: weakref.finalize[Any, Any]


@dataclass(slots=True, weakref_slot=True, eq=False)
class PagedUndo(Undo):
    """Holds the pages of its time, one entry a layer group, until it is settled (sliding groups: until it is gone)."""

    tables: list[_Held] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(len(distinct(held.pieces)) * held.page_nbytes for held in self.tables if held.drop.alive)


class PagedKV(PlacedKV):
    """One session's tables, one a layer group."""

    def __init__(self, geometry: KVGeometry, rebase_at: int, pools: Sequence[PagePool]) -> None:
        super().__init__(geometry, rebase_at)
        self._tables = [PageTable(pool) for pool in pools]
        self._undo: PagedUndo | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all pages that it or its open undo record uses; those shared with a fork count on both sides."""
        total = 0
        for index, table in enumerate(self._tables):
            pages = {*table.pages, *table.spare}
            if self._undo is not None:
                pages.update(distinct(self._undo.tables[index].pieces))
            total += len(pages) * table.pool.page_nbytes
        return total

    def table(self, group: int) -> PageTable:
        """The pages of one group, for the layout."""
        return self._tables[group]

    def held(self, group: int) -> tuple[Span, ...]:
        """Ledger positions of the table's tokens, in order."""
        table = self._tables[group]
        if self.geometry.groups[group].window is None:
            return self.placement.kept
        return (Span(table.base, table.base + table.tokens),) if table.tokens else ()

    def deltas(self, held: Sequence[Span]) -> list[tuple[int, int]]:
        """How far each run of ``held`` is turned when it is attended: ``(tokens, delta)``."""
        return self._deltas(self.placement, held)

    def end_page(self) -> None:
        """The next token starts a page, so that what is held so far can stay shared or be kept in whole pages."""
        self._check_open()
        for table in self._tables:
            table.fill = table.pool.page_tokens

    # -- growing ------------------------------------------------------------------------------------------------------

    def reserve(self, tokens: int) -> None:
        self._check_open()
        for group, table in zip(self.geometry.groups, self._tables, strict=True):
            if group.window is not None:
                table.trim(self._window_start(group, self.length) - table.base)
            table.reserve(tokens)

    def advance(self, ids: Sequence[int]) -> None:
        super().advance(ids)
        for table in self._tables:
            table.extend(len(ids))

    def skip(self, ids: Sequence[int]) -> None:
        self._check_open()
        self._pass_over(ids)
        for group, table in zip(self.geometry.groups, self._tables, strict=True):
            if group.window is not None:
                table.select(())
                table.base = self.length

    # -- forgetting ---------------------------------------------------------------------------------------------------

    def keep(self, spans: Sequence[Span]) -> None:
        self._check_open()
        kept = merged(spans)
        slots = slices(self.placement.kept, kept)  # refuses what is not held
        self._set(self._after_keep(kept))
        for group, table in zip(self.geometry.groups, self._tables, strict=True):
            if group.window is None:
                table.select(slots)

    def crop(self, length: int) -> None:
        self._check_open()
        self._check_crop(length)
        for group, table in zip(self.geometry.groups, self._tables, strict=True):
            if table.base > self._window_start(group, length):
                raise ValueError(f"cannot crop to {length}: {group.name} has nothing before {table.base}")
        del self._ids[length:]
        for group, table in zip(self.geometry.groups, self._tables, strict=True):
            table.truncate(self.tokens if group.window is None else length - table.base)

    # -- undo ---------------------------------------------------------------------------------------------------------

    def undo_record(self) -> Undo:
        self._check_open()
        self.settle()
        record = PagedUndo(self.placement, ())
        for table in self._tables:
            pages = table.pages
            table.pool.hold(pages, table.fill)
            drop = weakref.finalize(record, table.pool.drop, pages)
            drop.atexit = False
            record.tables.append(_Held(tuple(table.pieces), table.fill, table.base, table.pool.page_nbytes, drop))
        self._undo = record
        self._marked = (self._past, self._grows)
        return record

    def settle(self) -> None:
        if self._undo is None:
            return
        for group, held in zip(self.geometry.groups, self._undo.tables, strict=True):
            if group.window is None:
                held.drop()
        self._undo = None

    def rollback(self, undo: Undo) -> None:
        self._check_open()
        then = undo.placement
        moved = self._check_rollback(then)
        if moved and undo is not self._undo:
            raise ValueError("tokens were evicted since, and this is not the open undo record")
        assert isinstance(undo, PagedUndo)
        self._roll_back(then, moved)
        for group, table, held in zip(self.geometry.groups, self._tables, undo.tables, strict=True):
            wanted = 0 if group.window is None else self._window_start(group, then.length)
            if moved or table.base > wanted:
                table.adopt(held.pieces, held.fill, held.base)
            else:
                table.truncate(then.tokens if group.window is None else then.length - table.base)

    # -- storing and restoring ----------------------------------------------------------------------------------------

    def capture(self, span: Span) -> tuple[CapturedPart, ...]:
        self._check_open()
        self._check_capture(span)
        full = [i for i, group in enumerate(self.geometry.groups) if group.window is None]
        return tuple(
            CapturedPart(index, run, to_cpu(self.read(index, run))) for run in self._held_runs(span) for index in full
        )

    def window_snapshot(self) -> tuple[CapturedPart, ...]:
        self._check_open()
        sliding = [i for i, group in enumerate(self.geometry.groups) if group.window is not None]
        return tuple(
            CapturedPart(index, run, to_cpu(self.read(index, run))) for index in sliding for run in self.visible(index)
        )

    def read(self, group: int, span: Span) -> KVBlock:
        self._check_open()
        ((lo, hi),) = slices(self.held(group), (span,))
        return self._tables[group].copies(lo, hi)

    def place(self, placement: Placement, room: int = 0) -> None:
        """Room is taken a page at a time, when it is needed: ``room`` takes none ahead."""
        self._check_open()
        self._place(placement)
        for group, table in zip(self.geometry.groups, self._tables, strict=True):
            base = self._window_start(group, placement.length)
            table.lay_out(placement.tokens if group.window is None else placement.length - base, base)

    def target(self, group: int, span: Span) -> KVBlock:
        self._check_open()
        ((lo, hi),) = slices(self.held(group), (span,))
        return self._tables[group].views(lo, hi)

    def restored(self, ids: Sequence[int]) -> None:
        self._check_open()
        self._check_restored(ids)
        self.crop(len(ids))
        self._ids = array("i", ids)

    # -- life ---------------------------------------------------------------------------------------------------------

    def fork(self) -> PagedKV:
        self._check_open()
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._ids = array("i", self._ids)
        twin._undo = None
        twin._tables = [table.fork() for table in self._tables]
        return twin

    def close(self) -> None:
        self._forget()
        self.settle()
        for table in self._tables:
            table.clear()

    def check_integrity(self) -> None:
        self._check_placement()
        for group, table in zip(self.geometry.groups, self._tables, strict=True):
            table.check_integrity(self.tokens if group.window is None else self.length - table.base)
            assert table.base <= self._window_start(group, self.length), (group.name, table.base, self.length)
            assert group.window is not None or table.base == 0, table.base
            table.pool.check_integrity()


@LAYOUTS.register("paged")
class PagedLayout(PagedStepping):
    """Live KV in shared pages; see the module's docstring."""

    name = "paged"
    page_tokens: int = 256

    def __init__(self, geometry: KVGeometry, device: torch.device, page_tokens: int | None = None) -> None:
        super().__init__(geometry, device)
        if page_tokens is not None:
            self.page_tokens = page_tokens
        dtype: torch.dtype = getattr(torch, geometry.dtype)
        self.pools = [PagePool(group, dtype, device, self.page_tokens) for group in geometry.groups]

    @property
    def nbytes(self) -> int:
        """Bytes of all pools, free pages included."""
        return sum(pool.nbytes for pool in self.pools)

    def open(self, tokens: int = 0, limit: int | None = None) -> PagedKV:
        """An empty state. Pages are taken when they are needed: ``tokens`` takes none ahead."""
        return PagedKV(self.geometry, self.rebase_at, self.pools)

    def bytes_needed(
        self, kv: SequenceKV | None, tokens: int, limit: int | None = None, evictions: Evictions | None = None
    ) -> int:
        """Pages that it has stay its own until the turn cannot be taken back: new ones come to them."""
        total = kv.nbytes if isinstance(kv, PagedKV) else 0
        new = new_tokens(kv, tokens, evictions)
        for index, (group, pool) in enumerate(zip(self.geometry.groups, self.pools, strict=True)):
            table = kv.table(index) if isinstance(kv, PagedKV) else PageTable(pool)
            if group.window is None:
                most = tokens
                if evictions is not None and evictions.scattered:
                    most *= 4  # pages with few tokens left in them: a quarter, say
                elif evictions is not None and kv is None:
                    most *= 2  # first what is restored, then what is new
                live = min(new, most)
            else:
                live = min(new, group.window + self.piece_tokens)
                if kv is None:  # the record holds the window that was restored
                    live += min(group.window, tokens)
            pages = max(0, -(-(live - table.room) // self.page_tokens))
            # Where a page is shared it is copied; a cut, or the window's start, may fall inside one.
            pages += table.shared_page + (evictions is not None or group.window is not None)
            total += pages * pool.page_nbytes
        return total
