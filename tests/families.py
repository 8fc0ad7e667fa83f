"""Tiny random models of the families that are served, for comparing with transformers' own results.

Weights are drawn with a spread that keeps logits far from flat, so that a wrong key or position shows in the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    BambaConfig,
    Cohere2Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GlmConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    NemotronHConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

__all__ = ["FAMILIES", "VOCAB", "Family", "family"]

VOCAB = 131
_SHIFTED_NORMS = {"gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text"}
"""Models whose norms multiply by 1 + weight."""
_SLOW_DECAY = -2.0
"""Around which the logarithms of decay rates are drawn, so that what recurrent layers carry lasts some ten tokens."""


@dataclass(frozen=True)
class Family:
    """One model family: its tiny configuration and what is special about it.

    ``windows``: the reach of its layer groups, ``None`` for full attention. ``turns``: the dimensions of each layer's
    keys that turn with the position, 0 where none does, up to the last layer that attends. ``states``: the kinds of
    state that its recurrent layers carry. ``limit``: its longest context.
    """

    name: str
    config: Callable[[], PreTrainedConfig]
    windows: tuple[int | None, ...] = (None,)
    sinks: bool = False
    softcap: bool = False
    learned_positions: bool = False
    turns: tuple[int, ...] = (8, 8)
    interleaved: bool = False
    states: tuple[str, ...] = ()
    limit: int = 256

    @property
    def movable(self) -> bool:
        """Whether something may be evicted."""
        return not self.learned_positions and not self.states

    def build(self, seed: int = 0, attention: str = "eager") -> PreTrainedModel:
        """The model in float32 with ``seed``'s weights, as transformers runs it. The same seed, the same weights."""
        config = self.config()
        config._attn_implementation = attention
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in model.named_parameters():
            if weight.ndim == 1 and name.endswith("weight"):
                around = 0.0 if config.model_type in _SHIFTED_NORMS else 1.0
                noise = torch.randn(weight.shape, generator=generator) * 0.2 + around
            elif name.endswith("A_log"):
                noise = torch.randn(weight.shape, generator=generator) * 0.2 + _SLOW_DECAY
            else:
                noise = torch.randn(weight.shape, generator=generator) * 0.2
            weight.data.copy_(noise)
        model.generation_config.eos_token_id = None
        model.generation_config.bos_token_id = None
        model.generation_config.pad_token_id = 0
        return model.eval().requires_grad_(False)

    def __repr__(self) -> str:
        return self.name


