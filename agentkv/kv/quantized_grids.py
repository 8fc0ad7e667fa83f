"""Numbers as small integers on grids that choose themselves again: what the quantised layouts hold older tokens as.

What is held so is read, stored, restored and quantised again with every suspend. That must give the same numbers each
time, though in between they were rounded to the model's dtype. Two grids do:

``ends``       number ≈ lo + (hi − lo) · code / (levels − 1)
    ``lo`` and ``hi`` are the group's own ends, in the model's dtype. They come back as they were, so the grid is the
    same again, and so is every number: what lies nearer to a code than to its neighbours stays there.

``settled``    number ≈ step · (code + zero / 3)
    For keys, which are quantised as they were before RoPE and rounded after it: each comes back with a noise of up to
    half a unit in the last place of the *pair* that turned. So the grid is snapped to where that noise cannot move it:
    the step to a whole number of 1/K octaves, the zero to thirds of a step. The snapping shifts the top of the grid by
    less than half a step: both of the group's ends keep the first and last code, and give the same grid again.
    Where the noise is more than a sixth of a step, the step is a power of two at least twice the noise and the zero a
    whole number of steps: codes are then absolute, and stay what they are whatever the ends seem to be.

A number is off by half a step at most, and the rounding to its dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import log2

import torch
from torch import Tensor

from agentkv.rope import Rotation

__all__ = [
    "Format",
    "amplitude",
    "ends_codes",
    "ends_numbers",
    "ends_step",
    "pack",
    "settled_codes",
    "settled_grid",
    "settled_numbers",
    "settled_step",
    "unpack",
]

_SURE = 6.6
"""A step of so many times the noise is found again; 6.2 would do if snapping did not move the ends."""
_ABSOLUTE = 2.2
_ON = 0.2
"""How far off a power-of-two lattice, in steps, noise moves what lies on it; anything else is off it by more."""
_SMALLEST = 2.0**-100
_INDICES = 2**15


@dataclass(frozen=True, slots=True)
class Format:
    """How tokens are quantised: ``bits`` of a code, 8 or 4; ``group_tokens`` that share a channel's grid of keys.

    Groups start at whole multiples of ``group_tokens`` in the ledger. Segments of them grow together between whole
    multiples of ``segment_tokens``, and attention expands so many at a time: whatever a state has been through, its
    parts are the same, and so are their bits. On SmolLM2 512 float32 keys stay in a core's cache.
    """

    bits: int
    group_tokens: int = 64
    segment_tokens: int = 512

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def per_octave(self) -> int:
        """Steps an octave of the ``settled`` grid: half of one moves the top of the grid by a third of a step."""
        return round(self.top * 16 / 15)

    def width(self, dim: int) -> int:
        """Bytes of ``dim`` codes."""
        return dim if self.bits == 8 else (dim + 1) // 2

    def turns_back(self, dtype: torch.dtype) -> bool:
        """Whether keys of ``dtype`` are quantised as they were before RoPE.

        Not where codes are as fine as the dtype itself (8 bits on bfloat16): the noise of turning back would coarsen
        them, and a grid over the turned keys is off by no more than the keys were rounded by.
        """
        return self.bits < 1 - log2(_eps(dtype))


def _eps(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


# -- ends --------------------------------------------------------------------------------------------------------------


def ends_step(lo: Tensor, hi: Tensor, fmt: Format) -> Tensor:
    """The step between ``lo`` and ``hi``, in their dtype or float32 if that is wider: a trace too long, never short."""
    wide = torch.promote_types(lo.dtype, torch.float32)
    return (hi.to(wide) - lo.to(wide)) * ((1 + 4 * _eps(wide)) / fmt.top)


def ends_codes(numbers: Tensor, lo: Tensor, hi: Tensor, fmt: Format) -> Tensor:
    """``numbers`` (float32 or wider) as codes, uint8; ``lo`` and ``hi`` broadcast with them."""
    step = ends_step(lo, hi, fmt)
    codes = (numbers - lo) / torch.where(step > 0, step, 1)
    return codes.round_().clamp_(0, fmt.top).to(torch.uint8)


def ends_numbers(codes: Tensor, lo: Tensor, hi: Tensor, fmt: Format) -> Tensor:
    """``codes`` (float32 or wider, changed in place) as numbers: from ``lo`` to ``hi`` once rounded to their dtype."""
    numbers = codes.mul_(ends_step(lo, hi, fmt)).add_(lo)
    return numbers if hi.dtype != numbers.dtype else torch.minimum(numbers, hi, out=numbers)


# -- settled -----------------------------------------------------------------------------------------------------------


def amplitude(keys: Tensor, rotation: Rotation | None) -> Tensor:
    """``[..., D]``: of a pair that turns its length, for both; of other dimensions the size of the number."""
    size = keys.abs()
    n = len(rotation.frequencies) if rotation is not None else 0
    if rotation is not None and n:
        first, second = (
            (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if rotation.interleaved else (slice(n), slice(n, 2 * n))
        )
        length = torch.hypot(size[..., first], size[..., second])
        size[..., first], size[..., second] = length, length
    return size


def settled_grid(keys: Tensor, size: Tensor, dtype: torch.dtype, fmt: Format) -> tuple[Tensor, Tensor]:
    """Step index and zero ``[..., D]`` (int32) of groups ``keys [..., t, D]``; ``size``: their amplitudes ``[..., D]``.

    ``dtype``: what they are rounded to after they were turned.
    """
    lo, hi = keys.amin(-2), keys.amax(-2)
    noise = size * (_eps(dtype) / 2 + 4 * _eps(torch.float32))
    step = (hi - lo) / fmt.top
    # A lattice has one level to spare, and is what its own ends with noise ask for again: hence its last number may be
    # off by twice the noise more than half a step.
    least = torch.maximum((hi - lo - 2 * noise) / (fmt.top - 1), noise * _ABSOLUTE)
    exponent = least.clamp_(min=_SMALLEST).log2_().ceil_()
    whole = keys / torch.exp2(exponent)[..., None, :]
    absolute = (step < noise * _SURE) | (step < _SMALLEST)
    absolute |= whole.sub_(whole.round()).abs_().amax(-2) < _ON
    free = (step.clamp(min=_SMALLEST).log2() * fmt.per_octave).round_()
    index = torch.where(absolute, exponent * fmt.per_octave, free).to(torch.int32)
    index.clamp_(-_INDICES, _INDICES - 1)  # of numbers that are not finite it may be anything
    step = settled_step(index, fmt).to(keys.dtype)
    zero = torch.where(absolute, (lo / step).round_() * 3, (lo * 3 / step).round_())
    return index, zero.to(torch.int32)


def settled_step(index: Tensor, fmt: Format) -> Tensor:
    """The steps, float32: from a table, so that they are the same on every device."""
    return _steps(fmt, index.device)[index.to(torch.int32) + _INDICES]


def settled_codes(keys: Tensor, index: Tensor, zero: Tensor, fmt: Format) -> Tensor:
    """``keys [..., t, D]`` (float32 or wider) as codes, uint8."""
    step = settled_step(index, fmt)[..., None, :]
    return (keys / step).sub_((zero / 3)[..., None, :]).round_().clamp_(0, fmt.top).to(torch.uint8)


def settled_numbers(codes: Tensor, index: Tensor, zero: Tensor, fmt: Format) -> Tensor:
    """``codes [..., t, D]`` (float32 or wider, changed in place) as keys before RoPE."""
    return codes.add_((zero / 3)[..., None, :]).mul_(settled_step(index, fmt)[..., None, :])


@cache
def _steps(fmt: Format, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        indices = torch.arange(-_INDICES, _INDICES, dtype=torch.float64)
        return torch.exp2(indices / fmt.per_octave).to(torch.float32).to(device)


# -- codes -------------------------------------------------------------------------------------------------------------


def pack(codes: Tensor, into: Tensor) -> None:
    """``codes [..., D]`` into ``[..., width(D)]``, both uint8. Where two share a byte, d does with d + ceil(D / 2)."""
    dim, width = codes.shape[-1], into.shape[-1]
    into.copy_(codes[..., :width])
    if width < dim:
        into[..., : dim - width] |= codes[..., width:] << 4


def unpack(packed: Tensor, out: Tensor) -> Tensor:
    """The codes in ``packed [..., width(D)]``, written to ``out [..., D]``, of any dtype."""
    dim, width = out.shape[-1], packed.shape[-1]
    if width == dim:
        return out.copy_(packed)
    out[..., :width] = packed & 15
    out[..., width:] = (packed >> 4)[..., : dim - width]
    return out
