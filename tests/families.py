"""Tiny random models of the families that are served, for comparing with transformers' own results.

Weights are drawn with a spread that keeps logits far from flat, so that a wrong key or position shows in the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

__all__ = ["FAMILIES", "VOCAB", "Family", "family"]

VOCAB = 131


@dataclass(frozen=True)
class Family:
    """One model family: its tiny configuration and what is special about it.

    ``windows``: the reach of its layer groups, ``None`` for full attention.
    """

    name: str
    config: Callable[[], PreTrainedConfig]
    windows: tuple[int | None, ...] = (None,)
    sinks: bool = False
    softcap: bool = False
    learned_positions: bool = False

    def build(self, seed: int = 0, attention: str = "eager") -> PreTrainedModel:
        """The model in float32 with ``seed``'s weights, as transformers runs it. The same seed, the same weights."""
        config = self.config()
        config._attn_implementation = attention
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in model.named_parameters():
            if weight.ndim == 1 and name.endswith("weight"):
                around = 0.0 if config.model_type.startswith("gemma") else 1.0  # Gemma's norms multiply by 1 + weight
                noise = torch.randn(weight.shape, generator=generator) * 0.2 + around
            else:
                noise = torch.randn(weight.shape, generator=generator) * 0.2
            weight.data.copy_(noise)
        model.generation_config.eos_token_id = None
        model.generation_config.bos_token_id = None
        model.generation_config.pad_token_id = 0
        return model.eval().requires_grad_(False)

    def __repr__(self) -> str:
        return self.name


_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_HYBRID = ["sliding_attention", "full_attention", "sliding_attention"]


def _gemma3() -> PreTrainedConfig:
    return Gemma3TextConfig(
        **{**_GROUPED, "num_hidden_layers": 3},
        head_dim=8,
        query_pre_attn_scalar=12,
        sliding_window=9,
        layer_types=_HYBRID,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 100_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
        },
    )


def _gemma2() -> PreTrainedConfig:
    return Gemma2Config(
        **{**_GROUPED, "num_hidden_layers": 3},
        head_dim=8,
        query_pre_attn_scalar=12,
        sliding_window=11,
        layer_types=_HYBRID,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=20.0,
    )


def _gpt_oss() -> PreTrainedConfig:
    return GptOssConfig(
        **_GROUPED,
        head_dim=8,
        sliding_window=13,
        layer_types=["sliding_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )


FAMILIES = (
    Family("llama", lambda: LlamaConfig(**_GROUPED, attention_bias=True, mlp_bias=True)),
    Family("mistral", lambda: MistralConfig(**_GROUPED, sliding_window=16), windows=(16,)),
    Family("qwen2", lambda: Qwen2Config(**_GROUPED)),
    Family("qwen3", lambda: Qwen3Config(**_GROUPED, head_dim=12)),
    Family("gemma3", _gemma3, windows=(9, None)),
    Family("gemma2", _gemma2, windows=(11, None), softcap=True),
    Family(
        "gpt_neox",
        lambda: GPTNeoXConfig(**{**_SIZES, "hidden_size": 64}, rotary_pct=0.25),
    ),
    Family("phi3", lambda: Phi3Config(**_GROUPED, original_max_position_embeddings=256)),
    Family(
        "gpt2",
        lambda: GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=None, eos_token_id=None
        ),
        learned_positions=True,
    ),
    Family("gpt_oss", _gpt_oss, windows=(13, None), sinks=True),
)


def family(name: str) -> Family:
    """The one of that name."""
    return next(f for f in FAMILIES if f.name == name)
