"""What a codec is: one layer group's tensors over one span, to bytes and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agentkv.registry import Registry
from agentkv.types import KVGeometry

if TYPE_CHECKING:
    from torch import Tensor

    from agentkv.rope import Rotation

__all__ = ["CODECS", "Codec", "Fit", "KVBlock", "MissingFit"]


@dataclass(frozen=True, slots=True, eq=False)
class KVBlock:
    """KV of one layer group over ``T`` consecutive tokens at consecutive positions.

    ``keys``: one tensor a layer, ``[Hkv, T, Dk]``, post-RoPE, any floating dtype; ``values``: ``[Hkv, T, Dv]``.
    The tensors may be strided views of live buffers (last dimension contiguous): a codec never keeps them.

    Lossy codecs also need to know whose tensors these are: ``layers``, the model's layer indices; ``rotations``, how
    each layer's keys turn with their position (``None`` or an empty tuple: not at all); ``position`` of the first
    token. In ``decode`` these say where the keys are wanted, which may be another position than they came from.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    layers: tuple[int, ...] = ()
    rotations: tuple[Rotation | None, ...] = ()
    position: int = 0

    @property
    def tokens(self) -> int:
        """``T``."""
        return int(self.keys[0].shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers as they are, views counted at their own size."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def of(self, geometry: KVGeometry, group: int, position: int) -> KVBlock:
        """The same tensors, known to be layer group ``group`` of a model, from ``position`` on."""
        of = geometry.groups[group]
        layers = of.layers
        turn = geometry.rotations and not of.states
        rotations = tuple(geometry.rotations[layer] for layer in layers) if turn else ()
        return replace(self, layers=layers, rotations=rotations, position=position)

    def cut(self, start: int, stop: int) -> KVBlock:
        """Views of tokens ``[start, stop)`` of the ``T``."""
        return replace(
            self,
            keys=tuple(t[:, start:stop] for t in self.keys),
            values=tuple(t[:, start:stop] for t in self.values),
            position=self.position + start,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """What calibration found out about one model for one codec: kept beside the model, named in chunk headers.

    ``digest`` of its content; ``tensors`` and JSON ``facts`` mean what the codec says they mean.
    """

    codec: str
    digest: str
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


class MissingFit(ValueError):
    """A payload needs a ``Fit`` that is not here: it is intact, and readable where that fit is."""


class Codec(ABC):
    """Tensors to bytes and back. Stateless and thread-safe: one instance serves every thread."""

    name: str
    exact: bool
    """Whether decode(encode(x)) has the bits of x."""

    def bits_per_value(self, dtype: str) -> float:
        """About how many bits a number of ``dtype`` takes: to plan with. What a model's KV takes is measured."""
        return {"bfloat16": 16.0, "float16": 16.0, "float32": 32.0, "float64": 64.0}[dtype]

    def parameters(self) -> Mapping[str, Any]:
        """JSON-serialisable parameters for the chunk header; ``decode`` gets them back."""
        return {}

    def fitted(self, fit: Fit) -> Codec:
        """This codec for the model that ``fit`` belongs to; itself where it needs none. Its ``parameters`` name the
        fit's digest as ``fit``. ``ValueError`` where the fit is of another codec or does not hold together."""
        return self

    def bound(self, block: KVBlock) -> KVBlock:
        """How far each number of ``block`` may come back from what it was: float64 tensors of its shapes.

        Zero for exact codecs, whose NaN come back too. Public conformance checks hold a codec to it.
        """
        import torch

        def zeros(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(torch.zeros(t.shape, dtype=torch.float64) for t in tensors)

        return replace(block, keys=zeros(block.keys), values=zeros(block.values))

    @abstractmethod
    def encode(self, block: KVBlock) -> bytes:
        """Encode ``block``. The result describes shapes only as far as ``decode`` does not get them from ``out``.

        The same input gives the same bytes. What a lossy codec cannot keep within its bound (infinities, NaN) it
        stores losslessly. ``ValueError`` for a dtype it does not take.
        """

    @abstractmethod
    def decode(self, payload: bytes | memoryview, out: KVBlock, parameters: Mapping[str, Any]) -> None:
        """Fill the tensors of ``out`` (right shapes and dtype, possibly strided views of live buffers).

        Raises ``ValueError`` when the payload cannot have come from ``encode`` of a block of this shape, or when an
        exact codec's keys are wanted at another position; ``out`` may then be half-filled, so callers decode to the
        side. Memory stays in proportion to ``out`` whatever the payload claims.
        """


CODECS: Registry[Codec] = Registry("codecs", "codec", others=("auto",))
