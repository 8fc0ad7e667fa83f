"""Tensors as the unsigned words and the bytes they are made of: numpy views, no copies.

numpy does the bit work, not torch: its loops release the GIL and never start a second pool of threads under ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from agentkv.codecs.contract import KVBlock

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Bytes", "Words", "as_bytes", "as_words", "block_dtype"]

Words = np.ndarray[Any, np.dtype[Any]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_SIGNED = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def block_dtype(block: KVBlock) -> str:
    """The torch dtype name all tensors of ``block`` share, e.g. ``bfloat16``; ``ValueError`` where they differ."""
    names = {str(t.dtype).removeprefix("torch.") for t in (*block.keys, *block.values)}
    if len(names) != 1:
        raise ValueError(f"a block has one dtype, this one has {sorted(names) or 'no tensors'}")
    return names.pop()


def as_words(tensor: Tensor) -> Words:
    """``[..., D]`` CPU tensor of any dtype -> a view of the same shape and strides in unsigned words of its size."""
    import torch

    size = tensor.element_size()
    view: Any = _on_cpu(tensor).view(getattr(torch, _SIGNED[size])).numpy()
    return view.view(_UNSIGNED[size])  # type: ignore[no-any-return]


def as_bytes(tensor: Tensor) -> Bytes:
    """``[..., D]`` CPU tensor, last dimension contiguous -> a view ``[..., D * itemsize]`` of its bytes."""
    import torch

    view: Any = _on_cpu(tensor).view(torch.uint8).numpy()
    return view  # type: ignore[no-any-return]


def _on_cpu(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        raise ValueError(f"codecs work on CPU tensors, this one is on {tensor.device}")
    return tensor.detach()
