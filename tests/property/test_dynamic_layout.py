"""The dynamic layout against a naive one that keeps every key ever written and attends with a plain masked softmax."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule
from torch import Tensor

from agentkv.codecs import KVBlock
from agentkv.errors import Closed
from agentkv.kv.contract import AttentionTraits, Capture, Slot, Undo
from agentkv.kv.dynamic import DynamicKV, DynamicLayout
from agentkv.types import KVGeometry, LayerGroup, Span

QUERY_HEADS = 4
GROUPS = (
    LayerGroup((0, 3), None, 2, 4, 6),
    LayerGroup((1,), 5, 1, 4, 4),
    LayerGroup((2, 4), 70, 4, 2, 2),
)
GEOMETRY = KVGeometry(GROUPS, "float32")
CPU = torch.device("cpu")
LAYERS = {layer: (index, group) for index, group in enumerate(GROUPS) for layer in group.layers}


@dataclass
class Naive:
    """All ids, and per layer all keys ``[Hkv, n, Dk]`` and values ``[Hkv, n, Dv]`` ever computed."""

    ids: list[int] = field(default_factory=list)
    kv: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=lambda: {
            layer: (torch.empty(g.kv_heads, 0, g.key_dim), torch.empty(g.kv_heads, 0, g.value_dim))
            for layer, (_, g) in LAYERS.items()
        }
    )

    def copy(self, length: int | None = None) -> Naive:
        n = len(self.ids) if length is None else length
        return Naive(self.ids[:n], {layer: (k[:, :n], v[:, :n]) for layer, (k, v) in self.kv.items()})

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        k, v = self.kv[layer]
        self.kv[layer] = torch.cat([k, keys], 1), torch.cat([v, values], 1)

    def attend(self, layer: int, queries: Tensor, traits: AttentionTraits) -> Tensor:
        """``queries [Hq, T, Dk]`` of the last T tokens → ``[T, Hq, Dv]``."""
        _, group = LAYERS[layer]
        keys, values = (t.repeat_interleave(QUERY_HEADS // group.kv_heads, 0) for t in self.kv[layer])
        tokens, total = queries.shape[1], keys.shape[1]
        out = torch.zeros(tokens, QUERY_HEADS, group.value_dim)
        for i in range(tokens):
            position = total - tokens + i
            first = 0 if group.window is None else max(0, position + 1 - group.window)
            scores = torch.einsum("hd,hkd->hk", queries[:, i], keys[:, first : position + 1]) * traits.scaling
            if traits.softcap is not None:
                scores = traits.softcap * torch.tanh(scores / traits.softcap)
            weights = scores.exp()
            bottom = weights.sum(-1, keepdim=True)
            if traits.sinks is not None:
                bottom = bottom + traits.sinks.exp()[:, None]
            out[i] = torch.einsum("hk,hkd->hd", weights / bottom, values[:, first : position + 1])
        return out

    def block(self, group: LayerGroup, span: Span) -> KVBlock:
        lo, hi = span
        return KVBlock(
            tuple(self.kv[layer][0][:, lo:hi] for layer in group.layers),
            tuple(self.kv[layer][1][:, lo:hi] for layer in group.layers),
        )


def same(a: KVBlock, b: KVBlock) -> bool:
    return all(torch.equal(x, y) for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True))


def window(group: LayerGroup, length: int) -> Span:
    """What a query at ``length`` or later may still see."""
    return Span(0 if group.window is None else max(0, length - group.window), length)


@dataclass(eq=False)
class State:
    """A live state, the naive one it must equal, its open undo records, and captures that must stay valid."""

    kv: DynamicKV
    naive: Naive
    undo: list[tuple[Undo, Naive]] = field(default_factory=list)
    captures: list[tuple[Capture, Naive]] = field(default_factory=list)


def step(layout: DynamicLayout, states: list[State], counts: list[int], seed: int) -> None:
    """One packed step over ``states``, as the engine does it, compared in every layer."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    slots, start = [], 0
    for state, count in zip(states, counts, strict=True):
        state.kv.reserve(count)
        slots.append(Slot(state.kv, start, start + count))
        start += count
    rows = max(start, 2)  # a lone row is padded, as the adapter does
    meta = layout.plan(slots)
    for layer in sorted(LAYERS):
        _, group = LAYERS[layer]
        traits = AttentionTraits(0.7, softcap=1.5 if seed & 1 else None, sinks=draw(QUERY_HEADS) if seed & 2 else None)
        keys, values = draw(group.kv_heads, rows, group.key_dim), draw(group.kv_heads, rows, group.value_dim)
        queries = draw(QUERY_HEADS, rows, group.key_dim)
        layout.write(layer, keys, values, meta)
        out = layout.attend(layer, queries, meta, traits)
        assert out.shape == (rows, QUERY_HEADS, group.value_dim)
        assert bool(out.isfinite().all())
        for state, slot in zip(states, slots, strict=True):
            span = slice(slot.start, slot.stop)
            state.naive.append(layer, keys[:, span], values[:, span])
            torch.testing.assert_close(
                out[span], state.naive.attend(layer, queries[:, span], traits), atol=2e-5, rtol=1e-4
            )
    for state, count in zip(states, counts, strict=True):
        ids = torch.randint(0, 1000, (count,), generator=generator).tolist()
        state.kv.advance(ids)
        state.naive.ids.extend(ids)


