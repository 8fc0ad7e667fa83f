"""Keys moved to another position are the keys computed there, at any distance, rounded once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from agentkv.rope import Rotation, rotate

HEADS, TOKENS, DIM = 3, 7, 16
ANGLES = tuple(10_000.0 ** (-i / 8) for i in range(8))
ROTATIONS = {
    "half-split": Rotation(ANGLES),
    "interleaved": Rotation(ANGLES, interleaved=True),
    "half-split partial": Rotation(ANGLES[:3]),
    "interleaved partial": Rotation(ANGLES[:3], interleaved=True),
    "none": Rotation(()),
}
each_rotation = pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS.keys())


def keys(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_complex_numbers(x: Tensor, delta: int, rotation: Rotation) -> Tensor:
    """Each pair a complex number, multiplied by e^(i·Δ·frequency), one after the other; float64."""
    out = x.double().clone()
    n = len(rotation.frequencies)
    for i, frequency in enumerate(rotation.frequencies):
        a, b = (2 * i, 2 * i + 1) if rotation.interleaved else (i, i + n)
        angle = math.fmod(delta * frequency, 2 * math.pi)
        turned = torch.complex(out[..., a], out[..., b]) * complex(math.cos(angle), math.sin(angle))
        out[..., a], out[..., b] = turned.real, turned.imag
    return out


@each_rotation
@pytest.mark.parametrize("delta", [1, -1, 255, -4096, 100_000])
def test_it_is_multiplication_by_a_unit_complex_number(rotation: Rotation, delta: int) -> None:
    expected = by_complex_numbers(keys(), delta, rotation)
    wide = rotate(keys().double(), [(TOKENS, delta)], rotation)
    narrow = rotate(keys(), [(TOKENS, delta)], rotation)
    torch.testing.assert_close(wide, expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(narrow, expected.float(), atol=2e-6, rtol=0)


def test_control_the_reference_tells_the_rotations_apart() -> None:
    results = [by_complex_numbers(keys(), 5, rotation) for rotation in ROTATIONS.values()]
    assert all((a - b).abs().max() > 0.1 for i, a in enumerate(results) for b in results[:i])


@each_rotation
def test_each_run_of_tokens_moves_by_its_own_delta(rotation: Rotation) -> None:
    moved = rotate(keys(), [(2, 9), (0, 4), (4, 0), (1, -300)], rotation)
    torch.testing.assert_close(moved[:, :2], rotate(keys()[:, :2], [(2, 9)], rotation), atol=0, rtol=0)
    torch.testing.assert_close(moved[:, 2:6], keys()[:, 2:6], atol=0, rtol=0)
    torch.testing.assert_close(moved[:, 6:], rotate(keys()[:, 6:], [(1, -300)], rotation), atol=0, rtol=0)


@each_rotation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_delta_of_zero_changes_no_bit(rotation: Rotation, dtype: torch.dtype) -> None:
    original = keys(dtype)
    moved = rotate(original, [(TOKENS, 0)], rotation)
    assert moved.dtype == dtype
    assert torch.equal(moved, original)
    assert moved.data_ptr() != original.data_ptr()


@each_rotation
def test_moves_add_up_and_can_be_taken_back(rotation: Rotation) -> None:
    there = rotate(rotate(keys(), [(TOKENS, 70_000)], rotation), [(TOKENS, -69_000)], rotation)
    torch.testing.assert_close(there, rotate(keys(), [(TOKENS, 1000)], rotation), atol=2e-6, rtol=0)
    torch.testing.assert_close(rotate(there, [(TOKENS, -1000)], rotation), keys(), atol=2e-6, rtol=0)


@each_rotation
def test_the_keys_given_are_left_as_they_are(rotation: Rotation) -> None:
    original = keys()
    rotate(original, [(TOKENS, 12)], rotation)
    assert torch.equal(original, keys())


@pytest.mark.parametrize("name", ["half-split partial", "interleaved partial"])
def test_partial_rotation_keeps_the_other_dimensions_bit_for_bit(name: str) -> None:
    original = keys(torch.bfloat16)
    moved = rotate(original, [(TOKENS, 12)], ROTATIONS[name])
    assert torch.equal(moved[..., 6:], original[..., 6:])
    assert (moved[..., :6] != original[..., :6]).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_rotation
def test_narrow_keys_are_rounded_once(rotation: Rotation, dtype: torch.dtype) -> None:
    """No farther from the exact result than half a step of the dtype, but for the last float32 bits."""
    exact = by_complex_numbers(keys(dtype), 12_345, rotation)
    moved = rotate(keys(dtype), [(TOKENS, 12_345)], rotation).double()
    step = torch.finfo(dtype).eps * torch.exp2(exact.abs().log2().floor()) / 2
    assert ((moved - exact).abs() <= step + 1e-6).all()


def test_a_hundred_thousand_positions_away_angles_are_still_exact() -> None:
    """Float32 angles, the control, are off by thousands of times as much."""
    delta, rotation = 100_003, ROTATIONS["half-split"]
    exact = by_complex_numbers(keys(), delta, rotation)
    assert (rotate(keys(), [(TOKENS, delta)], rotation) - exact).abs().max() < 1e-6

    angles = torch.tensor(ANGLES) * torch.tensor(float(delta))
    x, y = keys()[..., :8], keys()[..., 8:]
    coarse = torch.cat([x * angles.cos() - y * angles.sin(), x * angles.sin() + y * angles.cos()], dim=-1)
    assert (coarse - exact).abs().max() > 1e-3


@each_rotation
def test_lengths_and_scores_are_kept(rotation: Rotation) -> None:
    """What attention sees depends on differences of positions only."""
    queries = keys(seed=1)
    before = (queries * keys()).sum(-1)
    after = (rotate(queries, [(TOKENS, 5000)], rotation) * rotate(keys(), [(TOKENS, 5000)], rotation)).sum(-1)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("deltas", "rotation"),
    [([(6, 1)], Rotation(ANGLES)), ([(8, 1)], Rotation(ANGLES)), ([(7, 1)], Rotation((1.0,) * 9))],
)
def test_what_does_not_fit_the_keys_is_refused(deltas: list[tuple[int, int]], rotation: Rotation) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        rotate(keys(), deltas, rotation)
