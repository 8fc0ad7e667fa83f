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

__all__ = ["fit_compact"]

_KEY_SHARE, _VALUE_SHARE = 0.25, 0.35
"""Steps as shares of a layer's rms around its means, as without a fit."""

_WIDEST = 512
"""Numbers a bundle. Decoding is a product with a square matrix of this side: wider is smaller and slower."""


def fit_compact(
    blocks: Sequence[KVBlock], *, widest: int = _WIDEST, steps: Mapping[int, tuple[float, float]] | None = None
) -> Fit:
    """The principal components of keys before RoPE and values over ``blocks``, in units of their steps.

    ``blocks``: KV of running text without its sinks; a layer's blocks may differ in length. Good bases take some ten
    tokens a number of a bundle, and text as various as what will be encoded. ``widest``: numbers a bundle may have,
    which is as many of a layer's heads as fit in, one at least. ``steps``: by layer, those of keys and of values.

    ``ValueError`` where there is nothing to learn from, or it is not finite.
    """
    import torch

    tensors: dict[str, Tensor] = {}
    facts: dict[str, int] = {}
    for layer, moments in sorted(_moments(blocks, widest).items()):
        tensors[f"{layer}.mean"], tensors[f"{layer}.basis"] = moments.basis(None if steps is None else steps[layer])
        facts = {"tokens": max(moments.tokens, facts.get("tokens", 0)), "widest": widest}
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

    def add(self, keys: Tensor, values: Tensor) -> None:
        """``[Hkv, T, D]`` float64."""
        import torch

        bundles, tokens = len(self._first), keys.shape[1]
        sides = [s.view(bundles, self._heads, tokens, -1).transpose(1, 2).flatten(2) for s in (keys, values)]
        numbers = torch.cat(sides, dim=2)
        self.tokens += numbers.shape[1]
        self._first += numbers.sum(1)
        self._second += numbers.transpose(1, 2) @ numbers

    def basis(self, steps: tuple[float, float] | None) -> tuple[Tensor, Tensor]:
        """The mean ``[bundles, N]`` float32 and components, largest first, a row each: ``[bundles, N, N]`` bfloat16.

        What is orthogonal is the basis of numbers in steps. Components of no variance keep a row, so that it can be
        inverted.
        """
        import torch

        mean = self._first / self.tokens
        covariance = self._second / self.tokens - mean[:, :, None] * mean[:, None, :]
        variance = covariance.diagonal(dim1=1, dim2=2).clamp(min=0)
        split = self._key_width
        if steps is None:
            spreads = variance[:, :split].mean().sqrt(), variance[:, split:].mean().sqrt()
            steps = _KEY_SHARE * float(spreads[0]) or 1.0, _VALUE_SHARE * float(spreads[1]) or 1.0
        step = torch.full_like(mean[0], steps[0])
        step[split:] = steps[1]
        _, vectors = torch.linalg.eigh(covariance / step[:, None] / step)
        return mean.float(), (vectors.flip(2).transpose(1, 2) * step).to(torch.bfloat16)


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
