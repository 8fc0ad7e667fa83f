"""Uniform grids: groups of numbers as small integers on evenly spaced levels that span the group's own range.

    number ≈ zero + step · code        0 <= code < levels

A step is a float32 rounded up to 16 values an octave, kept as 12 bits: any magnitude, no scale to overflow. A zero lies
on a whole number of ``step / fineness``, at most the group's smallest number, so no number is ever clipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Grid"]

_SHIFT = 19
"""Low bits of a float32 that a step does without: sign and exponent stay, and 4 bits of mantissa."""
_SMALLEST = 2.0**-126
_REACH = 2.0**21
"""Zeros stay within this many ``step / fineness``, so that float32 places the levels to a fraction of a step."""


@dataclass(frozen=True, slots=True)
class Grid:
    """``levels`` of a code, at most 256; zeros are multiples of ``step / fineness``, a power of two.

    A coarse zero costs up to one level in ``fineness``, a fine one costs bits: 1 suits 256 levels, 4 suits 16.
    """

    levels: int
    fineness: int

    def fit(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The grids of groups that reach from ``low`` to ``high`` (float32, within ±1e37): steps and zeros, int32.

        A constant comes back to 19 bits and more.
        """
        import torch

        least = torch.maximum(high, -low).mul_(self.fineness / _REACH)
        step = (high - low).div_(self.levels - 1 - 1 / self.fineness)
        bits = torch.maximum(step, least, out=step).clamp_(min=_SMALLEST).view(torch.int32)
        steps = bits.add_((1 << _SHIFT) - 1).bitwise_right_shift_(_SHIFT)
        zeros = (low / _as_float(steps)).mul_(self.fineness).floor_()
        return steps, zeros.to(torch.int32)

    def place(self, steps: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
        """Step and zero as float32, the same on both sides of a payload, for what ``fit`` gave."""
        step = _as_float(steps)
        return step, zeros * (step / self.fineness)

    def codes(self, numbers: Tensor, step: Tensor, zero: Tensor) -> Tensor:
        """``numbers`` (float32, changed in place) as codes, uint8; ``step`` and ``zero`` broadcast with them."""
        import torch

        numbers.sub_(zero).mul_(step.reciprocal()).round_().clamp_(0, self.levels - 1)
        # Straight to uint8 is 3 to 5 times as slow.
        return (
            numbers.to(torch.int16).to(torch.uint8) if self.levels > 128 else numbers.to(torch.int8).view(torch.uint8)
        )

    def width(self, dim: int) -> int:
        """Bytes that a row of ``dim`` codes takes: two codes share one where they have at most 16 levels."""
        return dim if self.levels > 16 else (dim + 1) // 2

    def pack(self, codes: Tensor, into: Tensor) -> None:
        """``codes [..., D]`` into ``[..., width(D)]``, both uint8. Code d shares its byte with d + ceil(D / 2)."""
        dim, width = codes.shape[-1], into.shape[-1]
        into.copy_(codes[..., :width])
        if width < dim:
            into[..., : dim - width] |= codes[..., width:] << 4

    def unpack(self, packed: Tensor, dim: int) -> Tensor:
        """The codes ``[..., dim]`` in ``packed [..., width(dim)]``, as a new float32 tensor."""
        import torch

        width = packed.shape[-1]
        if width == dim:
            return packed.to(torch.float32)
        codes = torch.empty((*packed.shape[:-1], dim), dtype=torch.float32, device=packed.device)
        codes[..., :width] = packed & 15
        codes[..., width:] = (packed >> 4)[..., : dim - width]
        return codes


def _as_float(steps: Tensor) -> Tensor:
    import torch

    return (steps << _SHIFT).view(torch.float32)
