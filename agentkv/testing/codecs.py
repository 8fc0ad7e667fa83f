"""The conformance checks of codecs: any codec, whoever wrote it, must pass them on any block.

    for block in my_blocks:
        check_codec(MyCodec(), block)

Each check raises ``AssertionError`` with the numbers that disagree. ``block`` is best a real one: layers, rotations and
position filled in, as a layout captures it.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from agentkv.codecs import Codec, KVBlock
from agentkv.rope import Rotation, rotate

__all__ = [
    "check_altered",
    "check_codec",
    "check_deterministic",
    "check_junk",
    "check_other_position",
    "check_round_trip",
    "check_strided",
    "check_threads",
    "check_truncated",
]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SLACK_BYTES = 1 << 20
"""Memory that a decode may take beside what is in proportion to the block: contexts of a compressor, tables."""


def check_codec(codec: Codec, block: KVBlock, seed: int = 0) -> None:
    """Every check of this module. ``seed`` chooses the cuts, alterations and junk, the same for the same seed."""
    check_round_trip(codec, block)
    check_deterministic(codec, block)
    check_strided(codec, block)
    if not codec.exact:
        for position in (0, block.position + 1, block.position + 10_007):
            check_other_position(codec, block, position)
    check_truncated(codec, block, seed)
    check_altered(codec, block, seed)
    check_junk(codec, block, seed)
    check_threads(codec, block)


def check_round_trip(codec: Codec, block: KVBlock) -> None:
    """Every number comes back within ``bound``, and where the bound is zero bit for bit, NaN included."""
    out = _blank(block)
    codec.decode(codec.encode(block), out, codec.parameters())
    _check_within(codec, block, out)


def check_deterministic(codec: Codec, block: KVBlock) -> None:
    """The same numbers give the same bytes, whether they are views or copies; the payload gives the same numbers."""
    payload = codec.encode(block)
    copy = _like(block, lambda t: t.clone(memory_format=torch.contiguous_format))
    assert codec.encode(block) == payload, f"{codec.name} encodes the same block to other bytes the second time"
    assert codec.encode(copy) == payload, f"{codec.name} encodes a copy of a block to other bytes"
    first, second = _blank(block), _blank(block)
    codec.decode(payload, first, codec.parameters())
    codec.decode(memoryview(bytearray(payload)), second, codec.parameters())
    for kind, a, b in _pairs(first, second):
        assert torch.equal(_bits(a), _bits(b)), f"{codec.name} decodes {kind} of one payload to other numbers"


def check_strided(codec: Codec, block: KVBlock) -> None:
    """Decoding into views of larger buffers gives the same numbers, and leaves what is around them alone."""
    payload = codec.encode(block)
    plain = _blank(block)
    codec.decode(payload, plain, codec.parameters())
    buffers = _like(block, lambda t: torch.full((t.shape[0], t.shape[1] + 5, t.shape[2]), 7.0, dtype=t.dtype))
    out = _like(buffers, lambda t: t[:, 2:-3])
    codec.decode(payload, out, codec.parameters())
    for kind, a, b in _pairs(out, plain):
        assert torch.equal(_bits(a), _bits(b)), f"{codec.name} decodes {kind} to other numbers into a strided view"
    for kind, buffer, _ in _pairs(buffers, plain):
        around = torch.cat([buffer[:, :2], buffer[:, -3:]], 1)
        assert bool((around == 7.0).all()), f"{codec.name} writes {kind} outside of the view it was given"


def check_other_position(codec: Codec, block: KVBlock, position: int) -> None:
    """Decoded for ``position``, keys are those of that position within the bound (of both in a pair, as they mix)
    and one more rounding; values are as they were. For codecs that are not exact."""
    out = replace(_blank(block), position=position)
    codec.decode(codec.encode(block), out, codec.parameters())
    bound = codec.bound(block)
    rotations = block.rotations or (None,) * len(block.keys)
    for layer, (key, got, rotation) in enumerate(zip(block.keys, out.keys, rotations, strict=True)):
        wanted = key.double()
        if rotation is not None:
            wanted = rotate(wanted, [(block.tokens, position - block.position)], rotation)
        info = torch.finfo(key.dtype)
        steps = max(info.eps, torch.finfo(torch.float32).eps)  # turns are made in float32
        size = _over_pairs(key.double(), rotation)
        allowed = _over_pairs(bound.keys[layer], rotation) + 4 * steps * size + 4 * info.smallest_normal * info.eps
        # Beyond the dtype's range, and next to infinities and NaN, there is no number to agree on.
        countable = wanted.isfinite() & (size < 0.9 * info.max)
        error = (got.double() - wanted).abs()
        wrong = countable & ~(error <= allowed)
        assert not bool(wrong.any()), (
            f"{codec.name}: keys of layer {layer} decoded for position {position} instead of {block.position} are off "
            f"by {float(error[wrong][0]):.3g} where {float(allowed[wrong][0]):.3g} is allowed, "
            f"{int(wrong.sum())} of {wrong.numel()} numbers"
        )
    _check_within(codec, replace(block, keys=()), replace(out, keys=()), bound=replace(bound, keys=()))


def check_truncated(codec: Codec, block: KVBlock, seed: int = 0, places: int = 40) -> None:
    """A payload cut short anywhere, or with bytes behind it, is a ``ValueError``: ``places`` of them are tried."""
    payload = codec.encode(block)
    chance = random.Random(seed)
    cuts = {*range(min(12, len(payload))), len(payload) - 1, *(chance.randrange(len(payload)) for _ in range(places))}
    for bad in (*(payload[:cut] for cut in sorted(cuts)), payload + b"\0"):
        try:
            codec.decode(bad, _blank(block), codec.parameters())
        except ValueError:
            continue
        raise AssertionError(f"{codec.name} decodes {len(bad)} bytes of a payload of {len(payload)} without an error")


def check_altered(codec: Codec, block: KVBlock, seed: int = 0, times: int = 20) -> None:
    """Altered bytes give other numbers or a ``ValueError``, in memory in proportion to the block."""
    payload = codec.encode(block)
    chance = random.Random(seed)

    def altered() -> Iterable[bytes]:
        for i in range(times):
            bad = bytearray(payload)
            # Heads are where a changed byte could ask for much: half of the changes go there.
            reach = min(len(bad), 200) if i % 2 else len(bad)
            for _ in range(chance.randint(1, 4)):
                bad[chance.randrange(reach)] = chance.randrange(256)
            yield bytes(bad)

    _check_contained(codec, block, altered())


def check_junk(codec: Codec, block: KVBlock, seed: int = 0, times: int = 20) -> None:
    """Random bytes, and random bytes behind a true head, are handled as altered ones are."""
    head = codec.encode(block)[:64]
    chance = random.Random(seed)
    lengths = (chance.randrange(400) for _ in range(times))
    _check_contained(codec, block, (head[: n % 65 if n % 2 else 0] + chance.randbytes(n) for n in lengths))


def check_threads(codec: Codec, block: KVBlock, threads: int = 4, times: int = 8) -> None:
    """Several threads with one codec get what one thread gets."""
    halves = [block, block.cut(0, max(1, block.tokens // 2))]
    expected = [codec.encode(half) for half in halves]
    numbers = [_decoded(codec, payload, half) for payload, half in zip(expected, halves, strict=True)]

    def there_and_back(turn: int) -> bool:
        half = halves[turn % 2]
        payload = codec.encode(half)
        again = _decoded(codec, payload, half)
        return payload == expected[turn % 2] and all(
            torch.equal(_bits(a), _bits(b)) for _, a, b in _pairs(again, numbers[turn % 2])
        )

    with ThreadPoolExecutor(threads) as pool:
        assert all(pool.map(there_and_back, range(times))), f"{codec.name} gives other results in {threads} threads"


def _check_within(codec: Codec, put: KVBlock, got: KVBlock, bound: KVBlock | None = None) -> None:
    bound = codec.bound(put) if bound is None else bound
    for (kind, a, b), (_, limit, _) in zip(_pairs(put, got), _pairs(bound, bound), strict=True):
        assert limit.shape == a.shape and limit.dtype == torch.float64, (
            f"{codec.name} bounds {kind} by {limit.dtype} {tuple(limit.shape)}, not float64 {tuple(a.shape)}"
        )
        same = _bits(a) == _bits(b)
        assert not codec.exact or not bool(limit.any()), f"{codec.name} says it is exact and has a bound for {kind}"
        error = (a.double() - b.double()).abs()
        wrong = ~same & ~((error <= limit) & (limit > 0))
        assert not bool(wrong.any()), (
            f"{codec.name}: {kind}: {float(a[wrong][0])!r} came back as {float(b[wrong][0])!r}, "
            f"{float(limit[wrong][0]):.3g} is allowed; {int(wrong.sum())} of {wrong.numel()} numbers"
        )


def _check_contained(codec: Codec, block: KVBlock, payloads: Iterable[bytes]) -> None:
    out = _blank(block)
    allowed = 16 * sum(t.numel() for t in (*block.keys, *block.values)) + _SLACK_BYTES
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    try:
        for payload in payloads:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                codec.decode(payload, out, codec.parameters())
            except ValueError:
                pass
            except Exception as error:
                start = payload[:16].hex(" ")
                raise AssertionError(
                    f"{codec.name} raises {error!r} for the bytes {start} … ({len(payload)})"
                ) from error
            taken = tracemalloc.get_traced_memory()[1] - before
            assert taken <= allowed, f"{codec.name} takes {taken:,} bytes to decode into a block of {block.nbytes:,}"
    finally:
        if not tracing:
            tracemalloc.stop()


def _over_pairs(numbers: Tensor, rotation: Rotation | None) -> Tensor:
    """``[..., D]``: sizes, and for the dimensions that turn the length of the pair they are in."""
    sizes = numbers.abs()
    if rotation is None or not rotation.frequencies:
        return sizes
    n = len(rotation.frequencies)
    a, b = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if rotation.interleaved else (slice(n), slice(n, 2 * n))
    sizes[..., a] = sizes[..., b] = torch.hypot(sizes[..., a], sizes[..., b])
    return sizes


def _decoded(codec: Codec, payload: bytes, like: KVBlock) -> KVBlock:
    out = _blank(like)
    codec.decode(payload, out, codec.parameters())
    return out


def _like(block: KVBlock, make: Callable[[Tensor], Tensor]) -> KVBlock:
    return replace(block, keys=tuple(map(make, block.keys)), values=tuple(map(make, block.values)))


def _blank(block: KVBlock) -> KVBlock:
    return _like(block, lambda t: torch.zeros(t.shape, dtype=t.dtype))


def _pairs(first: KVBlock, second: KVBlock) -> list[tuple[str, Tensor, Tensor]]:
    keys = [(f"keys {i}", a, b) for i, (a, b) in enumerate(zip(first.keys, second.keys, strict=True))]
    return keys + [(f"values {i}", a, b) for i, (a, b) in enumerate(zip(first.values, second.values, strict=True))]


def _bits(tensor: Tensor) -> Tensor:
    """As integers: NaN equals itself, and -0 is not 0."""
    return tensor.contiguous().view(_WORDS[tensor.element_size()])
