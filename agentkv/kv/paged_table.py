"""One session's pages in one layer group: the block table.

    pieces   (page 7, 0, 256) (page 2, 0, 40) (page 2, 90, 200)          tokens in order, in slots [lo, hi) of a page
    page 2   [ kept 0–39 | evicted | kept 90–199 | fill → free ]

What is kept stays where it was written; a page goes back to the pool once it holds no kept token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from agentkv.codecs import KVBlock
from agentkv.kv.paged_pool import PagePool, Rows

__all__ = ["PageTable", "Piece", "distinct"]

Piece = tuple[int, int, int]
"""``(page, lo, hi)``."""


@dataclass(slots=True, eq=False)
class PageTable:
    """See the module's docstring.

    ``fill``: where the last piece's page goes on; ``page_tokens`` where the next token starts a page. ``spare``: pages
    taken for tokens to come. ``base``: ledger position of the first token in a sliding group, 0 in a full one.
    """

    pool: PagePool
    pieces: list[Piece] = field(default_factory=list)
    tokens: int = 0
    fill: int = 0
    spare: list[int] = field(default_factory=list)
    base: int = 0

    def __post_init__(self) -> None:
        if not self.pieces:
            self.fill = self.pool.page_tokens

    @property
    def pages(self) -> list[int]:
        """The pages in use, each once, in order."""
        return distinct(self.pieces)

    @property
    def room(self) -> int:
        """Tokens that fit into pages already taken."""
        return (len(self.spare) + 1) * self.pool.page_tokens - self.fill

    @property
    def shared_page(self) -> bool:
        """Whether the next token belongs into a page that may not be written to there."""
        if not self.pieces or self.fill == self.pool.page_tokens:
            return False
        return not self.pool.writable(self.pieces[-1][0], self.fill)

    # -- growing ------------------------------------------------------------------------------------------------------

    def reserve(self, tokens: int) -> None:
        """Room for ``tokens`` more, in pages that nobody else sees; the shared last one is copied."""
        size = self.pool.page_tokens
        if not tokens:
            return
        if self.shared_page:
            old = self.pieces[-1][0]
            new = self.pool.copy(old, self.fill)
            self.pieces = [(new if page == old else page, lo, hi) for page, lo, hi in self.pieces]
            self.pool.release([old])
        if tokens > self.room:
            self.spare += self.pool.take(-(-(tokens - self.room) // size))

    def upcoming(self, tokens: int) -> list[Piece]:
        """Where the next ``tokens`` go, which were reserved."""
        size, pieces, fill, spare = self.pool.page_tokens, [], self.fill, iter(self.spare)
        page = self.pieces[-1][0] if self.pieces else -1
        while tokens:
            if fill == size:
                page, fill = next(spare), 0
            n = min(tokens, size - fill)
            pieces.append((page, fill, fill + n))
            fill, tokens = fill + n, tokens - n
        return pieces

    def extend(self, tokens: int) -> None:
        """They are there now."""
        for page, lo, hi in self.upcoming(tokens):
            if lo == 0:
                self.spare.remove(page)
            self._append(self.pieces, (page, lo, hi))
            self.fill = hi
        self.tokens += tokens

    @staticmethod
    def _append(pieces: list[Piece], piece: Piece) -> None:
        if pieces and pieces[-1][0] == piece[0] and pieces[-1][2] == piece[1]:
            pieces[-1] = (piece[0], pieces[-1][1], piece[2])
        else:
            pieces.append(piece)

    def lay_out(self, tokens: int, base: int) -> None:
        """An empty table gets ``tokens``, of undefined content, in consecutive rows."""
        assert not self.pieces
        size = self.pool.page_tokens
        pages = self.pool.take_run(-(-tokens // size))
        self.pieces = [(page, 0, min(size, tokens - i * size)) for i, page in enumerate(pages)]
        self.tokens, self.base = tokens, base
        self.fill = self.pieces[-1][2] if self.pieces else size

    # -- forgetting ---------------------------------------------------------------------------------------------------

    def select(self, slots: Iterable[tuple[int, int]]) -> None:
        """Only the tokens in these half-open ranges stay, in order."""
        pieces: list[Piece] = []
        for lo, hi in slots:
            for piece in self.cut(lo, hi):
                self._append(pieces, piece)
        # The last page goes on behind what was written to it, evicted or not: an undo record may want it back.
        fill = self.fill if pieces and pieces[-1][0] == self.pieces[-1][0] else self.pool.page_tokens
        self._set(pieces, fill)

    def truncate(self, tokens: int) -> None:
        """Only the first ``tokens`` stay."""
        kept, rest = list(self.cut(0, tokens)), list(self.cut(tokens, self.tokens))
        if rest:
            page, lo, _ = rest[0]
            self._set(kept, lo if kept and kept[-1][0] == page else self.pool.page_tokens)

    def trim(self, tokens: int) -> None:
        """The first ``tokens`` are not wanted any more; pages that hold nothing else go."""
        gone, at = 0, 0
        for i, (page, lo, hi) in enumerate(self.pieces):
            at += hi - lo
            if at > tokens:
                break
            if i + 1 < len(self.pieces) and self.pieces[i + 1][0] != page:
                gone = at
        if gone:
            self._set(list(self.cut(gone, self.tokens)), self.fill)
            self.base += gone

    def _set(self, pieces: list[Piece], fill: int) -> None:
        kept = set(distinct(pieces))
        gone = [page for page in self.pages if page not in kept]
        self.pieces, self.fill = pieces, fill
        self.tokens = sum(hi - lo for _, lo, hi in pieces)
        self.pool.release(gone)

    def clear(self) -> None:
        """No tokens, no spare pages."""
        spare, self.spare = self.spare, []
        self._set([], self.pool.page_tokens)
        self.pool.release(spare)
        self.base = 0

    # -- copies of the table, not of the pages ------------------------------------------------------------------------

    def fork(self) -> PageTable:
        """The same pages for another state."""
        self.pool.share(self.pages)
        return type(self)(self.pool, list(self.pieces), self.tokens, self.fill, [], self.base)

    def adopt(self, pieces: Sequence[Piece], fill: int, base: int) -> None:
        """Go back to what an undo record holds."""
        self.pool.share(distinct(pieces))
        self.pool.release(self.pages)
        self.pieces, self.fill, self.base = list(pieces), fill, base
        self.tokens = sum(hi - lo for _, lo, hi in pieces)

    # -- reading ------------------------------------------------------------------------------------------------------

    def cut(self, lo: int, hi: int) -> Iterable[Piece]:
        """The pieces of tokens ``[lo, hi)``."""
        at = 0
        for page, first, stop in self.pieces:
            a, b = max(lo, at), min(hi, at + stop - first)
            if a < b:
                yield page, first + a - at, first + b - at
            at += stop - first

    def rows(self, pieces: Iterable[Piece]) -> list[Rows]:
        """The pieces as rows of slabs, as few as possible."""
        found: list[Rows] = []
        for piece in pieces:
            slab, row, n = self.pool.rows(*piece)
            if found and found[-1][0] is slab and found[-1][1] + found[-1][2] == row:
                found[-1] = (slab, found[-1][1], found[-1][2] + n)
            else:
                found.append((slab, row, n))
        return found

    def views(self, lo: int, hi: int) -> KVBlock:
        """KV of tokens ``[lo, hi)``, which :meth:`lay_out` put into consecutive rows: to be written to."""
        ((slab, row, n),) = self.rows(self.cut(lo, hi))
        return KVBlock(
            tuple(k[row : row + n].transpose(0, 1) for k in slab.keys),
            tuple(v[row : row + n].transpose(0, 1) for v in slab.values),
        )

    def copies(self, lo: int, hi: int) -> KVBlock:
        """KV of tokens ``[lo, hi)``: contiguous tensors that share nothing with the pool."""
        rows = self.rows(self.cut(lo, hi))

        def gathered(layer: int, name: str) -> Tensor:
            parts = [getattr(slab, name)[layer][row : row + n] for slab, row, n in rows]
            tensor: Tensor = parts[0].new_empty((parts[0].shape[1], hi - lo, parts[0].shape[2]))
            at = 0
            for part in parts:
                tensor[:, at : at + part.shape[0]] = part.transpose(0, 1)
                at += part.shape[0]
            return tensor

        layers = range(len(self.pool.group.layers))
        return KVBlock(tuple(gathered(i, "keys") for i in layers), tuple(gathered(i, "values") for i in layers))

    def check_integrity(self, tokens: int) -> None:
        """``AssertionError`` where pieces and counters disagree; ``tokens`` are held."""
        size, name = self.pool.page_tokens, self.pool.group.name
        assert self.tokens == tokens == sum(hi - lo for _, lo, hi in self.pieces), (name, self.tokens, tokens)
        assert all(0 <= lo < hi <= size for _, lo, hi in self.pieces), (name, self.pieces)
        pages = self.pages
        assert len(set(pages) | set(self.spare)) == len(pages) + len(self.spare), (name, pages, self.spare)
        assert self.fill == size if not self.pieces else self.pieces[-1][2] <= self.fill <= size, (name, self.fill)


def distinct(pieces: Iterable[Piece]) -> list[int]:
    """Their pages, each once, in order: pieces of one page lie side by side."""
    pages: list[int] = []
    for page, _, _ in pieces:
        if not pages or pages[-1] != page:
            pages.append(page)
    return pages
