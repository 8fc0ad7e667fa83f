"""Pages of one layer group, from which all sessions of a layout take theirs.

    slab 0   keys[layer]  [pages · page_tokens, Hkv, D]      page ids 0 … 7
    slab 1   keys[layer]  [pages · page_tokens, Hkv, D]      page ids 8 … 11

The pool grows by slabs and gives trailing ones back: a live page never moves, so the model thread may use its pages
while other threads take, share and free theirs. Low ids are handed out first, which keeps trailing slabs free.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentkv.types import LayerGroup

__all__ = ["PagePool", "Rows", "Slab"]


@dataclass(slots=True, eq=False)
class Slab:
    """Tensors of ``pages`` pages from id ``first`` on: one a layer, ``[pages · page_tokens, Hkv, D]``."""

    first: int
    pages: int
    keys: list[Tensor]
    values: list[Tensor]
    taken: int = 0


Rows = tuple[Slab, int, int]
"""``(slab, row, tokens)``: consecutive rows of a slab's tensors."""


class PagePool:
    """Who uses which page: ``users`` are states, ``holds`` undo records. A page without either is free."""

    def __init__(self, group: LayerGroup, dtype: torch.dtype, device: torch.device, page_tokens: int) -> None:
        self.group = group
        self.page_tokens = page_tokens
        self.page_nbytes = page_tokens * group.values_per_token * dtype.itemsize
        self._dtype, self._device = dtype, device
        self._lock = threading.Lock()
        self._slabs: list[Slab] = []
        self._of: list[Slab] = []
        """Slab by page id."""
        self._free: list[int] = []
        self._users: list[int] = []
        self._holds: list[int] = []
        self._held_to: list[int] = []
        """Slots of the page before this one may be wanted by an undo record."""
        self._dropped: deque[Sequence[int]] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs, free pages included."""
        with self._lock:
            self._settle()
            return len(self._of) * self.page_nbytes

    @property
    def free(self) -> int:
        """Pages that nobody uses."""
        with self._lock:
            self._settle()
            return len(self._free)

    # -- taking and giving back ---------------------------------------------------------------------------------------

    def take(self, pages: int) -> list[int]:
        """That many pages, each with one user. Their content is undefined."""
        with self._lock:
            self._settle()
            if pages > len(self._free):
                self._grow(pages - len(self._free))
            return self._taken([heapq.heappop(self._free) for _ in range(pages)])

    def take_run(self, pages: int) -> list[int]:
        """The same with consecutive ids in one slab, so that their rows are consecutive too."""
        with self._lock:
            self._settle()
            run = self._run(pages)
            if run is None:
                self._grow(pages)
                run = self._run(pages)
            assert run is not None
            chosen = set(run)
            self._free = [page for page in self._free if page not in chosen]  # sorted by _run: still a heap
            return self._taken(run)

    def _run(self, pages: int) -> list[int] | None:
        self._free.sort()
        start = 0
        for i, page in enumerate(self._free):
            if i and (page != self._free[i - 1] + 1 or self._of[page] is not self._of[page - 1]):
                start = i
            if i - start + 1 >= pages:
                return self._free[i - pages + 1 : i + 1]
        return None if pages else []

    def _taken(self, pages: list[int]) -> list[int]:
        for page in pages:
            self._users[page] = 1
            self._of[page].taken += 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more user of each."""
        with self._lock:
            for page in pages:
                self._users[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One user of each less."""
        with self._lock:
            self._settle()
            for page in pages:
                self._users[page] -= 1
                self._free_if_unused(page)
            self._shrink()

    def hold(self, pages: Sequence[int], fill: int) -> None:
        """An undo record wants these: the last one's slots before ``fill``, all slots of the others."""
        with self._lock:
            for i, page in enumerate(pages):
                self._holds[page] += 1
                to = self.page_tokens if i + 1 < len(pages) else fill
                self._held_to[page] = max(self._held_to[page], to)

    def drop(self, pages: Sequence[int]) -> None:
        """Ends a ``hold``, at the next call. Takes no lock: garbage collection may come here from anywhere."""
        self._dropped.append(pages)

    def writable(self, page: int, slot: int) -> bool:
        """Whether its only user may write from ``slot`` on without anybody else seeing it."""
        return self._users[page] == 1 and self._held_to[page] <= slot

    def rows(self, page: int, lo: int, hi: int) -> Rows:
        """Slots ``[lo, hi)`` of a page, as rows of its slab."""
        slab = self._of[page]
        return slab, (page - slab.first) * self.page_tokens + lo, hi - lo

    def copy(self, page: int, tokens: int) -> int:
        """A page of one user with the same first ``tokens`` slots."""
        (twin,) = self.take(1)
        source, a, _ = self.rows(page, 0, tokens)
        target, b, _ = self.rows(twin, 0, tokens)
        for old, new in ((source.keys, target.keys), (source.values, target.values)):
            for x, y in zip(old, new, strict=True):
                y[b : b + tokens] = x[a : a + tokens]
        return twin

    # -- with the lock held -------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        while self._dropped:
            for page in self._dropped.popleft():
                self._holds[page] -= 1
                if not self._holds[page]:
                    self._held_to[page] = 0
                self._free_if_unused(page)
        self._shrink()

    def _free_if_unused(self, page: int) -> None:
        if not self._users[page] and not self._holds[page]:
            heapq.heappush(self._free, page)
            self._of[page].taken -= 1

    def _grow(self, pages: int) -> None:
        pages = max(pages, len(self._of) // 4)
        group, first = self.group, len(self._of)
        rows = pages * self.page_tokens

        def empty(dim: int) -> list[Tensor]:
            shape = (rows, group.kv_heads, dim)
            return [torch.empty(shape, dtype=self._dtype, device=self._device) for _ in group.layers]

        slab = Slab(first, pages, empty(group.key_dim), empty(group.value_dim))
        self._slabs.append(slab)
        for numbers in (self._users, self._holds, self._held_to):
            numbers.extend([0] * pages)
        self._of.extend([slab] * pages)
        for page in range(first, first + pages):
            heapq.heappush(self._free, page)

    def _shrink(self) -> None:
        """Give trailing slabs back that nobody uses any more."""
        before = len(self._slabs)
        while self._slabs and not self._slabs[-1].taken:
            slab = self._slabs.pop()
            for numbers in (self._users, self._holds, self._held_to, self._of):
                del numbers[slab.first :]
        if len(self._slabs) < before:
            self._free = [page for page in self._free if page < len(self._of)]
            heapq.heapify(self._free)

    def check_integrity(self) -> None:
        """``AssertionError`` where counts and free list disagree."""
        with self._lock:
            self._settle()
            free = set(self._free)
            assert len(free) == len(self._free), "a page is free twice"
            assert len(self._of) == sum(slab.pages for slab in self._slabs)
            for page, (users, holds) in enumerate(zip(self._users, self._holds, strict=True)):
                assert users >= 0 and holds >= 0 and (page in free) == (not users and not holds), (page, users, holds)
            for slab in self._slabs:
                assert slab.taken == sum(p not in free for p in range(slab.first, slab.first + slab.pages)), slab.first
