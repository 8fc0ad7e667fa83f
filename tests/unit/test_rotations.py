"""The rotation of each layer's keys is found by looking at the keys; what is no rotation is never taken for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from families import FAMILIES, VOCAB, Family, family
from torch import Tensor, nn
from transformers import Ministral3Config, NanoChatConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from agentkv.engine.adapter import ModelAdapter
from agentkv.engine.rotations import Projections, candidates, deviation, find_rotations, probe_positions
from agentkv.rope import Rotation, rotate

each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
each_movable = pytest.mark.parametrize("family", [f for f in FAMILIES if f.movable], ids=lambda f: f.name)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)

UNKNOWN = "its positions are not a rotation of the keys that agentkv knows"
ABSOLUTE = "its attention depends on absolute positions"
RECURRENT = "its recurrent layers have seen every token and can forget none"
LEARNED = "it has learned positions, added to its hidden states"

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}


def adapted(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> ModelAdapter:
    torch.manual_seed(0)
    return ModelAdapter(AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype))


@each_family
@each_dtype
def test_each_family_has_the_rotation_that_its_layers_apply(family: Family, dtype: torch.dtype) -> None:
    geometry = ModelAdapter(family.build().to(dtype)).geometry
    if family.learned_positions:
        assert geometry.fixed == LEARNED
        assert geometry.rotations == ()
        return
    assert geometry.fixed == (RECURRENT if family.states else None)
    assert [2 * len(r.frequencies) if r else 0 for r in geometry.rotations] == list(family.turns)
    assert {r.interleaved for r in geometry.rotations if r} == ({family.interleaved} if any(family.turns) else set())
    several = [r.frequencies for r in geometry.rotations if r and len(r.frequencies) > 1]
    assert all(frequencies[0] > frequencies[-1] >= 0 for frequencies in several)


@each_movable
@each_dtype
def test_keys_moved_are_the_keys_the_model_computes_there(family: Family, dtype: torch.dtype) -> None:
    """Of tokens that the search did not look at; a rotation slower by a fiftieth, the control, is far off."""
    adapter = ModelAdapter(family.build(seed=5).to(dtype))
    here, there = (adapter._probe(positions).seen for positions in ([3, 60, 9, 31], [58, 5, 9, 95]))
    deltas = [(1, 55), (1, -55), (1, 0), (1, 64)]
    for layer, rotation in enumerate(adapter.geometry.rotations):
        if rotation is None:
            assert torch.equal(here[layer].keys, there[layer].keys)
            continue
        moved = rotate(here[layer].keys, deltas, rotation)
        rounding = 8 * torch.finfo(dtype).eps * there[layer].keys.abs().max().item()
        torch.testing.assert_close(moved, there[layer].keys, atol=max(rounding, 1e-5), rtol=0)
        slower = replace(rotation, frequencies=tuple(0.98 * f for f in rotation.frequencies))
        wrong = rotate(here[layer].keys, deltas, slower)
        assert (wrong - there[layer].keys).abs().max() > 3 * max(rounding, 1e-5)


@each_movable
@each_dtype
def test_the_right_rotation_fits_and_no_other_comes_near(family: Family, dtype: torch.dtype) -> None:
    adapter = ModelAdapter(family.build().to(dtype))
    positions = probe_positions(adapter.context_limit)
    still, moved = (adapter._probe(p).seen for p in ([0] * len(positions), positions))
    for layer, rotation in enumerate(adapter.geometry.rotations):
        found = rotation or Rotation(())
        bound = max(1e-4, 4 * torch.finfo(dtype).eps)
        pair = still[layer].keys, moved[layer].keys, positions
        assert deviation(*pair, found).max() < bound / 2
        others = [r for r in (Rotation(()), *candidates(adapter.model)) if r != found]
        assert others
        assert min(deviation(*pair, other).max() for other in others) > 20 * bound


def test_each_layer_type_has_its_own_frequencies() -> None:
    sliding, full, again = ModelAdapter(family("gemma3").build()).geometry.rotations
    assert sliding == again
    assert sliding is not None and full is not None
    assert sliding.frequencies[1] == pytest.approx(1_000.0 ** (-1 / 4))
    assert full.frequencies[1] == pytest.approx(100_000.0 ** (-1 / 4))


def test_where_only_some_frequencies_are_not_zero_only_those_dimensions_turn() -> None:
    rotation = ModelAdapter(family("gemma4").build()).geometry.rotations[-1]
    assert rotation is not None
    assert [f > 0 for f in rotation.frequencies] == [True] * 2 + [False] * 6


@each_dtype
def test_a_model_that_turns_its_keys_backwards(dtype: torch.dtype) -> None:
    geometry = adapted(NanoChatConfig(**{**SIZES, "num_key_value_heads": 4}), dtype).geometry
    assert geometry.fixed is None
    assert all(r is not None and r.frequencies[0] == -1.0 for r in geometry.rotations)


def ministral3(scale_from: int) -> PreTrainedConfig:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": scale_from,
        "llama_4_scaling_beta": 0.1,
    }
    return Ministral3Config(**SIZES, rope_parameters=rope)


@each_dtype
def test_queries_scaled_by_their_position_fix_the_keys(dtype: torch.dtype) -> None:
    assert adapted(ministral3(64), dtype).geometry.fixed == ABSOLUTE
    assert adapted(ministral3(255), dtype).geometry.fixed == ABSOLUTE, "only the last position is scaled"
    assert adapted(ministral3(256), dtype).geometry.fixed is None, "no position that the context holds is scaled"


def test_the_probe_leaves_no_trace() -> None:
    for name in ("gemma3", "phi3_longrope", "llama_dynamic"):
        model = family(name).build()
        before = {key: buffer.clone() for key, buffer in model.named_buffers(remove_duplicate=False)}
        adapter = ModelAdapter(model)
        after = dict(model.named_buffers(remove_duplicate=False))
        assert before and all(torch.equal(after[key], before[key]) for key in before)
        assert adapter._running.cache is None


# The search itself, on keys made here.

POSITIONS = (1, 7, 37, 211, 255)
TRUE = Rotation(tuple(100.0 ** (-i / 4) for i in range(4)))


class Rotary(nn.Module):
    """A model that has these frequencies, and nothing else."""

    def __init__(self, *frequencies: tuple[float, ...]) -> None:
        super().__init__()
        for index, values in enumerate(frequencies):
            self.register_buffer(f"kind{index}_inv_freq", torch.tensor(values, dtype=torch.float64))


def layer(rotation: Rotation, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Projections, Projections]:
    """Projections at position 0 and, turned by ``rotation``, at ``POSITIONS``."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(h, len(POSITIONS), 8, generator=generator).double() for h in (4, 2, 2))
    k[..., 2] += 300.0  # as the key biases of Qwen 2 are
    turned = (rotate(x, [(1, p) for p in POSITIONS], rotation).to(dtype) for x in (q, k))
    return Projections(q.to(dtype), k.to(dtype), v.to(dtype)), Projections(*turned, v.to(dtype))


