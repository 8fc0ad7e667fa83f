"""How much each head's stored keys and values matter to the tokens that come after them.

An error δ in stored KV moves the next-token distribution by KL ≈ ½ δᵀFδ, where F, the Fisher information, is the mean
square of the gradient of log p(y) for y drawn from the model itself (Amari, Natural gradient works efficiently in
learning, 1998). One backward pass through some hundred tokens gives it for every stored number at once. What counts is
the KV that a lossy codec sees: a prefix whose end, which is attended to most, is left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, DynamicCache

from agentkv.codecs.spared import LOSSLESS_TAIL, SINKS

__all__ = ["kv_sensitivity"]

_PIECE = 512


def kv_sensitivity(
    path: Path, texts: Sequence[Sequence[int]], scored: int, *, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> dict[int, tuple[Tensor, Tensor]]:
    """By layer of full attention, of keys and of values: ``[Hkv]`` float64.

    Twice the KL, in nats a scored token, of an error with variance 1 in one number of a head of every stored token (to
    second order: errors are far smaller). ``path``: the model's folder; its weights are loaded once more for this, in
    ``dtype``. ``texts``: token ids, each a prefix of at least 145 tokens and ``scored`` more. The same seed gives the
    same figures.

    ``ValueError`` for a text that is too short.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    model.to(device).eval().requires_grad_(False)
    draw = torch.Generator(device=device).manual_seed(seed)
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for ids in texts:
        if len(ids) - scored <= SINKS + LOSSLESS_TAIL:
            raise ValueError(f"a text of {len(ids)} tokens has no prefix worth a codec before {scored} scored ones")
        for layer, sides in _gradients(model, ids, scored, draw).items():
            keys, values = (side.double().square().sum(1).mean(1).cpu() / scored / len(texts) for side in sides)
            before = found.get(layer, (0.0, 0.0))
            found[layer] = before[0] + keys, before[1] + values
    return found


def _gradients(
    model: Any, ids: Sequence[int], scored: int, draw: torch.Generator
) -> Mapping[int, tuple[Tensor, Tensor]]:
    """Of the log-probability of drawn tokens: ``[Hkv, T, D]`` of keys and of values, by layer; T tokens are stored."""
    cache: Any = DynamicCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    row = torch.tensor([list(ids)], device=model.device)
    prefix = len(ids) - scored
    with torch.no_grad():
        for start in range(0, prefix, _PIECE):
            piece = row[:, start : min(start + _PIECE, prefix)]
            model(input_ids=piece, use_cache=True, logits_to_keep=1, **{name: cache})
    stored = {}
    for index, layer in enumerate(cache.layers):
        if layer.keys.shape[2] == prefix and not getattr(layer, "is_sliding", False):
            layer.keys, layer.values = (t.detach().requires_grad_() for t in (layer.keys, layer.values))
            stored[index] = layer.keys, layer.values
    logits = model(input_ids=row[:, prefix:], use_cache=True, **{name: cache}).logits[0].float()
    drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=draw)[:, 0]
    cross_entropy(logits, drawn, reduction="sum").backward()  # type: ignore[no-untyped-call]
    seen = slice(SINKS, prefix - LOSSLESS_TAIL)
    return {index: (keys.grad[0, :, seen], values.grad[0, :, seen]) for index, (keys, values) in stored.items()}
