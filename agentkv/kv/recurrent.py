"""Recurrent layers in live KV: what they carry from token to token, beside another layout's keys and values.

A recurrent layer (linear attention, state space, short convolution) has no keys. It has a state of fixed size, which
each token overwrites: there is one, of all tokens so far, and no way back. So a state is a value here. A step makes a
new one, ``advance`` puts it in the old one's place, and undo records and forks hold the old one and copy nothing::

    step   before ──(the layers' copies)──▶ after        nothing has happened until …
    advance                                 state = after
    rollback                                state = the record's

For storing it is the one token of a window of one, see ``LayerGroup``. Sessions cannot share a row of such a model: the
layers go through a row as one sequence. A step is therefore one pass of the model for each session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from agentkv.codecs import KVBlock
from agentkv.errors import Unsupported
from agentkv.kv.contract import AttentionTraits, CapturedPart, Evictions, Layout, SequenceKV, Slot, Undo
from agentkv.kv.packed_states import PackedStates, packed
from agentkv.kv.placed import merged
from agentkv.kv.wrapped import WrappedKV
from agentkv.types import KVGeometry, Placement, Span

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Carried", "RecurrentKV", "RecurrentLayout", "RecurrentStep", "StateKey", "layout_for"]


class StateKey(NamedTuple):
    """One tensor of the state; ``kind`` and ``number`` as in ``StateShape``."""

    layer: int
    kind: str
    number: int


States = Mapping[StateKey, "Tensor"]
"""A session's whole state: tensors ``[1, *shape]``, never written to. Empty before the first token."""


class Carried:
    """A session's state in one step: ``before`` it, and what the layers have made of it so far."""

    def __init__(self, before: States) -> None:
        self.before = before
        self.after: dict[StateKey, Tensor] = {}

    def get(self, key: StateKey) -> Tensor | None:
        """The tensor as it is now; ``None`` before the first token. A copy, that the caller may overwrite: kernels of
        a single token update states in place."""
        if key not in self.after:
            if key not in self.before:
                return None
            self.after[key] = self.before[key].clone()
        return self.after[key]

    def put(self, key: StateKey, new: Tensor) -> Tensor:
        """``new [1, *shape]`` is the tensor from now on. Not kept where it is a part of a larger one."""
        if (old := self.before.get(key)) is not None:
            new = new.to(old.dtype)
        whole = new.is_contiguous() and new.untyped_storage().nbytes() == new.numel() * new.element_size()
        self.after[key] = new if whole else new.clone().contiguous()
        return self.after[key]

    @property
    def outcome(self) -> States:
        """The state after the step."""
        return {**self.before, **self.after}


@dataclass(slots=True)
class RecurrentStep:
    """One step. ``inner``: the inner layout's plan for the session whose pass it is."""

    slots: tuple[Slot, ...]
    inner: Any = None


class RecurrentUndo(Undo):
    """Holds the state of its time beside the inner layout's record."""

    __slots__ = ("inner", "state", "state_nbytes")

    def __init__(self, inner: Undo, state: States) -> None:
        super().__init__(inner.placement, inner.windows, inner.evicted)
        self.inner, self.state, self.state_nbytes = inner, state, _nbytes(state)

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes + self.state_nbytes


