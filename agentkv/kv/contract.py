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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from agentkv.codecs import KVBlock
from agentkv.registry import Registry
from agentkv.types import KVGeometry, Placement, Span

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["LAYOUTS", "AttentionTraits", "CapturedPart", "Evictions", "Layout", "SequenceKV", "Slot", "Undo"]


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
    """KV of one layer group over ``span``, on the CPU, safe to read while the session goes on.

    Keys are as they were computed, at consecutive positions: never a copy that was moved to another position.
    """

    group: int
    span: Span
    block: KVBlock


@dataclass(slots=True)
class Undo:
    """What it takes to go back to ``placement``.

    ``windows``: copies of the sliding windows, where the layout overwrites them. ``evicted``: what was evicted since,
    in host memory; it grows while the record is a state's open one.
    """

    placement: Placement
    windows: tuple[CapturedPart, ...]
    evicted: list[CapturedPart] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Ledger tokens at that time."""
        return self.placement.length

    @property
    def nbytes(self) -> int:
        """Bytes that it holds on the device."""
        return sum(part.block.nbytes for part in self.windows)


@dataclass(frozen=True, slots=True)
class Evictions:
    """What the evictions of a turn may take beside the tokens that are held at its end.

    ``new``: tokens that a state takes in the turn, evicted ones included, restored ones where it is new: until the turn
    can be taken back no more, they may be held beside the old. ``turned``: so many of the first tokens may be turned on
    from their masters, and the masters stay. ``scattered``: what stays may lie in many pieces. ``rebases``: positions
    may count anew, which turns all that is held, sliding windows too.
    """

    new: int
    turned: int = 0
    scattered: bool = False
    rebases: bool = False


class SequenceKV(ABC):
    """One session's live KV: token ids, positions and tensors, which change together and only here.

    Used by one thread at a time: the model thread while a turn runs, its session's owner otherwise.
    """

    geometry: KVGeometry
    limit: int | None = None
    """Tokens that it will hold at most: it makes no room for more, as long as that suffices."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Ledger tokens gone through: ``[0, length)``, evicted ones included."""

    @property
    @abstractmethod
    def ids(self) -> Sequence[int]:
        """The ids of those tokens. Valid until the next mutation."""

    @property
    @abstractmethod
    def placement(self) -> Placement:
        """Which of them are held, and at which positions they were computed."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """How many of them are held."""

    @property
    @abstractmethod
    def next_position(self) -> int:
        """Position at which the next token is computed."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether its memory was given back: by ``close``, or since it could not be rolled back."""

    @property
    def lossy(self) -> tuple[Span, ...]:
        """What of it is held with loss: read back, it is not what was computed."""
        return ()

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of device memory reserved: capacity, not length; masters and what the open undo record has there."""

    @abstractmethod
    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` more. Mutates capacity only.

        Where an allocation fails, here or in ``keep``, ``rollback`` leads back to the open undo record or raises.
        """

    @abstractmethod
    def advance(self, ids: Sequence[int]) -> None:
        """The tokens that the last step wrote are now part of the state."""

    @abstractmethod
    def keep(self, spans: Sequence[Span]) -> None:
        """Evict what full-attention layers hold outside ``spans``, ledger positions in order, all of them held.

        What lies before a gap is attended from then on as if it lay directly before what follows: its keys are turned
        on from their masters, which stay as they were computed. Sliding layers keep their own window.
        """

    @abstractmethod
    def skip(self, ids: Sequence[int]) -> None:
        """The next ledger tokens are passed over: part of ``ids``, never held, without a position of their own."""

    @abstractmethod
    def crop(self, length: int) -> None:
        """Forget the tokens from ``length`` on. ``ValueError`` where the state at ``length`` cannot be had any more.

        Undo records from after ``length`` are void: a rollback to them gives what was never there.
        """

    @abstractmethod
    def undo_record(self) -> Undo:
        """Copies what a later ``rollback`` needs, and makes the record the state's open one, instead of any other."""

    @abstractmethod
    def rollback(self, undo: Undo) -> None:
        """Back to the state at ``undo_record``, whatever was written since. Evictions need the open record.

        ``undo``: of this state's own, not of the one it was forked from; later records are void. Raises where an
        allocation fails, or one has failed that left nothing to go back to: the state can then only be closed.
        """

    @abstractmethod
    def settle(self) -> None:
        """The open undo record is given up: evicted tokens are gone for good."""

    @abstractmethod
    def capture(self, span: Span) -> tuple[CapturedPart, ...]:
        """What full-attention groups hold of ``span``, for storing: a part for each run of consecutive positions.

        May be views, which stay valid whatever the state does later.
        """

    @abstractmethod
    def window_snapshot(self) -> tuple[CapturedPart, ...]:
        """Copies of what forgets by itself (CPU): sliding groups' keys within the window before ``length``, and what
        recurrent groups carry there. Empty without such groups."""

    @abstractmethod
    def visible(self, group: int) -> tuple[Span, ...]:
        """What of a layer group the next query sees or could: the kept spans, or the last window; cut into runs."""

    @abstractmethod
    def read(self, group: int, span: Span) -> KVBlock:
        """KV of ``span``, which lies in one run of ``visible``, as it was computed: views or copies, on the device."""

    @abstractmethod
    def place(self, placement: Placement, room: int = 0) -> None:
        """Prepare this empty state to be restored to ``placement``, with room for ``room`` more."""

    @abstractmethod
    def target(self, group: int, span: Span) -> KVBlock:
        """The tensors that KV of ``span`` is restored into, after ``place``; ``restored`` makes them part of the state.

        ``span`` lies within one of the placement's runs. Distinct spans may be written from several threads at once.
        """

    def filled(self, group: int, span: Span) -> None:  # noqa: B027
        """Whoever asked for the ``target`` of ``span`` has written all of it. May be called from any thread, once for
        each target, and need not be: a state that holds some tokens otherwise can see to them before ``restored``."""

    @abstractmethod
    def restored(self, ids: Sequence[int]) -> None:
        """The state now holds exactly ``ids``, whose KV was written through ``target``.

        Where nothing was ever evicted, ``ids`` may be fewer than were placed.
        """

    @abstractmethod
    def fork(self) -> SequenceKV:
        """An independent state with the same content and no open undo record; bytes are copied when one side writes."""

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
    rebase_at: int = 100_000
    """Once the next position is beyond this, the next eviction starts counting anew: models make angles in float32."""

    lossy: str = ""
    """Names how older tokens are held with loss; empty where all is held as it was computed."""

    reserves: bool = False
    """Whether a state takes the memory for all it will ever hold when it opens."""

    piece_tokens: int = 2048
    """Most new tokens of one session in one step; see ``expect_pieces``."""

    inner: Layout[Any] | None = None
    """The layout that this one is around, if it is around one."""

    carries: bool = False
    """Whether it holds what recurrent layers carry: ``layout_for`` puts such a one around any other."""

    def __init__(self, geometry: KVGeometry, device: torch.device) -> None:
        if geometry.recurrent and not self.carries:
            raise ValueError(f"layout {self.name!r} holds keys and values only: make it with kv.recurrent.layout_for")
        self.geometry = geometry
        self.device = device

    def grown(self, tokens: int) -> int:
        """Tokens that a state has room for once it has grown to hold so many; not fewer for more."""
        return tokens

    def expect_pieces(self, tokens: int) -> None:
        """Steps will have at most so many new tokens of one session."""
        self.piece_tokens = tokens
        if self.inner is not None:
            self.inner.expect_pieces(tokens)

    @abstractmethod
    def open(self, tokens: int = 0, limit: int | None = None) -> SequenceKV:
        """An empty state with room for ``tokens``, which will never hold more than ``limit``."""

    @abstractmethod
    def bytes_needed(
        self, kv: SequenceKV | None, tokens: int, limit: int | None = None, evictions: Evictions | None = None
    ) -> int:
        """Most bytes that ``kv`` (or a new state, opened for ``tokens``) will have reserved on its way to ``tokens``
        tokens, in a turn that can be taken back. Without ``evictions`` there are none. ``limit`` is that of a new
        state; ``kv`` has its own."""

    @abstractmethod
    def plan(self, slots: Sequence[Slot]) -> Meta:
        """Everything about a step that is the same in every layer. Valid for that step only."""

    @abstractmethod
    def write(self, layer: int, keys: Tensor, values: Tensor, meta: Meta) -> None:
        """Store the step's new ``keys [Hkv, T, Dk]`` and ``values [Hkv, T, Dv]`` behind each session's tokens."""

    @abstractmethod
    def attend(self, layer: int, queries: Tensor, meta: Meta, traits: AttentionTraits) -> Tensor:
        """Attention of ``queries [Hq, T, Dk]``, each over its own session: ``[T, Hq, Dv]``."""


LAYOUTS: Registry[type[Layout[Any]]] = Registry("layouts", "layout", others=("auto",))
