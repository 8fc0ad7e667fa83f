"""One packed step over quantised live KV: older tokens are expanded a segment at a time, beside what is held exactly.

    queries of one session  attend  [ sinks | segment | segment | … ]  [ exact recent tokens | the step's own ]
                                      one scratch after the other        the inner layout's, gathered

The parts are merged by log-sum-exp. Layers with a sliding window, and sessions without older tokens, are the inner
layout's own: their bits are the same as without quantising.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from agentkv.kv.contract import AttentionTraits, Layout, Slot
from agentkv.kv.quantized_attention import Partial
from agentkv.kv.quantized_grids import Format
from agentkv.kv.quantized_segments import Segment
from agentkv.kv.shares import Gathers, Share
from agentkv.kv.stepping import joined
from agentkv.rope import Rotation, angles, turn
from agentkv.types import KVGeometry

if TYPE_CHECKING:
    from agentkv.kv.quantized_state import QuantizedKV

__all__ = ["Piece", "QuantizedPlan", "QuantizedStepping", "chunks"]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Tokens ``[lo, hi)`` of a segment, whole runs. ``position``: where the first is wanted, the others behind it.

    ``deltas``: how far keys that were not turned back are turned, ``(tokens, delta)``; empty for not at all.
    """

    segment: Segment
    lo: int
    hi: int
    position: int
    deltas: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> int:
        """How many."""
        return self.hi - self.lo