class RecurrentKV(WrappedKV):
    """A state of the inner layout and what the recurrent layers carry."""

    def __init__(self, layout: RecurrentLayout, inner: SequenceKV, state: States | None = None) -> None:
        super().__init__(layout.geometry, inner)
        self._layout = layout
        self._state: States = state or {}
        self._after: tuple[int, States] | None = None
        """What the last step made of it, and of how many tokens, until they are part of the state."""
        self._undo: RecurrentUndo | None = None
        self._restoring: dict[int, PackedStates] = {}

    @property
    def lossy(self) -> tuple[Span, ...]:
        return self.inner.lossy

    @property
    def nbytes(self) -> int:
        undo = self._undo.state if self._undo is not None else {}
        beside = sum(block.nbytes for block in self._restoring.values())
        beside += _nbytes(self._after[1]) if self._after is not None else 0
        return self.inner.nbytes + _nbytes(self._state) + (_nbytes(undo) if undo is not self._state else 0) + beside

    @property
    def state(self) -> States:
        """What the recurrent layers carry to the next token. Not to be written to."""
        return self._state

    def stepped(self, tokens: int, after: States) -> None:
        """A step has computed ``tokens`` more; ``advance`` makes ``after`` the state."""
        for index in self.geometry.recurrent:
            group = self.geometry.groups[index]
            for layer in group.layers:
                for kind, number, shape, dtype in group.states:
                    found = after.get(StateKey(layer, kind, number))
                    has = None if found is None else (tuple(found.shape[1:]), str(found.dtype).removeprefix("torch."))
                    if has != (shape, dtype):
                        raise RuntimeError(f"layer {layer} carries {kind} {number} as {has}, not as {(shape, dtype)}")
        self._after = tokens, after

    def advance(self, ids: Sequence[int]) -> None:
        if self._after is None or self._after[0] != len(ids):
            raise RuntimeError(f"no step has computed just these {len(ids)} tokens")
        self.inner.advance(ids)
        self._state, self._after = self._after[1], None

    # -- forgetting ---------------------------------------------------------------------------------------------------

    def keep(self, spans: Sequence[Span]) -> None:
        if merged(spans) != self.placement.kept:
            raise Unsupported("evicting from a model with recurrent layers", "their state holds all tokens for good")
        self.inner.keep(spans)

    def skip(self, ids: Sequence[int]) -> None:
        raise Unsupported("passing over tokens in a model with recurrent layers", "their state needs every one")

    def crop(self, length: int) -> None:
        if length not in (0, self.length):
            raise ValueError(
                f"cannot crop to {length}: of the recurrent layers there is the state at {self.length} only"
            )
        self.inner.crop(length)
        self._after = None
        if not length:
            self._state = {}

    def undo_record(self) -> Undo:
        self._undo = RecurrentUndo(self.inner.undo_record(), self._state)
        return self._undo

    def rollback(self, undo: Undo) -> None:
        assert isinstance(undo, RecurrentUndo)
        self.inner.rollback(undo.inner)
        self._state, self._after = undo.state, None

    def settle(self) -> None:
        self.inner.settle()
        self._undo = None

    # -- storing and restoring ----------------------------------------------------------------------------------------

    def window_snapshot(self) -> tuple[CapturedPart, ...]:
        from agentkv.kv.contiguous import to_cpu

        parts = [
            CapturedPart(index, span, to_cpu(self.read(index, span)))
            for index in self.geometry.recurrent
            for span in self.visible(index)
        ]
        return (*self.inner.window_snapshot(), *parts)

    def visible(self, group: int) -> tuple[Span, ...]:
        if not self.geometry.groups[group].states:
            return self.inner.visible(group)
        return (Span(self.length - 1, self.length),) if self.length else ()

    def read(self, group: int, span: Span) -> KVBlock:
        """Of a recurrent group, a copy."""
        of = self.geometry.groups[group]
        if not of.states:
            return self.inner.read(group, span)
        self._check_here(span)
        tensors = [self._state[StateKey(layer, s.kind, s.number)] for layer in of.layers for s in of.states]
        return packed(of, tensors, self._layout.dtype).block

    def place(self, placement: Placement, room: int = 0) -> None:
        self.inner.place(placement, room)
        if placement.length:
            groups = {index: self.geometry.groups[index] for index in self.geometry.recurrent}
            device, dtype = self._layout.device, self._layout.dtype
            self._restoring = {index: PackedStates(group, dtype, device) for index, group in groups.items()}

    def target(self, group: int, span: Span) -> KVBlock:
        if group not in self._restoring:
            return self.inner.target(group, span)
        self._check_here(span)
        return self._restoring[group].block

    def filled(self, group: int, span: Span) -> None:
        if group not in self._restoring:
            self.inner.filled(group, span)

    def restored(self, ids: Sequence[int]) -> None:
        if len(ids) not in (0, self.length):
            raise ValueError(f"{len(ids)} ids for a state at {self.length}: recurrent layers have no other")
        self.inner.restored(ids)
        state: dict[StateKey, Tensor] = {}
        for index, found in self._restoring.items() if len(ids) else ():
            group = self.geometry.groups[index]
            keys = [StateKey(layer, s.kind, s.number) for layer in group.layers for s in group.states]
            state.update(zip(keys, found.unpacked(), strict=True))
        self._state, self._restoring = state, {}

    def _check_here(self, span: Span) -> None:
        if span != Span(self.length - 1, self.length):
            raise ValueError(f"{span} is not held: of recurrent layers there is the state at {self.length} only")

    # -- life ---------------------------------------------------------------------------------------------------------

    def fork(self) -> RecurrentKV:
        return RecurrentKV(self._layout, self.inner.fork(), self._state)

    def close(self) -> None:
        self.inner.close()
        self._state, self._after, self._undo, self._restoring = {}, None, None, {}

    def check_integrity(self) -> None:
        self.inner.check_integrity()
        assert self.placement.trivial, self.placement
        expected = self._layout.state_nbytes if self.length else 0
        assert _nbytes(self._state) == expected, (self.length, _nbytes(self._state), expected)


