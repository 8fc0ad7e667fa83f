"""Recurrent layers' states as numbers of the model's dtype, for storing: the same bytes, whatever dtypes they are of.

layer's states   | conv, bfloat16   | recurrent, float32                    |        bytes, one after the other
its block        | keys  [rows, 1, width]     | values  [rows, 1, width]  |0 0|        the rest is zero
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from agentkv.codecs import KVBlock
from agentkv.types import LayerGroup

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["PackedStates", "packed", "unpacked"]


class PackedStates:
    """States of all layers of ``group``; ``block`` shows them, at first undefined."""

    def __init__(self, group: LayerGroup, dtype: torch.dtype, device: torch.device) -> None:
        import torch

        self._group = group
        half, shape = group.kv_heads * group.key_dim, (group.kv_heads, 1, group.key_dim)
        self._layers = [torch.empty(2 * half, dtype=dtype, device=device) for _ in group.layers]
        self.block = KVBlock(
            tuple(numbers[:half].view(shape) for numbers in self._layers),
            tuple(numbers[half:].view(shape) for numbers in self._layers),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all numbers."""
        return self.block.nbytes

    def fill(self, tensors: Iterable[Tensor]) -> None:
        """Take the bytes of ``tensors``: those of each layer in the group's order, layer by layer."""
        import torch

        following = iter(tensors)
        for numbers in self._layers:
            raw, at = numbers.view(torch.uint8), 0
            for state in self._group.states:
                raw[at : at + state.nbytes] = next(following).contiguous().view(-1).view(torch.uint8)
                at += state.nbytes
            raw[at:] = 0

    def unpacked(self) -> Iterator[Tensor]:
        """The tensors ``[1, *shape]``, in the same order: copies."""
        return unpacked(self._group, self.block)


def packed(group: LayerGroup, tensors: list[Tensor], dtype: torch.dtype) -> PackedStates:
    """``tensors`` as :meth:`PackedStates.fill` takes them, in a block of their own on their device."""
    states = PackedStates(group, dtype, tensors[0].device)
    states.fill(tensors)
    return states


def unpacked(group: LayerGroup, block: KVBlock) -> Iterator[Tensor]:
    """The tensors ``[1, *shape]`` that ``block`` of ``group`` holds, layer by layer: copies."""
    import torch

    for keys, values in zip(block.keys, block.values, strict=True):
        raw, at = torch.cat([keys.reshape(-1), values.reshape(-1)]).view(torch.uint8), 0
        for state in group.states:
            own = raw[at : at + state.nbytes].clone()
            yield own.view(getattr(torch, state.dtype)).view(1, *state.shape)
            at += state.nbytes
