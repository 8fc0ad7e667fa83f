"""Live KV written down as plainly as it can be: what every layout must equal.

It keeps each key ever computed together with its position, and attends with a masked softmax written out in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentkv.codecs import KVBlock
from agentkv.kv.contract import AttentionTraits, SequenceKV
from agentkv.kv.placed import lineage_after
from agentkv.rope import Rotation, rotate
from agentkv.types import KVGeometry, LayerGroup, Placement, Span

__all__ = ["GEOMETRY", "QUERY_HEADS", "NaiveKV", "same_block"]

QUERY_HEADS = 4
GEOMETRY = KVGeometry(
    groups=(
        LayerGroup((0, 3, 5), None, 2, 6, 4),
        LayerGroup((1,), 5, 1, 4, 4),
        LayerGroup((2, 4), 24, 4, 2, 2),
    ),
    dtype="float32",
    rotations=(
        Rotation((1.0, 0.3)),
        Rotation((0.9, 0.02)),
        Rotation((0.7,), interleaved=True),
        Rotation((0.8, 0.05, 0.01), interleaved=True),
        None,
        None,
    ),
)
"""A full group whose layers turn half-split, interleaved and not at all, and two sliding ones. Two dimensions of layer
0 do not turn."""


@dataclass(eq=False)
class NaiveKV:
    """``kv``: per layer all keys ``[Hkv, n, Dk]`` and values ``[Hkv, n, Dv]``, by ledger index, NaN where skipped."""

    geometry: KVGeometry = GEOMETRY
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    """Ledger indices that full-attention layers hold."""
    next_position: int = 0
    floor: int = 0
    lineage: str = ""
    evicted_at: int = 0
    """Ledger position of the last eviction."""
    reached: int = 0
    """Most tokens since sliding groups were last made anew."""
    lossy: set[int] = field(default_factory=set)
    """Ledger indices whose KV in full-attention layers is what a layout made of it: see ``adopt``."""
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for group in self.geometry.groups:
            for layer in group.layers:
                empty = (torch.empty(group.kv_heads, 0, dim) for dim in (group.key_dim, group.value_dim))
                self.kv.setdefault(layer, (next(empty), next(empty)))

    def copy(self) -> NaiveKV:
        """The same state; tensors are never written to, so they may be shared."""
        return NaiveKV(
            self.geometry, list(self.ids), list(self.positions), list(self.held), self.next_position, self.floor,
            self.lineage, self.evicted_at, self.reached, set(self.lossy), dict(self.kv),
        )  # fmt: skip

    # -- what is held -------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Ledger tokens gone through."""
        return len(self.ids)

    @property
    def kept(self) -> tuple[Span, ...]:
        """``held`` as spans."""
        return tuple(_spans(self.held))

    def window(self, group: LayerGroup, length: int | None = None) -> Span:
        """What a query at ``length`` or later may see of a sliding group."""
        assert group.window is not None
        length = self.length if length is None else length
        return Span(min(length, max(self.floor, length - group.window)), length)

    def runs(self, group: LayerGroup) -> list[Span]:
        """What of the group can be seen, cut where ledger or position jumps."""
        indices = self.held if group.window is None else list(range(*self.window(group)))
        runs: list[Span] = []
        for span in _spans(indices):
            start = span.start
            for i in range(span.start + 1, span.stop):
                if self.positions[i] != self.positions[i - 1] + 1:
                    runs.append(Span(start, i))
                    start = i
            runs.append(Span(start, span.stop))
        return runs

    def block(self, group: LayerGroup, span: Span) -> KVBlock:
        """What was computed for ``span``."""
        lo, hi = span
        pairs = [self.kv[layer] for layer in group.layers]
        return KVBlock(tuple(k[:, lo:hi] for k, _ in pairs), tuple(v[:, lo:hi] for _, v in pairs))

    def agrees(self, placement: Placement) -> bool:
        """Whether a layout says the same about what is held, and where."""
        return (
            placement.length == self.length
            and placement.kept == self.kept
            and placement.floor == self.floor
            and placement.lineage == self.lineage
            and placement.next_position == self.next_position
            and all(placement.position_of(i) == self.positions[i] for i in self.held)
        )

    # -- changes ------------------------------------------------------------------------------------------------------

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Of one step's new tokens, before ``advance``."""
        k, v = self.kv[layer]
        self.kv[layer] = torch.cat([k, keys], 1), torch.cat([v, values], 1)

    def advance(self, ids: Sequence[int]) -> None:
        """The tokens appended to all layers are part of the state."""
        self.held.extend(range(self.length, self.length + len(ids)))
        self.positions.extend(range(self.next_position, self.next_position + len(ids)))
        self.ids.extend(ids)
        self.next_position += len(ids)
        self.reached = max(self.reached, self.length)

    def keep(self, spans: Sequence[Span], rebase_at: int) -> None:
        """See ``SequenceKV.keep``."""
        self.held = [i for span in spans for i in range(*span)]
        if self.next_position > rebase_at:
            self.next_position = len(self.held)
        self.lineage = lineage_after(self.lineage, "keep", self.length, self.kept)
        self.evicted_at = self.length

    def skip(self, ids: Sequence[int]) -> None:
        """See ``SequenceKV.skip``."""
        for layer, (k, v) in self.kv.items():
            nothing = [t.new_full((t.shape[0], len(ids), t.shape[2]), float("nan")) for t in (k, v)]
            self.append(layer, *nothing)
        self.positions.extend([-1] * len(ids))
        self.ids.extend(ids)
        self.floor = self.evicted_at = self.reached = self.length
        self.lineage = lineage_after(self.lineage, "skip", self.length, self.kept)

    def crop(self, length: int) -> None:
        """See ``SequenceKV.crop``."""
        self.next_position -= self.length - length
        self.held = [i for i in self.held if i < length]
        self.lossy = {i for i in self.lossy if i < length}
        self.kv = {layer: (k[:, :length], v[:, :length]) for layer, (k, v) in self.kv.items()}
        del self.ids[length:], self.positions[length:]

    def adopt(self, kv: SequenceKV) -> None:
        """Take over what ``kv`` made of tokens that it holds with loss since the last call, once it is within bounds.

        From then on they must stay what they are.
        """
        for group in self.geometry.groups:
            if group.window is not None:
                continue
            index = self.geometry.groups.index(group)
            for lossy in kv.lossy:
                assert set(range(*lossy)) <= set(self.held), f"{lossy} is not held"
                fresh = _spans([i for i in range(*lossy) if i not in self.lossy])
                for span in (common for run in self.runs(group) for new in fresh if len(common := run.intersect(new))):
                    self._take(group, span, kv.read(index, span), kv.bound(index, span))  # type: ignore[attr-defined]
        self.lossy |= {i for span in kv.lossy for i in range(*span)}

    def _take(self, group: LayerGroup, span: Span, found: KVBlock, bound: KVBlock) -> None:
        for at, layer in enumerate(group.layers):
            taken = []
            for exact, new, off in zip(self.kv[layer], (found.keys[at], found.values[at]),
                                       (bound.keys[at], bound.values[at]), strict=True):  # fmt: skip
                old = exact[:, span.start : span.stop].double()
                assert bool(((new.double() - old).abs() <= off).all()), f"{span} of layer {layer} is out of bounds"
                assert float(off.max()) <= float(old.abs().max()), "a bound that allows anything"
                taken.append(torch.cat([exact[:, : span.start], new.to(exact.dtype), exact[:, span.stop :]], 1))
            self.kv[layer] = (taken[0], taken[1])

    # -- attention ----------------------------------------------------------------------------------------------------

    def attend(self, layer: int, queries: Tensor, traits: AttentionTraits) -> Tensor:
        """``queries [Hq, T, Dk]`` of the T tokens appended last → ``[T, Hq, Dv]``.

        What is held lies directly before them: slot j of n is seen at position ``next_position - n + j``.
        """
        group = next(g for g in self.geometry.groups if layer in g.layers)
        tokens = queries.shape[1]
        past = self.held if group.window is None else list(range(*self.window(group)))
        indices = torch.tensor([*past, *range(self.length, self.length + tokens)], dtype=torch.long)
        keys, values = (t.double()[:, indices] for t in self.kv[layer])
        rotation = self.geometry.rotations[layer]
        if rotation is not None and past:
            seen = self.next_position - len(past)
            deltas = [(1, seen + j - self.positions[i]) for j, i in enumerate(past)]
            keys = torch.cat([rotate(keys[:, : len(past)], deltas, rotation), keys[:, len(past) :]], 1)
        query = torch.arange(len(past), len(past) + tokens)[:, None]
        key = torch.arange(len(past) + tokens)[None, :]
        hidden = key > query
        if group.window is not None:
            hidden |= key <= query - group.window
        repeat = queries.shape[0] // group.kv_heads
        scores = queries.double() @ keys.repeat_interleave(repeat, 0).transpose(1, 2) * traits.scaling
        if traits.softcap is not None:
            scores = traits.softcap * torch.tanh(scores / traits.softcap)
        weights = scores.masked_fill(hidden, float("-inf")).exp()
        bottom = weights.sum(-1, keepdim=True)
        if traits.sinks is not None:
            bottom = bottom + traits.sinks.double().exp()[:, None, None]
        out = (weights / bottom) @ values.repeat_interleave(repeat, 0)
        return out.transpose(0, 1).to(queries.dtype)


def same_block(a: KVBlock, b: KVBlock) -> bool:
    """Bit for bit, but for NaN payloads."""
    pairs = zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True)
    return all(x.shape == y.shape and torch.equal(x, y) for x, y in pairs)


def _spans(indices: Sequence[int]) -> list[Span]:
    spans: list[Span] = []
    for i in indices:
        if spans and spans[-1].stop == i:
            spans[-1] = Span(spans[-1].start, i + 1)
        else:
            spans.append(Span(i, i + 1))
    return spans
