"""Keys as they were before RoPE: what all lossy codecs quantise.

Post-RoPE keys of one channel swing with their position; pre-RoPE they keep to a mean and a range of their own, which is
what makes a channel cheap to quantise (KIVI, arXiv 2402.02750; KVQuant, arXiv 2401.18079). Angles are float64, the
turn is float32, and it has unit modulus: a model's attention factor (YaRN) stays in the key.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from agentkv.codecs.contract import KVBlock
from agentkv.rope import Rotation, rotate

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["post_rope", "pre_rope", "rotations_of", "slabs", "turn_on", "turn_slab"]

_SLAB = 600_000
"""Numbers of keys at once: layers enough for calls that last, few enough for what they work on to stay in a core's
cache. Between calls threads wait for one another (Python's lock), which costs about as much as a short call."""

_FARTHEST = 1 << 53


def rotations_of(block: KVBlock) -> tuple[Rotation | None, ...]:
    """One a layer; ``None`` where keys do not turn."""
    rotations = block.rotations or (None,) * len(block.keys)
    return tuple(r if r is not None and r.frequencies else None for r in rotations)


def slabs(block: KVBlock) -> Iterator[slice]:
    """The layers of ``block``, some neighbours at a time that turn alike. What one is cut into shows in no number."""
    rotations = rotations_of(block)
    many = max(1, _SLAB // block.keys[0].numel())
    start = 0
    for stop in range(1, len(rotations) + 1):
        if stop == len(rotations) or stop - start == many or rotations[stop] != rotations[start]:
            yield slice(start, stop)
            start = stop


def turn_slab(keys: Tensor, layers: slice, block: KVBlock, sense: int) -> None:
    """Turn ``keys [layers, Hkv, T, Dk]`` (float32, in place) of a slab to the positions of ``block``.

    ``sense`` -1: back from there to position 0.
    """
    import torch

    rotation = rotations_of(block)[layers.start]
    if rotation is None:
        return
    cos, sin = (t.to(keys.device) for t in _angles(rotation, block.position, block.tokens, sense))
    width = cos.shape[1]
    both = slice(0, width, 2), slice(1, width, 2)
    first, second = both if rotation.interleaved else (slice(width // 2), slice(width // 2, width))
    turned = keys[..., :width]
    across = torch.mul(turned, sin)
    turned.mul_(cos)
    turned[..., first].sub_(across[..., second])
    turned[..., second].add_(across[..., first])


def turn_on(block: KVBlock, position: int) -> None:
    """Turn the keys of ``block``, whose first token's were made at ``position``, to its own positions, in place.

    In float32 or what is wider, rounded once. ``ValueError`` where ``position`` is not one that a token can have.
    """
    if abs(position) > _FARTHEST:
        raise ValueError(f"keys of position {position}; positions reach to {_FARTHEST}")
    by = block.position - position
    for keys, rotation in zip(block.keys, rotations_of(block), strict=True):
        if by and rotation is not None:
            keys.copy_(rotate(keys, [(block.tokens, by)], rotation))


@lru_cache(maxsize=64)
def _angles(rotation: Rotation, position: int, tokens: int, sense: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[T, 2n]`` float32: each of a pair has those of its pair."""
    import torch

    with torch.inference_mode(False):
        positions = sense * (torch.arange(tokens, dtype=torch.float64) + float(position))
        each = positions[:, None] * torch.tensor(rotation.frequencies, dtype=torch.float64)
        sides = [side.to(torch.float32) for side in (torch.cos(each), torch.sin(each))]
        if rotation.interleaved:
            return sides[0].repeat_interleave(2, 1), sides[1].repeat_interleave(2, 1)
        return sides[0].repeat(1, 2), sides[1].repeat(1, 2)


def pre_rope(block: KVBlock) -> Tensor:
    """The keys of ``block`` turned back to position 0: a new tensor ``[layers, Hkv, T, Dk]``, float32.

    Infinities and NaN spread to the pair they are in: look for them first.
    """
    import torch

    keys = torch.empty((len(block.keys), *block.keys[0].shape), dtype=torch.float32, device=block.keys[0].device)
    for layers in slabs(block):
        torch._foreach_copy_(keys[layers].unbind(), block.keys[layers])
        turn_slab(keys[layers], layers, block, -1)
    return keys


def post_rope(keys: Tensor, out: KVBlock) -> None:
    """Turn ``keys [layers, Hkv, T, Dk]`` (float32, changed in place) to the positions of ``out``, and write them there.

    Rounded once, to the dtype of ``out``.
    """
    import torch

    for layers in slabs(out):
        turn_slab(keys[layers], layers, out, 1)
        torch._foreach_copy_(out.keys[layers], keys[layers].unbind())
