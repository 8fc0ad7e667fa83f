"""A fitted basis in which one step serves all components of keys and values alike.

Keys before RoPE and values of a layer are linear in the same hidden state, and there are fewer independent numbers in
them than numbers: a basis over some heads' keys and values together takes half a bit a number less than one for each
(measured: docs/codecs.md). So heads come in *bundles*: ``h`` heads' keys, then the same heads' values, ``N = h · (Dk +
Dv)`` numbers a token; wider bundles are smaller in bytes, and slower in proportion.

``Fit.tensors`` for layer i: ``i.mean [bundles, N]`` float32 and ``i.basis [bundles, N, N]`` bfloat16, one row a
component. A bundle's numbers are ``mean + scale · symbols @ basis``. The way there is the inverse of the basis as it is
stored, so that its rounding costs nothing; it need not be orthogonal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from agentkv.codecs.compact_escapes import Escapes
from agentkv.codecs.compact_symbols import Filled
from agentkv.codecs.contract import Fit, KVBlock

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Basis", "Bundles"]

_ESCAPES_AT_ONCE = 1024

_AT_ONCE = 64
"""Products are over a multiple of so many components: oneDNN compiles code for every new shape, 1 ms each."""


@dataclass(frozen=True, slots=True, eq=False)
class Bundles:
    """Those of some layers: ``mean [layers, bundles, 1, N]``, ``forward`` and ``basis [layers, bundles, N, N]``.

    ``mean`` and ``forward`` are float32, ``basis`` is in the dtype that products are made in, ``sums`` are those of its
    magnitudes over components, ``[layers, bundles, 1, N]``. ``scale``: units of the basis to a step. ``heads`` a
    bundle, keys of ``key_dim`` each. Rows of levels are components, those of a layer together.
    """

    mean: Tensor
    forward: Tensor
    basis: Tensor
    sums: Tensor
    heads: int
    key_dim: int
    scale: float = 1.0

    @property
    def rows(self) -> int:
        """Of each layer."""
        return self.mean[0].numel()

    def levels(self, layer: int, keys: Tensor, values: Tensor) -> Tensor:
        """The layer's ``keys [Hkv, T, Dk]`` before RoPE and ``values``, float32, in steps: ``[rows, T]`` float32."""
        import torch

        bundles, tokens = self.mean.shape[1], keys.shape[1]
        sides = [side.view(bundles, self.heads, tokens, -1).transpose(1, 2).flatten(2) for side in (keys, values)]
        numbers = torch.cat(sides, dim=2).sub_(self.mean[layer]).mul_(1 / self.scale)
        levels: Tensor = torch.bmm(self.forward[layer].transpose(1, 2), numbers.transpose(1, 2))
        return levels.flatten(0, 1)

    def numbers(self, layers: slice, symbols: Tensor, filled: Filled, escapes: Escapes | None) -> tuple[Tensor, Tensor]:
        """The way back from ``symbols [layers, rows, T]`` int8.

        Symbols are whole in bfloat16 too; a product rounded to it is off by far less than a step. Components that vary
        least come last and are often nothing but zeros, which the product leaves out.
        """
        import torch

        basis = self.basis[layers]
        many, bundles, components, _ = basis.shape
        tokens = symbols.shape[2]
        used = np.flatnonzero(filled.reshape(many * bundles, components).any(0))
        n = min(components, -(-int(used[-1] + 1) // _AT_ONCE) * _AT_ONCE) if len(used) else 0
        factors = symbols.view(many * bundles, components, tokens)[:, :n].to(basis.dtype).transpose(1, 2)
        # One call for them all: each has a fixed cost of about half of what a layer of 384 numbers takes.
        product = torch.bmm(factors, basis.flatten(0, 1)[:, :n])
        sides = self._sides(product.view(many, bundles, tokens, components))
        keys, values = (torch.empty(side.shape, dtype=torch.float32, device=side.device).copy_(side) for side in sides)
        if escapes is not None:
            bundle, component = escapes.rows // components, escapes.rows % components
            for start in range(0, len(bundle), _ESCAPES_AT_ONCE):
                at = slice(start, start + _ESCAPES_AT_ONCE)
                found = basis.flatten(0, 1)[bundle[at], component[at]].float().mul_(escapes.excess[at, None])
                for side, into in zip(self._sides(found[None, None]), (keys, values), strict=True):
                    here = bundle[at] // bundles, bundle[at] % bundles, escapes.tokens[at]
                    into.transpose(2, 3).index_put_(here, side[0, 0].transpose(0, 1), accumulate=True)
        for numbers, mean in zip((keys, values), self._sides(self.mean[layers]), strict=True):
            (numbers if self.scale == 1 else numbers.mul_(self.scale)).add_(mean)
        return keys.flatten(1, 2), values.flatten(1, 2)

    def spread(self, error: float) -> tuple[Tensor, Tensor]:
        """How far keys and values can be off where levels are off by ``error``: ``[layers, Hkv, 1, D]`` float64."""
        keys, values = self._sides(self.sums.double() * (error * self.scale))
        return keys.flatten(1, 2), values.flatten(1, 2)

    def _sides(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """``[layers, bundles, T, N]`` -> views of keys ``[layers, bundles, heads a bundle, T, Dk]`` and of values."""
        split = self.heads * self.key_dim
        sides = numbers[..., :split], numbers[..., split:]
        keys, values = (side.view(*side.shape[:3], self.heads, -1).transpose(2, 3) for side in sides)
        return keys, values


class Basis:
    """What a ``Fit`` holds, checked, and stacked for the layers that blocks have. Thread-safe."""

    def __init__(self, digest: str, layers: Mapping[int, tuple[Tensor, Tensor, Tensor]]) -> None:
        """``layers``: mean, forward and basis of each."""
        self.digest = digest
        self._layers = layers
        self._stacked: dict[tuple[tuple[int, ...], torch.device], Bundles] = {}

    @classmethod
    def of(cls, fit: Fit) -> Basis:
        """``ValueError`` where the fit is of another codec or its tensors do not hold together."""
        import torch

        if fit.codec != "compact":
            raise ValueError(f"a fit of codec {fit.codec!r} is none for 'compact'")
        layers = {}
        for name, basis in fit.tensors.items():
            layer, _, kind = name.partition(".")
            if kind == "mean":
                continue
            mean = fit.tensors.get(f"{layer}.mean")
            if kind != "basis" or not layer.isdecimal() or mean is None:
                raise ValueError(f"fit {fit.digest}: {name!r} is no layer's basis, or has no mean beside it")
            if basis.ndim != 3 or basis.shape[1] != basis.shape[2] or mean.shape != basis.shape[:2]:
                shapes = f"{tuple(basis.shape)} and its mean {tuple(mean.shape)}"
                raise ValueError(f"fit {fit.digest}: {name!r} {shapes} do not agree")
            try:
                # One by one: with several threads torch 2.13 fails at a batch of them.
                forward = torch.stack([torch.linalg.inv(each) for each in basis.double()]).float()
            except RuntimeError as error:
                raise ValueError(f"fit {fit.digest}: {name!r} has no inverse: {error}") from None
            if not all(bool(t.isfinite().all()) for t in (mean, forward, basis)):
                raise ValueError(f"fit {fit.digest}: {name!r}, its mean or its inverse is not finite")
            layers[int(layer)] = mean.float(), forward, basis
        if not layers:
            raise ValueError(f"fit {fit.digest} has no basis of any layer")
        return cls(fit.digest, layers)

    def covers(self, block: KVBlock) -> bool:
        """Whether all layers of ``block`` were fitted, with heads as it has them."""
        heads = block.keys[0].shape[0]
        numbers = heads * (block.keys[0].shape[2] + block.values[0].shape[2])
        found = [self._layers[layer][0].shape for layer in block.layers if layer in self._layers]
        return (
            0 < len(found) == len(block.keys)
            and len(set(found)) == 1
            and heads % found[0][0] == 0
            and found[0].numel() == numbers
        )

    def bundles(self, block: KVBlock, scale: float) -> Bundles:
        """For ``block``, which is covered."""
        import torch

        device = block.keys[0].device
        key = block.layers, device
        if key not in self._stacked:
            means, forwards, bases = (torch.stack(each).to(device) for each in self._columns(block.layers))
            heads = block.keys[0].shape[0] // means.shape[1]
            basis = bases.to(_product_dtype(device))
            sums = basis.float().abs().sum(2, keepdim=True)
            dim = block.keys[0].shape[2]
            self._stacked[key] = Bundles(means[:, :, None], forwards, basis, sums, heads, dim)
        return replace(self._stacked[key], scale=scale)

    def _columns(self, layers: tuple[int, ...]) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(self._layers[layer] for layer in layers), strict=True)


def _product_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where products of it are fast, which is twice as fast as float32 on a CPU with AVX-512 BF16 or AMX."""
    import torch

    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported() if device.type == "cpu" else True
    return torch.bfloat16 if fast else torch.float32
