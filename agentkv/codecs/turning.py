"""Keys as they were before RoPE: what all lossy codecs quantise.

Post-RoPE keys of one channel swing with their position; pre-RoPE they keep to a mean and a range of their own, which is
what makes a channel cheap to quantise (KIVI, arXiv 2402.02750; KVQuant, arXiv 2401.18079). Angles are float64, the
turn is float32, and it has unit modulus: a model's attention factor (YaRN) stays in the key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from agentkv.codecs.contract import KVBlock
from agentkv.rope import Rotation, angles, turn

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["post_rope", "pre_rope"]


def pre_rope(block: KVBlock) -> Tensor:
    """The keys of ``block`` turned back to position 0: a new tensor ``[layers, Hkv, T, Dk]``, float32.

    Infinities and NaN spread to the pair they are in: look for them first.
    """
    import torch

    keys = torch.stack([k.to(torch.float32) for k in block.keys])
    _turn_all(keys, block, -1)
    return keys


def post_rope(keys: Tensor, out: KVBlock) -> None:
    """Turn ``keys [layers, Hkv, T, Dk]`` (float32, changed in place) to the positions of ``out``, and write them there.

    Rounded once, to the dtype of ``out``.
    """
    _turn_all(keys, out, 1)
    for source, into in zip(keys, out.keys, strict=True):
        into.copy_(source)


def _turn_all(keys: Tensor, block: KVBlock, sense: int) -> None:
    positions = range(block.position, block.position + keys.shape[2])
    for rotation, layers in _alike(block.rotations):
        cos, sin = angles([(1, sense * p) for p in positions], rotation, keys.dtype)
        turn(keys[layers], cos.to(keys.device), sin.to(keys.device), rotation.interleaved)


def _alike(rotations: tuple[Rotation | None, ...]) -> Iterator[tuple[Rotation, slice]]:
    """Neighbouring layers with the same rotation, together; those without one are left out."""
    start = 0
    for stop in range(1, len(rotations) + 1):
        if stop == len(rotations) or rotations[stop] != rotations[start]:
            here = rotations[start]
            if here is not None and here.frequencies:
                yield here, slice(start, stop)
            start = stop
