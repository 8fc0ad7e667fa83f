"""Linear layers with weights in oneDNN's own blocked format, for bf16 on a CPU; those that read the same input, as one.

torch hands oneDNN a plain weight on every call, which it must read as it lies. Packed once, the same product is faster
at the few rows of a decode step (1536×576 at 8 rows: 117 µs plain, 72 µs packed). A call
costs about 40 µs however small its weight, so query, key and value projections run as one product, and so do gate and
up. The plain weights are given back, so memory does not double; a head tied to the embedding costs its size again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["PackedLinear", "pack_linears"]

_ROWS = 8
"""The row count that the blocked format is chosen for; any other works."""

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Children of one module that are called with the same input, in this order, in every family that names them so."""


class PackedLinear(nn.Module):
    """``x [..., in] bf16 → [..., out] bf16``, the given layers' outputs side by side. Inference only, no ``weight``."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self._bias = torch.cat([bias.detach() for bias in biases]) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return result


class _Shared:
    """One product for several siblings: computed when the first asks with an input, let go when the last has asked."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._linear = PackedLinear(linears)
        self._sizes = [linear.out_features for linear in linears]
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def part(self, x: Tensor, index: int) -> Tensor:
        if x is not self._input:
            self._outputs = self._linear(x).split(self._sizes, dim=-1)
            self._input = x
        output = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._input, self._outputs = None, ()
        return output


class _Sibling(nn.Module):
    """Stands where one of the siblings stood."""

    def __init__(self, shared: _Shared, index: int) -> None:
        super().__init__()
        self._shared, self._index = shared, index

    def forward(self, x: Tensor) -> Tensor:
        return self._shared.part(x, self._index)


def pack_linears(model: nn.Module) -> int:
    """Replace every plain bf16 ``nn.Linear`` on the CPU. Returns how many; 0 where it would not help."""
    if next(model.parameters()).device.type != "cpu" or not _supported():
        return 0
    packed = 0
    for parent in list(model.modules()):
        plain = {
            name: child for name, child in parent.named_children() if isinstance(child, nn.Linear) and _packable(child)
        }
        for names in _SIBLINGS:
            group = [plain[name] for name in names if name in plain]
            if len(group) == len(names) and _joinable(group):
                shared = _Shared(group)
                for index, name in enumerate(names):
                    setattr(parent, name, _Sibling(shared, index))
                    del plain[name]
                packed += len(names)
        for name, linear in plain.items():
            setattr(parent, name, PackedLinear([linear]))
            packed += 1
    return packed


def _supported() -> bool:
    return (
        torch._C._has_mkldnn
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _packable(linear: nn.Linear) -> bool:
    """Subclasses may do more than a product."""
    return type(linear) is nn.Linear and linear.weight.dtype == torch.bfloat16


def _joinable(group: Sequence[nn.Linear]) -> bool:
    inputs = {linear.in_features for linear in group}
    biases = {linear.bias is None for linear in group}
    return len(inputs) == 1 and len(biases) == 1