_SIZES: dict[str, Any] = {
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
_FULL_LAST = ["sliding_attention", "sliding_attention", "full_attention"]
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


def _gemma4() -> PreTrainedConfig:
    return Gemma4TextConfig(
        **{**_GROUPED, "num_hidden_layers": 3},
        head_dim=8,
        global_head_dim=16,
        sliding_window=9,
        layer_types=_FULL_LAST,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCAB,
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


def _cohere2() -> PreTrainedConfig:
    return Cohere2Config(
        **{**_GROUPED, "num_hidden_layers": 3}, head_dim=8, sliding_window=10, layer_types=_HYBRID, logit_scale=1.0
    )


def _qwen3_moe() -> PreTrainedConfig:
    return Qwen3MoeConfig(
        **_GROUPED, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
    )


_LINEAR = ["linear_attention", "full_attention", "linear_attention"]
_DELTA: dict[str, Any] = {
    **{**_GROUPED, "num_hidden_layers": 3},
    "head_dim": 8,
    "layer_types": _LINEAR,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 16}


def _falcon_h1() -> PreTrainedConfig:
    return FalconH1Config(**_GROUPED, **_MAMBA, head_dim=8, mamba_d_ssm=32, mamba_d_head=8)


def _qwen3_next() -> PreTrainedConfig:
    return Qwen3NextConfig(
        **_DELTA,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )


def _lfm2() -> PreTrainedConfig:
    return Lfm2Config(**{**_GROUPED, "num_hidden_layers": 3}, layer_types=["conv", "full_attention", "conv"])


def _bamba() -> PreTrainedConfig:
    return BambaConfig(**_GROUPED, **_MAMBA, mamba_d_head=16, attn_layer_indices=[1])


def _nemotron_h() -> PreTrainedConfig:
    sizes = {name: size for name, size in _GROUPED.items() if name != "num_hidden_layers"}
    return NemotronHConfig(
        **sizes,
        head_dim=8,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=16,
    )


def _yarn(factor: float) -> dict[str, Any]:
    original = int(_SIZES["max_position_embeddings"] / factor)
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": factor}
    return {**rope, "original_max_position_embeddings": original}


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [2.0, 4.0, 6.0, 8.0],
    "original_max_position_embeddings": 96,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}

FAMILIES = (
    Family("llama", lambda: LlamaConfig(**_GROUPED, attention_bias=True, mlp_bias=True)),
    Family("mistral", lambda: MistralConfig(**_GROUPED, sliding_window=16), windows=(16,)),
    Family("qwen2", lambda: Qwen2Config(**_GROUPED)),
    Family("qwen3", lambda: Qwen3Config(**_GROUPED, head_dim=12), turns=(12, 12)),
    Family("gemma3", _gemma3, windows=(9, None), turns=(8, 8, 8)),
    Family("gemma2", _gemma2, windows=(11, None), softcap=True, turns=(8, 8, 8)),
    Family("gemma4", _gemma4, windows=(9, None), turns=(8, 8, 16)),
    Family("gpt_neox", lambda: GPTNeoXConfig(**{**_SIZES, "hidden_size": 64}, rotary_pct=0.25), turns=(4, 4)),
    Family("phi3", lambda: Phi3Config(**_GROUPED, original_max_position_embeddings=256)),
    Family(
        "gpt2",
        lambda: GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=None, eos_token_id=None
        ),
        learned_positions=True,
        turns=(),
    ),
    Family("gpt_oss", _gpt_oss, windows=(13, None), sinks=True),
    Family("qwen3_moe", _qwen3_moe),
    Family("glm", lambda: GlmConfig(**_GROUPED, head_dim=8), turns=(4, 4), interleaved=True),
    Family("cohere2", _cohere2, windows=(10, None), turns=(8, 0, 8), interleaved=True),
    Family("smollm3", lambda: SmolLM3Config(**_GROUPED, no_rope_layers=[1, 0]), turns=(8, 0)),
    Family("olmo2", lambda: Olmo2Config(**_GROUPED)),
    Family("llama_llama3", lambda: LlamaConfig(**_GROUPED, rope_parameters=_LLAMA3)),
    Family("llama_yarn", lambda: LlamaConfig(**_GROUPED, rope_parameters=_yarn(4.0))),
    Family("qwen2_yarn", lambda: Qwen2Config(**_GROUPED, rope_parameters=_yarn(8.0))),
    Family("llama_dynamic", lambda: LlamaConfig(**_GROUPED, rope_parameters=_DYNAMIC)),
    Family(
        "phi3_longrope",
        lambda: Phi3Config(**_GROUPED, original_max_position_embeddings=96, rope_parameters=_LONGROPE),
        limit=96,
    ),
    Family("qwen3_next", _qwen3_next, turns=(0, 2), states=("conv", "recurrent")),
    Family("qwen3_5", lambda: Qwen3_5TextConfig(**_DELTA), turns=(0, 2), states=("conv", "recurrent")),
    Family("falcon_h1", _falcon_h1, states=("conv", "recurrent")),
    Family("bamba", _bamba, turns=(0, 4), states=("conv", "recurrent")),
    Family("nemotron_h", _nemotron_h, turns=(0, 0, 0), states=("conv", "recurrent")),
    Family("lfm2", _lfm2, turns=(0, 8), states=("conv",)),
)


def family(name: str) -> Family:
    """The one of that name."""
    return next(f for f in FAMILIES if f.name == name)
