"""How each layer's keys turn with their position, found by looking: no model is taken at its word.

A probe runs the same tokens twice, all at position 0 and then at ``probe_positions``. Its attention hands values on
without mixing them, so that positions reach a layer's projections through their rotation only; where they come another
way, the values show it. A rotation is one of the model's own sets of frequencies (``…inv_freq`` buffers), paired the
one way or the other and turning the one way or the other, that makes every pair of the first keys that of the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentkv.rope import Rotation, rotate

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Projections", "candidates", "deviation", "find_rotations", "probe_positions"]

_NO_TURN = Rotation(())
_FARTHEST = 2**17
"""Beyond this position a model's own float32 angles are too coarse to be compared."""


@dataclass(frozen=True, slots=True)
class Projections:
    """What one layer's attention was given: queries ``[Hq, T, D]``, keys ``[Hkv, T, D]``, values ``[Hkv, T, Dv]``."""

    queries: Tensor
    keys: Tensor
    values: Tensor


def probe_positions(limit: int | None) -> tuple[int, ...]:
    """Positions below ``limit``, the last one among them: slow frequencies and scaled queries show only there."""
    end = min(limit or _FARTHEST, _FARTHEST)
    return tuple(sorted({p for p in (1, 7, 37, 211, 1501, end - 1) if 0 < p < end}))


def find_rotations(
    model: nn.Module,
    still: Mapping[int, Projections],
    moved: Mapping[int, Projections],
    positions: Sequence[int],
) -> tuple[tuple[Rotation | None, ...], str | None]:
    """``KVGeometry.rotations`` and ``KVGeometry.fixed`` from the same tokens at position 0 and at ``positions``."""
    known = candidates(model)
    rotations: list[Rotation | None] = [None] * (max(still) + 1)
    for layer in sorted(still):
        before, after = still[layer], moved[layer]
        if not _turns(before.values, after.values, positions, _NO_TURN):
            return (), "it has learned positions, added to its hidden states"
        fitting = (r for r in (_NO_TURN, *known) if _turns(before.keys, after.keys, positions, r))
        found = next(fitting, None) if before.keys.any() else None
        if found is None:
            return (), "its positions are not a rotation of the keys that agentkv knows"
        if not _turns(before.queries, after.queries, positions, found):
            return (), "its attention depends on absolute positions"
        rotations[layer] = found if found.frequencies else None
    return tuple(rotations), None


def candidates(model: nn.Module) -> tuple[Rotation, ...]:
    """Each set of frequencies among the model's buffers, in both pairings and senses (NanoChat turns backwards).

    Float64 of the numbers that the model computes with.
    """
    sets = {
        tuple(buffer.double().tolist()): None
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and buffer.ndim == 1
    }
    return tuple(
        Rotation(tuple(sense * f for f in frequencies), interleaved)
        for sense in (1.0, -1.0)
        for frequencies in sets
        for interleaved in (False, True)
    )


def deviation(before: Tensor, after: Tensor, positions: Sequence[int], rotation: Rotation) -> Tensor:
    """How far ``before [H, T, D]``, turned on from position 0, is from ``after``: ``[T]``, each token's worst pair.

    Relative to that pair's own length: a few large dimensions (biases of Qwen 2) hide nothing. Infinite where the
    rotation does not fit the shape.
    """
    if 2 * len(rotation.frequencies) > before.shape[2]:
        return torch.full((before.shape[1],), torch.inf, dtype=torch.float64)
    before, after = before.double().cpu(), after.double().cpu()
    turned = _pairs(rotate(before, [(1, p) for p in positions], rotation), rotation)
    target = _pairs(after, rotation)
    floor = (0.02 * before.square().mean().sqrt()).clamp_min(torch.finfo(torch.float64).tiny)
    return ((turned - target).abs() / target.abs().maximum(floor)).amax(dim=(0, 2))


def _turns(before: Tensor, after: Tensor, positions: Sequence[int], rotation: Rotation) -> bool:
    """Whether the deviation is rounding: of the dtype, and of the model's float32 angles far out."""
    rounding = max(1e-4, 4 * torch.finfo(before.dtype).eps)
    bound = torch.tensor([rounding + 2e-7 * p for p in positions], dtype=torch.float64)
    return bool((deviation(before, after, positions, rotation) <= bound).all())


def _pairs(x: Tensor, rotation: Rotation) -> Tensor:
    """``[H, T, D]`` as complex numbers: the pairs that turn, then each dimension that does not."""
    n = len(rotation.frequencies)
    if rotation.interleaved:
        first, second = x[..., 0 : 2 * n : 2], x[..., 1 : 2 * n : 2]
    else:
        first, second = x[..., :n], x[..., n : 2 * n]
    return torch.cat([torch.complex(first, second), x[..., 2 * n :].to(torch.complex128)], dim=-1)
