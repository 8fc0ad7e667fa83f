"""What ``int8`` and ``int4`` promise beyond the conformance checks: size, accuracy, what they fall back to."""

from __future__ import annotations

import struct
import tracemalloc
from dataclasses import replace

import pytest
import torch
import zstandard

from agentkv.codecs import CODECS, KVBlock
from agentkv.codecs.grids import Grid
from agentkv.rope import Rotation, rotate
from agentkv.testing.codecs import check_other_position, check_round_trip

ROPE = Rotation(tuple(1e4 ** (-i / 32) for i in range(32)))
BOTH = pytest.mark.parametrize("name", ["int8", "int4"])


def block(
    tokens: int = 256, layers: int = 6, dtype: torch.dtype = torch.bfloat16, bias: float = 2.0, position: int = 512
) -> KVBlock:
    """KV-like numbers ``[3, tokens, 64]``: pre-RoPE channels with a mean and a scale of their own, keys turned."""
    random = torch.Generator().manual_seed(0)

    def one(bias: float) -> torch.Tensor:
        scale, mean = torch.randn(2, 3, 1, 64, generator=random)
        return torch.randn(3, tokens, 64, generator=random) * (0.5 * scale).exp() + bias * mean

    keys = [rotate(one(bias).double(), [(1, position + t) for t in range(tokens)], ROPE) for _ in range(layers)]
    values = [one(0.2) for _ in range(layers)]
    return KVBlock(
        tuple(k.to(dtype) for k in keys),
        tuple(v.to(dtype) for v in values),
        tuple(range(layers)),
        (ROPE,) * layers,
        position,
    )


def decoded(name: str, kv: KVBlock, payload: bytes | None = None) -> KVBlock:
    out = replace(kv, keys=tuple(map(torch.zeros_like, kv.keys)), values=tuple(map(torch.zeros_like, kv.values)))
    CODECS.get(name).decode(CODECS.get(name).encode(kv) if payload is None else payload, out, {})
    return out


def relative_error(got: tuple[torch.Tensor, ...], put: tuple[torch.Tensor, ...]) -> float:
    """Of the part that changes from token to token, which is what attention goes by."""
    a, b = torch.stack(got).double(), torch.stack(put).double()
    return float((a - b).pow(2).mean().sqrt() / (b - b.mean(2, keepdim=True)).pow(2).mean().sqrt())


@pytest.mark.parametrize(("name", "ratio", "keys", "values"), [("int8", 2.05, 0.01, 0.025), ("int4", 3.6, 0.06, 0.25)])
def test_size_and_accuracy(name: str, ratio: float, keys: float, values: float) -> None:
    kv = block()
    payload = CODECS.get(name).encode(kv)
    assert len(payload) * ratio < kv.nbytes
    out = decoded(name, kv, payload)
    assert relative_error(out.keys, kv.keys) < keys
    assert relative_error(out.values, kv.values) < values


@BOTH
def test_bits_per_value_is_what_a_block_takes(name: str) -> None:
    kv, codec = block(), CODECS.get(name)
    assert not codec.exact
    assert 16 * len(codec.encode(kv)) / kv.nbytes == pytest.approx(codec.bits_per_value("bfloat16"), rel=0.08)


@BOTH
def test_a_size_does_not_depend_on_the_dtype(name: str) -> None:
    sizes = [
        len(CODECS.get(name).encode(block(dtype=dtype))) for dtype in (torch.float64, torch.float32, torch.float16)
    ]
    assert max(sizes) < 1.01 * min(sizes)


@BOTH
def test_huge_biases_of_keys_cost_next_to_nothing(name: str) -> None:
    """Qwen2's edge layers: a channel's mean is hundreds of times what changes from token to token."""
    plain, biased = block(dtype=torch.float32), block(dtype=torch.float32, bias=300)
    assert len(CODECS.get(name).encode(biased)) < 1.03 * len(CODECS.get(name).encode(plain))
    away = [(1, -(biased.position + t)) for t in range(biased.tokens)]
    before = tuple(rotate(k, away, ROPE) for k in biased.keys)
    after = tuple(rotate(k, away, ROPE) for k in decoded(name, biased).keys)
    assert relative_error(after, before) < {"int8": 0.01, "int4": 0.06}[name]


@BOTH
def test_quantising_before_rope_is_what_makes_keys_accurate(name: str) -> None:
    kv = block(bias=10)
    blind = replace(kv, rotations=())
    error = relative_error(decoded(name, kv).keys, kv.keys)
    assert relative_error(decoded(name, blind).keys, kv.keys) > 1.5 * error


@BOTH
@pytest.mark.parametrize("tokens", [1, 2, 63, 65, 97, 129, 240, 255, 2048])
def test_any_number_of_tokens(name: str, tokens: int) -> None:
    kv = block(tokens, layers=1)
    check_round_trip(CODECS.get(name), kv)
    check_other_position(CODECS.get(name), kv, 9)


