"""A model that cannot be right here is refused when it is loaded; the error names the feature that is in the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from driving import adapted
from families import VOCAB, family
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BloomConfig,
    Cache,
    DeepseekV3Config,
    FalconConfig,
    Gemma3TextConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    Mamba2Config,
    MambaConfig,
    MiniMaxConfig,
    MptConfig,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.mpt.configuration_mpt import MptAttentionConfig

from agentkv.engine.adapter import ModelAdapter, StepInput
from agentkv.errors import InvalidRequest, Unsupported
from agentkv.kv.recurrent import StateKey

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def bloom() -> PreTrainedConfig:
    return BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)


def mpt() -> PreTrainedConfig:
    return MptConfig(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, attn_config=MptAttentionConfig(alibi=True))


def falcon() -> PreTrainedConfig:
    return FalconConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True, multi_query=False
    )


def mamba() -> PreTrainedConfig:
    return MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)


def mamba2() -> PreTrainedConfig:
    return Mamba2Config(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, n_groups=1
    )


def qwen3_next_without_attention() -> PreTrainedConfig:
    return Qwen3NextConfig(**SIZES, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16)


def jamba() -> PreTrainedConfig:
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    return JambaConfig(**sizes, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=8)


def recurrent_gemma() -> PreTrainedConfig:
    return RecurrentGemmaConfig(**{**SIZES, "num_hidden_layers": 3}, lru_width=32)


def llama4() -> PreTrainedConfig:
    return Llama4TextConfig(**SIZES, intermediate_size_mlp=32, num_local_experts=2, attention_chunk_size=16)


def gemma3n() -> PreTrainedConfig:
    return Gemma3nTextConfig(
        **{**SIZES, "num_hidden_layers": 4, "intermediate_size": [32] * 4},
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
    )


def deepseek() -> PreTrainedConfig:
    return DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4, "head_dim": 4},
        moe_intermediate_size=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        n_shared_experts=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        first_k_dense_replace=1,
    )


def bidirectional() -> PreTrainedConfig:
    return Gemma3TextConfig(**SIZES, use_bidirectional_attention=True)


def granite_hybrid(*layer_types: str) -> PreTrainedConfig:
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    return GraniteMoeHybridConfig(
        **sizes, layer_types=list(layer_types), mamba_n_heads=4, mamba_d_head=16, num_local_experts=0
    )


def minimax() -> PreTrainedConfig:
    return MiniMaxConfig(**SIZES, layer_types=["linear_attention", "full_attention"], num_local_experts=2)


def masked_window() -> PreTrainedConfig:
    return PhimoeConfig(**SIZES, sliding_window=16, num_local_experts=2)


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        (bloom, "ALiBi"),
        (mpt, "ALiBi"),
        (falcon, "ALiBi"),
        (mamba, "recurrent state"),
        (mamba2, "recurrent state"),
        (qwen3_next_without_attention, "recurrent state"),
        (jamba, "recurrent state"),
        (minimax, "recurrent state"),
        (recurrent_gemma, "recurrent_gemma layers [0, 1]"),
        (masked_window, "phimoe layer 0"),
        (llama4, "layer type chunked_attention"),
        (gemma3n, "Gemma3nTextAttention of layer 2"),
        (deepseek, "DeepseekV3Attention of layer 0"),
        (bidirectional, "bidirectional attention"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_refused_by_name(config: Callable[[], PreTrainedConfig], feature: str) -> None:
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.float32)
    with pytest.raises(Unsupported) as caught:
        ModelAdapter(model)
    assert caught.value.feature == feature
    assert str(caught.value).startswith(f"{feature} is not supported: ")


def test_longrope_that_does_not_say_where_it_changes_is_refused_by_name() -> None:
    model = family("phi3_longrope").build()
    del model.config.rope_parameters["original_max_position_embeddings"]
    with pytest.raises(Unsupported, match="rope type 'longrope' is not supported: its configuration does not say"):
        ModelAdapter(model)


def test_a_transformers_that_hands_states_out_in_another_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Cache, "get_recurrent_state")
    with pytest.raises(Unsupported, match=r"recurrent state is not supported: transformers .* install 5.24 or later"):
        adapted(family("falcon_h1"))
    adapted(family("llama"))


@pytest.mark.parametrize("forgetful", ["conv", "recurrent"])
def test_layers_that_do_not_take_up_what_they_carried_are_refused(forgetful: str) -> None:
    model = family("falcon_h1").build()

    class Forgetful(torch.nn.Module):
        """A mixer that starts anew at each row of several tokens, as Jamba's does with its recurrent state."""

        def __init__(self, mixer: torch.nn.Module) -> None:
            super().__init__()
            self.mixer, self.layer_idx = mixer, mixer.layer_idx

        def forward(self, hidden_states: torch.Tensor, cache: Any = None, **kwargs: Any) -> torch.Tensor:
            if hidden_states.shape[1] > 1:
                key = StateKey(self.layer_idx, forgetful, 0)
                cache.carried.before = {k: t for k, t in cache.carried.before.items() if k != key}
            return self.mixer(hidden_states, cache=cache, **kwargs)

    ModelAdapter(model)
    model.model.layers[1].mamba = Forgetful(model.model.layers[1].mamba)
    with pytest.raises(Unsupported, match="falcon_h1 does not take it up where a row is longer than one token"):
        ModelAdapter(model)


