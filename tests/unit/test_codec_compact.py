"""What ``compact`` promises: its size, its bound, means and outliers of any size, fits, and bytes that are not its."""

from __future__ import annotations

import inspect
import struct
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import zstandard
from torch import Tensor
from transformers import DynamicCache, Qwen2Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from agentkv.codecs import CODECS, Codecs, Fit, KVBlock, MissingFit
from agentkv.codecs.compact import Compact
from agentkv.codecs.compact_fit import fit_compact
from agentkv.codecs.turning import post_rope, pre_rope
from agentkv.rope import Rotation, rotate

FREQUENCIES = tuple(10_000.0 ** (-i / 32) for i in range(32))
STORED, PLAIN, FITTED = 0, 1, 2


def block(
    tokens: int = 256, layers: int = 4, dtype: torch.dtype = torch.bfloat16, position: int = 100, seed: int = 0
) -> KVBlock:
    """KV-like numbers ``[3, tokens, 64]``: before RoPE correlated within a head, channels of different scale and mean.

    The seed draws the tokens; heads have the same covariance whatever the seed.
    """
    heads, draw = torch.Generator().manual_seed(99), torch.Generator().manual_seed(seed)
    decay = torch.logspace(0, -1.5, 64)

    def one() -> Tensor:
        mix, mean = torch.randn(3, 64, 64, generator=heads) / 8, torch.randn(3, 1, 64, generator=heads)
        return (torch.randn(3, tokens, 64, generator=draw) * decay) @ mix + mean

    keys, values = zip(*((one(), one().to(dtype)) for _ in range(layers)), strict=True)
    turned = tuple(k.to(dtype) for k in keys)
    kv = KVBlock(turned, values, tuple(range(layers)), (Rotation(FREQUENCIES),) * layers, position)
    post_rope(torch.stack(keys), kv)
    return kv


def there_and_back(codec: Compact, kv: KVBlock, at: int | None = None) -> KVBlock:
    out = replace(
        kv,
        keys=tuple(map(torch.empty_like, kv.keys)),
        values=tuple(map(torch.empty_like, kv.values)),
        position=kv.position if at is None else at,
    )
    codec.decode(memoryview(codec.encode(kv)), out, codec.parameters())
    return out


def worst(got: KVBlock, put: KVBlock, bound: KVBlock) -> float:
    """The largest error as a share of its bound; 0/0 is 0."""
    shares = []
    for side in ("keys", "values"):
        for a, b, c in zip(getattr(got, side), getattr(put, side), getattr(bound, side), strict=True):
            error = (a.double() - b.double()).abs()
            shares.append(float(torch.where(error == 0, 0.0, error / c).max()))
    return max(shares)


COMPACT = Compact()


@pytest.fixture(scope="module")
def fit() -> Fit:
    return fit_compact([block(tokens=2000, seed=7)])


def test_it_is_registered_and_makes_four_of_sixteen_bits() -> None:
    codec = CODECS.get("compact")
    kv = block()
    payload = codec.encode(kv)
    assert (codec.name, codec.exact, payload[1]) == ("compact", False, PLAIN)
    assert len(payload) < kv.nbytes / 3.8
    assert payload == codec.encode(kv)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [1, 2, 17, 256])
def test_numbers_come_back_within_the_bound(dtype: torch.dtype, tokens: int) -> None:
    kv = block(tokens, dtype=dtype)
    assert worst(there_and_back(COMPACT, kv), kv, COMPACT.bound(kv)) <= 1


def test_the_bound_is_tight_enough_to_say_something() -> None:
    kv = block(dtype=torch.float32)
    assert worst(there_and_back(COMPACT, kv), kv, COMPACT.bound(kv)) > 0.9


@pytest.mark.parametrize("rotation", [None, Rotation(FREQUENCIES[:8]), Rotation(FREQUENCIES[::2], True)])
def test_partial_interleaved_and_no_rotations(rotation: Rotation | None) -> None:
    kv = replace(block(), rotations=(rotation, Rotation(FREQUENCIES), rotation, None))
    assert worst(there_and_back(COMPACT, kv), kv, COMPACT.bound(kv)) <= 1


def test_keys_come_back_at_another_position() -> None:
    kv = block(dtype=torch.float32)
    moved = there_and_back(COMPACT, kv, at=5000)
    assert not torch.allclose(moved.keys[0], kv.keys[0], atol=0.5)
    here, there = pre_rope(there_and_back(COMPACT, kv)), pre_rope(moved)
    assert torch.allclose(here, there, atol=1e-4)


