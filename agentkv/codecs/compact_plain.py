"""The quantiser that needs no fit: mean removed by head and channel, one step a layer, keys and values apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentkv.codecs.compact_escapes import Escapes
from agentkv.codecs.compact_symbols import Filled

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

    def levels(self, layer: int, numbers: Tensor, out: Tensor) -> None:
        """``numbers [Hkv, T, D]`` in steps, into ``out [rows, T]``."""
        scaled = (numbers - self.mean[layer]).mul_(1 / self.step[layer])
        out.view(scaled.shape[0], scaled.shape[2], -1).copy_(scaled.transpose(1, 2))

    def numbers(self, layers: slice, symbols: Tensor, escapes: Escapes | None) -> Tensor:
        """The way back from ``symbols [layers, rows, T]`` int8 of these channels: ``[layers, Hkv, T, D]`` float32."""
        import torch

        mean = self.mean[layers]
        many, heads, _, dim = mean.shape
        tokens = symbols.shape[2]
        numbers = torch.empty((many, heads, tokens, dim), dtype=torch.float32, device=symbols.device)
        numbers.copy_(symbols.view(many, heads, dim, tokens).transpose(2, 3))
        if escapes is not None:
            row = escapes.rows
            numbers[row // (heads * dim), row // dim % heads, escapes.tokens, row % dim] += escapes.excess
        return numbers.mul_(self.step[layers]).add_(mean)


@dataclass(frozen=True, slots=True, eq=False)
class Plain:
    """Keys and values with means and steps of their own. Rows of levels: a layer's key channels, its value channels."""

    keys: Channels
    values: Channels

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, scale: float) -> Plain:
        """For ``keys [layers, Hkv, T, Dk]`` before RoPE and ``values``, float32; ``scale`` multiplies the steps."""
        return cls(Channels.of(keys, _KEY_SHARE * scale), Channels.of(values, _VALUE_SHARE * scale))

    @property
    def rows(self) -> int:
        """Of each layer."""
        return self.keys.mean[0].numel() + self.values.mean[0].numel()

    def levels(self, layer: int, keys: Tensor, values: Tensor) -> Tensor:
        """The layer's ``keys [Hkv, T, Dk]`` before RoPE and ``values``, float32, in steps: ``[rows, T]`` float32."""
        import torch

        split = self.keys.mean[0].numel()
        levels = torch.empty((self.rows, keys.shape[1]), dtype=torch.float32, device=keys.device)
        self.keys.levels(layer, keys, levels[:split])
        self.values.levels(layer, values, levels[split:])
        return levels

    def numbers(self, layers: slice, symbols: Tensor, filled: Filled, escapes: Escapes | None) -> tuple[Tensor, Tensor]:
        """The way back from ``symbols [layers, rows, T]`` int8."""
        split = self.keys.mean[0].numel()
        of_keys, of_values = (None, None) if escapes is None else escapes.split(split, self.rows)
        keys = self.keys.numbers(layers, symbols[:, :split], of_keys)
        return keys, self.values.numbers(layers, symbols[:, split:], of_values)

    def spread(self, error: float) -> tuple[Tensor, Tensor]:
        """How far keys and values can be off where levels are off by ``error``: ``[layers, Hkv, 1, D]`` float64."""
        keys, values = ((side.step.double() * error).expand(side.mean.shape) for side in (self.keys, self.values))
        return keys, values
