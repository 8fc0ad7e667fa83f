"""Write-behind: live KV to chunk files, then to the manifest.

A turn that ends at ``r`` stores the tokens that the manifest does not have yet. Under a lossless codec they are cut on
the ledger like this::

    0          pinned                             r
    |  chunk   |  chunk (256)  | … |  chunk (≤256) |
               ^ resume point                      ^ resume point

Under a lossy one the last tokens are stored losslessly, and *sealed* once they are far enough behind the end: encoded
with the lossy codec, from live KV that never went through one, in place of the lossless segments::

    0  16      pinned                 sealed      ≥128    r
    |ex|lossy  |  lossy (256)  | … |  lossy (256)  | exact |

A token is encoded with loss once, whatever follows; the first 16 (attention sinks), sliding windows, and what a live
layout holds with loss already are always stored as they are.

Full groups are stored for every token that is held. Sliding groups (and recurrent ones, whose state is a window of one
token) only where a chunk overlaps the window before a resume point; what overlaps several windows is stored once, from
the latest. What a policy evicted is not stored any more: chunks end at its borders, and where positions jump.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from agentkv.codecs import Codec
from agentkv.codecs.spared import LOSSLESS_TAIL, SINKS
from agentkv.kv.contract import CapturedPart, SequenceKV
from agentkv.sessions.db.records import Manifest, ResumePoint, SegmentRecord
from agentkv.storage.chunkfile import MAX_CHUNK_TOKENS, Part
from agentkv.types import Placement, Span, union, without

__all__ = ["Snapshot", "take_snapshot"]


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """KV as it was at the end of a turn, safe to read while the session goes on.

    ``span``: what the manifest does not have yet. ``sealed``: chunks to be encoded with loss, of it or of what is
    stored losslessly; ``plain``: the other chunks of ``span``. ``ids``: the ledger up to ``span.stop``. ``full``: what
    the full groups hold (views). ``windows``: the sliding groups (copies) before resume points; ``kinds`` names those
    points. ``placement``: of the whole state.
    """

    span: Span
    sealed: tuple[Span, ...]
    plain: tuple[Span, ...]
    ids: array[int]
    full: tuple[CapturedPart, ...]
    windows: Mapping[int, tuple[CapturedPart, ...]]
    kinds: Mapping[int, str]
    placement: Placement

    def spans(self) -> list[Span]:
        """Its chunks, in ledger order."""
        return sorted((*self.sealed, *self.plain))

    def points(self) -> list[ResumePoint]:
        """Its resume points, in order."""
        last = None if self.placement.trivial else self.placement
        return sorted(ResumePoint(p, kind, last if p == self.span.stop else None) for p, kind in self.kinds.items())

    def void(self) -> Span | None:
        """Older resume points inside lose a sliding window that was stored where sealed chunks are going to be."""
        reach = max((len(part.span) for parts in self.windows.values() for part in parts), default=0)
        if not reach or not self.sealed or self.sealed[0].start >= self.span.start:
            return None
        return Span(self.sealed[0].start, self.sealed[-1].stop + reach)

    def needed(self) -> list[Span]:
        """What must stay stored to restore its last resume point, full and sliding groups."""
        windows = [part.span for part in self.windows[self.span.stop]]
        return [*self.placement.kept, *windows]

    def manifest(self, chunk_ids: Sequence[str]) -> Manifest:
        """What its chunks, in ledger order, add to a manifest."""
        segments = tuple(SegmentRecord(name, span) for name, span in zip(chunk_ids, self.spans(), strict=True))
        return Manifest(segments, tuple(self.points()))

    def parts(self, span: Span, codec: Codec, lossless: Codec) -> list[Part]:
        """The parts of the chunk ``span``, by group and in ledger order, each with what encodes it."""
        pieces = [span]
        if span in self.sealed and span.start < SINKS:
            sinks = span.intersect(Span(0, SINKS))
            pieces = [sinks, *without(span, [sinks])]
        parts = [
            _slice(part, piece, codec if span in self.sealed and piece.stop > SINKS else lossless)
            for part in self.full
            if part.span.intersect(span) == span
            for piece in pieces
        ]
        covered: dict[int, int] = {}
        for point in sorted(self.windows, reverse=True):
            for captured in self.windows[point]:
                limit = covered.get(captured.group, span.stop)
                wanted = captured.span.intersect(Span(span.start, limit))
                if len(wanted):
                    parts.append(_slice(captured, wanted, lossless))
                    covered[captured.group] = wanted.start
        return sorted(parts, key=lambda part: (part.group, part.span))


def take_snapshot(
    kv: SequenceKV,
    stored: int,
    sealed: int,
    pinned: int,
    early: Mapping[int, tuple[CapturedPart, ...]],
    *,
    seal: bool,
) -> Snapshot | None:
    """What of ``kv`` lies behind ``stored``; ``None`` when nothing does. Call while no turn runs on the session.

    ``seal``: whether what is far enough behind the end is encoded with loss, from ``sealed`` on: up to there it was.
    ``early``: windows captured when the prefill passed a resume point. Where something before the point was evicted
    since, there is nothing to resume from.
    """
    span = Span(stored, kv.length)
    if not len(span):
        return None
    placement = kv.placement
    whole = placement.whole_prefix
    windows = {point: parts for point, parts in early.items() if (sealed if seal else stored) < point <= whole}
    windows[span.stop] = kv.window_snapshot()
    kinds = dict.fromkeys(windows, "prefix") | {span.stop: "commit"}
    chunks = tuple(_sealable(kv, sealed, pinned, windows)) if seal else ()
    plain = tuple(_plain(span, chunks, placement, pinned, windows.values()))
    first = min(stored, chunks[0].start) if chunks else stored
    full = kv.capture(Span(first, span.stop))
    return Snapshot(span, chunks, plain, array("i", kv.ids), full, windows, kinds, placement)


def _sealable(
    kv: SequenceKV, sealed: int, pinned: int, windows: Mapping[int, tuple[CapturedPart, ...]]
) -> Iterator[Span]:
    """Chunks from ``sealed`` on that are complete and far enough behind the end.

    Those that hold the sliding windows of a resume point which is not at hand any more stay as they are.
    """
    placement, last = kv.placement, kv.length - LOSSLESS_TAIL
    if all(group.window is not None for group in kv.geometry.groups):
        return
    reach = max((group.window or 0 for group in kv.geometry.groups), default=0)
    untouched = [*kv.lossy]
    if reach and pinned not in windows:
        untouched.append(Span(max(0, pinned - reach), pinned))
    held = (kept.intersect(Span(sealed, kv.length)) for kept in placement.kept)
    for run in placement.runs(span for span in held if len(span)):
        for chunk in _cut(run, [pinned]):
            complete = len(chunk) == MAX_CHUNK_TOKENS or chunk.stop in (pinned, run.stop)
            if chunk.stop > last or not complete:
                return
            if not any(len(chunk.intersect(span)) for span in untouched):
                yield chunk


def _plain(
    span: Span,
    sealed: Sequence[Span],
    placement: Placement,
    pinned: int,
    windows: Iterable[tuple[CapturedPart, ...]],
) -> Iterator[Span]:
    """What else of ``span`` is stored, cut into chunks.

    The pinned prefix ends its own chunk. A chunk is held by all full groups or by none, and its positions are
    consecutive.
    """
    held = [kept.intersect(span) for kept in placement.kept]
    sliding = [part.span.intersect(span) for parts in windows for part in parts]
    cuts = [pinned, *(border for part in held for border in part)]
    for run in placement.runs(union([*held, *sliding])):
        for rest in without(run, sealed):
            yield from _cut(rest, cuts)


def _cut(span: Span, cuts: Iterable[int]) -> Iterator[Span]:
    """``span`` in chunks that end at ``cuts``."""
    inner = sorted({cut for cut in cuts if span.start < cut < span.stop})
    for start, stop in zip([span.start, *inner], [*inner, span.stop], strict=True):
        yield from Span(start, stop).split(MAX_CHUNK_TOKENS)


def _slice(part: CapturedPart, span: Span, codec: Codec) -> Part:
    return Part(part.group, span, part.block.cut(span.start - part.span.start, span.stop - part.span.start), codec)