def shifted(kv: KVBlock, mean: float) -> KVBlock:
    """``kv`` with ``mean`` added to its keys before RoPE, as a bias of the key projection does, and to its values."""
    keys = tuple(map(torch.empty_like, kv.keys))
    post_rope(pre_rope(kv) + mean, replace(kv, keys=keys))
    return replace(kv, keys=keys, values=tuple(v + mean for v in kv.values))


@pytest.mark.parametrize("mean", [600.3, 1e5])
def test_means_of_any_size_cost_nothing(mean: float) -> None:
    """Key biases of Qwen2 have norms of hundreds; float16 rounds 600 to halves and ends at 65504."""
    plain = block(dtype=torch.float32)
    kv = shifted(plain, mean)
    assert worst(there_and_back(COMPACT, kv), kv, COMPACT.bound(plain)) < 1.5
    assert len(COMPACT.encode(kv)) < 1.03 * len(COMPACT.encode(plain))


@torch.no_grad()
def test_key_biases_of_norm_600_cost_no_quality() -> None:
    """A model as Qwen2 is made, its biases in the edge layers, its distributions far from flat."""
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            spread = {"embed": 1.5, "lm_he": 0.4}.get(name.removeprefix("model.")[:5], 0.04)
            weight.copy_(torch.randn(weight.shape, generator=draw) * spread)
    for layer in (0, 3):
        bias = model.model.layers[layer].self_attn.k_proj.bias
        direction = torch.randn(bias.shape, generator=draw)
        bias.copy_(600 * direction / direction.norm())
    ids = torch.randint(1, 512, (1, 640), generator=draw)
    prefix, tokens = 512, 256
    rotation = Rotation(tuple(config.rope_parameters["rope_theta"] ** (-i / 16) for i in range(16)))

    def after(change: Callable[[KVBlock], KVBlock]) -> Tensor:
        cache: Any = DynamicCache(config=config)
        given = {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}
        model(input_ids=ids[:, :prefix], **given)
        assert cache.layers[0].keys.norm(dim=3).mean() > 300
        for start in (16, 16 + tokens - 64):
            span = slice(start, start + 192)
            keys, values = zip(*((c.keys[0, :, span], c.values[0, :, span]) for c in cache.layers), strict=True)
            got = change(KVBlock(keys, values, (0, 1, 2, 3), (rotation,) * 4, start))
            for to_key, to_value, key, value in zip(keys, values, got.keys, got.values, strict=True):
                to_key.copy_(key)
                to_value.copy_(value)
        return model(input_ids=ids[:, prefix:], **given).logits[0].log_softmax(-1)

    def divergence(change: Callable[[KVBlock], KVBlock]) -> float:
        return float((exact.exp() * (exact - after(change))).sum(-1).mean())

    exact = after(lambda kv: kv)
    assert -(exact.exp() * exact).sum(-1).mean() < 3, "flat distributions hide everything: these have 3 of 6.2 nats"
    assert divergence(lambda kv: there_and_back(COMPACT, kv)) < 0.005

    def four_bits_a_token(kv: KVBlock) -> KVBlock:
        def side(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            steps = [t.abs().amax(2, keepdim=True) / 7 for t in tensors]
            return tuple((t / s).round() * s for t, s in zip(tensors, steps, strict=True))

        return replace(kv, keys=side(kv.keys), values=side(kv.values))

    assert divergence(four_bits_a_token) > 0.05, "the control: post-RoPE keys, a step for each token"


def test_outliers_escape() -> None:
    kv = block()
    kv.keys[1][0, 7, 3] = 4000.0
    kv.values[2][2, 255, 63] = -4000.0
    assert COMPACT.encode(kv)[1] == PLAIN
    got = there_and_back(COMPACT, kv)
    assert worst(got, kv, COMPACT.bound(kv)) <= 1
    assert got.values[2][2, 255, 63] == -4000.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_what_is_not_finite_or_nearly_so_is_stored_bit_for_bit(value: float) -> None:
    kv = block(tokens=40)
    kv.keys[1][0, 7, 3] = value
    kv.values[2][2, 0, 0] = -value
    payload = COMPACT.encode(kv)
    assert payload[1] == STORED
    got = there_and_back(COMPACT, kv)
    for a, b in zip((*got.keys, *got.values), (*kv.keys, *kv.values), strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))


