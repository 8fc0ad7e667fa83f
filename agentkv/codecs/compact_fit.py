"""Fitting a basis for ``compact`` to KV of a text: what calibration calls once a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from blake3 import blake3

from agentkv.codecs.contract import Fit, KVBlock
from agentkv.codecs.turning import pre_rope

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["fit_compact"]

_KEY_SHARE, _VALUE_SHARE = 0.25, 0.35
"""Steps as shares of a layer's rms, as without a fit."""


def fit_compact(blocks: Sequence[KVBlock]) -> Fit:
    """The principal components of each head's keys before RoPE and values over ``blocks``, each in units of a step.

    ``blocks``: KV of running text, some thousand tokens in all, sinks left out; a layer's blocks may differ in length.
    ``ValueError`` where there is nothing to learn from, or it is not finite.
    """
    found = _moments(blocks)
    tensors: dict[str, Tensor] = {}
    tokens = 0
    for (side, layer), moments in sorted(found.items()):
        tokens = max(tokens, moments.tokens)
        mean, basis = moments.basis(_KEY_SHARE if side == "keys" else _VALUE_SHARE)
        tensors[f"{side}.{layer}.mean"] = mean
        tensors[f"{side}.{layer}.basis"] = basis
    digest = blake3(b"compact fit 1")
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return Fit("compact", digest.hexdigest(length=16), tensors, {"tokens": tokens})


class _Moments:
    """Sums over tokens of one layer's keys or values: ``first [Hkv, D]``, ``second [Hkv, D, D]``, float64."""

    def __init__(self, numbers: Tensor) -> None:
        heads, _, dim = numbers.shape
        self.tokens = 0
        self._first = numbers.new_zeros(heads, dim)
        self._second = numbers.new_zeros(heads, dim, dim)

    def add(self, numbers: Tensor) -> None:
        """``numbers [Hkv, T, D]`` float64."""
        self.tokens += numbers.shape[1]
        self._first += numbers.sum(1)
        self._second += numbers.transpose(1, 2) @ numbers

    def basis(self, share: float) -> tuple[Tensor, Tensor]:
        """The mean ``[Hkv, D]`` float32 and components, largest first, a row each: ``[Hkv, D, D]`` float32."""
        import torch

        mean = self._first / self.tokens
        covariance = self._second / self.tokens - mean[:, :, None] * mean[:, None, :]
        variances, vectors = torch.linalg.eigh(covariance)
        step = share * float(variances.clamp(min=0).mean().sqrt()) or 1.0
        return mean.float(), (step * vectors.flip(2).transpose(1, 2)).float().contiguous()


def _moments(blocks: Sequence[KVBlock]) -> Mapping[tuple[str, int], _Moments]:
    found: dict[tuple[str, int], _Moments] = {}
    for block in blocks:
        if not block.layers:
            raise ValueError("a block that does not say which layers it is of cannot be fitted")
        for side, tensors in (("keys", pre_rope(block)), ("values", block.values)):
            for layer, tensor in zip(block.layers, tensors, strict=True):
                numbers = tensor.double().cpu()
                if not bool(numbers.isfinite().all()):
                    raise ValueError(f"{side} of layer {layer} are not finite: nothing can be fitted to them")
                found.setdefault((side, layer), _Moments(numbers)).add(numbers)
    if not found:
        raise ValueError("no blocks to fit to: calibration needs KV of some thousand tokens")
    return found