class RecurrentLayout(Layout[RecurrentStep]):
    """``inner`` makes the layout of the keys and values, whose name this one has."""

    inner: Layout[Any]
    carries = True

    def __init__(
        self, geometry: KVGeometry, device: torch.device, inner: Callable[[KVGeometry, torch.device], Layout[Any]]
    ) -> None:
        import torch

        super().__init__(geometry, device)
        self.inner = inner(geometry.attention, device)
        self.name, self.lossy, self.reserves = self.inner.name, self.inner.lossy, self.inner.reserves
        self.dtype: torch.dtype = getattr(torch, geometry.dtype)
        groups = (geometry.groups[index] for index in geometry.recurrent)
        self.state_nbytes = sum(len(group.layers) * sum(s.nbytes for s in group.states) for group in groups)

    def open(self, tokens: int = 0, limit: int | None = None) -> RecurrentKV:
        return RecurrentKV(self, self.inner.open(tokens, limit))

    def bytes_needed(
        self, kv: SequenceKV | None, tokens: int, limit: int | None = None, evictions: Evictions | None = None
    ) -> int:
        """With three states: the present one, what a step makes of it, and that of an undo record."""
        inner = kv.inner if isinstance(kv, RecurrentKV) else None
        return self.inner.bytes_needed(inner, tokens, limit, evictions) + 3 * self.state_nbytes

    def plan(self, slots: Sequence[Slot]) -> RecurrentStep:
        return RecurrentStep(tuple(slots))

    def passes(self, step: RecurrentStep) -> Iterator[tuple[Slot, Carried]]:
        """One session after the other: while it is at hand, ``write`` and ``attend`` are about its rows alone, and what
        its recurrent layers make of their state goes into the second."""
        for slot in step.slots:
            kv = slot.kv
            assert isinstance(kv, RecurrentKV)
            step.inner = self.inner.plan([Slot(kv.inner, 0, slot.tokens)])
            carried = Carried(kv.state)
            yield slot, carried
            kv.stepped(slot.tokens, carried.outcome)

    def write(self, layer: int, keys: Tensor, values: Tensor, meta: RecurrentStep) -> None:
        self.inner.write(layer, keys, values, meta.inner)

    def attend(self, layer: int, queries: Tensor, meta: RecurrentStep, traits: AttentionTraits) -> Tensor:
        return self.inner.attend(layer, queries, meta.inner, traits)


def layout_for(
    make: Callable[[KVGeometry, torch.device], Layout[Any]], geometry: KVGeometry, device: torch.device
) -> Layout[Any]:
    """The layout that ``make`` makes, with room for recurrent layers' states where the model has such layers."""
    return RecurrentLayout(geometry, device, make) if geometry.recurrent else make(geometry, device)


def _nbytes(state: States) -> int:
    return sum(t.numel() * t.element_size() for t in state.values())