class DynamicMachine(RuleBasedStateMachine):
    states = Bundle("states")

    def __init__(self) -> None:
        super().__init__()
        self.layout = DynamicLayout(GEOMETRY, CPU)
        self.live: list[State] = []

    def _add(self, state: State) -> State:
        self.live.append(state)
        return state

    @initialize(target=states, tokens=st.integers(1, 100))
    def first(self, tokens: int) -> State:
        state = self._add(State(self.layout.open(), Naive()))
        step(self.layout, [state], [tokens], tokens)
        return state

    @rule(target=states, tokens=st.sampled_from([0, 1, 64, 150]))
    def open(self, tokens: int) -> State:
        kv = self.layout.open(tokens)
        assert kv.nbytes == self.layout.bytes_needed(None, tokens)
        return self._add(State(kv, Naive()))

    @rule(
        states=st.lists(states, min_size=1, max_size=3, unique=True),
        counts=st.lists(st.one_of(st.just(1), st.integers(1, 12), st.integers(50, 90)), min_size=3, max_size=3),
        seed=st.integers(0, 2**20),
    )
    def step(self, states: list[State], counts: list[int], seed: int) -> None:
        step(self.layout, states, counts[: len(states)], seed)

    @rule(state=states, tokens=st.integers(0, 200))
    def reserve(self, state: State, tokens: int) -> None:
        state.kv.reserve(tokens)
        held = state.kv.nbytes
        state.kv.reserve(tokens)
        assert state.kv.nbytes == held, "what was reserved is there"

    @rule(state=states)
    def open_undo(self, state: State) -> None:
        undo = state.kv.undo_record()
        assert undo.length == state.kv.length
        state.undo.append((undo, state.naive.copy()))

    @rule(state=states, data=st.data())
    def rollback(self, state: State, data: st.DataObject) -> None:
        if not state.undo:
            return
        back = data.draw(st.integers(1, len(state.undo)))
        undo, naive = state.undo[-back]
        del state.undo[-back + 1 if back > 1 else len(state.undo) :]
        state.kv.rollback(undo)
        state.naive = naive.copy()
        # Captures made in the turn that is undone belonged to it.
        state.captures = [(c, n) for c, n in state.captures if c.span.stop <= undo.length]

    @rule(target=states, state=states)
    def fork(self, state: State) -> State:
        twin = state.kv.fork()
        for index in range(len(GROUPS)):
            ours, theirs = state.kv.buffers(index), twin.buffers(index)
            assert [k.data_ptr() for k in ours.keys] == [k.data_ptr() for k in theirs.keys], "copied before a write"
        return self._add(State(twin, state.naive.copy(), list(state.undo), list(state.captures)))

    @rule(state=states, data=st.data())
    def capture(self, state: State, data: st.DataObject) -> None:
        length = state.kv.length
        if not length:
            return
        start = data.draw(st.integers(0, length - 1))
        points = data.draw(st.sampled_from([(), (length,)]))
        capture = state.kv.capture(Span(start, length), points)
        assert capture.ids == tuple(state.naive.ids[start:])
        expected = {0: Span(start, length)}
        if points:
            for index, group in enumerate(GROUPS):
                expected.setdefault(index, Span(start, length).intersect(window(group, length)))
        assert {part.group: part.span for part in capture.parts} == expected
        state.captures.append((capture, state.naive.copy()))

    @rule(state=states)
    def window_snapshot(self, state: State) -> None:
        length = state.kv.length
        parts = state.kv.window_snapshot()
        assert [(p.group, p.span) for p in parts] == [(i, window(GROUPS[i], length)) for i in (1, 2) if length]
        for part in parts:
            assert same(part.block, state.naive.block(GROUPS[part.group], part.span))
            for tensor in (*part.block.keys, *part.block.values):
                tensor.fill_(float("nan"))  # copies: what is done to them does not matter to the state

    @rule(
        target=states,
        state=states,
        opened=st.sampled_from([0, 64, 300]),
        room=st.sampled_from([0, 9, 200]),
        cut=st.integers(1, 100),
    )
    def restore(self, state: State, opened: int, room: int, cut: int) -> State:
        """A new state filled from the other's content, in pieces, as a restore does."""
        length = state.kv.length
        kv = self.layout.open(opened)
        twin = kv.fork() if cut % 2 else None
        kv.place(length, room)
        for index, group in enumerate(GROUPS):
            for piece in window(group, length).split(cut):
                source = state.naive.block(group, piece)
                into = kv.target(index, piece)
                for a, b in zip((*source.keys, *source.values), (*into.keys, *into.values), strict=True):
                    b.copy_(a)
        kv.restored(state.naive.ids)
        if twin is not None:
            twin.place(length)  # the twin's memory is its own by now: what it is filled with must not show
            for tensor in (*twin.target(0, Span(0, length)).keys, *twin.target(0, Span(0, length)).values):
                tensor.fill_(float("nan"))
            twin.close()
        return self._add(State(kv, state.naive.copy()))

    @precondition(lambda self: len(self.live) > 1)
    @rule(state=consumes(states))
    def close(self, state: State) -> None:
        self.live.remove(state)
        state.kv.close()
        assert state.kv.nbytes == 0
        for use in (
            lambda: state.kv.reserve(1),
            lambda: state.kv.advance([1]),
            state.kv.undo_record,
            state.kv.window_snapshot,
            state.kv.fork,
            lambda: state.kv.place(3),
            lambda: state.kv.target(0, Span(0, 1)),
            lambda: state.kv.restored([]),
            lambda: state.kv.rollback(Undo(0, ())),
            lambda: state.kv.capture(Span(0, 1), ()),
        ):
            with pytest.raises(Closed):
                use()
        state.kv.close()

    @invariant()
    def everything_is_as_in_the_naive_state(self) -> None:
        for state in self.live:
            state.kv.check_integrity()
            assert list(state.kv.ids) == state.naive.ids
            assert state.kv.length == len(state.naive.ids)
            for index, group in enumerate(GROUPS):
                span = window(group, state.kv.length)
                assert same(state.kv.buffers(index).block(*span), state.naive.block(group, span)), group.name
            for capture, naive in state.captures:
                for part in capture.parts:
                    assert same(part.block, naive.block(GROUPS[part.group], part.span)), "a capture changed"


