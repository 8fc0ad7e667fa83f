"""What the lossless codecs promise beyond the round trip: size, dtype, memory, threads."""

from __future__ import annotations

import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import zstandard

from agentkv.codecs import CODECS, KVBlock


def block(dtype: torch.dtype = torch.bfloat16, layers: int = 6, tokens: int = 256, seed: int = 0) -> KVBlock:
    """KV-like numbers ``[3, tokens, 64]``: gaussian, each channel with its own scale and mean."""
    random = torch.Generator().manual_seed(seed)

    def one() -> torch.Tensor:
        scale, mean = torch.randn(2, 3, 1, 64, generator=random)
        return (torch.randn(3, tokens, 64, generator=random) * (0.7 * scale).exp() + mean).to(dtype)

    return KVBlock(tuple(one() for _ in range(layers)), tuple(one() for _ in range(layers)))


def empty_like(block: KVBlock) -> KVBlock:
    return KVBlock(tuple(map(torch.zeros_like, block.keys)), tuple(map(torch.zeros_like, block.values)))


def test_both_codecs_are_registered_and_exact() -> None:
    for name in ("raw", "exact"):
        assert CODECS.get(name).name == name
        assert CODECS.get(name).exact


def test_raw_is_the_bytes_themselves() -> None:
    kv = block()
    plain = b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in (*kv.keys, *kv.values))
    assert CODECS.get("raw").encode(kv) == plain


def test_exact_shrinks_bf16_by_a_third() -> None:
    kv = block()
    assert len(CODECS.get("exact").encode(kv)) < kv.nbytes / 1.4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_exact_never_grows_by_more_than_its_head(dtype: torch.dtype) -> None:
    noise = torch.randint(0, 256, (2, 300, 64 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    kv = KVBlock((noise,), (noise.flip(1),))
    assert len(CODECS.get("exact").encode(kv)) <= kv.nbytes + 2 + 9 * dtype.itemsize


def test_encoding_is_deterministic() -> None:
    assert CODECS.get("exact").encode(block()) == CODECS.get("exact").encode(block())


def test_a_payload_of_another_dtype_of_the_same_size_is_refused() -> None:
    payload = CODECS.get("exact").encode(block(torch.bfloat16))
    with pytest.raises(ValueError, match="dtype code"):
        CODECS.get("exact").decode(payload, empty_like(block(torch.float16)), {})


def test_integers_and_mixed_dtypes_are_refused() -> None:
    whole = torch.zeros(1, 4, 32, dtype=torch.int16)
    with pytest.raises(ValueError, match="int16"):
        CODECS.get("exact").encode(KVBlock((whole,), (whole,)))
    with pytest.raises(ValueError, match="one dtype"):
        CODECS.get("exact").encode(KVBlock((whole.to(torch.float16),), (whole.to(torch.bfloat16),)))


def test_a_bomb_is_refused_in_bounded_memory() -> None:
    kv = block(layers=1, tokens=4)
    numbers = kv.nbytes // 2
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(256 << 20))
    hidden = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(64 << 20))
    lie = bytearray(zstandard.ZstdCompressor(level=1).compress(bytes(numbers)))
    tracemalloc.start()
    for frame in (bomb, hidden, bytes(lie[:-3])):
        head = struct.pack("<BB", 1, 1) + struct.pack("<BQ", 0, numbers) + struct.pack("<BQ", 1, len(frame))
        with pytest.raises(ValueError):
            CODECS.get("exact").decode(head + bytes(numbers) + frame, empty_like(kv), {})
    with pytest.raises(ValueError, match="claims"):
        head = struct.pack("<BB", 1, 1) + struct.pack("<BQ", 0, 2**63) + struct.pack("<BQ", 1, 8)
        CODECS.get("exact").decode(head, empty_like(kv), {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_threads_do_not_disturb_each_other() -> None:
    codec = CODECS.get("exact")
    kvs = [block(layers=2, seed=i) for i in range(8)]

    def there_and_back(kv: KVBlock) -> bool:
        out = empty_like(kv)
        codec.decode(codec.encode(kv), out, {})
        return all(torch.equal(a, b) for a, b in zip((*out.keys, *out.values), (*kv.keys, *kv.values), strict=True))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(there_and_back, kvs * 3))
