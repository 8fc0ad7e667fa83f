"""The groups of a block's numbers that share a grid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from agentkv.codecs.contract import KVBlock

if TYPE_CHECKING:
    import torch

__all__ = ["Shape", "pieces", "spans"]

_SUMMED = 32768
"""Numbers of a head."""
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


def pieces(shape: Shape) -> Iterator[tuple[slice, slice, int]]:
    """The tokens in equal runs, and those of the last one where it is shorter: tokens, runs, tokens a run."""
    whole, rest = divmod(shape.tokens, shape.run)
    if whole:
        yield slice(0, whole * shape.run), slice(0, whole), shape.run
    if rest:
        yield slice(whole * shape.run, shape.tokens), slice(whole, whole + 1), rest


def spans(shape: Shape, dim: int, device: torch.device) -> Iterator[slice]:
    """The tokens, so many whole runs at a time as sums are made over: what sums round off is in payloads.

    On a GPU at most two spans.
    """
    for tokens, _, run in pieces(shape):
        room = _SUMMED // dim if device.type == "cpu" else shape.tokens
        length = max(1, room // shape.run) * run
        for start in range(tokens.start, tokens.stop, length):
            yield slice(start, min(start + length, tokens.stop))
