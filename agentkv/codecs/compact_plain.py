"""The quantiser that needs no fit: mean removed by head and channel, one step a layer, keys and values apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Channels"]

_HALF_LARGEST = 65504.0


@dataclass(frozen=True, slots=True, eq=False)
class Channels:
    """Keys or values of some layers: ``mean [layers, Hkv, 1, D]`` and ``step [layers, 1, 1, 1]``, float32.

    The means are as they are stored, float16 unless one is out of its range: what rounding takes from a mean is left
    in the numbers and quantised with them, however large the mean is (key biases of Qwen2 have norms of hundreds).
    """

    mean: Tensor
    step: Tensor

    @classmethod
    def of(cls, numbers: Tensor, share: float) -> Channels:
        """For ``numbers [layers, Hkv, T, D]`` float32: steps are ``share`` of each layer's rms around the means."""
        import torch

        mean = numbers.mean(2, keepdim=True)
        if bool(mean.abs().max() <= _HALF_LARGEST):
            mean = mean.half().float()
        spread = torch.linalg.vector_norm(numbers - mean, dim=(1, 2, 3), keepdim=True)
        step = spread * (share / math.sqrt(numbers[0].numel()))
        return cls(mean, torch.where(step == 0, 1.0, step))

    @property
    def half(self) -> bool:
        """Whether the means are float16 numbers."""
        return bool(self.mean.abs().max() <= _HALF_LARGEST)

    @property
    def finite(self) -> bool:
        """Whether these can be divided by and come back."""
        return bool(self.mean.isfinite().all() and self.step.isfinite().all() and (1 / self.step).isfinite().all())

    def levels(self, numbers: Tensor) -> Tensor:
        """``numbers [layers, Hkv, T, D]`` in steps, a channel a row: ``[layers, Hkv, D, T]``."""
        levels: Tensor = (numbers - self.mean).mul_(1 / self.step).transpose(2, 3)
        return levels

    def numbers(self, levels: Tensor) -> Tensor:
        """The way back."""
        back: Tensor = levels.transpose(2, 3).mul(self.step).add_(self.mean)
        return back

    def reach(self, error: float) -> Tensor:
        """How far numbers can be off where each symbol is off by ``error``: ``[layers, Hkv, 1, D]`` float64."""
        reach: Tensor = (self.step.double() * error).expand(self.mean.shape)
        return reach