def found(model: nn.Module, *layers: tuple[Projections, Projections]) -> tuple[tuple[Rotation | None, ...], str | None]:
    still: Mapping[int, Projections] = {i: pair[0] for i, pair in enumerate(layers)}
    return find_rotations(model, still, {i: pair[1] for i, pair in enumerate(layers)}, POSITIONS)


@each_dtype
def test_each_layer_is_looked_at_by_itself(dtype: torch.dtype) -> None:
    rotations = [TRUE, Rotation(()), replace(TRUE, interleaved=True), Rotation(TRUE.frequencies[:2])]
    model = Rotary(TRUE.frequencies, TRUE.frequencies[:2])
    result, fixed = found(model, *(layer(r, dtype, seed) for seed, r in enumerate(rotations)))
    assert fixed is None
    assert list(result) == [r if r.frequencies else None for r in rotations]


def changed(index: int, factor: float) -> tuple[float, ...]:
    return tuple(f * (factor if i == index else 1.0) for i, f in enumerate(TRUE.frequencies))


@each_dtype
@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("factor", [1.02, 0.5, -1.0])
def test_control_one_wrong_frequency_is_rejected(dtype: torch.dtype, index: int, factor: float) -> None:
    """Also in the pairs beside the large biases, which hide them from any measure of the whole key."""
    assert found(Rotary(changed(index, factor)), layer(TRUE, dtype)) == ((), UNKNOWN)
    wrong_and_right = Rotary(changed(index, factor), TRUE.frequencies)
    assert found(wrong_and_right, layer(TRUE, dtype)) == ((TRUE,), None)


@pytest.mark.parametrize("frequencies", [(), TRUE.frequencies[:3], (*TRUE.frequencies, 0.01)])
def test_too_few_or_too_many_frequencies_are_rejected(frequencies: tuple[float, ...]) -> None:
    assert found(Rotary(frequencies), layer(TRUE)) == ((), UNKNOWN)


def test_keys_of_zeros_show_nothing() -> None:
    still, moved = layer(TRUE)
    zero = torch.zeros_like(still.keys)
    assert found(Rotary(TRUE.frequencies), (replace(still, keys=zero), replace(moved, keys=zero))) == ((), UNKNOWN)


def scaled(x: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 1.0, 1.0, 1.0, 1.07])[:, None]


def test_what_depends_on_positions_otherwise_is_fixed() -> None:
    model = Rotary(TRUE.frequencies)
    still, moved = layer(TRUE)
    assert found(model, (still, replace(moved, values=scaled(moved.values)))) == ((), LEARNED)
    assert found(model, (still, replace(moved, queries=scaled(moved.queries)))) == ((), ABSOLUTE)
    assert found(model, (still, replace(moved, queries=still.queries))) == ((), ABSOLUTE)
    assert found(model, (still, replace(moved, keys=scaled(moved.keys)))) == ((), UNKNOWN)


@pytest.mark.parametrize("limit", [2, 8, 256, 131_072, 10_000_000, None])
def test_the_probe_stays_in_the_context_and_reaches_its_end(limit: int | None) -> None:
    positions = probe_positions(limit)
    assert list(positions) == sorted(set(positions))
    assert positions[0] == 1
    assert positions[-1] == min(limit or 2**17, 2**17) - 1
