"""A block cut into tiles: few enough numbers to stay in a core's cache, and for torch not to start threads of its own.

Grids never straddle tiles: a tile holds whole runs of tokens. How a block is cut shows in no payload.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from agentkv.codecs.contract import KVBlock
from agentkv.rope import Rotation, angles, turn

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Shape", "Tile", "Turns", "rotations_of", "tiles"]

_CPU_NUMBERS = 32768
"""From more than this torch uses its own threads, which would get in the way of the caller's."""
_RUN, _GROUP = 64, 64


@dataclass(frozen=True, slots=True)
class Shape:
    """A block's shape and its groups: a key grid covers ``run`` tokens (the last one of ``runs`` maybe fewer), a value
    grid one of the ``groups`` equal parts of a token's channels. Both are near 64 numbers.
    """

    layers: int
    heads: int
    tokens: int
    key_dim: int
    value_dim: int
    run: int
    runs: int
    groups: int

    @classmethod
    def of(cls, block: KVBlock) -> Shape:
        """As it follows from the tensors of ``block``, and from nothing else."""
        heads, tokens, key_dim = block.keys[0].shape
        value_dim = block.values[0].shape[2]
        run = ceil(tokens / max(1, round(tokens / _RUN)))
        parts = [n for n in range(1, value_dim + 1) if value_dim % n == 0]
        groups = min(parts, key=lambda n: abs(value_dim // n - _GROUP))
        return cls(len(block.keys), heads, tokens, key_dim, value_dim, run, ceil(tokens / run), groups)


@dataclass(frozen=True, slots=True)
class Tile:
    """Heads and tokens ``[heads, tokens]`` of one layer: the token ``runs``, each of ``run`` tokens."""

    layer: int
    heads: slice
    tokens: slice
    runs: slice
    run: int


def tiles(shape: Shape, dim: int, device: torch.device) -> Iterator[Tile]:
    """Tiles of tensors ``[heads, tokens, dim]`` that cover ``shape``; on a GPU a layer is one tile, or two."""
    whole, rest = divmod(shape.tokens, shape.run)
    room = max(1, _CPU_NUMBERS // dim) if device.type == "cpu" else shape.heads * shape.tokens
    many = max(1, room // shape.run)
    spans = [(first, min(first + many, whole), shape.run) for first in range(0, whole, many)]
    spans += [(whole, whole + 1, rest)] if rest else []
    for layer in range(shape.layers):
        for first, last, run in spans:
            tokens = slice(first * shape.run, first * shape.run + (last - first) * run)
            heads = max(1, room // (tokens.stop - tokens.start))
            for head in range(0, shape.heads, heads):
                yield Tile(layer, slice(head, min(head + heads, shape.heads)), tokens, slice(first, last), run)


def rotations_of(block: KVBlock) -> tuple[Rotation | None, ...]:
    """One a layer."""
    return block.rotations or (None,) * len(block.keys)


class Turns:
    """Turns keys of a block, tile by tile, to its positions (``sense`` 1) or from them to position 0 (-1)."""

    def __init__(self, block: KVBlock, sense: int) -> None:
        import torch

        self._rotations = rotations_of(block)
        deltas = [(1, sense * p) for p in range(block.position, block.position + block.tokens)]
        device = block.keys[0].device
        self._angles = {
            r: tuple(t.to(device) for t in angles(deltas, r, torch.float32))
            for r in set(self._rotations)
            if r is not None and r.frequencies
        }

    def turn(self, keys: Tensor, tile: Tile) -> None:
        """``keys [heads, tokens, Dk]`` float32 of ``tile``, in place."""
        rotation = self._rotations[tile.layer]
        if rotation in self._angles:
            cos, sin = self._angles[rotation]
            turn(keys, cos[tile.tokens], sin[tile.tokens], rotation.interleaved)
