"""The quantiser that needs no fit: mean removed by head and channel, one step a layer, keys and values apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentkv.codecs.compact_escapes import Escapes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Channels", "Plain"]

_KEY_SHARE, _VALUE_SHARE = 0.25, 0.35
"""Steps as shares of a layer's root mean square around its means."""

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

    @property
    def rows(self) -> int:
        """Channels of all layers."""
        return self.mean.numel()

    def levels(self, numbers: Tensor, out: Tensor) -> None:
        """``numbers [layers, Hkv, T, D]`` in steps, into ``out [rows, T]``."""
        scaled = (numbers - self.mean).mul_(1 / self.step)
        out.view(*self.mean.shape[:2], self.mean.shape[3], -1).copy_(scaled.transpose(2, 3))

    def numbers(self, symbols: Tensor) -> Tensor:
        """The way back from ``symbols [rows, T]`` int8: ``[layers, Hkv, T, D]`` float32."""
        import torch

        layers, heads, _, dim = self.mean.shape
        numbers = torch.empty((layers, heads, symbols.shape[1], dim), dtype=torch.float32, device=symbols.device)
        numbers.copy_(symbols.view(layers, heads, dim, -1).transpose(2, 3))
        return numbers.mul_(self.step).add_(self.mean)

    def add(self, numbers: Tensor, escapes: Escapes) -> None:
        """Give ``numbers`` what int8 could not hold of them."""
        _, heads, _, dim = self.mean.shape
        row, token = escapes.rows, escapes.tokens
        layer, head, channel = row // (heads * dim), row // dim % heads, row % dim
        numbers[layer, head, token, channel] += escapes.excess * self.step.view(-1)[layer]


@dataclass(frozen=True, slots=True, eq=False)
class Plain:
    """Keys and values with means and steps of their own."""

    keys: Channels
    values: Channels

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, scale: float) -> Plain:
        """For ``keys [layers, Hkv, T, Dk]`` before RoPE and ``values``, float32; ``scale`` multiplies the steps."""
        return cls(Channels.of(keys, _KEY_SHARE * scale), Channels.of(values, _VALUE_SHARE * scale))

    @property
    def rows(self) -> int:
        """Rows of levels: channels of the keys, then of the values."""
        return self.keys.rows + self.values.rows

    def levels(self, keys: Tensor, values: Tensor) -> Tensor:
        """``[rows, T]`` float32."""
        import torch

        levels = torch.empty((self.rows, keys.shape[2]), dtype=torch.float32, device=keys.device)
        self.keys.levels(keys, levels[: self.keys.rows])
        self.values.levels(values, levels[self.keys.rows :])
        return levels

    def numbers(self, symbols: Tensor, escapes: Escapes) -> tuple[Tensor, Tensor]:
        """The way back from ``symbols [rows, T]`` int8: keys before RoPE and values, float32."""
        split = self.keys.rows
        keys, values = self.keys.numbers(symbols[:split]), self.values.numbers(symbols[split:])
        self.keys.add(keys, escapes.within(0, split))
        self.values.add(values, escapes.within(split, self.rows))
        return keys, values

    def spread(self, error: float) -> tuple[Tensor, Tensor]:
        """How far keys and values can be off where levels are off by ``error``: ``[layers, Hkv, 1, D]`` float64."""
        keys, values = ((side.step.double() * error).expand(side.mean.shape) for side in (self.keys, self.values))
        return keys, values
