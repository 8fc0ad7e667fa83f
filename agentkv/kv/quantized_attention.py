"""Attention in parts: each over some of the keys, merged by log-sum-exp as if it had been one softmax over all.

The merge is that of FlashAttention and FlashDecoding (arXiv 2205.14135): a part's output weighs what its keys' summed
exponentials are of all. Learned sinks (gpt-oss) are one more part, whose output is nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentkv.kv.attention import Reach
from agentkv.kv.contract import AttentionTraits

__all__ = ["Partial", "over"]


class Partial:
    """The attention of ``queries [Hq, T, Dk]`` so far."""

    def __init__(self, queries: Tensor, traits: AttentionTraits) -> None:
        self._queries, self._traits = queries, traits
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, keys: Tensor, values: Tensor, reach: Reach | None = None) -> None:
        """Attend ``keys [Hkv, L, Dk]`` and ``values [Hkv, L, Dv]`` too; all of them, or as far as ``reach`` says."""
        out, lse = over(self._queries, keys, values, reach, self._traits)
        if self._out is None or self._lse is None:
            self._out, self._lse = out, lse
        else:
            self._out = torch.lerp(self._out, out, torch.sigmoid(lse - self._lse))
            self._lse = torch.logaddexp(self._lse, lse)

    def result(self) -> Tensor:
        """``[T, Hq, Dv]``, in the queries' dtype."""
        assert self._out is not None and self._lse is not None
        out = self._out
        if self._traits.sinks is not None:
            out = out * torch.sigmoid(self._lse - self._traits.sinks.to(self._lse.dtype).view(-1, 1, 1))
        return out.to(self._queries.dtype).transpose(0, 1)


def over(
    queries: Tensor, keys: Tensor, values: Tensor, reach: Reach | None, traits: AttentionTraits
) -> tuple[Tensor, Tensor]:
    """Softmax attention over these keys alone ``[Hq, T, Dv]``, and the log of its denominators ``[Hq, T, 1]``.

    Both float32 or wider. Query heads that share a KV head are folded into its rows.
    """
    heads, tokens, dim = queries.shape
    kv_heads = keys.shape[0]
    folded = queries.reshape(kv_heads, heads // kv_heads * tokens, dim)
    if queries.device.type == "cpu" and traits.softcap is None and keys.shape[2] == values.shape[2]:
        mask = None if reach is None else reach.folded_mask(heads // kv_heads)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out, lse = flash(folded[None], keys[None], values[None], attn_mask=mask, scale=traits.scaling)
        return out.reshape(heads, tokens, values.shape[2]).to(lse.dtype), lse.reshape(heads, tokens, 1)
    scores = torch.matmul(folded, keys.transpose(1, 2)).view(heads, tokens, keys.shape[1]) * traits.scaling
    if traits.softcap is not None:
        scores = traits.softcap * torch.tanh(scores / traits.softcap)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if reach is not None and reach.mask is not None:
        scores = scores + reach.mask
    lse = torch.logsumexp(scores, -1, keepdim=True)
    weights = torch.exp(scores - lse).to(values.dtype)
    out = torch.matmul(weights.view(kv_heads, folded.shape[1], keys.shape[1]), values)
    return out.view(heads, tokens, values.shape[2]).to(lse.dtype), lse
