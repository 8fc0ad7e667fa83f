"""Plain values shared by every floor. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from agentkv.rope import Rotation

__all__ = [
    "ExportReport",
    "Fingerprints",
    "FinishReason",
    "ImportReport",
    "KVGeometry",
    "LayerGroup",
    "Placement",
    "RestoreReport",
    "SessionState",
    "Span",
    "StateShape",
    "SuspendReport",
    "Tier",
    "Usage",
    "union",
    "without",
]

FinishReason = Literal["stop", "length", "tool_calls"]

_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_WIDEST = 2**15
"""Numbers in a row of a recurrent group's block."""


class Span(NamedTuple):
    """Half-open interval ``[start, stop)`` of ledger positions."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def intersect(self, other: Span) -> Span:
        """The common part; empty (length 0) where there is none."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def split(self, size: int) -> Iterator[Span]:
        """Consecutive spans of at most ``size`` tokens."""
        for start in range(self.start, self.stop, size):
            yield Span(start, min(start + size, self.stop))


def union(spans: Iterable[Span]) -> list[Span]:
    """The same positions in as few spans as possible, in order; overlaps count once."""
    found: list[Span] = []
    for span in sorted(span for span in spans if len(span)):
        if found and span.start <= found[-1].stop:
            found[-1] = Span(found[-1].start, max(found[-1].stop, span.stop))
        else:
            found.append(Span(*span))
    return found


def without(span: Span, holes: Iterable[Span]) -> Iterator[Span]:
    """What of ``span`` lies in none of ``holes``, which are in order."""
    at = span.start
    for hole in holes:
        common = span.intersect(hole)
        if len(common):
            if common.start > at:
                yield Span(at, common.start)
            at = common.stop
    if at < span.stop:
        yield Span(at, span.stop)