def test_numbers_near_the_end_of_float16_do_not_become_infinite() -> None:
    kv = block(dtype=torch.float16)
    kv.values[0][:, ::3] = 65504.0
    kv.keys[0][:, ::3] = -65504.0
    assert worst(there_and_back(COMPACT, kv), kv, COMPACT.bound(kv)) <= 1


def test_a_stored_block_is_turned_where_it_is_wanted_elsewhere() -> None:
    kv = block(tokens=40, dtype=torch.float32)
    kv.values[2][2, 0, 0] = float("inf")
    assert COMPACT.encode(kv)[1] == STORED
    assert torch.allclose(pre_rope(there_and_back(COMPACT, kv, at=5000)), pre_rope(kv), atol=1e-4)


@pytest.mark.parametrize("value", [0.0, -1.7, 1e-42])
def test_constants_come_back_and_take_next_to_nothing(value: float) -> None:
    kv = replace(block(dtype=torch.float32), rotations=())
    kv = replace(
        kv, keys=tuple(torch.full_like(k, value) for k in kv.keys), values=tuple(map(torch.zeros_like, kv.values))
    )
    got = there_and_back(COMPACT, kv)
    assert worst(got, kv, COMPACT.bound(kv)) <= 1
    assert len(COMPACT.encode(kv)) < kv.nbytes / 100


