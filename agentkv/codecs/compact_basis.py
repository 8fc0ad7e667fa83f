"""A fitted basis for each head: where one step is right for every component of keys and values alike.

``Fit.tensors`` for layer i: ``keys.i.mean [Hkv, D]`` float32 and ``keys.i.basis [Hkv, D, D]`` float16 or float32, one
row a component, and ``values.i.…`` likewise. A head's numbers are ``mean + scale · symbols @ basis``. The way there is
the inverse of the basis as it is stored, so that its rounding costs nothing; it need not be orthogonal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentkv.codecs.contract import Fit

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Basis", "Heads"]


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """Keys or values of some layers: ``mean [layers, Hkv, 1, D]``, ``forward`` and ``inverse [layers, Hkv, D, D]``.

    All float32. ``scale``: units of the basis to a step.
    """

    mean: Tensor
    forward: Tensor
    inverse: Tensor
    scale: float = 1.0

    def levels(self, numbers: Tensor) -> Tensor:
        """``numbers [layers, Hkv, T, D]`` in steps, a component a row: ``[layers, Hkv, D, T]``."""
        import torch

        there: Tensor = torch.matmul(
            self.forward.transpose(2, 3) * (1 / self.scale), (numbers - self.mean).transpose(2, 3)
        )
        return there

    def numbers(self, levels: Tensor) -> Tensor:
        """The way back."""
        import torch

        layers, heads, dim, tokens = levels.shape
        back: Tensor = torch.baddbmm(
            self.mean.reshape(layers * heads, 1, dim),
            levels.reshape(layers * heads, dim, tokens).transpose(1, 2),
            self.inverse.reshape(layers * heads, dim, dim),
            alpha=self.scale,
        )
        return back.reshape(layers, heads, tokens, dim)

    def reach(self, error: float) -> Tensor:
        """How far numbers can be off where each symbol is off by ``error``: ``[layers, Hkv, 1, D]`` float64."""
        return self.inverse.double().abs().sum(2, keepdim=True) * (error * self.scale)


class Basis:
    """What a ``Fit`` holds, checked and stacked for the layers that blocks have. Thread-safe."""

    def __init__(self, digest: str, sides: Mapping[str, Mapping[int, tuple[Tensor, Tensor, Tensor]]]) -> None:
        self.digest = digest
        self._sides = sides
        self._stacked: dict[tuple[int, ...], tuple[Heads, Heads]] = {}

    @classmethod
    def of(cls, fit: Fit) -> Basis:
        """``ValueError`` where the fit is of another codec or its tensors do not hold together."""
        import torch

        if fit.codec != "compact":
            raise ValueError(f"a fit of codec {fit.codec!r} is none for 'compact'")
        sides: dict[str, dict[int, tuple[Tensor, Tensor, Tensor]]] = {"keys": {}, "values": {}}
        for name, basis in fit.tensors.items():
            side, _, rest = name.partition(".")
            layer, _, kind = rest.partition(".")
            if kind != "basis":
                continue
            mean = fit.tensors.get(f"{side}.{layer}.mean")
            if side not in sides or not layer.isdecimal() or mean is None:
                raise ValueError(f"fit {fit.digest}: {name!r} has no mean beside it or is none of keys and values")
            if basis.ndim != 3 or basis.shape[1] != basis.shape[2] or mean.shape != basis.shape[:2]:
                raise ValueError(
                    f"fit {fit.digest}: {name!r} {tuple(basis.shape)} and its mean {tuple(mean.shape)} do not agree"
                )
            try:
                forward = torch.linalg.inv(basis.double()).float()
            except RuntimeError as error:
                raise ValueError(f"fit {fit.digest}: {name!r} has no inverse: {error}") from None
            found = (mean.float(), forward, basis.float())
            if not all(bool(t.isfinite().all()) for t in found):
                raise ValueError(f"fit {fit.digest}: {name!r} or its mean or inverse is not finite")
            sides[side][int(layer)] = found
        if not sides["keys"] or sides["keys"].keys() != sides["values"].keys():
            raise ValueError(f"fit {fit.digest} has keys and values of different layers, or none")
        return cls(fit.digest, sides)

    def covers(self, layers: tuple[int, ...], keys: tuple[int, ...], values: tuple[int, ...]) -> bool:
        """Whether all of ``layers`` were fitted, with heads of these shapes ``(Hkv, D)``."""
        return bool(layers) and all(
            layer in self._sides["keys"]
            and self._sides["keys"][layer][0].shape == keys
            and self._sides["values"][layer][0].shape == values
            for layer in layers
        )

    def heads(self, layers: tuple[int, ...], scale: float) -> tuple[Heads, Heads]:
        """Those of keys and of values of ``layers``, which are covered."""
        import torch

        if layers not in self._stacked:
            sides = []
            for side in (self._sides["keys"], self._sides["values"]):
                means, forwards, inverses = zip(*(side[layer] for layer in layers), strict=True)
                sides.append(Heads(torch.stack(means)[:, :, None], torch.stack(forwards), torch.stack(inverses)))
            self._stacked[layers] = sides[0], sides[1]
        keys, values = self._stacked[layers]
        return replace(keys, scale=scale), replace(values, scale=scale)
