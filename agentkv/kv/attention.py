"""Attention of one session's new tokens over its own keys."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentkv.kv.contract import AttentionTraits

__all__ = ["Reach", "attend"]

_SPLIT_TOKENS = 64
"""From so many queries on; for fewer, two calls and a merge cost more than a mask."""


@dataclass(slots=True)
class Reach:
    """Which of the keys each new query of one session sees, in one layer group.

    The queries are at positions ``[past, past + tokens)`` of the given keys, of which those before ``past`` are older;
    a query sees itself and what lies before it, at most ``window`` keys.
    """

    tokens: int
    past: int
    window: int | None
    dtype: torch.dtype
    device: torch.device
    _mask: Tensor | None = None
    _folded: dict[int, Tensor] = field(default_factory=dict)

    @property
    def split(self) -> bool:
        """Whether attention over the older keys and over the new ones are better computed apart."""
        return self.window is None and self.past > 0 and self.tokens >= _SPLIT_TOKENS

    @property
    def mask(self) -> Tensor | None:
        """Additive mask ``[tokens, past + tokens]``, made once; ``None`` where every query sees every key."""
        if self.tokens == 1:
            return None
        if self._mask is None:
            query = torch.arange(self.past, self.past + self.tokens, device=self.device)[:, None]
            key = torch.arange(self.past + self.tokens, device=self.device)[None, :]
            hidden = key > query
            if self.window is not None:
                hidden |= key <= query - self.window
            self._mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
            self._mask.masked_fill_(hidden, float("-inf"))
        return self._mask

    def folded_mask(self, fold: int) -> Tensor | None:
        """The mask for ``fold`` query heads that are rows of one head: ``[fold · tokens, past + tokens]``."""
        mask = self.mask
        if mask is None or fold == 1:
            return mask
        if fold not in self._folded:
            self._folded[fold] = mask.repeat(fold, 1)
        return self._folded[fold]


def _eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, traits: AttentionTraits) -> Tensor:
    """Softmax attention written out, for what the fused kernels lack: score caps and learned sinks.

    Query heads that share a KV head are folded into its rows, so that K and V are read as they are stored.
    """
    heads, tokens, dim = q.shape
    kv_heads, keys, _ = k.shape
    folded = q.reshape(kv_heads, -1, dim)
    scores = torch.matmul(folded, k.transpose(1, 2)).view(heads, tokens, keys) * traits.scaling
    if traits.softcap is not None:
        scores = traits.softcap * torch.tanh(scores / traits.softcap)
    if scores.dtype in (torch.bfloat16, torch.float16):
        scores = scores.float()
    if mask is not None:
        scores = scores + mask
    if traits.sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        sink = traits.sinks.to(scores.dtype).view(heads, 1, 1).expand(-1, tokens, -1)
        weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    out = torch.matmul(weights.to(v.dtype).reshape(kv_heads, -1, keys), v)
    return out.view(heads, tokens, -1)


def attend(q: Tensor, k: Tensor, v: Tensor, reach: Reach, traits: AttentionTraits) -> Tensor:
    """``q [Hq, T, D]`` over ``k [Hkv, L, D]``, ``v [Hkv, L, Dv]`` → ``[T, Hq, Dv]``; ``reach`` says who sees what."""
    if traits.softcap is not None or traits.sinks is not None:
        return _eager(q, k, v, reach.mask, traits).transpose(0, 1)
    if reach.split and q.device.type == "cpu" and k.shape[2] == v.shape[2]:
        return _split(q, k, v, reach.past, traits.scaling).transpose(0, 1)
    # Folded, K and V are read once for all query heads of a KV head. One query over 1,024 keys (9 heads on 3, bf16, two
    # cores): 140 µs so and 611 µs with enable_gqa on an EPYC with AVX512-BF16, 144 and 124 µs on a Xeon with AMX.
    heads, tokens, dim = q.shape
    folded = q.reshape(1, k.shape[0], -1, dim)
    mask = reach.folded_mask(heads // k.shape[0])
    out = scaled_dot_product_attention(folded, k[None], v[None], attn_mask=mask, scale=traits.scaling)
    return out.reshape(heads, tokens, -1).transpose(0, 1)


def _split(q: Tensor, k: Tensor, v: Tensor, past: int, scaling: float) -> Tensor:
    """A long piece: the keys before it, which all its queries see, and its own keys, causally; merged by log-sum-exp.

    Neither part needs a mask, which costs a sixth of a masked call's time (CPU, bf16, 256 queries over 2,048 keys). For
    the first part, query heads that share a KV head are folded into its rows: K and V are read as they are stored.
    """
    heads, tokens, dim = q.shape
    kv_heads = k.shape[0]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    own_k, own_v = k[:, past:], v[:, past:]
    if heads != kv_heads:
        own_k = own_k.repeat_interleave(heads // kv_heads, dim=0)
        own_v = own_v.repeat_interleave(heads // kv_heads, dim=0)
    near, near_lse = flash(q[None], own_k[None], own_v[None], is_causal=True, scale=scaling)
    folded = q.reshape(1, kv_heads, -1, dim)
    far, far_lse = flash(folded, k[None, :, :past], v[None, :, :past], scale=scaling)
    share = torch.sigmoid(far_lse.reshape(heads, tokens, 1) - near_lse.reshape(heads, tokens, 1))
    near = near[0].to(share.dtype)
    return torch.lerp(near, far.reshape(near.shape).to(share.dtype), share).to(q.dtype)
