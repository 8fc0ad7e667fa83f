"""The ``compact`` codec: a uniform quantiser and an entropy coder. Four bits a number, and half of that with a fit.

Keys before RoPE and values, less their mean by head and channel, in steps that are a share of each layer's spread; the
symbols through zstd. Huffman codes make the fine steps that a channel hardly needs nearly free, which is why a uniform
step without clipping beats codes of fixed width (uniform steps are optimal at high rate: Gish and Pierce, 1968).
A ``Fit`` brings means and a basis in which one step serves all components (``compact_basis``).

    payload   = version u8 | mode u8 | body
    STORED    : position of the first token i64 | what the exact codec makes of it: there are infinities or NaN, or it
                would come out too large
    PLAIN     : itemsize of means u8 | steps f32 [2, layers] | means f16 or f32, of keys, of values | quantised
    FITTED    : scale f32 | quantised
    quantised = escapes u32 | their places u64 | their excess f32 | symbols (``compact_symbols``)

A level is a number in steps, a symbol the whole one next to it. Rows of symbols are a layer's channels or components,
layer after layer, each row the T tokens. Where a symbol would not fit in int8 there is an escape: its place in
[rows, T], and the level's excess.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from agentkv.codecs.compact_basis import Basis
from agentkv.codecs.compact_escapes import Escapes, symbols_of
from agentkv.codecs.compact_plain import Channels, Plain
from agentkv.codecs.compact_symbols import Filled, SymbolCoder
from agentkv.codecs.contract import CODECS, Codec, Fit, KVBlock, MissingFit
from agentkv.codecs.exact import Exact
from agentkv.codecs.turning import pre_rope, slabs, turn_on, turn_slab
from agentkv.codecs.words import block_dtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Compact"]

_VERSION = 1
_HEAD = struct.Struct("<BB")
_STORED, _PLAIN, _FITTED = 0, 1, 2
_POSITION = struct.Struct("<q")
_WIDTH = struct.Struct("<B")
_SCALE = struct.Struct("<f")
_COUNT = struct.Struct("<I")

_MANY = 256
"""With more than one escape in so many numbers a block is not quantised this way: an escape takes twelve bytes."""

_WORTH = 0.65
"""Above this share of the raw bytes the exact codec, which often makes 0.7, is asked for its size too."""

_ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
_SMALLEST = {"bfloat16": 2.0**-133, "float16": 2.0**-24, "float32": 2.0**-149, "float64": 2.0**-149}
_ARITHMETIC, _PRODUCT = 2.0**-18, 2.0**-8
"""What turns and sums in float32, and products in bfloat16, may lose as a share of the norm of a head's numbers."""


class _Quantiser(Protocol):
    """A layer's keys before RoPE and values ``[Hkv, T, D]`` float32 to levels ``[rows, T]`` float32, and back from
    ``symbols [layers, rows, T]`` int8 of some layers to ``[layers, Hkv, T, D]``. ``filled [layers, rows]``: which rows
    are not all zeros.

    Some layers at a time: what they need stays in the core's cache, which is twice as fast as all at once.
    """

    @property
    def rows(self) -> int: ...
    def levels(self, layer: int, keys: Tensor, values: Tensor) -> Tensor: ...
    def numbers(
        self, layers: slice, symbols: Tensor, filled: Filled, escapes: Escapes | None
    ) -> tuple[Tensor, Tensor]: ...
    def spread(self, error: float) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """A block quantised. ``head``: the payload up to the escapes; ``symbols [layers, rows, T]``; escapes by layer."""

    head: bytes
    quantiser: _Quantiser
    symbols: Tensor
    escapes: Mapping[int, Escapes]


