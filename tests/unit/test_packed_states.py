"""States of any dtypes as numbers of the model's: the same bytes there and back, through any lossless codec."""

import pytest
import torch

from agentkv.codecs import CODECS, KVBlock
from agentkv.kv.packed_states import packed, unpacked
from agentkv.types import LayerGroup, StateShape

SHAPES = (
    StateShape("conv", 0, (33, 4), "bfloat16"),
    StateShape("conv", 1, (5, 1), "float16"),
    StateShape("recurrent", 0, (3, 8, 9), "float32"),
    StateShape("recurrent", 1, (7,), "float64"),
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("codec", ["raw", "exact"])
def test_every_bit_comes_back_whatever_the_bits_mean(dtype: torch.dtype, codec: str) -> None:
    """Random bytes: infinities and every kind of NaN among them."""
    group = LayerGroup.recurrent((0, 2), SHAPES, dtype.itemsize)
    random = torch.Generator().manual_seed(3)
    tensors = []
    for _ in group.layers:
        for state in SHAPES:
            raw = torch.randint(0, 256, (state.nbytes,), dtype=torch.uint8, generator=random)
            tensors.append(raw.view(getattr(torch, state.dtype)).view(1, *state.shape))
    assert any(t.isnan().any() for t in tensors)
    block = packed(group, tensors, dtype).block
    assert all(t.shape == (group.kv_heads, 1, group.key_dim) and t.dtype == dtype for t in (*block.keys, *block.values))
    back = KVBlock(tuple(map(torch.ones_like, block.keys)), tuple(map(torch.ones_like, block.values)))
    CODECS.get(codec).decode(CODECS.get(codec).encode(block), back, {})
    for ours, theirs in zip(unpacked(group, back), tensors, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert torch.equal(ours.view(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


def test_a_large_state_is_cut_into_rows_that_a_chunk_header_can_name() -> None:
    states = (StateShape("recurrent", 0, (32, 128, 128), "float32"), StateShape("conv", 0, (8192, 4), "bfloat16"))
    group = LayerGroup.recurrent((0,), states, itemsize=2)
    assert max(group.kv_heads, group.key_dim) < 2**16
    numbers = group.values_per_token
    assert 0 <= 2 * numbers - sum(state.nbytes for state in states) < 1000
