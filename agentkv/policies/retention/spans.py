"""Arithmetic on held spans: half-open, in ascending order, disjoint."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from agentkv.types import Span

__all__ = ["clip", "last", "merged", "tokens"]


def tokens(spans: Iterable[Span]) -> int:
    """How many tokens ``spans`` hold."""
    return sum(len(span) for span in spans)


def clip(spans: Sequence[Span], to: Span) -> tuple[Span, ...]:
    """The part of ``spans`` that lies in ``to``."""
    found = []
    for i in range(bisect_right(spans, to.start, key=lambda span: span.stop), len(spans)):
        if spans[i].start >= to.stop:
            break
        found.append(spans[i].intersect(to))
    return tuple(found)


def last(spans: Sequence[Span], count: int) -> tuple[Span, ...]:
    """The last ``count`` tokens of ``spans``: all where they hold fewer, none where ``count`` is below one."""
    found: list[Span] = []
    for span in reversed(spans):
        if count <= 0:
            break
        found.append(Span(max(span.start, span.stop - count), span.stop))
        count -= len(found[-1])
    return tuple(reversed(found))


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same tokens, each once and in order, whatever the order of ``spans``: what touches or overlaps is one."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and len(span) and span.start <= found[-1].stop:
            found[-1] = Span(found[-1].start, max(found[-1].stop, span.stop))
        elif len(span):
            found.append(span)
    return tuple(found)