class Compact(Codec):
    """About 4x on bf16 KV, and 6x and more with a fit. ``step`` multiplies the steps: larger is smaller and worse."""

    name = "compact"
    exact = False

    def __init__(self, step: float = 1.0, basis: Basis | None = None) -> None:
        if not 1 / 16 <= step <= 16:
            raise ValueError(f"steps can be multiplied by 1/16 to 16, not by {step}")
        self.step = float(np.float32(step))
        self._basis = basis
        self._coder = SymbolCoder()
        self._exact = Exact()

    def bits_per_value(self, dtype: str) -> float:
        """By experience, whatever the dtype."""
        return 4.0 if self._basis is None else 2.7

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
        payload = self._quantised(block)
        if payload is not None and len(payload) <= _WORTH * block.nbytes:
            return payload
        stored = _HEAD.pack(_VERSION, _STORED) + _POSITION.pack(block.position) + self._exact.encode(_on_cpu(block))
        return stored if payload is None or len(stored) <= len(payload) else payload

    def decode(self, payload: bytes | memoryview, out: KVBlock, parameters: Mapping[str, Any]) -> None:
        """Fill ``out``; keys of a stored block are turned on where they are wanted at another position.

        ``MissingFit`` where the payload was made with a fit that this codec does not have. Memory beyond the payload
        is about twelve bytes a number of ``out``.
        """
        import torch

        block_dtype(out)
        source = _Source(memoryview(payload).cast("B"))
        with torch.inference_mode():
            self._decode(source, out, parameters)

    def _decode(self, source: _Source, out: KVBlock, parameters: Mapping[str, Any]) -> None:
        import torch

        version, mode = source.take(_HEAD)
        if version != _VERSION:
            raise ValueError(f"a compact payload of version {version}; {_VERSION} is known")
        if mode == _STORED:
            self._restore(source, out)
            return
        if mode == _PLAIN:
            quantiser: _Quantiser = _plain_from(source, out)
        elif mode == _FITTED:
            quantiser = self._fitted_from(source, out, parameters)
        else:
            raise ValueError(f"a compact payload of mode {mode}; 0 to 2 are known")
        escapes, symbols, filled = self._symbols_from(source, quantiser.rows, out)
        for layers in slabs(out):
            keys, values = quantiser.numbers(layers, symbols[layers], filled[layers], escapes.of(layers))
            turn_slab(keys, layers, out, 1)
            torch._foreach_copy_([*out.keys[layers], *out.values[layers]], [*keys.unbind(), *values.unbind()])

    def bound(self, block: KVBlock) -> KVBlock:
        """Half a step, as it spreads over heads through basis and turns; rounding; nothing where it is stored."""
        import torch

        plan = None if self.encode(block)[1] == _STORED else self._plan(block)
        if plan is None:
            return super().bound(block)
        name, lost = block_dtype(block), _PRODUCT if plan.head[1] == _FITTED else _ARITHMETIC
        sides = []
        for tensors, reach in zip((block.keys, block.values), plan.quantiser.spread(0.5), strict=True):
            numbers = torch.stack([t.double() for t in tensors])
            norm = torch.linalg.vector_norm(numbers, dim=3, keepdim=True)
            reach = reach + lost * (norm + torch.linalg.vector_norm(reach, dim=3, keepdim=True))
            reach = _turned(reach, block) if tensors is block.keys else reach
            sides.append(tuple((reach + _ROUNDING[name] * (numbers.abs() + reach) + _SMALLEST[name]).unbind()))
        return replace(block, keys=sides[0], values=sides[1])

    # -- encoding -----------------------------------------------------------------------------------------------------

    def _plan(self, block: KVBlock) -> _Plan | None:
        """``None`` where the block holds what is not finite in float32, or might not be once it has come back."""
        import torch

        if block_dtype(block) not in _ROUNDING:
            raise ValueError(f"compact encodes {', '.join(_ROUNDING)}, not {block_dtype(block)}")
        keys, values = pre_rope(block), torch.stack([v.to(torch.float32) for v in block.values])
        limit = min(torch.finfo(block.keys[0].dtype).max, torch.finfo(torch.float32).max) / 8
        for side in (keys, values):
            low, high = side.aminmax()
            if not (-limit < low and high < limit):  # NaN too
                return None
        if self._basis is not None and self._basis.covers(block):
            bundles = self._basis.bundles(block, self.step)
            plan = _planned(_HEAD.pack(_VERSION, _FITTED) + _SCALE.pack(self.step), bundles, keys, values, limit)
            if plan is not None:
                return plan
        plain = Plain.of(keys, values, self.step)
        sides = plain.keys, plain.values
        if not all(side.finite for side in sides):
            return None
        width = 2 if all(side.half for side in sides) else 4
        parts = [side.step.cpu().numpy().astype("<f4") for side in sides]
        parts += [side.mean.cpu().numpy().astype(f"<f{width}") for side in sides]
        head = [_HEAD.pack(_VERSION, _PLAIN), _WIDTH.pack(width), *(part.tobytes() for part in parts)]
        return _planned(b"".join(head), plain, keys, values, limit)

    def _quantised(self, block: KVBlock) -> bytes | None:
        plan = self._plan(block)
        if plan is None:
            return None
        layers, rows, tokens = plan.symbols.shape
        places, excess = [], []
        for layer, escapes in plan.escapes.items():
            places.append((((layer * rows + escapes.rows) * tokens) + escapes.tokens).cpu().numpy().astype("<u8"))
            excess.append(escapes.excess.cpu().numpy().astype("<f4"))
        count = _COUNT.pack(sum(map(len, places)))
        symbols = self._coder.pack(plan.symbols.view(layers * rows, tokens).cpu().numpy())
        return b"".join([plan.head, count, *(part.tobytes() for part in (*places, *excess)), symbols])

    # -- decoding -----------------------------------------------------------------------------------------------------

    def _restore(self, source: _Source, out: KVBlock) -> None:
        """A stored block: bits where keys are wanted where they came from, else turned on."""
        (position,) = source.take(_POSITION)
        found = _on_cpu(out)
        self._exact.decode(source.rest(), found, {})
        turn_on(found, position)
        for tensor, into in zip((*found.keys, *found.values), (*out.keys, *out.values), strict=True):
            if into is not tensor:
                into.copy_(tensor)

    def _fitted_from(self, source: _Source, out: KVBlock, parameters: Mapping[str, Any]) -> _Quantiser:
        (scale,) = source.take(_SCALE)
        if self._basis is None or parameters.get("fit", self._basis.digest) != self._basis.digest:
            raise MissingFit(f"it was encoded by 'compact' with fit {parameters.get('fit')}, which is not here")
        if not self._basis.covers(out) or not 0 < scale < math.inf:
            raise ValueError(f"fit {self._basis.digest} does not have the heads of layers {out.layers}, scale {scale}")
        return self._basis.bundles(out, scale)

    def _symbols_from(self, source: _Source, rows: int, out: KVBlock) -> tuple[_Listed, Tensor, Filled]:
        """The escapes; symbols ``[layers, rows, T]`` int8 on the device of ``out``; which rows ``[layers, rows]``
        are not all zeros."""
        import torch

        layers, tokens, device = len(out.keys), out.tokens, out.keys[0].device
        numbers = layers * rows * tokens
        (count,) = source.take(_COUNT)
        if count * _MANY > numbers:
            raise ValueError(f"{count} escapes among {numbers} numbers")
        places, excess = source.array("<u8", count), source.array("<f4", count)
        if count and (int(places.max()) >= numbers or not np.isfinite(excess).all()):
            raise ValueError(f"an escape at {int(places.max())} of {numbers} numbers, or one that is not finite")
        listed = _Listed(places.astype(np.int64), excess.astype(np.float32), rows, tokens, device)
        symbols, filled = self._coder.unpack(source.rest(), layers * rows, tokens)
        return listed, torch.from_numpy(symbols).view(layers, rows, tokens).to(device), filled.reshape(layers, rows)


