"""The ``compact`` codec: a uniform quantiser and an entropy coder. Four bits a number, and fewer in a fitted basis.

Keys before RoPE and values, less their mean by head and channel, in steps that are a share of each layer's spread; the
symbols through zstd. Huffman codes make the fine steps that a channel hardly needs nearly free, which is why a uniform
step without clipping beats codes of fixed width (uniform steps are optimal at high rate: Gish and Pierce, 1968).
A ``Fit`` brings each head a mean and a basis in which one step serves all components (``compact_basis``).

    payload   = version u8 | mode u8 | body
    STORED    : position of the first token i64 | what the exact codec makes of it: there are infinities or NaN, or
                it would come out too large
    PLAIN     : itemsize of means u8 | steps f32 [2, layers] | means f16 or f32, of keys, of values | quantised
    FITTED    : scale f32 | quantised
    quantised = escapes u32 | their places u64 | their levels f32 | symbols (``compact_symbols``)

Rows of symbols are channels: [layers, Hkv, D] of the keys, then of the values, each row the T tokens. A level is a
number in steps, a symbol the whole one next to it; a level whose symbol would not fit in int8 is an escape.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from agentkv.codecs.compact_basis import Basis
from agentkv.codecs.compact_plain import Channels
from agentkv.codecs.compact_symbols import SymbolCoder
from agentkv.codecs.contract import CODECS, Codec, Fit, KVBlock, MissingFit
from agentkv.codecs.exact import Exact
from agentkv.codecs.turning import post_rope, pre_rope
from agentkv.codecs.words import block_dtype

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Compact"]

_VERSION = 1
_HEAD = struct.Struct("<BB")
_STORED, _PLAIN, _FITTED = 0, 1, 2
_POSITION = struct.Struct("<q")
_WIDTH = struct.Struct("<B")
_SCALE = struct.Struct("<f")
_COUNT = struct.Struct("<I")

_KEY_SHARE, _VALUE_SHARE = 0.25, 0.35
"""Steps as shares of a layer's rms around its means."""

_LARGEST = 127
_MANY = 64
"""With more than one escape in so many numbers the block is stored: an escape takes twelve bytes."""

_WORTH = 0.65
"""Above this share of the raw bytes the exact codec, which often makes 0.7, is asked for its size too."""

_ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
_SMALLEST = {"bfloat16": 2.0**-133, "float16": 2.0**-24, "float32": 2.0**-149, "float64": 2.0**-149}
_ARITHMETIC = 2.0**-18
"""What turns, sums and products in float32 lose, as a share of the norm of a head's numbers."""


class _Quantiser(Protocol):
    def levels(self, numbers: Tensor) -> Tensor: ...
    def numbers(self, levels: Tensor) -> Tensor: ...
    def reach(self, error: float) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """How a block will be quantised: ``head`` is the payload up to the escapes, sides are keys and values.

    ``numbers``: keys before RoPE and values, ``[layers, Hkv, T, D]`` float32.
    """

    head: bytes
    numbers: tuple[Tensor, Tensor]
    quantisers: tuple[_Quantiser, _Quantiser]


