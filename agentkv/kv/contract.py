"""What a layout of live KV is. One layout serves one model on one device; it opens one ``SequenceKV`` a session.

A step goes through it like this, once for all sessions of the batch::

    rows of the packed batch   [ s0 s0 s0 s0 | s1 | s2 | s3 s3 ]      (a prefill piece, two decodes, a prefill piece)
                                 slot 0        1    2    slot 3

    for slot in slots: slot.kv.reserve(slot.tokens)       # capacity, may move old keys
    meta = layout.plan(slots)                              # static for the step: masks, offsets
    for layer in model:  layout.write(layer, k, v, meta)   # one scatter
                         layout.attend(layer, q, meta, …)  # one call
    for slot in slots: slot.kv.advance(ids)                # the tokens are now part of the state
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from agentkv.codecs import KVBlock
from agentkv.registry import Registry
from agentkv.types import KVGeometry, Span

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["LAYOUTS", "AttentionTraits", "Capture", "CapturedPart", "Layout", "SequenceKV", "Slot", "Undo"]


@dataclass(frozen=True, slots=True)
class AttentionTraits:
    """What a layer's attention call asks for beside plain softmax attention.

    ``scaling`` multiplies the scores; ``softcap`` bounds them (``softcap·tanh(score/softcap)``); ``sinks`` are the
    learned per-head logits ``[Hq]`` that join the softmax's denominator (gpt-oss).
    """

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class CapturedPart:
    """KV of one layer group over ``span``, on the CPU, safe to read while the session goes on."""

    group: int
    span: Span
    block: KVBlock


@dataclass(frozen=True, slots=True)
class Capture:
    """KV of ``span`` as it was when captured.

    Full groups cover the whole span. Sliding groups cover what of ``span`` overlaps the window before each of
    ``resume_points``; a group may thus have several parts, or none.
    """

    span: Span
    ids: tuple[int, ...]
    parts: tuple[CapturedPart, ...]
    resume_points: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Undo:
    """What it takes to go back to ``length`` tokens: snapshots of the groups that forget (sliding windows)."""

    length: int
    windows: tuple[CapturedPart, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the snapshots hold."""
        return sum(part.block.nbytes for part in self.windows)


class SequenceKV(ABC):
    """One session's live KV: token ids, positions and tensors, which change together and only here.

    Used by one thread at a time: the model thread while a turn runs, its session's owner otherwise.
    """

    geometry: KVGeometry

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens held: ledger positions ``[0, length)``."""

    @property
    @abstractmethod
    def ids(self) -> Sequence[int]:
        """The ids of those tokens. Valid until the next mutation."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of device memory reserved: capacity, not length."""

    @abstractmethod
    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` more. Mutates capacity only."""

    @abstractmethod
    def advance(self, ids: Sequence[int]) -> None:
        """The tokens that the last step wrote are now part of the state."""

    @abstractmethod
    def undo_record(self) -> Undo:
        """Copies what a later ``rollback`` needs. Does not mutate."""

    @abstractmethod
    def rollback(self, undo: Undo) -> None:
        """Back to the state at ``undo_record``, whatever was written since."""

    @abstractmethod
    def capture(self, span: Span, resume_points: Sequence[int]) -> Capture:
        """KV of ``span`` for storing. Windows must still be held at each of ``resume_points``; may be called at the
        moment a resume point is reached only. Full groups may be views that stay valid under append and rollback."""

    @abstractmethod
    def window_snapshot(self) -> tuple[CapturedPart, ...]:
        """Copies of the sliding groups' keys within the window before ``length`` (CPU). Empty without such groups."""

    @abstractmethod
    def place(self, length: int, room: int = 0) -> None:
        """Prepare this empty state to be restored to ``length`` tokens, with room for ``room`` more."""

    @abstractmethod
    def target(self, group: int, span: Span) -> KVBlock:
        """The tensors that KV of ``span`` is restored into, after ``place``; ``restored`` makes them part of the state.

        Distinct spans may be written from several threads at once.
        """

    @abstractmethod
    def restored(self, ids: Sequence[int]) -> None:
        """The state now holds exactly ``ids``, whose KV was written through ``target``."""

    @abstractmethod
    def fork(self) -> SequenceKV:
        """An independent state with the same content; bytes are copied when one side writes."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. Later use raises ``Closed``."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when ids, positions and tensors disagree. For tests and doubt, not per token."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One session's rows ``[start, stop)`` in the packed batch of a step."""

    kv: SequenceKV
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """Rows, that is new tokens, of this session."""
        return self.stop - self.start


Meta = TypeVar("Meta")


class Layout(ABC, Generic[Meta]):
    """How live KV is stored and attended, for one model on one device."""

    name: str

    def __init__(self, geometry: KVGeometry, device: torch.device) -> None:
        self.geometry = geometry
        self.device = device

    @abstractmethod
    def open(self, tokens: int = 0) -> SequenceKV:
        """An empty state with room for ``tokens``."""

    @abstractmethod
    def bytes_needed(self, kv: SequenceKV | None, tokens: int) -> int:
        """Bytes that ``kv`` (or a new state) will have reserved once it holds ``tokens`` tokens."""

    @abstractmethod
    def plan(self, slots: Sequence[Slot]) -> Meta:
        """Everything about a step that is the same in every layer. Valid for that step only."""

    @abstractmethod
    def write(self, layer: int, keys: Tensor, values: Tensor, meta: Meta) -> None:
        """Store the step's new ``keys [Hkv, T, Dk]`` and ``values [Hkv, T, Dv]`` behind each session's tokens."""

    @abstractmethod
    def attend(self, layer: int, queries: Tensor, meta: Meta, traits: AttentionTraits) -> Tensor:
        """Attention of ``queries [Hq, T, Dk]``, each over its own session: ``[T, Hq, Dv]``."""


LAYOUTS: Registry[type[Layout[Any]]] = Registry("layouts")