@BOTH
def test_odd_and_unequal_dimensions(name: str) -> None:
    random = torch.Generator().manual_seed(1)
    kv = KVBlock((torch.randn(2, 70, 33, generator=random),), (torch.randn(2, 70, 127, generator=random),))
    check_round_trip(CODECS.get(name), kv)
    assert len(CODECS.get(name).encode(kv)) < 0.4 * kv.nbytes


@BOTH
def test_constants_come_back_exactly_in_bf16(name: str) -> None:
    constant = torch.full((2, 100, 64), -1.703125, dtype=torch.bfloat16)
    kv = KVBlock((constant,), (constant * 100,))
    out = decoded(name, kv)
    assert torch.equal(out.keys[0], kv.keys[0])
    assert torch.equal(out.values[0], kv.values[0])


@BOTH
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 60_000.0])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_what_does_not_fit_is_stored_losslessly_and_still_moves(name: str, side: str, value: float) -> None:
    kv = block(layers=2, tokens=40, dtype=torch.float16)
    getattr(kv, side)[1][2, 17, 5] = value
    payload = CODECS.get(name).encode(kv)
    out = decoded(name, kv, payload)
    for got, put in zip((*out.keys, *out.values), (*kv.keys, *kv.values), strict=True):
        assert torch.equal(got.view(torch.int16), put.view(torch.int16))
    moved = decoded(name, replace(kv, position=kv.position + 3), payload)
    assert torch.equal(moved.keys[0], rotate(kv.keys[0], [(40, 3)], ROPE))
    assert torch.equal(moved.values[0], kv.values[0])


@BOTH
def test_a_block_too_small_to_share_grids_is_not_larger_than_exact(name: str) -> None:
    kv = block(tokens=1)
    assert len(CODECS.get(name).encode(kv)) <= len(CODECS.get("exact").encode(kv)) + 10


@BOTH
def test_integers_are_refused(name: str) -> None:
    whole = torch.zeros(1, 4, 32, dtype=torch.int16)
    with pytest.raises(ValueError, match="int16"):
        CODECS.get(name).encode(KVBlock((whole,), (whole,)))


@BOTH
def test_other_versions_modes_and_shapes_are_refused(name: str) -> None:
    kv = block(layers=1)
    payload = CODECS.get(name).encode(kv)
    for bad in (b"\x02" + payload[1:], payload[:1] + b"\x07" + payload[2:]):
        with pytest.raises(ValueError, match="version"):
            decoded(name, kv, bad)
    with pytest.raises(ValueError, match="frame"):
        decoded(name, kv.cut(0, 255), payload)


@BOTH
def test_a_bomb_is_refused_in_bounded_memory(name: str) -> None:
    kv = block(layers=1, tokens=4)
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(256 << 20))
    tracemalloc.start()
    head = b"\x01\x00" + struct.pack("<BQ", 1, len(bomb)) + 12 * struct.pack("<BQ", 1, 0) + struct.pack("<BQ", 1, 0)
    with pytest.raises(ValueError, match="unpacks to 268435456"):
        decoded(name, kv, head + bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@BOTH
def test_tensors_made_in_inference_mode_are_filled(name: str) -> None:
    kv = block(layers=1)
    payload = CODECS.get(name).encode(kv)
    with torch.inference_mode():
        out = replace(kv, keys=(torch.zeros_like(kv.keys[0]),), values=(torch.zeros_like(kv.values[0]),))
    CODECS.get(name).decode(payload, out, {})
    assert torch.equal(out.keys[0], decoded(name, kv, payload).keys[0])


@pytest.mark.parametrize("levels", [2, 12, 16, 17, 256])
@pytest.mark.parametrize("dim", [1, 7, 64])
def test_packed_codes_come_back(levels: int, dim: int) -> None:
    grid = Grid(levels, 4)
    codes = torch.randint(0, levels, (3, 5, dim), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    packed = torch.empty(3, 5, grid.width(dim), dtype=torch.uint8)
    grid.pack(codes, packed)
    assert torch.equal(grid.unpack(packed, dim), codes.float())


@pytest.mark.parametrize("grid", [Grid(256, 1), Grid(128, 1), Grid(32, 4), Grid(12, 4)])
def test_a_grid_spans_its_group(grid: Grid) -> None:
    numbers = torch.randn(1000, 64, generator=torch.Generator().manual_seed(3)) * torch.logspace(-30, 30, 1000)[:, None]
    numbers[::3] += 100
    fitted = grid.fit(numbers.amin(1), numbers.amax(1))
    step, zero = (t[:, None] for t in grid.place(*fitted))
    codes = grid.codes(numbers.clone(), step, zero)
    assert int(codes.amax()) <= grid.levels - 1
    error = ((codes * step + zero).double() - numbers.double()).abs()
    assert bool((error <= 0.5 * step.double() + 2e-7 * numbers.abs().amax(1, keepdim=True)).all())
    assert bool((step[1::3, 0] < 1.2 * (numbers.amax(1) - numbers.amin(1))[1::3] / (grid.levels - 2)).all())
