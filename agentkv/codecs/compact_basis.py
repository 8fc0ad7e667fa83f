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

from agentkv.codecs.compact_escapes import Escapes
from agentkv.codecs.contract import Fit, KVBlock

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Basis", "Bundles"]

_ESCAPES_AT_ONCE = 1024


def _bundled(keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """``keys [layers, Hkv, T, Dk]`` and ``values [layers, Hkv, T, Dv]`` -> ``[layers, Hkv/heads, T, N]``, copied."""
    import torch

    def side(numbers: Tensor) -> Tensor:
        layers, kv_heads, tokens, dim = numbers.shape
        return numbers.view(layers, kv_heads // heads, heads, tokens, dim).transpose(2, 3).flatten(3)

    return torch.cat([side(keys), side(values)], dim=3)


def _unbundled(numbers: Tensor, heads: int, key_dim: int) -> tuple[Tensor, Tensor]:
    """The way back."""
    layers, bundles, tokens, _ = numbers.shape

    def side(numbers: Tensor) -> Tensor:
        return numbers.reshape(layers, bundles, tokens, heads, -1).transpose(2, 3).flatten(1, 2)

    return side(numbers[..., : heads * key_dim]), side(numbers[..., heads * key_dim :])


@dataclass(frozen=True, slots=True, eq=False)
class Bundles:
    """Those of some layers: ``mean [layers, bundles, 1, N]``, ``forward`` and ``basis [layers, bundles, N, N]``.

    ``mean`` and ``forward`` are float32, ``basis`` is in the dtype that products are made in. ``scale``: units of the
    basis to a step. ``heads`` a bundle, keys of ``key_dim`` each.
    """

    mean: Tensor
    forward: Tensor
    basis: Tensor
    heads: int
    key_dim: int
    scale: float = 1.0

    @property
    def rows(self) -> int:
        """Components of all layers."""
        return self.mean.numel()

    def levels(self, keys: Tensor, values: Tensor) -> Tensor:
        """``keys [layers, Hkv, T, Dk]`` before RoPE and ``values`` in steps, a component a row: ``[rows, T]``."""
        import torch

        numbers = _bundled(keys, values, self.heads).sub_(self.mean)
        levels: Tensor = torch.matmul(self.forward.transpose(2, 3), numbers.transpose(2, 3))
        return levels.mul_(1 / self.scale).flatten(0, 2)

    def numbers(self, symbols: Tensor, escapes: Escapes) -> tuple[Tensor, Tensor]:
        """The way back from ``symbols [rows, T]`` int8: keys before RoPE and values, float32.

        Symbols are whole in bfloat16 too; a product rounded to it is off by far less than a step.
        """
        import torch

        layers, bundles, components, width = self.basis.shape
        back: Tensor = torch.bmm(
            symbols.view(layers * bundles, components, -1).to(self.basis.dtype).transpose(1, 2),
            self.basis.flatten(0, 1),
        ).float()
        bundle, component = escapes.rows // components, escapes.rows % components
        for start in range(0, len(bundle), _ESCAPES_AT_ONCE):
            at = slice(start, start + _ESCAPES_AT_ONCE)
            found = self.basis.flatten(0, 1)[bundle[at], component[at]].float().mul_(escapes.excess[at, None])
            back.index_put_((bundle[at], escapes.tokens[at]), found, accumulate=True)
        back = back.view(layers, bundles, -1, width).mul_(self.scale).add_(self.mean)
        return _unbundled(back, self.heads, self.key_dim)

    def spread(self, error: float) -> tuple[Tensor, Tensor]:
        """How far keys and values can be off where levels are off by ``error``: ``[layers, Hkv, 1, D]`` float64."""
        reach = self.basis.double().abs().sum(2, keepdim=True) * (error * self.scale)
        return _unbundled(reach, self.heads, self.key_dim)


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
                forward = torch.linalg.inv(basis.double()).float()
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
            self._stacked[key] = Bundles(means[:, :, None], forwards, basis, heads, block.keys[0].shape[2])
        return replace(self._stacked[key], scale=scale)

    def _columns(self, layers: tuple[int, ...]) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(self._layers[layer] for layer in layers), strict=True)


def _product_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where products of it are fast, which is twice as fast as float32 on a CPU with AVX-512 BF16 or AMX."""
    import torch

    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported() if device.type == "cpu" else True
    return torch.bfloat16 if fast else torch.float32