class Tier(StrEnum):
    """Where a session's KV state is."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class SessionState(StrEnum):
    """``new`` has no KV yet; ``live`` is on the device; the two ``-ing`` states are transitions under way."""

    NEW = "new"
    LIVE = "live"
    DEMOTING = "demoting"
    HOST = "host"
    DISK = "disk"
    RESTORING = "restoring"


class StateShape(NamedTuple):
    """One tensor that a recurrent layer carries from token to token: ``kind`` ``conv`` or ``recurrent``, its ``number``
    among those of that kind in its layer, its shape for one session, and its torch dtype's name."""

    kind: str
    number: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * _ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose KV has the same shape and the same reach.

    ``window`` is ``None`` for full attention, else the number of keys a query sees, itself included.
    ``states``: what each of its layers carries, where they are recurrent. Such a group has a window of one token: its
    "keys" and "values" at ``r - 1`` are the two halves of the state's bytes at ``r``, as numbers of the model's dtype.
    """

    layers: tuple[int, ...]
    window: int | None
    kv_heads: int
    key_dim: int
    value_dim: int
    states: tuple[StateShape, ...] = ()

    @classmethod
    def recurrent(cls, layers: tuple[int, ...], states: tuple[StateShape, ...], itemsize: int) -> LayerGroup:
        """Layers that all carry ``states``, in a model whose numbers have ``itemsize`` bytes."""
        half = -(-sum(state.nbytes for state in states) // (2 * itemsize))
        rows = -(-half // _WIDEST)
        width = -(-half // rows)
        return cls(layers, 1, rows, width, width, states)

    @property
    def name(self) -> str:
        """``full``, ``sliding:W`` or ``recurrent``, with the shape where it matters: unique within one geometry."""
        reach = "recurrent" if self.states else "full" if self.window is None else f"sliding:{self.window}"
        return f"{reach}:{self.kv_heads}x{self.key_dim}x{self.value_dim}"

    @property
    def values_per_token(self) -> int:
        """Numbers (not bytes) that one token occupies over all layers of the group, keys and values together."""
        return len(self.layers) * self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shapes of a model's KV state: its layer groups and the torch dtype name (``bfloat16``, ``float32`` …).

    ``rotations``: how each layer's keys turn with their position (``None``: not at all), in layer order.
    ``fixed``: why keys cannot be moved to another position, so that nothing may be evicted; ``None`` where they can.
    Neither takes part in comparison: both follow from what the KV fingerprint covers. Recurrent groups come last; a
    layer that attends and is recurrent is in two groups.
    """

    groups: tuple[LayerGroup, ...]
    dtype: str
    rotations: tuple[Rotation | None, ...] = field(default=(), compare=False)
    fixed: str | None = field(default=None, compare=False)

    @property
    def itemsize(self) -> int:
        """Bytes a number."""
        return _ITEMSIZE[self.dtype]

    @property
    def recurrent(self) -> tuple[int, ...]:
        """Indices of the recurrent groups."""
        return tuple(index for index, group in enumerate(self.groups) if group.states)

    @property
    def attention(self) -> KVGeometry:
        """The same without its recurrent groups."""
        return replace(self, groups=tuple(group for group in self.groups if not group.states))

    def nbytes(self, tokens: int) -> int:
        """Bytes that ``tokens`` consecutive tokens need; sliding groups hold at most their window."""
        return self.itemsize * sum(
            g.values_per_token * (tokens if g.window is None else min(tokens, g.window)) for g in self.groups
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """Which ledger positions a KV state holds, and at which positions their keys were computed.

    The state has gone through ``length`` ledger tokens and holds those in ``kept`` (full-attention layers; sliding
    ones hold their last window in any case, though nothing before ``floor``). ``bases``: ``(index, base)`` in order:
    tokens from ledger ``index`` on were computed at position ``ledger index - base``. ``lineage``: digest of the
    evictions so far, ``""`` for none.
    """

    length: int = 0
    kept: tuple[Span, ...] = ()
    bases: tuple[tuple[int, int], ...] = ()
    lineage: str = ""
    floor: int = 0

    @classmethod
    def whole(cls, length: int) -> Placement:
        """Everything, each token at its own ledger position."""
        return cls(length, (Span(0, length),) if length else ())

    @property
    def trivial(self) -> bool:
        """Whether nothing was ever evicted or moved."""
        return self == Placement.whole(self.length)

    @property
    def whole_prefix(self) -> int:
        """Tokens held from the ledger's start on, before the first gap."""
        return self.kept[0].stop if self.kept and self.kept[0].start == 0 else 0

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return sum(len(span) for span in self.kept)

    @property
    def next_position(self) -> int:
        """Position at which the next token is computed."""
        return self.length - (self.bases[-1][1] if self.bases else 0)

    def position_of(self, index: int) -> int:
        """Position at which ledger token ``index`` was computed."""
        base = 0
        for start, candidate in self.bases:
            if start > index:
                break
            base = candidate
        return index - base

    def runs(self, spans: Iterable[Span]) -> Iterator[Span]:
        """``spans``, cut where positions jump: within a run they are consecutive."""
        for span in spans:
            cuts = [index for index, _ in self.bases if span.start < index < span.stop]
            for start, stop in zip([span.start, *cuts], [*cuts, span.stop], strict=True):
                yield Span(start, stop)


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """``kv``: digest of what KV depends on. ``session``: digest of what the ledger depends on (DESIGN §2)."""

    kv: str
    session: str


@dataclass(frozen=True, slots=True)
class Usage:
    """``cached_tokens`` of the ``prompt_tokens`` were not computed by the engine in this turn."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """How a turn got its KV state.

    ``source``: ``new`` (nothing was stored), ``device``, ``host``, ``disk``, or ``recompute`` (stored KV existed or
    should have, none of it was usable). ``tokens`` of KV were reused from there; ``reason`` says why anything had to
    be recomputed, else ``None``. ``seconds`` is the time until the state was live; ``codec`` that of the chunks read.
    ``recompute``, where a session that evicts had tokens recomputed: ``replay`` computed the ledger again through the
    policy, which gives the state that was lost; ``retained`` computed the retained tokens alone, as if nothing had ever
    been between them.
    Of stored KV, ``estimated_restore_seconds`` and ``estimated_recompute_seconds`` say what either way was expected to
    take when it was chosen, ``None`` before anything was measured.
    """

    source: Literal["new", "device", "host", "disk", "recompute"]
    tokens: int
    seconds: float = 0.0
    codec: str | None = None
    reason: str | None = None
    recomputed_tokens: int = 0
    recompute: Literal["replay", "retained"] | None = None
    estimated_restore_seconds: float | None = None
    estimated_recompute_seconds: float | None = None

    @property
    def chosen(self) -> bool:
        """Whether what was stored was computed since that is faster; ``reason`` begins with ``cheaper``. No fault."""
        return self.reason is not None and self.reason.startswith("cheaper:")


@dataclass(frozen=True, slots=True)
class SuspendReport:
    """What one suspend did. ``nbytes``: the session's encoded bytes at rest; ``chunks_written``: new ones."""

    session_id: str
    tier: Tier
    nbytes: int
    seconds: float
    chunks_written: int
    tokens: int
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What one export wrote to ``path``: ``nbytes``, with ``tokens`` of ledger.

    Of the tokens that the session held, ``kv_tokens`` have their KV in the file, in ``chunks`` chunks. ``reason``: why
    that is not all of them, else ``None``; the others are computed where the file is imported.
    """

    session_id: str
    path: Path
    nbytes: int
    tokens: int
    kv_tokens: int
    chunks: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What one import made of a file: session ``session_id`` with ``tokens`` of ledger, a copy of ``imported_from``.

    Its next turn reuses the KV of ``kv_tokens``, of ``nbytes`` in ``chunks`` new chunks. ``reason``: why not of all
    that it had held, else ``None``; the others are computed.
    """

    session_id: str
    imported_from: str
    tokens: int
    kv_tokens: int
    chunks: int
    nbytes: int
    reason: str | None
