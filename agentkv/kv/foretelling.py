"""How many bytes a state may come to take on its way to so many tokens."""

from __future__ import annotations

from agentkv.kv.contiguous import ContiguousKV
from agentkv.kv.contract import Evictions, SequenceKV
from agentkv.types import KVGeometry, LayerGroup

__all__ = ["contiguous_nbytes", "most_in_window", "new_tokens"]


def new_tokens(kv: SequenceKV | None, tokens: int, evictions: Evictions | None) -> int:
    """Tokens that are yet to be computed, for a state that is to hold ``tokens``."""
    if evictions is not None:
        return evictions.new
    return max(0, tokens - (0 if kv is None else kv.tokens))


def in_window(group: LayerGroup, tokens: int, evictions: Evictions | None) -> int:
    """Tokens that a sliding group holds at least: what full groups evicted it may hold as well."""
    assert group.window is not None
    return group.window if evictions is not None else min(group.window, tokens)


def most_in_window(group: LayerGroup, tokens: int, evictions: Evictions | None, new: int, piece: int) -> int:
    """Slots that a sliding group takes at once: its window, and a step's new tokens."""
    return in_window(group, tokens, evictions) + min(piece, new)


def contiguous_nbytes(
    geometry: KVGeometry, kv: SequenceKV | None, tokens: int, evictions: Evictions | None, capacities: list[int]
) -> int:
    """Bytes of a contiguous state: slots, ``capacities`` of them in each group, masters, and the copies of windows that
    an undo record makes."""
    turned, rebases, total = 0, False, 0
    if evictions is not None:
        turned, rebases = tokens if evictions.rebases else min(evictions.turned, tokens), evictions.rebases
    for index, (group, capacity) in enumerate(zip(geometry.groups, capacities, strict=True)):
        total += capacity * group.values_per_token
        standing = kv.buffers(index).moved if isinstance(kv, ContiguousKV) else 0
        if group.window is None:
            masters = max(standing, turned)
        else:
            masters = capacity if rebases else standing
            total += in_window(group, tokens, evictions) * group.values_per_token
        rotated = sum(geometry.rotations[layer] is not None for layer in group.layers) if geometry.rotations else 0
        total += masters * rotated * group.kv_heads * group.key_dim
    return total * geometry.itemsize
