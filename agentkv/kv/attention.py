"""Attention of one session's new tokens over its own keys.

Grouped queries are folded: the ``G`` query heads that share a KV head become ``G·T`` query rows of that head, so that
K and V are read as they are stored. Measured on a CPU (bf16, 9 query / 3 KV heads, 4096 tokens): 0.39 ms a call,
against 2.28 ms with ``enable_gqa`` and 4.0 ms with repeated K/V.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentkv.kv.contract import AttentionTraits

__all__ = ["attend_decode", "attend_piece", "piece_mask"]


def piece_mask(
    tokens: int, past: int, held_from: int, window: int | None, fold: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Additive mask ``[fold·tokens, keys]`` of a piece: row ``g·tokens + i`` is the query at position ``past + i``.

    The keys are ledger positions ``[held_from, past + tokens)``. A query sees itself and what lies before it, at most
    ``window`` keys. ``None`` when every query sees every key.
    """
    query = torch.arange(past, past + tokens, device=device)[:, None]
    key = torch.arange(held_from, past + tokens, device=device)[None, :]
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    if bool(visible.all()):
        return None
    mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))
    return mask.repeat(fold, 1)


def _eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, traits: AttentionTraits, fold: int) -> Tensor:
    """Softmax attention written out, for what the fused kernels lack: score caps and learned sinks.

    ``q [Hkv, R, D]``, ``k [Hkv, L, D]``, ``v [Hkv, L, Dv]``, where ``R = fold·tokens``.
    """
    scores = torch.matmul(q, k.transpose(1, 2)) * traits.scaling
    if traits.softcap is not None:
        scores = traits.softcap * torch.tanh(scores / traits.softcap)
    scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    if mask is not None:
        scores = scores + mask
    if traits.sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        rows = q.shape[1] // fold
        sink = traits.sinks.to(scores.dtype).view(q.shape[0], fold, 1).expand(-1, -1, rows).reshape(q.shape[0], -1, 1)
        weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    return torch.matmul(weights.to(v.dtype), v)


def attend_decode(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, traits: AttentionTraits) -> Tensor:
    """One query over all given keys: ``q [Hq, 1, D]``, ``k [Hkv, L, D]``, ``v [Hkv, L, Dv]`` → ``[1, Hq, Dv]``.

    A single query a head is better left unfolded: the kernel spreads the query heads over the threads (measured with
    torch 2.13, bf16, 9/3 heads, 1,024 keys not in cache: 124 µs against 144 µs folded).
    """
    if traits.softcap is None and traits.sinks is None:
        out = scaled_dot_product_attention(q[None], k[None], v[None], scale=traits.scaling, enable_gqa=True)
        return out[0].transpose(0, 1)
    return attend_piece(q, k, v, mask, traits)


def attend_piece(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, traits: AttentionTraits) -> Tensor:
    """Several queries under ``mask`` (see :func:`piece_mask`): ``q [Hq, T, D]`` → ``[T, Hq, Dv]``."""
    heads, tokens, _ = q.shape
    kv_heads = k.shape[0]
    fold = heads // kv_heads
    q = q.reshape(kv_heads, fold * tokens, -1)
    if traits.softcap is not None or traits.sinks is not None:
        out = _eager(q, k, v, mask, traits, fold)
    else:
        out = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=traits.scaling)[0]
    return out.reshape(heads, tokens, -1).transpose(0, 1)
