"""A state that holds another layout's: what it does not do itself the inner one does."""

from __future__ import annotations

from collections.abc import Sequence

from agentkv.codecs import KVBlock
from agentkv.kv.contract import CapturedPart, SequenceKV, Undo
from agentkv.types import KVGeometry, Placement, Span

__all__ = ["WrappedKV"]


class WrappedKV(SequenceKV):
    """``inner`` is the wrapper's alone."""

    def __init__(self, geometry: KVGeometry, inner: SequenceKV) -> None:
        self.geometry = geometry
        self.inner = inner

    @property
    def limit(self) -> int | None:
        return self.inner.limit

    @limit.setter
    def limit(self, tokens: int | None) -> None:
        self.inner.limit = tokens

    @property
    def length(self) -> int:
        return self.inner.length

    @property
    def ids(self) -> Sequence[int]:
        return self.inner.ids

    @property
    def placement(self) -> Placement:
        return self.inner.placement

    @property
    def tokens(self) -> int:
        return self.inner.tokens

    @property
    def next_position(self) -> int:
        return self.inner.next_position

    @property
    def closed(self) -> bool:
        return self.inner.closed

    def reserve(self, tokens: int) -> None:
        self.inner.reserve(tokens)

    def advance(self, ids: Sequence[int]) -> None:
        self.inner.advance(ids)

    def keep(self, spans: Sequence[Span]) -> None:
        self.inner.keep(spans)

    def skip(self, ids: Sequence[int]) -> None:
        self.inner.skip(ids)

    def crop(self, length: int) -> None:
        self.inner.crop(length)

    def undo_record(self) -> Undo:
        return self.inner.undo_record()

    def rollback(self, undo: Undo) -> None:
        self.inner.rollback(undo)

    def settle(self) -> None:
        self.inner.settle()

    def capture(self, span: Span) -> tuple[CapturedPart, ...]:
        return self.inner.capture(span)

    def window_snapshot(self) -> tuple[CapturedPart, ...]:
        return self.inner.window_snapshot()

    def visible(self, group: int) -> tuple[Span, ...]:
        return self.inner.visible(group)

    def read(self, group: int, span: Span) -> KVBlock:
        return self.inner.read(group, span)

    def place(self, placement: Placement, room: int = 0) -> None:
        self.inner.place(placement, room)

    def target(self, group: int, span: Span) -> KVBlock:
        return self.inner.target(group, span)

    def filled(self, group: int, span: Span) -> None:
        self.inner.filled(group, span)

    def restored(self, ids: Sequence[int]) -> None:
        self.inner.restored(ids)

    def close(self) -> None:
        self.inner.close()

    def check_integrity(self) -> None:
        self.inner.check_integrity()
