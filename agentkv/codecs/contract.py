"""What a codec is: one layer group's tensors over one span, to bytes and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentkv.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CODECS", "Codec", "KVBlock"]


@dataclass(frozen=True, slots=True, eq=False)
class KVBlock:
    """KV of one layer group over ``T`` consecutive tokens.

    ``keys``: one tensor a layer, ``[Hkv, T, Dk]``, post-RoPE, any floating dtype; ``values``: ``[Hkv, T, Dv]``.
    The tensors may be strided views of live buffers (last dimension contiguous): a codec never keeps them.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def tokens(self) -> int:
        """``T``."""
        return int(self.keys[0].shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers as they are, views counted at their own size."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


class Codec(ABC):
    """Tensors to bytes and back. Stateless and thread-safe: one instance serves every thread."""

    name: str
    exact: bool
    """Whether decode(encode(x)) has the bits of x."""

    def parameters(self) -> Mapping[str, Any]:
        """JSON-serialisable parameters for the chunk header; ``decode`` gets them back."""
        return {}

    @abstractmethod
    def encode(self, block: KVBlock) -> bytes:
        """Encode CPU tensors. The result describes shapes only as far as ``decode`` does not get them from ``out``."""

    @abstractmethod
    def decode(self, payload: bytes | memoryview, out: KVBlock, parameters: Mapping[str, Any]) -> None:
        """Fill the CPU tensors of ``out`` (right shapes and dtype, possibly strided views of live buffers).

        Raises ``ValueError`` when the payload cannot have come from ``encode`` of a block of this shape; ``out`` may
        then be half-filled, so callers decode to the side.
        """


CODECS: Registry[Codec] = Registry("codecs")