class Compact(Codec):
    """About 4x on bf16 KV, and 5x and more with a fit. ``step`` multiplies the steps: larger is smaller and worse."""

    name = "compact"
    exact = False

    def __init__(self, step: float = 1.0, basis: Basis | None = None) -> None:
        if not 1 / 16 <= step <= 16:
            raise ValueError(f"steps can be multiplied by 1/16 to 16, not by {step}")
        self.step = step
        self._basis = basis
        self._coder = SymbolCoder()
        self._exact = Exact()

    def bits_per_value(self, dtype: str) -> float:
        """By experience, whatever the dtype."""
        return 4.0 if self._basis is None else 3.0

    def parameters(self) -> Mapping[str, Any]:
        """The fit, where there is one. All else is in the payload."""
        return {} if self._basis is None else {"fit": self._basis.digest}

    def fitted(self, fit: Fit) -> Compact:
        """The same with the bases of ``fit``."""
        return Compact(self.step, Basis.of(fit))

    def encode(self, block: KVBlock) -> bytes:
        """Quantise, or store what does not lend itself. ``ValueError`` for a dtype that is not one of the four floats.

        A fitted codec treats layers that its fit does not have as one without a fit does.
        """
        plan = self._plan(block)
        payload = None if plan is None else self._quantised(plan)
        if payload is not None and len(payload) <= _WORTH * block.nbytes:
            return payload
        stored = _HEAD.pack(_VERSION, _STORED) + _POSITION.pack(block.position) + self._exact.encode(block)
        return stored if payload is None or len(stored) <= len(payload) else payload

    def decode(self, payload: bytes | memoryview, out: KVBlock, parameters: Mapping[str, Any]) -> None:
        """Fill ``out``; keys of a stored block are turned on where they are wanted at another position.

        ``MissingFit`` where the payload was made with a fit that this codec does not have. Memory beyond the payload
        is about seven bytes a number of ``out``.
        """
        block_dtype(out)
        source = _Source(memoryview(payload).cast("B"))
        version, mode = source.take(_HEAD)
        if version != _VERSION:
            raise ValueError(f"a compact payload of version {version}; {_VERSION} is known")
        if mode == _STORED:
            self._restore(source, out)
            return
        if mode == _PLAIN:
            quantisers = _plain_from(source, out)
        elif mode == _FITTED:
            quantisers = self._fitted_from(source, out, parameters)
        else:
            raise ValueError(f"a compact payload of mode {mode}; 0 to 2 are known")
        shapes = [(len(side), side[0].shape[0], side[0].shape[2], out.tokens) for side in (out.keys, out.values)]
        keys, values = self._levels_from(source, shapes)
        post_rope(quantisers[0].numbers(keys), out)
        for numbers, into in zip(quantisers[1].numbers(values), out.values, strict=True):
            into.copy_(numbers)

    def bound(self, block: KVBlock) -> KVBlock:
        """Half a step, as it spreads over a head through basis and turns; rounding; nothing where it is stored."""
        import torch

        plan = self._plan(block)
        if plan is None or self._quantised(plan) is None:
            return super().bound(block)
        name = block_dtype(block)
        found = []
        for numbers, quantiser in zip(plan.numbers, plan.quantisers, strict=True):
            reach = quantiser.reach(0.5).expand(numbers.shape)
            norm = torch.linalg.vector_norm(numbers.double(), dim=3, keepdim=True)
            found.append(reach + _ARITHMETIC * (norm + torch.linalg.vector_norm(reach, dim=3, keepdim=True)))
        found[0] = _turned(found[0], block)
        sides = []
        for tensors, reach in zip((block.keys, block.values), found, strict=True):
            grown = [t.double().abs() + r for t, r in zip(tensors, reach, strict=True)]
            sides.append(tuple(r + _ROUNDING[name] * g + _SMALLEST[name] for r, g in zip(reach, grown, strict=True)))
        return replace(block, keys=sides[0], values=sides[1])

    # -- encoding -----------------------------------------------------------------------------------------------------

    def _plan(self, block: KVBlock) -> _Plan | None:
        """``None`` where the block holds what is not finite in float32, or might not be once it has come back."""
        import torch

        if block_dtype(block) not in _ROUNDING:
            raise ValueError(f"compact encodes {', '.join(_ROUNDING)}, not {block_dtype(block)}")
        numbers = pre_rope(block), torch.stack([v.to(torch.float32) for v in block.values])
        largest = min(torch.finfo(block.keys[0].dtype).max, torch.finfo(torch.float32).max) / 8
        for side in numbers:
            low, high = side.aminmax()
            if not (-largest < low and high < largest):  # NaN too
                return None
        shapes = [(t[0].shape[0], t[0].shape[2]) for t in (block.keys, block.values)]
        if self._basis is not None and self._basis.covers(block.layers, *shapes):
            scale = _SCALE.pack(self.step)
            heads = self._basis.heads(block.layers, _SCALE.unpack(scale)[0])
            if any(bool(side.reach(0.5).max() > largest) for side in heads):
                return None
            return _Plan(_HEAD.pack(_VERSION, _FITTED) + scale, numbers, heads)
        channels = Channels.of(numbers[0], _KEY_SHARE * self.step), Channels.of(numbers[1], _VALUE_SHARE * self.step)
        if not (channels[0].finite and channels[1].finite):
            return None
        half = all(side.half for side in channels)
        steps = np.stack([side.step.cpu().numpy().reshape(-1) for side in channels])
        means = [side.mean.cpu().numpy().astype("<f2" if half else "<f4") for side in channels]
        head = [_HEAD.pack(_VERSION, _PLAIN), _WIDTH.pack(2 if half else 4), steps.astype("<f4").tobytes()]
        return _Plan(b"".join([*head, *(mean.tobytes() for mean in means)]), numbers, channels)

    def _quantised(self, plan: _Plan) -> bytes | None:
        """The payload; ``None`` with too many escapes."""
        import torch

        rows, places, levels = [], [], []
        before = 0
        for numbers, quantiser in zip(plan.numbers, plan.quantisers, strict=True):
            exact = quantiser.levels(numbers)
            symbols = exact.round()
            low, high = symbols.aminmax()
            if low < -_LARGEST or high > _LARGEST:
                far = (symbols.abs() > _LARGEST).flatten().nonzero()[:, 0]
                places.append(far.cpu().numpy().astype("<u8") + before)
                levels.append(exact.flatten()[far].cpu().numpy().astype("<f4"))
                symbols = symbols.clamp_(-_LARGEST, _LARGEST)
            before += symbols.numel()
            rows.append(symbols.to(torch.int8).contiguous().cpu().numpy().reshape(-1, symbols.shape[3]))
        escapes = sum(map(len, places))
        if escapes * _MANY > before:
            return None
        lists = [array.tobytes() for array in (*places, *levels)]
        return b"".join([plan.head, _COUNT.pack(escapes), *lists, self._coder.pack(np.concatenate(rows))])

    # -- decoding -----------------------------------------------------------------------------------------------------

    def _restore(self, source: _Source, out: KVBlock) -> None:
        """A stored block: bits where keys are wanted where they came from, else turned on in float32."""
        (position,) = source.take(_POSITION)
        self._exact.decode(source.rest(), out, {})
        if position != out.position and any(r is not None and r.frequencies for r in out.rotations):
            post_rope(pre_rope(replace(out, position=position)), out)

    def _fitted_from(
        self, source: _Source, out: KVBlock, parameters: Mapping[str, Any]
    ) -> tuple[_Quantiser, _Quantiser]:
        (scale,) = source.take(_SCALE)
        if self._basis is None or parameters.get("fit", self._basis.digest) != self._basis.digest:
            raise MissingFit(f"it was encoded by 'compact' with fit {parameters.get('fit')}, which is not here")
        shapes = [(t[0].shape[0], t[0].shape[2]) for t in (out.keys, out.values)]
        if not self._basis.covers(out.layers, *shapes) or not 0 < scale < math.inf:
            raise ValueError(f"fit {self._basis.digest} has no heads {shapes} for layers {out.layers} at scale {scale}")
        return self._basis.heads(out.layers, scale)

    def _levels_from(self, source: _Source, shapes: Sequence[tuple[int, int, int, int]]) -> list[Tensor]:
        """Keys and values in steps, ``[layers, Hkv, D, T]`` float32 for each of ``shapes``, escapes in their places."""
        import torch

        sizes = [math.prod(shape) for shape in shapes]
        tokens = shapes[0][3]
        (escapes,) = source.take(_COUNT)
        if escapes * _MANY > sum(sizes):
            raise ValueError(f"{escapes} escapes among {sum(sizes)} numbers")
        places, levels = source.array("<u8", escapes), source.array("<f4", escapes)
        if escapes and int(places.max()) >= sum(sizes):
            raise ValueError(f"an escape at {int(places.max())} of {sum(sizes)} numbers")
        rows = self._coder.unpack(source.rest(), sum(sizes) // tokens, tokens).reshape(-1)
        sides, before = [], 0
        for shape, size in zip(shapes, sizes, strict=True):
            side = torch.from_numpy(rows[before : before + size].astype(np.float32))
            here = (places >= before) & (places < before + size)
            side.numpy()[places[here] - before] = levels[here]
            sides.append(side.view(shape))
            before += size
        return sides


class _Source:
    """A payload, read from front to back. ``ValueError`` where it ends too early."""

    def __init__(self, payload: memoryview) -> None:
        self._left = payload

    def _bytes(self, count: int) -> memoryview:
        if count > len(self._left):
            raise ValueError(f"a compact payload ends {count - len(self._left)} bytes too early")
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    def take(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self._bytes(form.size))

    def array(self, dtype: str, count: int) -> np.ndarray[Any, np.dtype[Any]]:
        return np.frombuffer(self._bytes(count * np.dtype(dtype).itemsize), dtype=dtype)

    def rest(self) -> memoryview:
        return self._left


def _plain_from(source: _Source, out: KVBlock) -> tuple[_Quantiser, _Quantiser]:
    import torch

    (width,) = source.take(_WIDTH)
    if width not in (2, 4):
        raise ValueError(f"means of {width} bytes; 2 and 4 are known")
    steps = source.array("<f4", 2 * len(out.keys)).astype(np.float32).reshape(2, -1, 1, 1, 1)
    sides = []
    for tensors, step in zip((out.keys, out.values), steps, strict=True):
        shape = (len(tensors), tensors[0].shape[0], 1, tensors[0].shape[2])
        mean = source.array(f"<f{width}", math.prod(shape)).astype(np.float32).reshape(shape)
        if not (np.isfinite(mean).all() and np.isfinite(step).all() and (step > 0).all()):
            raise ValueError("a compact payload whose means or steps are not finite numbers")
        sides.append(Channels(torch.from_numpy(mean), torch.from_numpy(step)))
    return sides[0], sides[1]


def _turned(reach: Tensor, block: KVBlock) -> Tensor:
    """``reach [layers, Hkv, T, D]`` of keys before RoPE, as it is behind it: each of a pair gets their norm."""
    reach = reach.clone()
    for layer, rotation in zip(reach, block.rotations, strict=bool(block.rotations)):
        if rotation is not None:
            n = len(rotation.frequencies)
            first, second = (
                (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if rotation.interleaved else (slice(n), slice(n, 2 * n))
            )
            both = (layer[..., first].square() + layer[..., second].square()).sqrt()
            layer[..., first], layer[..., second] = both, both
    return reach


CODECS.register("compact")(Compact())