TestDynamicLayout = DynamicMachine.TestCase
TestDynamicLayout.settings = settings(max_examples=40, stateful_step_count=25)


def decode(layout: DynamicLayout, state: State, tokens: int) -> None:
    """Decode steps, without comparing the attention of each."""
    for seed in range(tokens):
        state.kv.reserve(1)
        meta = layout.plan([Slot(state.kv, 0, 1)])
        for layer, (_, group) in LAYERS.items():
            generator = torch.Generator().manual_seed(1000 * layer + seed)
            keys = torch.randn(group.kv_heads, 1, group.key_dim, generator=generator)
            values = torch.randn(group.kv_heads, 1, group.value_dim, generator=generator)
            layout.write(layer, keys, values, meta)
            state.naive.append(layer, keys, values)
        state.kv.advance([seed])
        state.naive.ids.append(seed)


def opened(tokens: int = 0, room: int = 0) -> tuple[DynamicLayout, State]:
    layout = DynamicLayout(GEOMETRY, CPU)
    state = State(layout.open(room), Naive())
    if tokens:
        step(layout, [state], [tokens], 1)
    return layout, state


def test_rollback_after_a_window_was_compacted_away() -> None:
    layout, state = opened(20)
    undo, before = state.kv.undo_record(), state.naive.copy()
    held = state.kv.buffers(1).base
    decode(layout, state, 120)
    assert state.kv.buffers(1).base > 20 > held, "the window was compacted past the undo record"
    state.kv.rollback(undo)
    state.naive = before
    step(layout, [state], [7], 3)
    state.kv.check_integrity()