def test_a_hybrid_of_attention_layers_only_has_no_recurrent_state() -> None:
    model = AutoModelForCausalLM.from_config(granite_hybrid("attention", "attention"), dtype=torch.float32)
    assert ModelAdapter(model).geometry.fixed is None


def test_a_window_as_long_as_the_context_is_none() -> None:
    config = PhimoeConfig(**{**SIZES, "max_position_embeddings": 64}, sliding_window=64, num_local_experts=2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert [group.window for group in ModelAdapter(model).geometry.groups] == [None]


def test_dynamic_rope_in_one_layer_type_ends_the_context_where_it_changes() -> None:
    rope = {
        "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    model = AutoModelForCausalLM.from_config(Gemma3TextConfig(**SIZES, rope_parameters=rope), dtype=torch.float32)
    adapter = ModelAdapter(model)
    assert adapter.context_limit == SIZES["max_position_embeddings"]
    with pytest.raises(ValueError, match="position 128 would change the rotation"):
        adapter.run(StepInput([1, 2], [0, 128], [1]), None, None)


def test_encoder_decoder_is_refused_by_name() -> None:
    config = T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    with pytest.raises(Unsupported, match="t5 is not supported: encoder-decoder"):
        ModelAdapter(T5ForConditionalGeneration(config))


def test_a_mounted_adapter_is_refused_by_name() -> None:
    model = family("llama").build()
    model.peft_config = {"default": object()}
    with pytest.raises(Unsupported, match=r"an adapter \(LoRA\) is not supported: merge it"):
        ModelAdapter(model)


def test_refusal_is_an_invalid_request() -> None:
    assert issubclass(Unsupported, InvalidRequest)


def passing(**extra: object) -> PreTrainedModel:
    """A Llama whose attention calls carry something more."""
    model = family("llama").build()

    def pass_on(module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, {**kwargs, **extra}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(pass_on, with_kwargs=True)
    return model


def test_an_attention_argument_of_unknown_meaning_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="attention argument 'block_indices' is not supported"):
        ModelAdapter(passing(block_indices=torch.zeros(1)))
    ModelAdapter(passing(block_indices=None))


def test_a_bias_on_the_scores_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="an attention mask or bias is not supported"):
        ModelAdapter(passing(attention_mask=torch.zeros(1, 1, 2, 2)))


def test_no_mask_is_built_under_our_attention_name() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    from agentkv.engine.adapter import ATTENTION_NAME

    assert ATTENTION_NAME in AttentionInterface()
    assert ATTENTION_NAME not in ALL_MASK_ATTENTION_FUNCTIONS
