"""A turn as an engine runs it, with the memory that a layout foretold for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agentkv.kv.contract import Evictions, Layout, SequenceKV
from agentkv.kv.turning import turned_of
from agentkv.types import Placement

__all__ = ["evictions_of", "watched_turn"]


def evictions_of(placement: Placement, window: int, sinks: int | None, new: int, rebase_at: int) -> Evictions | None:
    """What a turn of ``new`` tokens may need beside what it holds, under a policy that keeps ``sinks`` first tokens and
    the last ones (``None``: any). As residency reckons it."""
    if placement.tokens + new <= window and placement.trivial:
        return None
    turned = max(turned_of(placement), max(window, placement.tokens) if sinks is None else sinks)
    rebases = bool(placement.bases) or placement.next_position + new > rebase_at
    return Evictions(new, turned, scattered=sinks is None, rebases=rebases)


def watched_turn(
    layout: Layout[Any],
    kv: SequenceKV,
    counts: Sequence[int],
    window: int,
    keep: Callable[[], None],
    step: Callable[[int], None],
    foretold: int,
) -> None:
    """Steps of ``counts`` new tokens, cut where ``window`` tokens are held: ``keep`` evicts then, ``step`` computes.

    ``AssertionError`` where more than ``foretold`` bytes are reserved at any time.
    """

    def check(when: str) -> None:
        assert kv.nbytes <= foretold, f"{kv.nbytes} bytes {when}, {foretold} were foretold"

    check("with the undo record")
    for count in counts:
        while count:
            if kv.tokens >= window:
                keep()
                check("after an eviction")
            n = min(count, window - kv.tokens, layout.piece_tokens)
            step(n)
            check(f"after a step of {n} tokens")
            count -= n
