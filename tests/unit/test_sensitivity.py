"""Sensitivities say beforehand what an error in stored KV costs."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCAB, family
from torch import Tensor
from transformers import DynamicCache

from agentkv.engine.sensitivity import kv_sensitivity

STORED, SCORED = 16 + 60 + 128, 50
SEEN = slice(16, STORED - 128)


def after(model: Any, ids: Tensor, layer: int, side: str, head: int, noise: float, seed: int) -> Tensor:
    """Log-probabilities ``[SCORED, V]`` after a prefix of which one head's stored keys or values have an error."""
    cache: Any = DynamicCache(config=model.config)
    given = {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}
    model(input_ids=ids[:, :STORED], **given)
    stored = getattr(cache.layers[layer], side)
    draw = torch.Generator().manual_seed(seed)
    stored[0, head, SEEN] += noise * torch.randn(stored[0, head, SEEN].shape, generator=draw)
    return model(input_ids=ids[:, STORED:], **given).logits[0].log_softmax(-1)


@torch.no_grad()
def test_it_predicts_the_kl_of_noise(tmp_path: Path) -> None:
    model: Any = family("llama").build(attention="sdpa")
    model.save_pretrained(tmp_path)
    texts = torch.randint(1, VOCAB, (20, 1, STORED + SCORED), generator=torch.Generator().manual_seed(0))
    with torch.enable_grad():
        rows = [t[0].tolist() for t in texts]
        found = kv_sensitivity(tmp_path, rows, SCORED, device=torch.device("cpu"), dtype=torch.float32)
    assert sorted(found) == [0, 1]
    noise, dim = 0.1, model.config.hidden_size // model.config.num_attention_heads
    exact = [after(model, ids, 0, "keys", 0, 0.0, 0) for ids in texts]
    for layer in (0, 1):
        for index, side in enumerate(("keys", "values")):
            measured = 0.0
            for seed, (ids, was) in enumerate(zip(texts, exact, strict=True)):
                for head in (0, 1):
                    noisy = after(model, ids, layer, side, head, noise, seed)
                    measured += float((was.exp() * (was - noisy)).sum(-1).mean()) / len(texts)
            predicted = float(found[layer][index].sum()) * dim * noise**2 / 2
            assert measured == pytest.approx(predicted, rel=0.4), (layer, side)


def test_a_text_without_a_prefix_is_refused(tmp_path: Path) -> None:
    family("llama").build().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="144"):
        kv_sensitivity(tmp_path, [[1] * 144], 0, device=torch.device("cpu"), dtype=torch.float32)
