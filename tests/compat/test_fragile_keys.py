"""Keys with huge biases, as Qwen2 has them in its first and last layers, bear four bits where means are removed.

After RoPE such a bias swings with the position; coded by token it takes the whole range of 16 levels. Before RoPE it is
a constant of its channel, and costs nothing (KIVI, arXiv 2402.02750; KVQuant, arXiv 2401.18079).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from driving import prompt
from families import VOCAB, family
from transformers import Qwen2Config

from agentkv.codecs import CODECS, Codec, KVBlock
from agentkv.engine.calibration import Scorer
from agentkv.engine.direct import prefill, step
from agentkv.engine.loading import load
from agentkv.models import resolve
from agentkv.settings import Settings
from agentkv.types import Span

BIAS = 600.0
LAYERS, HEADS, DIM = 3, 2, 8
PREFIX, SCORED = 900, 100


class PerToken(Codec):
    """The control: 16 levels between the least and largest number of each token's head, keys as they are after RoPE."""

    name = "per-token"
    exact = False

    def encode(self, block: KVBlock) -> bytes:
        parts = []
        for tensor in (*block.keys, *block.values):
            low, high = tensor.float().aminmax(dim=-1, keepdim=True)
            size = (high - low).clamp_min(1e-30) / 15
            codes = ((tensor.float() - low) / size).round().to(torch.uint8)
            parts += [low.numpy().tobytes(), size.numpy().tobytes(), codes.numpy().tobytes()]
        return b"".join(parts)

    def decode(self, payload: bytes | memoryview, out: KVBlock, parameters: Mapping[str, Any]) -> None:
        at = 0
        for tensor in (*out.keys, *out.values):
            heads, tokens, dim = tensor.shape
            rows = heads * tokens
            low, size = np.frombuffer(payload, np.float32, 2 * rows, at).reshape(2, heads, tokens, 1)
            codes = np.frombuffer(payload, np.uint8, rows * dim, at + 8 * rows).reshape(heads, tokens, dim)
            at += rows * (8 + dim)
            tensor.copy_(torch.from_numpy(low + size * codes))


@cache
def scorer(bias: float, seed: int) -> tuple[Scorer, float]:
    """A qwen2 whose keys have a bias of norm ``bias`` a head in the first and the last layer, and its mean entropy.

    The bias lies in the pair of dimensions that turns slowest: in a faster one, all attention would go to one token.
    """
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=2 * HEADS * DIM,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2 * HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = replace(family("qwen2"), config=lambda: config).build(seed)
    model.lm_head.weight.data *= 1.6
    assert model.model.layers[0].self_attn.k_proj.weight.std() > 0.19
    for layer in (0, LAYERS - 1):
        biases = model.model.layers[layer].self_attn.k_proj.bias.data.view(HEADS, DIM)
        biases[:, [DIM // 2 - 1, DIM - 1]] = bias / math.sqrt(2)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        settings = Settings(home=Path(folder) / "home", device="cpu", dtype="float32")
        local = resolve(folder, settings)
        assert local is not None
        loaded = load(local, settings)
    ids = prompt(PREFIX + SCORED)
    kv = loaded.layout.open()
    prefill(loaded.adapter, loaded.layout, kv, ids[:PREFIX], loaded.piece)
    p = step(loaded.adapter, loaded.layout, [(kv, ids[PREFIX:])], rows="all").double().softmax(-1)
    keys = kv.capture(Span(0, PREFIX))[0].block.keys
    assert keys[0].norm(dim=-1).mean() > 0.9 * bias
    return Scorer(loaded, ids[:PREFIX], ids[PREFIX:]), torch.special.entr(p).sum(-1).mean().item()


def mean_kl(codec: Codec, bias: float, seed: int) -> float:
    result = scorer(bias, seed)[0].measure(codec.name, codec)
    assert result is not None
    print(f"{codec.name}, bias {bias:g}, weights {seed}: mean KL {result.mean_kl:.5f}, {result.ratio:.2f}x")
    return result.mean_kl


@pytest.mark.parametrize("weights", [0, 1])
def test_logits_are_far_from_flat(weights: int) -> None:
    assert scorer(BIAS, weights)[1] < 0.75 * math.log(VOCAB)


@pytest.mark.parametrize("weights", [0, 1])
@pytest.mark.parametrize("name", ["int8", "int4", "compact"])
def test_huge_key_biases_cost_nothing(name: str, weights: int) -> None:
    codec = CODECS.get(name)
    with_bias, without = mean_kl(codec, BIAS, weights), mean_kl(codec, 0.0, weights)
    assert with_bias <= 0.005
    assert with_bias <= 3 * without


@pytest.mark.parametrize("weights", [0, 1])
def test_control_four_bits_a_token_after_rope_break_on_them(weights: int) -> None:
    assert mean_kl(PerToken(), BIAS, weights) > 0.05
    assert mean_kl(PerToken(), 0.0, weights) < 0.05