def test_noise_over_all_bits_hardly_grows() -> None:
    noise = torch.randint(0, 2**16, (3, 100, 64), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    kv = KVBlock((noise.view(torch.bfloat16),), (noise.flip(1).view(torch.bfloat16),))
    assert len(COMPACT.encode(kv)) <= kv.nbytes + 64


def test_larger_steps_are_smaller_and_decode_needs_no_word_of_them() -> None:
    kv = block()
    sizes = [len(Compact(step).encode(kv)) for step in (0.5, 1.0, 2.0)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 1.3 * sizes[2]
    out = replace(kv, keys=tuple(map(torch.empty_like, kv.keys)), values=tuple(map(torch.empty_like, kv.values)))
    COMPACT.decode(Compact(2.0).encode(kv), out, {})
    assert worst(out, kv, Compact(2.0).bound(kv)) <= 1
    with pytest.raises(ValueError, match="step"):
        Compact(0.0)


def test_integers_are_refused() -> None:
    whole = torch.zeros(1, 4, 32, dtype=torch.int16)
    with pytest.raises(ValueError, match="int16"):
        COMPACT.encode(KVBlock((whole,), (whole,)))


# -- with a fit -------------------------------------------------------------------------------------------------------


def test_a_fit_makes_it_smaller_at_the_same_error(fit: Fit) -> None:
    kv, fitted = block(), COMPACT.fitted(fit)
    payload = fitted.encode(kv)
    assert payload[1] == FITTED
    assert len(payload) < 0.85 * len(COMPACT.encode(kv))
    got, plain = there_and_back(fitted, kv), there_and_back(COMPACT, kv)

    def error(other: KVBlock) -> float:
        return sum(float((a.float() - b.float()).square().sum()) for a, b in zip(other.keys, kv.keys, strict=True))

    assert error(got) < 1.1 * error(plain)
    assert worst(got, kv, fitted.bound(kv)) <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_bound_holds_with_a_fit_and_a_step(fit: Fit, dtype: torch.dtype) -> None:
    codec = Compact(3.0).fitted(fit)
    kv = block(tokens=33, dtype=dtype)
    kv.keys[1][0, 7, 3] = 500.0
    assert codec.encode(kv)[1] == FITTED
    assert worst(there_and_back(codec, kv), kv, codec.bound(kv)) <= 1


def test_chunks_name_their_fit(fit: Fit) -> None:
    kv, fitted = block(), COMPACT.fitted(fit)
    assert fitted.parameters() == {"fit": fit.digest}
    payload = fitted.encode(kv)
    with pytest.raises(MissingFit, match=fit.digest):
        COMPACT.decode(payload, kv, fitted.parameters())
    other = COMPACT.fitted(fit_compact([block(tokens=500, seed=8)]))
    with pytest.raises(MissingFit, match=fit.digest):
        other.decode(payload, kv, fitted.parameters())
    codecs = Codecs([fit], {"compact": fit.digest})
    assert codecs.encoder("compact").encode(kv) == payload


def test_layers_that_were_not_fitted_are_encoded_without(fit: Fit) -> None:
    kv = replace(block(), layers=(0, 1, 2, 9))
    fitted = COMPACT.fitted(fit)
    assert fitted.encode(kv) == COMPACT.encode(kv)
    assert worst(there_and_back(fitted, kv), kv, COMPACT.bound(kv)) <= 1


def test_a_block_of_some_of_the_layers_finds_its_own(fit: Fit) -> None:
    kv, fitted = block(), COMPACT.fitted(fit)
    some = replace(kv, keys=kv.keys[1::2], values=kv.values[1::2], layers=(1, 3), rotations=kv.rotations[1::2])
    assert worst(there_and_back(fitted, some), some, fitted.bound(some)) <= 1


def test_equal_blocks_make_equal_fits_and_others_do_not(fit: Fit) -> None:
    assert fit_compact([block(tokens=2000, seed=7)]).digest == fit.digest
    assert fit_compact([block(tokens=2000, seed=6)]).digest != fit.digest
    kv = block(tokens=2000, seed=7)
    assert all(
        torch.allclose(a, fit.tensors[name], atol=1e-4)
        for name, a in fit_compact([kv.cut(0, 700), kv.cut(700, 2000)]).tensors.items()
        if name.endswith("mean")
    )


def test_what_matters_more_gets_finer_steps_and_the_same_cost() -> None:
    """The KL that a sensitivity predicts is shared out evenly, whatever the heads' sizes."""
    kv = block(tokens=2000, seed=7)
    heads = 1e-4 * torch.tensor([1.0, 16.0, 4.0])
    matters = {layer: (heads * 2.0**layer, heads.flip(0)) for layer in range(4)}
    codec = COMPACT.fitted(fit_compact([kv], matters))
    fresh = block(dtype=torch.float32)
    got = there_and_back(codec, fresh)
    costs = [
        float((a - b).square().mean((1, 2))[head] * weight[head])
        for weights, sides in (
            ([matters[layer][0] for layer in range(4)], zip(got.keys, fresh.keys, strict=True)),
            ([matters[layer][1] for layer in range(4)], zip(got.values, fresh.values, strict=True)),
        )
        for weight, (a, b) in zip(weights, sides, strict=True)
        for head in range(3)
    ]
    assert max(costs) < 2 * min(costs)
    with pytest.raises(ValueError, match="layers \\[3\\]"):
        fit_compact([kv], {layer: matters[layer] for layer in range(3)})
    with pytest.raises(ValueError, match="finite"):
        fit_compact([kv], {layer: (heads * float("nan"), heads) for layer in range(4)})


def test_narrow_bundles_are_a_head_each() -> None:
    kv = block()
    narrow = COMPACT.fitted(fit_compact([block(tokens=2000, seed=7)], widest=200))
    assert narrow.encode(kv)[1] == FITTED
    assert worst(there_and_back(narrow, kv), kv, narrow.bound(kv)) <= 1


def test_fits_of_several_wide_bundles_load_with_two_threads() -> None:
    bases = torch.linalg.qr(torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(5)))[0]
    fit = Fit("compact", "wide", {"0.mean": torch.zeros(2, 256), "0.basis": bases.to(torch.bfloat16)}, {})
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert COMPACT.fitted(fit).parameters() == {"fit": "wide"}
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("position", [(1 << 63) - 1, -(1 << 63)])
def test_a_stored_position_beyond_reason_is_refused(position: int) -> None:
    kv = block(tokens=9)
    kv.keys[0][0, 0, 0] = float("inf")
    payload = COMPACT.encode(kv)
    assert payload[1] == STORED
    with pytest.raises(ValueError, match=str(position)):
        COMPACT.decode(payload[:2] + struct.pack("<q", position) + payload[10:], kv, {})


def test_stored_float64_numbers_beyond_float32_turn() -> None:
    kv = block(tokens=9, dtype=torch.float64)
    kv = replace(kv, keys=tuple(k * 1e200 for k in kv.keys))
    out = there_and_back(COMPACT, kv, at=kv.position + 5)
    wanted = rotate(kv.keys[0], [(9, 5)], Rotation(FREQUENCIES))
    assert float(((out.keys[0] - wanted).abs() / wanted.abs().amax()).max()) < 1e-12


def test_slabs_show_in_no_number(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = replace(block(layers=5), layers=(0, 1, 2, 3, 1))
    for codec in (COMPACT, COMPACT.fitted(fit), CODECS.get("int8"), CODECS.get("int4")):
        found = []
        for numbers in (1, 2 * kv.keys[0].numel(), 1 << 30):
            monkeypatch.setattr("agentkv.codecs.turning._SLAB", numbers)
            payload = codec.encode(kv)
            out = replace(
                kv, keys=tuple(map(torch.empty_like, kv.keys)), values=tuple(map(torch.empty_like, kv.values))
            )
            codec.decode(payload, out, codec.parameters())
            found.append((payload, torch.stack([*out.keys, *out.values])))
        assert all(payload == found[0][0] and torch.equal(out, found[0][1]) for payload, out in found)


def test_float32_products_decode_what_bfloat16_ones_do(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of them is faster depends on the CPU."""
    kv = block()
    ours = there_and_back(COMPACT.fitted(fit), kv)
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr("agentkv.codecs.compact_basis._product_dtype", lambda device, dtype=dtype: dtype)
        codec = COMPACT.fitted(fit)
        got = there_and_back(codec, kv)
        assert worst(got, kv, codec.bound(kv)) <= 1
        assert all(torch.allclose(a, b, atol=0.05) for a, b in zip(got.keys, ours.keys, strict=True))


def test_fits_that_do_not_hold_together_are_refused(fit: Fit) -> None:
    with pytest.raises(ValueError, match="int8"):
        COMPACT.fitted(replace(fit, codec="int8"))
    for name, tensor in (
        ("0.mean", torch.zeros(1, 383)),
        ("0.basis", torch.zeros(1, 384, 384)),
        ("1.basis", torch.full((1, 384, 384), float("nan"))),
        ("other.basis", torch.eye(384)[None]),
    ):
        with pytest.raises(ValueError, match="fit"):
            COMPACT.fitted(replace(fit, tensors={**fit.tensors, name: tensor}))
    with pytest.raises(ValueError, match="no blocks"):
        fit_compact([])
    with pytest.raises(ValueError, match="not finite"):
        fit_compact([replace(block(), values=tuple(v * float("nan") for v in block().values))])


# -- other bytes ------------------------------------------------------------------------------------------------------


def test_cut_lengthened_and_altered_payloads_are_value_errors_or_decode(fit: Fit) -> None:
    kv = block(tokens=20, layers=2)
    random = torch.Generator().manual_seed(5)
    for codec in (COMPACT, COMPACT.fitted(fit)):
        payload = codec.encode(kv)
        for cut in (0, 1, 2, 3, 20, len(payload) // 2, len(payload) - 1):
            with pytest.raises(ValueError):
                codec.decode(payload[:cut], kv, codec.parameters())
        with pytest.raises(ValueError):
            codec.decode(payload + b"\0", kv, codec.parameters())
        for _ in range(100):
            bad = bytearray(payload)
            at = int(torch.randint(0, min(len(bad), 120), (1,), generator=random))
            bad[at] = int(torch.randint(0, 256, (1,), generator=random))
            with suppress(ValueError):
                codec.decode(bytes(bad), there_and_back(codec, kv), codec.parameters())


def test_bombs_are_refused_in_bounded_memory() -> None:
    kv = block(tokens=4, layers=1)
    rows = 2 * 3 * 64
    bomb = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    classes = zstandard.ZstdCompressor().compress(bytes(rows))
    head = struct.pack("<BBB", 1, PLAIN, 2) + struct.pack("<2f", 1, 1) + bytes(2 * rows)
    tracemalloc.start()
    for body in (
        struct.pack("<II", 0, len(bomb)) + bomb + bomb,
        struct.pack("<II", 0, len(classes)) + classes + bomb,
        struct.pack("<I", 2**32 - 1) + bytes(64),
    ):
        with pytest.raises(ValueError):
            COMPACT.decode(head + body, kv, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_threads_do_not_disturb_each_other(fit: Fit) -> None:
    codec = COMPACT.fitted(fit)
    kvs = [block(layers=2, seed=i) for i in range(6)]
    alone = [there_and_back(codec, kv) for kv in kvs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda kv: there_and_back(codec, kv), kvs * 2))
    for a, b in zip(alone * 2, together, strict=True):
        assert all(torch.equal(x, y) for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True))
