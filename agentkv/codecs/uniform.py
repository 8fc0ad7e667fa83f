"""What ``int8`` and ``int4`` are: every number on a uniform grid, the codes entropy-coded.

Keys are quantised before RoPE, a grid for each layer, head, channel and run of about 64 tokens: each channel has a
range of its own, which lasts. Values have their channels' means removed (that alone narrows a token's range by a tenth)
and get a grid for each layer, head and token (KIVI, arXiv 2402.02750; KVQuant, arXiv 2401.18079).

    payload = version u8 | mode u8 | rest
    mode 0    frames of: key steps, zeros, codes; value means, steps, zeros, codes
    mode 1    position i64 | payload of ``exact``: numbers that are not finite or near the end of their dtype, and
              blocks too small to share a grid

What describes the grids takes a frame for each byte of its integers.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from agentkv.codecs.contract import Codec, KVBlock
from agentkv.codecs.exact import Exact
from agentkv.codecs.frames import join_frames, split_frames
from agentkv.codecs.grids import Grid
from agentkv.codecs.tiles import Shape, pieces, spans
from agentkv.codecs.turning import rotations_of, slabs, turn_on, turn_slab
from agentkv.codecs.words import Bytes, block_dtype

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Uniform"]

_VERSION = 1
_GRIDS, _EXACT = 0, 1
_HEAD = struct.Struct("<BB")
_POSITION = struct.Struct("<q")
_FLOATS = ("bfloat16", "float16", "float32", "float64")
_STEP_BYTES, _ZERO_BYTES, _MEAN_BYTES = 2, 3, 2
_POOR = 0.6
"""A payload above this share of the block may be larger than ``exact`` would make it."""

_exact = Exact()


class Uniform(Codec):
    """Keys on one grid, values on another; ``bits``: what a number of real KV takes, everything counted."""

    exact = False
    keys: Grid
    values: Grid
    bits: float

    def bits_per_value(self, dtype: str) -> float:
        """``bits``, whatever the dtype."""
        return self.bits

    def encode(self, block: KVBlock) -> bytes:
        """Quantise what can be. ``ValueError`` for a dtype that is not one of the four floats."""
        import torch

        _check_dtype(block)
        with torch.inference_mode():
            frames = self._encode(block)
            payload = None if frames is None else _HEAD.pack(_VERSION, _GRIDS) + frames
            if payload is not None and len(payload) < _POOR * block.nbytes:
                return payload
            head = _HEAD.pack(_VERSION, _EXACT) + _POSITION.pack(block.position)
            lossless = head + _exact.encode(_on_cpu(block))
        return lossless if payload is None or len(lossless) <= len(payload) else payload

    def decode(self, payload: bytes | memoryview, out: KVBlock, parameters: Mapping[str, Any]) -> None:
        """Fill ``out``, keys turned to its positions. Memory: about a byte a number, whatever the payload claims."""
        import torch

        _check_dtype(out)
        source = memoryview(payload).cast("B")
        if len(source) < _HEAD.size:
            raise ValueError(f"a payload of {len(source)} bytes is shorter than its head")
        version, mode = _HEAD.unpack_from(source)
        if version != _VERSION or mode not in (_GRIDS, _EXACT):
            raise ValueError(f"payload version {version}, mode {mode}; expected version {_VERSION}, mode 0 or 1")
        with torch.inference_mode():
            if mode == _EXACT:
                _decode_exact(source[_HEAD.size :], out)
            else:
                self._decode(_read(source[_HEAD.size :], out, self.keys, self.values), out)

    def bound(self, block: KVBlock) -> KVBlock:
        """Half a step (of a turned pair: the root of both halves squared) and what float32 and the dtype round off.

        Zero where the block is stored losslessly. What it says of keys holds at any position.
        """
        payload = memoryview(self.encode(block))
        if payload[1] == _EXACT:
            return super().bound(block)
        block, shape = _on_cpu(block), Shape.of(block)
        described = _read(payload[_HEAD.size :], block, self.keys, self.values)
        half = self.keys.place(*described.key_grids)[0].double() / 2
        half = half.repeat_interleave(shape.run, 2)[:, :, : shape.tokens]
        for at, rotation in zip(half, rotations_of(block), strict=True):
            if rotation is not None and rotation.frequencies:
                n = len(rotation.frequencies)
                pairs = at[..., : 2 * n].unflatten(-1, (n, 2) if rotation.interleaved else (2, n))
                pairs.copy_(pairs.norm(dim=-1 if rotation.interleaved else -2, keepdim=True).expand_as(pairs))
        keys = tuple(_with_rounding(k, h) for k, h in zip(block.keys, half, strict=True))
        half = self.values.place(*described.value_grids)[0].double() / 2
        half = half.repeat_interleave(shape.value_dim // shape.groups, 3)
        values = tuple(_with_rounding(v, h) for v, h in zip(block.values, half, strict=True))
        return replace(block, keys=keys, values=values)

    def _encode(self, block: KVBlock) -> bytes | None:
        """The frames of mode 0, or ``None`` where the numbers are not fit for it."""
        keys = self._encode_keys(block)
        values = None if keys is None else self._encode_values(block)
        return None if keys is None or values is None else join_frames([*keys, *values])

    def _encode_keys(self, block: KVBlock) -> list[Bytes] | None:
        import torch

        grid, shape, device, limit = self.keys, Shape.of(block), block.keys[0].device, _limit(block)
        steps, zeros = torch.empty((2, *_key_grids(shape)), dtype=torch.int32, device=device)
        codes = torch.empty(_codes(shape, shape.key_dim, grid), dtype=torch.uint8, device=device)
        for layers in slabs(block):
            numbers = _wide(block.keys[layers])
            turn_slab(numbers, layers, block, -1)
            for tokens, runs, run in pieces(shape):
                grouped = _in_runs(numbers[:, :, tokens], run)
                low, high = grouped.amin(3), grouped.amax(3)
                if not _within(low, high, limit):
                    return None
                fitted = grid.fit(low, high)
                steps[layers, :, runs], zeros[layers, :, runs] = fitted
                step, zero = grid.place(*fitted)
                found = grid.codes(grouped, step[..., None, :], zero[..., None, :])
                grid.pack(found.flatten(2, 3), codes[layers, :, tokens])
        return [*_planes(steps, _STEP_BYTES), *_planes(_folded(zeros), _ZERO_BYTES), _flat(codes)]

    def _encode_values(self, block: KVBlock) -> list[Bytes] | None:
        import torch

        grid, shape, device, limit = self.values, Shape.of(block), block.values[0].device, _limit(block)
        means = torch.empty(_means(shape), dtype=torch.bfloat16, device=device)
        steps, zeros = torch.empty((2, *_value_grids(shape)), dtype=torch.int32, device=device)
        codes = torch.empty(_codes(shape, shape.value_dim, grid), dtype=torch.uint8, device=device)
        for layers in slabs(block):
            numbers = _wide(block.values[layers])
            sums = numbers.new_zeros(means[layers].shape)
            for tokens in spans(shape, shape.value_dim, device):
                sums += numbers[:, :, tokens].sum(2, keepdim=True)
            means[layers] = sums.div_(shape.tokens)
            numbers -= means[layers].to(torch.float32)
            grouped = numbers.view(*numbers.shape[:3], shape.groups, -1)
            low, high = grouped.amin(4), grouped.amax(4)
            if not _within(low, high, limit):
                return None
            steps[layers], zeros[layers] = fitted = grid.fit(low, high)
            step, zero = grid.place(*fitted)
            grid.pack(grid.codes(grouped, step[..., None], zero[..., None]).flatten(3), codes[layers])
        means_planes = _planes(means.view(torch.int16).to(torch.int32), _MEAN_BYTES)
        return [*means_planes, *_planes(steps, _STEP_BYTES), *_planes(_folded(zeros), _ZERO_BYTES), _flat(codes)]

    def _decode(self, read: _Read, out: KVBlock) -> None:
        import torch

        shape, device = Shape.of(out), out.keys[0].device
        key_step, key_zero = (t.to(device)[..., None, :] for t in self.keys.place(*read.key_grids))
        step, zero = (t.to(device)[..., None] for t in self.values.place(*read.value_grids))
        key_codes, codes, means = (t.to(device) for t in (read.key_codes, read.value_codes, read.means.float()))
        for layers in slabs(out):
            keys = self.keys.unpack(key_codes[layers], shape.key_dim)
            for tokens, runs, run in pieces(shape):
                here = layers, slice(None), runs
                _in_runs(keys[:, :, tokens], run).mul_(key_step[here]).add_(key_zero[here])
            turn_slab(keys, layers, out, 1)
            values = self.values.unpack(codes[layers], shape.value_dim)
            values.view(*values.shape[:3], shape.groups, -1).mul_(step[layers]).add_(zero[layers])
            values += means[layers]
            torch._foreach_copy_([*out.keys[layers], *out.values[layers]], [*keys.unbind(), *values.unbind()])


def _in_runs(numbers: Tensor, run: int) -> Tensor:
    """``[layers, Hkv, T, D]`` as ``[layers, Hkv, runs, run, D]``."""
    layers, heads, _, dim = numbers.shape
    return numbers.view(layers, heads, -1, run, dim)


def _wide(tensors: tuple[Tensor, ...]) -> Tensor:
    """``[layers, Hkv, T, D]`` float32, new."""
    import torch

    wide = torch.empty((len(tensors), *tensors[0].shape), dtype=torch.float32, device=tensors[0].device)
    torch._foreach_copy_(wide.unbind(), tensors)
    return wide


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """The frames of mode 0, on the CPU. Grids: steps and zeros, int32, as ``Grid.fit`` gave them."""

    key_grids: tuple[Tensor, Tensor]
    """``[layers, Hkv, runs, Dk]``"""
    key_codes: Tensor
    """``[layers, Hkv, T, width]`` uint8"""
    means: Tensor
    """``[layers, Hkv, 1, Dv]`` bfloat16"""
    value_grids: tuple[Tensor, Tensor]
    """``[layers, Hkv, T, groups]``"""
    value_codes: Tensor


def _read(source: memoryview, out: KVBlock, keys: Grid, values: Grid) -> _Read:
    """``ValueError`` unless ``source`` holds what a block of the shape of ``out`` takes."""
    import torch

    shape = Shape.of(out)
    key_codes, value_codes = _codes(shape, shape.key_dim, keys), _codes(shape, shape.value_dim, values)
    key_grids, value_grids, means = _key_grids(shape), _value_grids(shape), _means(shape)
    grid_bytes = _STEP_BYTES + _ZERO_BYTES
    sizes = [prod(key_grids)] * grid_bytes + [prod(key_codes)]
    sizes += [prod(means)] * _MEAN_BYTES + [prod(value_grids)] * grid_bytes + [prod(value_codes)]
    frames = iter(split_frames(source, sizes))

    def whole(nbytes: int, shape: tuple[int, ...]) -> Tensor:
        numbers = np.zeros(shape, dtype=np.int32)
        for i in range(nbytes):
            numbers |= next(frames).reshape(shape).astype(np.int32) << (8 * i)
        return torch.from_numpy(numbers)

    def grids(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return whole(_STEP_BYTES, shape), _unfolded(whole(_ZERO_BYTES, shape))

    def codes(shape: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(next(frames).reshape(shape).copy())  # torch wants arrays it could write to

    return _Read(
        key_grids=grids(key_grids),
        key_codes=codes(key_codes),
        means=whole(_MEAN_BYTES, means).to(torch.int16).view(torch.bfloat16),
        value_grids=grids(value_grids),
        value_codes=codes(value_codes),
    )


def _decode_exact(source: memoryview, out: KVBlock) -> None:
    """Bit for bit at the position it was encoded at; keys wanted at another one are turned there, rounded once."""
    if len(source) < _POSITION.size:
        raise ValueError(f"a position of {_POSITION.size} bytes was expected, {len(source)} are left")
    (position,) = _POSITION.unpack_from(source)
    plain = _on_cpu(out)
    _exact.decode(source[_POSITION.size :], plain, {})
    turn_on(plain, position)
    for into, tensor in zip((*out.keys, *out.values), (*plain.keys, *plain.values), strict=True):
        if into is not tensor:
            into.copy_(tensor)


def _key_grids(shape: Shape) -> tuple[int, int, int, int]:
    return shape.layers, shape.heads, shape.runs, shape.key_dim


def _value_grids(shape: Shape) -> tuple[int, int, int, int]:
    return shape.layers, shape.heads, shape.tokens, shape.groups


def _means(shape: Shape) -> tuple[int, int, int, int]:
    return shape.layers, shape.heads, 1, shape.value_dim


def _codes(shape: Shape, dim: int, grid: Grid) -> tuple[int, int, int, int]:
    return shape.layers, shape.heads, shape.tokens, grid.width(dim)


def _limit(block: KVBlock) -> float:
    """Numbers up to this one stay finite through float32, and in their dtype however a pair is turned."""
    import torch

    return min(torch.finfo(block.keys[0].dtype).max, torch.finfo(torch.float32).max / 16) / 1.6


def _within(low: Tensor, high: Tensor, limit: float) -> bool:
    return bool(low.amin() >= -limit) and bool(high.amax() <= limit)


def _planes(numbers: Tensor, nbytes: int) -> list[Bytes]:
    """Byte i of every number (int32), low bytes first."""
    words = numbers.cpu().numpy().view(np.uint32).reshape(-1)
    return [(words >> (8 * i)).astype(np.uint8) for i in range(nbytes)]


def _flat(codes: Tensor) -> Bytes:
    flat: Bytes = codes.cpu().numpy().reshape(-1)
    return flat


def _folded(numbers: Tensor) -> Tensor:
    """0, -1, 1, -2 … as 0, 1, 2, 3 …, so that the high bytes of small numbers are zero."""
    return (numbers << 1) ^ (numbers >> 31)


def _unfolded(numbers: Tensor) -> Tensor:
    return (numbers >> 1) ^ -(numbers & 1)


def _on_cpu(block: KVBlock) -> KVBlock:
    return replace(block, keys=tuple(t.cpu() for t in block.keys), values=tuple(t.cpu() for t in block.values))


def _with_rounding(numbers: Tensor, half: Tensor) -> Tensor:
    """``half`` steps, and what is rounded off on the way: a few units of float32, the last place of the dtype."""
    import torch

    info, single = torch.finfo(numbers.dtype), torch.finfo(torch.float32)
    size = numbers.double().abs()
    arithmetic = 8 * single.eps * size.amax() + 4 * single.smallest_normal
    error = half + arithmetic
    return error + info.eps / 2 * (size + error) + info.smallest_normal * info.eps


def _check_dtype(block: KVBlock) -> None:
    name = block_dtype(block)
    if name not in _FLOATS:
        raise ValueError(f"quantisers take {', '.join(_FLOATS)}, not {name}")