def chunks(pieces: Sequence[Piece], tokens: int) -> Iterator[list[Piece]]:
    """``pieces``, in order, in those that lie between the same multiples of ``tokens`` in the ledger."""
    for _, chunk in groupby(pieces, lambda piece: piece.segment.span.start // tokens):
        yield list(chunk)


@dataclass(slots=True)
class QuantizedPlan:
    """``inner``: the inner layout's plan. ``older``: what of each slot is expanded, a scratch after the other.

    ``new``: keys and values of layers that were written and are to be attended.
    """

    inner: list[Share]
    older: list[list[list[Piece]]]
    new: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class QuantizedStepping(Layout[QuantizedPlan]):
    """What quantised layouts do in a step. Only the model's thread calls ``plan``, ``write`` and ``attend``."""

    inner: Layout[Any]
    format: Format

    def __init__(self, geometry: KVGeometry, device: torch.device) -> None:
        super().__init__(geometry, device)
        self._where = {
            layer: (index, position)
            for index, group in enumerate(geometry.groups)
            for position, layer in enumerate(group.layers)
        }
        self.full = [i for i, group in enumerate(geometry.groups) if group.window is None]
        self.dtype: torch.dtype = getattr(torch, geometry.dtype)
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self._scratch: dict[str, Tensor] = {}
        self._turns: dict[Rotation, tuple[Tensor, Tensor]] = {}

    @property
    def staging_nbytes(self) -> int:
        """Bytes of what all sessions share: the scratch and the table of angles, as they are now."""
        shared = [*self._scratch.values(), *(t for pair in self._turns.values() for t in pair)]
        return sum(t.numel() * t.element_size() for t in shared)

    def plan(self, slots: Sequence[Slot]) -> QuantizedPlan:
        states = [cast("QuantizedKV", slot.kv) for slot in slots]
        unwrapped = [Slot(kv.inner, slot.start, slot.stop) for kv, slot in zip(states, slots, strict=True)]
        return QuantizedPlan(self.inner.plan(unwrapped), [kv.older() for kv in states])

    def write(self, layer: int, keys: Tensor, values: Tensor, meta: QuantizedPlan) -> None:
        self.inner.write(layer, keys, values, meta.inner)
        if self._where[layer][0] in self.full and any(meta.older):
            meta.new[layer] = (keys, values)

    def attend(self, layer: int, queries: Tensor, meta: QuantizedPlan, traits: AttentionTraits) -> Tensor:
        if layer not in meta.new:
            return self.inner.attend(layer, queries, meta.inner, traits)
        keys, values = meta.new.pop(layer)
        outputs = []
        for share, older in zip(meta.inner, meta.older, strict=True):
            if not older:
                outputs.append(self.inner.attend(layer, queries, [share], traits)[: share.tokens])
                continue
            part = Partial(queries.narrow(1, share.start, share.tokens), traits)
            for chunk in older:
                part.add(*self._expanded(layer, chunk))
            part.add(*self._recent(layer, share, keys, values), share.groups[self._where[layer][0]].reach)
            outputs.append(part.result())
        return joined(outputs, queries.shape[1])

    def _recent(self, layer: int, share: Share, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What the slot holds exactly, and its new tokens: ``[Hkv, past + T, D]``."""
        group = self._where[layer][0]
        past = share.groups[group].reach.past
        found = []
        for new in (keys, values):
            out = new.new_empty((new.shape[0], past + share.tokens, new.shape[2]), dtype=self.dtype)
            out[:, past:] = new.narrow(1, share.start, share.tokens)
            found.append(out)
        if past:
            cast(Gathers, self.inner).gather(layer, share, found[0][:, :past], found[1][:, :past])
        return found[0], found[1]

    # -- expanding ----------------------------------------------------------------------------------------------------

    def _expanded(self, layer: int, pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
        """In the scratch: valid until the next call."""
        group = self.geometry.groups[self._where[layer][0]]
        tokens = sum(piece.tokens for piece in pieces)
        wide = [
            self._room(f"wide {name}", group.kv_heads, tokens, dim, self.wide)
            for name, dim in (("keys", group.key_dim), ("values", group.value_dim))
        ]
        self.expand(layer, pieces, *wide)
        if self.wide == self.dtype:
            return wide[0], wide[1]
        keys, values = (
            self._room(name, t.shape[0], tokens, t.shape[2], self.dtype).copy_(t)
            for name, t in zip(("keys", "values"), wide, strict=True)
        )
        return keys, values

    def _room(self, name: str, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Tensor:
        numbers = heads * tokens * dim
        if name not in self._scratch or self._scratch[name].numel() < numbers:
            with torch.inference_mode(False):
                self._scratch[name] = torch.empty(
                    heads * self.format.segment_tokens * dim, dtype=dtype, device=self.device
                )
        return self._scratch[name][:numbers].view(heads, tokens, dim)

    def expand(self, layer: int, pieces: Sequence[Piece], keys: Tensor, values: Tensor) -> None:
        """``pieces`` one after the other into ``keys [Hkv, t, Dk]`` and ``values [Hkv, t, Dv]``, float32 or wider."""
        index, position = self._where[layer]
        group = self.full.index(index)
        rotation = self.geometry.rotations[layer] if self.geometry.rotations else None
        at = 0
        for piece in pieces:
            k, v = keys.narrow(1, at, piece.tokens), values.narrow(1, at, piece.tokens)
            piece.segment.expand(group, position, piece.lo, piece.hi, k, v)
            at += piece.tokens
            if rotation is None:
                continue
            if piece.segment.turned_back:
                turn(k, *self.angles(rotation, piece.position, piece.tokens), rotation.interleaved)
            elif piece.deltas:
                cos, sin = angles(piece.deltas, rotation, self.wide)
                turn(k, cos.to(self.device), sin.to(self.device), rotation.interleaved)

    def angles(self, rotation: Rotation, position: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions ``[position, position + tokens)``, from a table that all sessions share."""
        table = self._turns.get(rotation)
        stop = position + tokens
        if table is None or table[0].shape[0] < stop:
            size = max(1024, -(-stop // 1024) * 1024, 0 if table is None else table[0].shape[0] * 5 // 4)
            with torch.inference_mode(False):
                cos, sin = angles([(1, p) for p in range(size)], rotation, self.wide)
                table = cos.to(self.device), sin.to(self.device)
            self._turns[rotation] = table
        return table[0][position:stop], table[1][position:stop]