def test_rollback_of_a_fork_leaves_the_other_side_alone() -> None:
    layout, state = opened(20)
    undo, before = state.kv.undo_record(), state.naive.copy()
    while state.kv.buffers(1).base <= 20:  # until the window was moved to the front, where the record would go
        decode(layout, state, 1)
    twin = State(state.kv.fork(), state.naive.copy())
    state.kv.rollback(undo)
    state.naive = before
    for each in (twin, state):
        for index, group in enumerate(GROUPS):
            span = window(group, each.kv.length)
            assert same(each.kv.buffers(index).block(*span), each.naive.block(group, span))
    step(layout, [state, twin], [3, 4], 9)


def test_a_token_is_not_paid_for_with_a_copy_of_the_cache() -> None:
    layout, state = opened(64)
    moves = 0
    before = [k.data_ptr() for i in range(3) for k in state.kv.buffers(i).keys]
    for _ in range(256):
        decode(layout, state, 1)
        now = [k.data_ptr() for i in range(3) for k in state.kv.buffers(i).keys]
        moves += now != before
        before = now
    assert moves <= 12


def test_sliding_groups_do_not_grow_with_the_session() -> None:
    layout, state = opened()
    for seed in range(12):
        step(layout, [state], [50], seed)
    assert state.kv.length == 600
    assert state.kv.buffers(1).capacity <= 128
    assert state.kv.buffers(2).capacity <= 192
    assert layout.open(5000).buffers(2).capacity <= 192, "nor with the room a session is opened with"


def test_misuse_is_told() -> None:
    layout, state = opened(100)
    kv = state.kv
    with pytest.raises(ValueError, match="only an empty state"):
        kv.place(5)
    with pytest.raises(ValueError, match="100 tokens are held"):
        kv.capture(Span(90, 101), ())
    with pytest.raises(ValueError, match="the window before 20 is gone"):
        step(layout, [state], [90], 0)
        step(layout, [state], [90], 0)
        kv.capture(Span(0, 20), (20,))
    empty = layout.open()
    with pytest.raises(ValueError, match="call place"):
        empty.target(0, Span(0, 10))
    with pytest.raises(ValueError, match="call place"):
        empty.restored([1, 2, 3])
    with pytest.raises(ValueError, match="cannot roll forward"):
        empty.rollback(kv.undo_record())


def test_integrity_is_checked_for_real() -> None:
    _, state = opened(10)
    state.kv.buffers(0).keys[0] = state.kv.buffers(0).keys[0][:, :5]
    with pytest.raises(AssertionError):
        state.kv.check_integrity()
    _, state = opened(10)
    state.kv.buffers(1).base = 9
    with pytest.raises(AssertionError):
        state.kv.check_integrity()
    _, state = opened(10)
    state.kv.advance(range(1000))
    with pytest.raises(AssertionError):
        state.kv.check_integrity()
