"""Rotary position embeddings: keys moved to another position without computing them again.

RoPE (https://arxiv.org/abs/2104.09864) turns each pair of a key's dimensions by ``position · frequency``. A key made at
position p and turned on by Δ is the key at p + Δ. Angles are made in float64: float32 is off by a hundredth of a
radian at 100,000 positions. The turn has unit modulus: a model's own attention factor (YaRN) is in the key already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Rotation", "angles", "rotate", "turn"]


@dataclass(frozen=True, slots=True)
class Rotation:
    """How the first ``2 · len(frequencies)`` dimensions of a key turn with its position; the others do not.

    ``frequencies``: radians a position, one a pair. Pairs are ``(i, i + n)`` for n frequencies, or ``(2i, 2i + 1)``
    where ``interleaved``.
    """

    frequencies: tuple[float, ...]
    interleaved: bool = False


def angles(deltas: Sequence[tuple[int, int]], rotation: Rotation, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[T, n]`` for ``deltas``: ``(tokens, delta)`` in order, T tokens together.

    Made in float64, given in the dtype that keys of ``dtype`` are turned in: float32, or wider where they are.
    """
    import torch

    counts = torch.tensor([tokens for tokens, _ in deltas])
    by = torch.tensor([delta for _, delta in deltas], dtype=torch.float64)
    each = by[:, None] * torch.tensor(rotation.frequencies, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    return torch.cos(each).to(wide).repeat_interleave(counts, 0), torch.sin(each).to(wide).repeat_interleave(counts, 0)


def turn(keys: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Turn ``keys [..., D]`` in place by angles ``[..., n]`` that broadcast with them; rounded once."""
    n = cos.shape[-1]
    first, second = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if interleaved else (slice(n), slice(n, 2 * n))
    x, y = keys[..., first].to(cos.dtype), keys[..., second].to(cos.dtype)
    a, b = x * cos - y * sin, x * sin + y * cos
    keys[..., first], keys[..., second] = a.to(keys.dtype), b.to(keys.dtype)


def rotate(keys: Tensor, deltas: Sequence[tuple[int, int]], rotation: Rotation) -> Tensor:
    """``keys [H, T, D]`` moved on by whole positions; a new tensor of the same dtype, rounded once.

    ``deltas``: ``(tokens, delta)`` in order, their tokens add up to T.
    """
    n = len(rotation.frequencies)
    if sum(tokens for tokens, _ in deltas) != keys.shape[1] or 2 * n > keys.shape[2]:
        raise ValueError(f"keys {tuple(keys.shape)} do not fit {list(deltas)} and {n} frequencies")
    out = keys.clone()
    if n and deltas:
        cos, sin = angles(deltas, rotation, keys.dtype)
        turn(out, cos.to(keys.device), sin.to(keys.device), rotation.interleaved)
    return out
