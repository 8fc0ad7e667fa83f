"""Lossless codecs give back every bit, and nothing but ``ValueError`` for bytes that are not theirs."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentkv.codecs import CODECS, KVBlock

FLOATS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
FILLS = ("normal", "channels", "bits", "constant", "zeros", "special")
quiet = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def fill(shape: tuple[int, int, int], dtype: torch.dtype, how: str, seed: int) -> torch.Tensor:
    """``[Hkv, T, D]`` numbers of one kind; ``bits`` are arbitrary bit patterns, NaN payloads among them."""
    random = torch.Generator().manual_seed(seed)
    if how == "bits":
        raw = torch.randint(0, 256, (*shape[:2], shape[2] * dtype.itemsize), generator=random, dtype=torch.uint8)
        return raw.view(dtype)
    if how == "constant":
        return torch.full(shape, -1.7, dtype=dtype)
    if how == "zeros":
        return torch.zeros(shape, dtype=dtype)
    numbers = torch.randn(shape, generator=random)
    if how == "channels":
        numbers = numbers * torch.logspace(-3, 3, shape[2]) + 5
    if how == "special":
        for i, value in enumerate((float("nan"), float("inf"), float("-inf"), -0.0, 1e-45, -3e38)):
            numbers.view(-1)[i::11] = value
    return numbers.to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers: NaN equals itself, and -0 is not 0."""
    return tensor.contiguous().view(FLOATS[tensor.dtype])


def strided(like: torch.Tensor, before: int) -> torch.Tensor:
    """A view of ``like``'s shape inside a larger live buffer ``[Hkv, capacity, D]``."""
    heads, tokens, dim = like.shape
    return torch.zeros(heads, before + tokens + 3, dim, dtype=like.dtype)[:, before : before + tokens]


@st.composite
def blocks(draw: st.DrawFn) -> KVBlock:
    dtype = draw(st.sampled_from(list(FLOATS)))
    layers, heads = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    tokens = draw(st.integers(1, 300))
    key_dim, value_dim = draw(st.integers(32, 256)), draw(st.integers(32, 256))
    how, seed = draw(st.sampled_from(FILLS)), draw(st.integers(0, 2**31))
    if draw(st.booleans()):  # a strided view of a live buffer
        tokens, total = max(1, tokens // 2), tokens
    else:
        total = tokens
    keys = tuple(fill((heads, total, key_dim), dtype, how, seed + i)[:, :tokens] for i in range(layers))
    values = tuple(fill((heads, total, value_dim), dtype, how, seed - i - 1)[:, :tokens] for i in range(layers))
    return KVBlock(keys, values)


@pytest.mark.parametrize("name", ["raw", "exact"])
@quiet
@given(block=blocks(), before=st.integers(0, 5))
def test_every_bit_comes_back_into_strided_buffers(name: str, block: KVBlock, before: int) -> None:
    codec = CODECS.get(name)
    payload = codec.encode(block)
    out = KVBlock(*(tuple(strided(t, before) for t in side) for side in (block.keys, block.values)))
    codec.decode(memoryview(payload), out, codec.parameters())
    for got, put in zip((*out.keys, *out.values), (*block.keys, *block.values), strict=True):
        assert torch.equal(bits(got), bits(put))


@pytest.mark.parametrize("name", ["raw", "exact"])
@quiet
@given(block=blocks(), data=st.data())
def test_a_payload_of_another_length_is_a_value_error(name: str, block: KVBlock, data: st.DataObject) -> None:
    codec = CODECS.get(name)
    payload = codec.encode(block)
    cut = data.draw(st.integers(0, len(payload) - 1))
    for bad in (payload[:cut], payload + b"\0"):
        with pytest.raises(ValueError):
            codec.decode(bad, block, {})


@quiet
@given(block=blocks(), data=st.data())
def test_an_altered_exact_payload_decodes_or_is_a_value_error(block: KVBlock, data: st.DataObject) -> None:
    payload = bytearray(CODECS.get("exact").encode(block))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, min(200, len(payload) - 1)))] = data.draw(st.integers(0, 255))
    with suppress(ValueError):
        CODECS.get("exact").decode(bytes(payload), block, {})


@quiet
@given(junk=st.binary(max_size=400))
def test_junk_is_never_more_than_a_value_error(junk: bytes) -> None:
    out = KVBlock((torch.zeros(2, 5, 32, dtype=torch.bfloat16),), (torch.zeros(2, 5, 32, dtype=torch.bfloat16),))
    for name in ("raw", "exact"):
        with suppress(ValueError):
            CODECS.get(name).decode(junk, out, {})
