"""Fitting a basis for ``compact`` to KV of a text: what calibration calls once a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from blake3 import blake3

from agentkv.codecs.contract import Fit, KVBlock
from agentkv.codecs.turning import pre_rope

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Sensitivity", "fit_compact"]

Sensitivity = Mapping[int, tuple["Tensor", "Tensor"]]

_KEY_SHARE, _VALUE_SHARE = 0.25, 0.35
"""Steps as shares of a layer's rms around its means, as without a fit."""

_EXPECTED_KL = 0.0005
"""Nats a token that steps of 1 cost by the sensitivities: so little that a calibration can begin there."""

_WIDEST = 512
"""Numbers a bundle. Decoding is a product with a square matrix of this side: wider is smaller and slower."""


def fit_compact(blocks: Sequence[KVBlock], sensitivity: Sensitivity | None = None, *, widest: int = _WIDEST) -> Fit:
    """The principal components of keys before RoPE and values over ``blocks``, in units of their steps.

    ``blocks``: KV of running text without its sinks; a layer's blocks may differ in length. Good bases take some ten
    tokens a number of a bundle, and text as various as what will be encoded. ``widest``: numbers a bundle may have,
    which is as many of a layer's heads as fit in, one at least.

    ``sensitivity``: by layer, of each head's keys and values ``[Hkv]``, the second derivative of the KL by their error
    (``engine.sensitivity``). With it every number of every head costs the same KL, which is the least for the bits
    (reverse water-filling over the whole model; Cover and Thomas, 10.3.3); without it, steps are shares of each layer's
    rms. Worth 40 % of the bytes (docs/codecs.md).

    ``ValueError`` where there is nothing to learn from, or it is not finite.
    """
    import torch

    found = _moments(blocks, widest)
    tensors: dict[str, Tensor] = {}
    facts: dict[str, int | bool] = {"widest": widest, "sensitivity": sensitivity is not None}
    facts["tokens"] = max(moments.tokens for moments in found.values())
    steps = None if sensitivity is None else _steps(found, sensitivity)
    for layer, moments in sorted(found.items()):
        tensors[f"{layer}.mean"], tensors[f"{layer}.basis"] = moments.basis(
            moments.shares() if steps is None else steps[layer]
        )
    digest = blake3(json.dumps(["compact", 1, facts]).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return Fit("compact", digest.hexdigest(length=16), tensors, facts)


class _Moments:
    """Sums over tokens of one layer's bundles: ``first [bundles, N]``, ``second [bundles, N, N]``, float64."""

    def __init__(self, key_heads: Tensor, value_heads: Tensor, widest: int) -> None:
        heads, _, key_dim = key_heads.shape
        width = key_dim + value_heads.shape[2]
        self._heads = max(h for h in range(1, heads + 1) if heads % h == 0 and (h == 1 or h * width <= widest))
        self._key_width = self._heads * key_dim
        self.tokens = 0
        self._first = key_heads.new_zeros(heads // self._heads, self._heads * width)
        self._second = key_heads.new_zeros(*self._first.shape, self._heads * width)

    @property
    def numbers(self) -> int:
        """A token's."""
        return self._first.numel()

    def add(self, keys: Tensor, values: Tensor) -> None:
        """``[Hkv, T, D]`` float64."""
        import torch

        bundles, tokens = len(self._first), keys.shape[1]
        sides = [s.view(bundles, self._heads, tokens, -1).transpose(1, 2).flatten(2) for s in (keys, values)]
        numbers = torch.cat(sides, dim=2)
        self.tokens += numbers.shape[1]
        self._first += numbers.sum(1)
        self._second += numbers.transpose(1, 2) @ numbers

    def shares(self) -> tuple[Tensor, Tensor]:
        """Steps of each head's keys and values ``[Hkv]``: the same share of the layer's rms for all."""
        keys, values = (v.mean().sqrt() for v in self._variance().tensor_split((self._key_width,), dim=1))
        heads = len(self._first) * self._heads
        return (_KEY_SHARE * keys).expand(heads), (_VALUE_SHARE * values).expand(heads)

    def basis(self, steps: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The mean ``[bundles, N]`` float32 and components, largest first, a row each: ``[bundles, N, N]`` bfloat16.

        ``steps``: of each head's keys and values ``[Hkv]``. The basis is orthogonal to numbers in steps.
        """
        import torch

        bundles, width = self._first.shape
        key_dim, value_dim = self._key_width // self._heads, (width - self._key_width) // self._heads
        sides = zip(steps, (key_dim, value_dim), strict=True)
        each = [side.view(bundles, self._heads).repeat_interleave(dim, dim=1) for side, dim in sides]
        step = torch.cat(each, dim=1).to(self._first)
        step = torch.where(step > 0, step, 1.0)
        mean = self._first / self.tokens
        covariance = self._second / self.tokens - mean[:, :, None] * mean[:, None, :]
        _, vectors = torch.linalg.eigh(covariance / step[:, :, None] / step[:, None, :])
        return mean.float(), (vectors.flip(2).transpose(1, 2) * step[:, None]).to(torch.bfloat16)

    def _variance(self) -> Tensor:
        second = self._second.diagonal(dim1=1, dim2=2) / self.tokens
        return (second - (self._first / self.tokens).square()).clamp(min=0)


_LEAST = 1e-4
"""Of the mean sensitivity: a head that seemed to matter less is taken to matter so much."""


def _steps(found: Mapping[int, _Moments], sensitivity: Sensitivity) -> dict[int, tuple[Tensor, Tensor]]:
    """Steps of each head ``[Hkv]`` that cost the same KL a number, ``_EXPECTED_KL`` in all.

    An error spread evenly over a step s has variance s²/12 and costs sensitivity · s²/24.
    """
    import torch

    missing = sorted(found.keys() - sensitivity.keys())
    if missing:
        raise ValueError(f"no sensitivity is given of layers {missing}")
    every = torch.cat([side.double().flatten() for layer in found for side in sensitivity[layer]])
    if not bool(every.isfinite().all() and (every >= 0).all() and (every > 0).any()):
        raise ValueError("sensitivities are finite numbers from 0 on, and not all 0")
    numbers = sum(moments.numbers for moments in found.values())
    floor = every[every > 0].mean() * _LEAST
    each = 24 * _EXPECTED_KL / numbers

    def step(side: Tensor) -> Tensor:
        return (each / side.double().clamp(min=float(floor))).sqrt()

    return {layer: (step(sensitivity[layer][0]), step(sensitivity[layer][1])) for layer in found}


def _moments(blocks: Sequence[KVBlock], widest: int) -> Mapping[int, _Moments]:
    found: dict[int, _Moments] = {}
    for block in blocks:
        if not block.layers:
            raise ValueError("a block that does not say which layers it is of cannot be fitted")
        for layer, *sides in zip(block.layers, pre_rope(block), block.values, strict=True):
            keys, values = (side.double().cpu() for side in sides)
            if not (bool(keys.isfinite().all()) and bool(values.isfinite().all())):
                raise ValueError(f"KV of layer {layer} is not finite: nothing can be fitted to it")
            if layer not in found:
                found[layer] = _Moments(keys, values, widest)
            found[layer].add(keys, values)
    if not found:
        raise ValueError("no blocks to fit to: calibration needs KV of some thousand tokens")
    return found
