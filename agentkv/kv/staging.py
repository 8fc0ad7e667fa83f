"""Copies between a CUDA device and pinned host memory, on a stream of their own, finished before they are used.

Without the events a copy may read what the model's stream has not written yet, or a buffer may be reused while a copy
still reads it: restored KV is then garbled without an error.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from agentkv.codecs import KVBlock

__all__ = ["pinned_like", "to_device", "to_host"]


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def pinned_like(block: KVBlock, tokens: int) -> KVBlock:
    """Uninitialised host tensors of the block's shapes, for ``tokens`` tokens; pinned where the block is on CUDA."""

    def empty(t: Tensor) -> Tensor:
        return torch.empty((t.shape[0], tokens, t.shape[2]), dtype=t.dtype, pin_memory=t.is_cuda)

    return KVBlock(tuple(map(empty, block.keys)), tuple(map(empty, block.values)))


def to_host(block: KVBlock) -> KVBlock:
    """The block in pinned host memory, complete on return; everything queued on the device before it is waited for."""
    host = pinned_like(block, block.tokens)
    _copy(block, host)
    return host


def to_device(host: KVBlock, target: KVBlock) -> None:
    """Fill device tensors from host ones; complete on return, so that the host memory may be reused at once."""
    _copy(host, target)


def _copy(source: KVBlock, into: KVBlock) -> None:
    tensors = (*source.keys, *source.values)
    targets = (*into.keys, *into.values)
    device = next(t.device for t in (*tensors, *targets) if t.is_cuda)
    stream = _stream(device)
    stream.wait_event(torch.cuda.default_stream(device).record_event())
    with torch.cuda.stream(stream):
        for a, b in zip(tensors, targets, strict=True):
            b.copy_(a, non_blocking=True)
            (a if a.is_cuda else b).record_stream(stream)
        done = stream.record_event()
    done.synchronize()