@dataclass(frozen=True, slots=True, eq=False)
class _Listed:
    """A payload's escapes: ``places [E]`` in ``[layers, rows, tokens]``, int64, and ``excess [E]`` float32."""

    places: np.ndarray[Any, np.dtype[np.int64]]
    excess: np.ndarray[Any, np.dtype[np.float32]]
    rows: int
    tokens: int
    device: torch.device

    def of(self, layers: slice) -> Escapes | None:
        """Those of ``layers``, rows counted from the first of them."""
        import torch

        start, stop = (layer * self.rows * self.tokens for layer in (layers.start, layers.stop))
        here = (self.places >= start) & (self.places < stop)
        if not here.any():
            return None
        row, token = np.divmod(self.places[here] - start, self.tokens)
        row, token, excess = (torch.from_numpy(part).to(self.device) for part in (row, token, self.excess[here]))
        return Escapes(row, token, excess)


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


def _planned(head: bytes, quantiser: _Quantiser, keys: Tensor, values: Tensor, limit: float) -> _Plan | None:
    """``None`` where the error could leave the dtype's range, whose eighth is ``limit``, or escapes are too many."""
    import torch

    if any(not float(side.max()) <= limit for side in quantiser.spread(0.5)):
        return None
    layers, tokens = len(keys), keys.shape[2]
    symbols = torch.empty((layers, quantiser.rows, tokens), dtype=torch.int8, device=keys.device)
    found: dict[int, Escapes] = {}
    for layer in range(layers):
        try:
            escapes = symbols_of(quantiser.levels(layer, keys[layer], values[layer]), symbols[layer])
        except ValueError:
            return None
        if escapes is not None:
            found[layer] = escapes
    if sum(len(escapes.rows) for escapes in found.values()) * _MANY > symbols.numel():
        return None
    return _Plan(head, quantiser, symbols, found)


def _plain_from(source: _Source, out: KVBlock) -> Plain:
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
        sides.append(Channels(*(torch.from_numpy(part).to(out.keys[0].device) for part in (mean, step))))
    return Plain(*sides)


def _on_cpu(block: KVBlock) -> KVBlock:
    return replace(block, keys=tuple(k.cpu() for k in block.keys), values=tuple(v.cpu() for v in block.values))


def _turned(reach: Tensor, block: KVBlock) -> Tensor:
    """``reach [layers, Hkv, T, D]`` of keys before RoPE, as it is behind it: each of a pair gets their norm."""
    for layer, rotation in zip(reach, block.rotations, strict=bool(block.rotations)):
        if rotation is not None:
            n, both = len(rotation.frequencies), rotation.interleaved
            first, second = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if both else (slice(n), slice(n, 2 * n))
            norm = (layer[..., first].square() + layer[..., second].square()).sqrt()
            layer[..., first], layer[..., second] = norm, norm
    return reach


CODECS.register("compact")(Compact())
