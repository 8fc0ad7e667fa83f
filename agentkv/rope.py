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
    from torch import Tensor

__all__ = ["Rotation", "rotate"]


@dataclass(frozen=True, slots=True)
class Rotation:
    """How the first ``2 · len(frequencies)`` dimensions of a key turn with its position; the others do not.

    ``frequencies``: radians a position, one a pair. Pairs are ``(i, i + n)`` for n frequencies, or ``(2i, 2i + 1)``
    where ``interleaved``.
    """

    frequencies: tuple[float, ...]
    interleaved: bool = False


def rotate(keys: Tensor, deltas: Sequence[tuple[int, int]], rotation: Rotation) -> Tensor:
    """``keys [H, T, D]`` moved on by whole positions; a new tensor of the same dtype, rounded once.

    ``deltas``: ``(tokens, delta)`` in order, their tokens add up to T. Computed in float32 (float64 keys: in float64)
    from float64 angles.
    """
    import torch

    n = len(rotation.frequencies)
    if sum(tokens for tokens, _ in deltas) != keys.shape[1] or 2 * n > keys.shape[2]:
        raise ValueError(f"keys {tuple(keys.shape)} do not fit {list(deltas)} and {n} frequencies")
    frequencies = torch.tensor(rotation.frequencies, dtype=torch.float64)
    wide = torch.promote_types(keys.dtype, torch.float32)
    cos, sin = [], []
    for tokens, delta in deltas:
        angles = frequencies * delta
        cos.append(torch.cos(angles).to(wide).expand(tokens, n))
        sin.append(torch.sin(angles).to(wide).expand(tokens, n))
    cosines, sines = torch.cat(cos).to(keys.device), torch.cat(sin).to(keys.device)
    out = keys.clone()
    if rotation.interleaved:
        x, y = keys[..., 0 : 2 * n : 2].to(wide), keys[..., 1 : 2 * n : 2].to(wide)
        out[..., 0 : 2 * n : 2] = (x * cosines - y * sines).to(keys.dtype)
        out[..., 1 : 2 * n : 2] = (x * sines + y * cosines).to(keys.dtype)
    else:
        x, y = keys[..., :n].to(wide), keys[..., n : 2 * n].to(wide)
        out[..., :n] = (x * cosines - y * sines).to(keys.dtype)
        out[..., n : 2 * n] = (x * sines + y * cosines).to(keys.dtype)
    return out
