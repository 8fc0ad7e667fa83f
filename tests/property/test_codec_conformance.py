"""Every codec passes the public conformance checks on every kind of block; the checks catch codecs that are wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentkv.codecs import CODECS, Codec, KVBlock
from agentkv.rope import Rotation
from agentkv.testing.codecs import (
    check_altered,
    check_codec,
    check_deterministic,
    check_other_position,
    check_round_trip,
    check_strided,
    check_truncated,
)

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FILLS = ("normal", "channels", "biased", "outliers", "bits", "constant", "zeros", "tiny", "largest", "special")
MOST_NUMBERS = 40_000
quiet = settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])


def fill(shape: tuple[int, int, int], dtype: torch.dtype, how: str, seed: int) -> torch.Tensor:
    """``[Hkv, T, D]`` numbers of one kind."""
    random = torch.Generator().manual_seed(seed)
    if how == "bits":
        raw = torch.randint(0, 256, (*shape[:2], shape[2] * dtype.itemsize), generator=random, dtype=torch.uint8)
        return raw.view(dtype)
    if how in ("constant", "zeros"):
        return torch.full(shape, -1.7 if how == "constant" else 0.0, dtype=dtype)
    numbers = torch.randn(shape, generator=random)
    if how == "channels":
        numbers = numbers * torch.logspace(-3, 3, shape[2]) + 5
    if how == "biased":  # as the keys of Qwen2's edge layers
        numbers = numbers + 600 * torch.randn(shape[0], 1, shape[2], generator=random)
    if how == "outliers":
        numbers.view(-1)[:: max(1, numbers.numel() // 7)] *= 3000
    if how == "special":
        for i, value in enumerate((float("nan"), float("inf"), float("-inf"), -0.0, 1e-45, -3e38)):
            numbers.view(-1)[i::11] = value
    scale = {"tiny": torch.finfo(dtype).smallest_normal, "largest": torch.finfo(dtype).max / 4}.get(how, 1.0)
    return (numbers.double().clamp(-4, 4) * scale).to(dtype) if scale != 1.0 else numbers.to(dtype)


@st.composite
def rotations(draw: st.DrawFn, key_dim: int) -> Rotation | None:
    pairs = draw(st.sampled_from((0, key_dim // 8, key_dim // 4, key_dim // 2)))
    if not pairs:
        return None
    base = draw(st.sampled_from((1e4, 5e5)))
    return Rotation(tuple(base ** (-i / pairs) for i in range(pairs)), draw(st.booleans()))


@st.composite
def blocks(draw: st.DrawFn, fills: tuple[str, ...] = FILLS) -> KVBlock:
    dtype = draw(st.sampled_from(FLOATS))
    key_dim, value_dim = draw(st.sampled_from((32, 64, 80, 127, 128, 256))), draw(st.integers(32, 256))
    layers, heads = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 3, 8, 64)))
    most = max(1, min(2048, MOST_NUMBERS // (layers * heads * max(key_dim, value_dim))))
    tokens = draw(st.one_of(st.integers(1, most), st.just(most)))
    how, seed = draw(st.sampled_from(fills)), draw(st.integers(0, 2**31))
    total = tokens + draw(st.sampled_from((0, 3)))  # with 3: strided views of live buffers
    keys = tuple(fill((heads, total, key_dim), dtype, how, seed + i)[:, :tokens] for i in range(layers))
    values = tuple(fill((heads, total, value_dim), dtype, how, seed - i - 1)[:, :tokens] for i in range(layers))
    turns = tuple(draw(rotations(key_dim)) for _ in range(layers)) if draw(st.booleans()) else ()
    return KVBlock(keys, values, tuple(range(layers)), turns, draw(st.sampled_from((0, 1, 256, 100_000))))


@pytest.mark.parametrize("name", list(CODECS))
@quiet
@given(block=blocks(), seed=st.integers(0, 2**16))
def test_every_codec_keeps_the_contract(name: str, block: KVBlock, seed: int) -> None:
    check_codec(CODECS.get(name), block, seed)


@pytest.mark.parametrize("name", [name for name in CODECS if not CODECS.get(name).exact])
@quiet
@given(block=blocks(("bits", "special")))
def test_what_is_not_finite_comes_back_bit_for_bit(name: str, block: KVBlock) -> None:
    codec = CODECS.get(name)
    if all(bool(t.isfinite().all()) for t in (*block.keys, *block.values)):
        return
    assert not any(bool(t.any()) for t in (*codec.bound(block).keys, *codec.bound(block).values))
    check_round_trip(codec, block)


class Wrong(Codec):
    """``int8``, wrong in one way."""

    name = "wrong"
    exact = False

    def __init__(self, how: str) -> None:
        self.how, self.right, self.calls = how, CODECS.get("int8"), 0

    def bound(self, block: KVBlock) -> KVBlock:
        bound = self.right.bound(block)
        shrunk = 0.8 if self.how == "bound" else 1.0
        return replace(
            bound, keys=tuple(k * shrunk for k in bound.keys), values=tuple(v * shrunk for v in bound.values)
        )

    def encode(self, block: KVBlock) -> bytes:
        self.calls += 1
        return self.right.encode(block) + (bytes([self.calls]) if self.how == "deterministic" else b"")

    def decode(self, payload: bytes | memoryview, out: KVBlock, parameters: Mapping[str, Any]) -> None:
        payload = bytes(payload)
        if self.how == "truncated" and len(payload) < 100:
            return
        if self.how == "deterministic":
            payload = payload[:-1]
        if self.how == "position":
            out = replace(out, position=0)
        try:
            self.right.decode(payload, out, parameters)
        except ValueError as error:
            raise (KeyError(str(error)) if self.how == "altered" else error) from None
        if self.how == "strided":
            out.keys[0].as_strided((1,), (1,), 0).fill_(1.0)


@pytest.mark.parametrize(
    ("how", "check"),
    [
        ("bound", check_round_trip),
        ("deterministic", check_deterministic),
        ("strided", check_strided),
        ("position", lambda codec, block: check_other_position(codec, block, 77)),
        ("truncated", check_truncated),
        ("altered", check_altered),
    ],
)
def test_the_checks_catch_a_codec_that_is_wrong(how: str, check: Any) -> None:
    rotation = Rotation(tuple(1e4 ** (-i / 32) for i in range(32)))
    keys, values = fill((2, 200, 64), torch.float32, "normal", 1), fill((2, 200, 64), torch.float32, "normal", 2)
    block = KVBlock((keys,), (values,), (0,), (rotation,), 0)
    check(Wrong("nothing"), block)
    with pytest.raises(AssertionError):
        check(Wrong(how), block)
