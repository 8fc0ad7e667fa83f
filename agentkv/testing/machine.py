"""What :func:`agentkv.testing.layouts.layout_machine` runs. Importing this module needs hypothesis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule
from torch import Tensor

from agentkv.codecs import KVBlock
from agentkv.errors import Closed
from agentkv.kv.contract import AttentionTraits, CapturedPart, Evictions, Layout, SequenceKV, Slot, Undo
from agentkv.kv.turning import turned_of
from agentkv.testing.foretold import evictions_of, watched_turn
from agentkv.testing.naive import GEOMETRY, QUERY_HEADS, NaiveKV, same_block
from agentkv.types import Placement, Span

if TYPE_CHECKING:
    from agentkv.testing.layouts import MakeLayout

__all__ = ["LIMIT", "LayoutMachine", "State", "packed_step"]

CPU = torch.device("cpu")
LIMIT = 300
"""Tokens that a state may hold."""
REBASE_AT = 90
PIECE = 40
"""Most tokens of a step of a turn whose memory is foretold."""
CAPTURES = 8
"""Captures that are watched at a time."""
SLIDING = [i for i, group in enumerate(GEOMETRY.groups) if group.window is not None]


@dataclass(eq=False)
class State:
    """A live state, the naive one it must equal, and the undo records of its own that are not void, the last first."""

    kv: SequenceKV
    naive: NaiveKV = field(default_factory=NaiveKV)
    undo: list[tuple[Undo, NaiveKV]] = field(default_factory=list)
    open: Undo | None = None

    @property
    def room(self) -> int:
        return LIMIT - len(self.naive.held)

    def forget(self) -> None:
        """Undo records are let go, as their owner does."""
        self.undo, self.open = [], None


def packed_step(layout: Layout[Any], states: Sequence[State], counts: Sequence[int], seed: int) -> None:
    """One packed step over ``states``, as an engine does it, compared in every layer."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    slots, start = [], 0
    for state, count in zip(states, counts, strict=True):
        state.kv.reserve(count)
        slots.append(Slot(state.kv, start, start + count))
        start += count
    rows = max(start, 2)  # a lone row is padded
    meta = layout.plan(slots)
    groups = {layer: group for group in GEOMETRY.groups for layer in group.layers}
    for layer, group in sorted(groups.items(), key=lambda item: item[0]):
        traits = AttentionTraits(0.7, softcap=1.5 if seed & 1 else None, sinks=draw(QUERY_HEADS) if seed & 2 else None)
        keys, values = draw(group.kv_heads, rows, group.key_dim), draw(group.kv_heads, rows, group.value_dim)
        queries = draw(QUERY_HEADS, rows, group.key_dim)
        layout.write(layer, keys, values, meta)
        out = layout.attend(layer, queries, meta, traits)
        assert out.shape == (rows, QUERY_HEADS, group.value_dim), (layer, out.shape)
        assert bool(out.isfinite().all()), layer
        for state, slot in zip(states, slots, strict=True):
            span = slice(slot.start, slot.stop)
            state.naive.append(layer, keys[:, span], values[:, span])
            expected = state.naive.attend(layer, queries[:, span], traits)
            torch.testing.assert_close(out[span], expected, atol=5e-5, rtol=1e-4)
    for state, count in zip(states, counts, strict=True):
        ids = torch.randint(0, 1000, (count,), generator=generator).tolist()
        state.kv.advance(ids)
        state.naive.advance(ids)
        state.naive.adopt(state.kv)


def raises(kind: type[Exception], use: Callable[[], object]) -> bool:
    """Whether ``use`` raises it. Anything else goes through."""
    try:
        use()
    except kind:
        return True
    return False


class LayoutMachine(RuleBasedStateMachine):
    """See :func:`agentkv.testing.layouts.layout_machine`."""

    make_layout: MakeLayout
    states = Bundle("states")

    def __init__(self) -> None:
        super().__init__()
        self.layout = self.make_layout(GEOMETRY, CPU)
        self.layout.rebase_at = REBASE_AT
        self.layout.expect_pieces(PIECE)
        self.live: list[State] = []
        self.captures: list[tuple[CapturedPart, KVBlock]] = []

    def _opened(self, tokens: int) -> SequenceKV:
        needed = self.layout.bytes_needed(None, tokens, LIMIT)
        kv = self.layout.open(tokens, LIMIT)
        assert kv.nbytes <= needed, "a new state takes more than was foretold"
        return kv

    def _add(self, state: State) -> State:
        self.live.append(state)
        return state

    # -- steps --------------------------------------------------------------------------------------------------------

    @initialize(target=states, tokens=st.integers(1, 100))
    def first(self, tokens: int) -> State:
        state = self._add(State(self._opened(0)))
        packed_step(self.layout, [state], [tokens], tokens)
        return state

    @rule(target=states, tokens=st.sampled_from([0, 1, 64, 150]))
    def open(self, tokens: int) -> State:
        return self._add(State(self._opened(tokens)))

    @rule(
        states=st.lists(states, min_size=1, max_size=3, unique=True),
        counts=st.lists(st.one_of(st.just(1), st.integers(1, 12), st.integers(30, 80)), min_size=3, max_size=3),
        seed=st.integers(0, 2**20),
    )
    def step(self, states: list[State], counts: list[int], seed: int) -> None:
        batch = [(state, min(n, state.room)) for state, n in zip(states, counts, strict=False) if state.room]
        if batch:
            packed_step(self.layout, [state for state, _ in batch], [n for _, n in batch], seed)

    @rule(state=states, seed=st.integers(0, 2**20), steps=st.integers(2, 9))
    def decode(self, state: State, seed: int, steps: int) -> None:
        for i in range(min(steps, state.room)):
            packed_step(self.layout, [state], [1], seed + i)

    @rule(state=states, tokens=st.integers(0, 120))
    def reserve(self, state: State, tokens: int) -> None:
        tokens = min(tokens, state.room)
        state.kv.reserve(tokens)
        held = state.kv.nbytes
        state.kv.reserve(tokens)
        assert state.kv.nbytes == held, "what was reserved is there"

    # -- forgetting ---------------------------------------------------------------------------------------------------

    @rule(state=states, cuts=st.lists(st.integers(0, LIMIT), max_size=7), first=st.booleans(), odd=st.integers(1, 9))
    def keep(self, state: State, cuts: list[int], first: bool, odd: int) -> None:
        """Any subset, in spans that may touch."""
        n = len(state.naive.held)
        bounds = [0, *sorted({cut for cut in cuts if 0 < cut < n}), n]
        pieces = list(pairwise(bounds))[0 if first else 1 :: 2]
        self._keep(state, [i for lo, hi in pieces for i in state.naive.held[lo:hi]], odd)

    @rule(state=states, sink=st.integers(0, 9), window=st.integers(1, 40))
    def keep_sink_and_window(self, state: State, sink: int, window: int) -> None:
        held = state.naive.held
        self._keep(state, held if len(held) <= sink + window else held[:sink] + held[len(held) - window :], LIMIT)

    def _keep(self, state: State, indices: list[int], odd: int) -> None:
        spans: list[Span] = []
        for i in indices:
            if spans and spans[-1].stop == i and i % odd:
                spans[-1] = Span(spans[-1].start, i + 1)
            else:
                spans.append(Span(i, i + 1))
        state.kv.keep(spans)
        state.naive.keep(spans, REBASE_AT)

    @rule(state=states, data=st.data())
    def keep_what_is_not_held(self, state: State, data: st.DataObject) -> None:
        absent = sorted(set(range(state.naive.length + 2)) - set(state.naive.held))
        index = data.draw(st.sampled_from(absent))
        assert raises(ValueError, lambda: state.kv.keep([Span(index, index + 1)])), "kept what is not held"
        if len(state.naive.held) > 1:
            lo, hi = state.naive.held[0], state.naive.held[-1]
            assert raises(ValueError, lambda: state.kv.keep([Span(hi, hi + 1), Span(lo, lo + 1)])), "out of order"

    @rule(state=states, ids=st.lists(st.integers(0, 99), min_size=1, max_size=30))
    def skip(self, state: State, ids: list[int]) -> None:
        state.kv.skip(ids)
        state.naive.skip(ids)

    @rule(state=states, data=st.data())
    def crop(self, state: State, data: st.DataObject) -> None:
        naive = state.naive
        choice = st.one_of(st.integers(0, naive.length), st.integers(naive.evicted_at, naive.length))
        self._crop(state, data.draw(choice))

    def _crop(self, state: State, length: int) -> None:
        naive = state.naive
        windows = [GEOMETRY.groups[i] for i in SLIDING]
        sure = length >= naive.evicted_at and all(
            naive.window(g, length).start >= naive.window(g, naive.reached).start for g in windows
        )
        if raises(ValueError, lambda: state.kv.crop(length)):
            assert not sure, "the state there is still to be had"
            return
        assert length >= naive.evicted_at, "what was evicted since cannot be back"
        naive.crop(length)
        state.undo = [(undo, then) for undo, then in state.undo if then.length <= length]

    # -- undo ---------------------------------------------------------------------------------------------------------

    @rule(state=states)
    def undo_record(self, state: State) -> None:
        state.open = state.kv.undo_record()
        assert state.open.length == state.naive.length
        assert state.naive.agrees(state.open.placement)
        state.undo.append((state.open, state.naive.copy()))

    @rule(state=states, data=st.data())
    def rollback(self, state: State, data: st.DataObject) -> None:
        if not state.undo:
            return
        self._roll_back(state, data.draw(st.sampled_from([1, 1, len(state.undo)])))

    def _roll_back(self, state: State, back: int) -> None:
        undo, then = state.undo[-back]
        if then.lineage != state.naive.lineage and undo is not state.open:
            assert raises(ValueError, lambda: state.kv.rollback(undo)), "evicted tokens came from nowhere"
            return
        state.kv.rollback(undo)
        del state.undo[len(state.undo) - back + 1 :]
        moved = then.lineage != state.naive.lineage
        state.naive = then.copy()
        state.naive.reached = then.length if moved else max(then.reached, then.length)

    @rule(state=states)
    def settle(self, state: State) -> None:
        held = state.kv.nbytes
        state.kv.settle()
        assert state.kv.nbytes <= held
        state.open = None

    @rule(
        state=states,
        before=st.integers(1, 20),
        keep=st.integers(0, 30),
        after=st.integers(1, 70),
        seed=st.integers(0, 99),
    )
    def undone_turn(self, state: State, before: int, keep: int, after: int, seed: int) -> None:
        """A turn that evicts more than once, then fails."""
        self.undo_record(state)
        for tokens in (before, after):
            if state.room >= tokens:
                packed_step(self.layout, [state], [tokens], seed)
            self.keep_sink_and_window(state, seed % 4, keep)
        self._roll_back(state, 1)

    @rule(
        state=states,
        counts=st.lists(st.one_of(st.just(1), st.integers(1, 90)), min_size=1, max_size=6),
        room=st.integers(0, 60),
        sinks=st.none() | st.integers(0, 9),
        slack=st.integers(1, 20),
        seed=st.integers(0, 99),
        back=st.booleans(),
    )
    def foretold_turn(
        self, state: State, counts: list[int], room: int, sinks: int | None, slack: int, seed: int, back: bool
    ) -> None:
        """A turn of any length in a window, taken back or not, never holds more than the layout foretold."""
        kv, new = state.kv, sum(counts)
        state.forget()
        kv.settle()
        window = min(LIMIT, max(kv.tokens + room, (sinks or 0) + slack + 1))
        evictions = evictions_of(kv.placement, window, sinks, new, REBASE_AT)
        foretold = self.layout.bytes_needed(kv, min(kv.tokens + new, max(window, kv.tokens)), LIMIT, evictions)
        self.undo_record(state)

        def keep() -> None:
            held = state.naive.held
            left = window - slack
            if sinks is None:  # here and there
                self._keep(state, [*held[seed % 3 :: 2][-left:-1], held[-1]], LIMIT)
            else:
                self._keep(state, [*held[:sinks], *held[max(sinks, len(held) - (left - sinks)) :]], LIMIT)

        watched_turn(
            self.layout, kv, counts, window, keep, lambda n: packed_step(self.layout, [state], [n], seed), foretold
        )
        if back:
            self._roll_back(state, 1)
        else:
            self.settle(state)
        assert kv.nbytes <= foretold, "more is held at the end"

    @rule(state=states, back=st.integers(1, 30), tokens=st.integers(1, 30), seed=st.integers(0, 2**20))
    def computed_anew(self, state: State, back: int, tokens: int, seed: int) -> None:
        """What was captured lies behind a crop, and other tokens follow."""
        naive = state.naive
        if naive.length > naive.evicted_at:
            span = Span(naive.evicted_at, naive.length)
            self._watch(state, state.kv.capture(span), [0], span)
            self._crop(state, max(naive.length - back, naive.evicted_at))
            if state.room:  # a window that is full of what was evicted before has none
                packed_step(self.layout, [state], [min(tokens, state.room)], seed)

    # -- life ---------------------------------------------------------------------------------------------------------

    @rule(target=states, state=states)
    def fork(self, state: State) -> State:
        return self._add(State(state.kv.fork(), state.naive.copy()))

    @rule(
        target=states, state=states, counts=st.tuples(st.integers(1, 4), st.integers(1, 4)), seed=st.integers(0, 2**20)
    )
    def fork_and_go_on(self, state: State, counts: tuple[int, int], seed: int) -> State:
        """Both sides write where neither had written."""
        twin = self._add(State(state.kv.fork(), state.naive.copy()))
        if state.room > max(counts):
            packed_step(self.layout, [state, twin], counts, seed)
        return twin

    @precondition(lambda self: len(self.live) > 1)
    @rule(state=consumes(states))
    def close(self, state: State) -> None:
        self.live.remove(state)
        kv, nothing = state.kv, Undo(Placement(), ())
        kv.close()
        assert kv.nbytes == 0
        uses: list[Callable[[], object]] = [
            lambda: kv.reserve(1), lambda: kv.advance([1]), lambda: kv.skip([1]), lambda: kv.keep([]),
            lambda: kv.crop(0), kv.undo_record, lambda: kv.rollback(nothing), lambda: kv.capture(Span(0, 1)),
            kv.window_snapshot, lambda: kv.read(0, Span(0, 1)), lambda: kv.place(Placement.whole(3)),
            lambda: kv.target(0, Span(0, 1)), lambda: kv.restored([]), kv.fork,
        ]  # fmt: skip
        for use in uses:
            assert raises(Closed, use), "a closed state was used"
        kv.close()
        state.forget()

    # -- storing and restoring ----------------------------------------------------------------------------------------

    @rule(state=states, data=st.data())
    def capture(self, state: State, data: st.DataObject) -> None:
        length = state.naive.length
        if not length:
            return
        start = data.draw(st.integers(0, length - 1))
        span = Span(start, data.draw(st.integers(start + 1, length)))
        self._watch(state, state.kv.capture(span), [0], span)

    @rule(state=states)
    def window_snapshot(self, state: State) -> None:
        self._watch(state, state.kv.window_snapshot(), SLIDING, Span(0, state.naive.length))

    def _watch(self, state: State, parts: Sequence[CapturedPart], groups: Sequence[int], span: Span) -> None:
        for index in groups:
            group = GEOMETRY.groups[index]
            expected = [run for have in state.naive.runs(group) if len(run := have.intersect(span))]
            assert [part.span for part in parts if part.group == index] == expected, group.name
        assert {part.group for part in parts} <= set(groups)
        self.captures += [(part, state.naive.block(GEOMETRY.groups[part.group], part.span)) for part in parts]
        self.captures = self.captures[-CAPTURES:]

    @rule(
        target=states,
        state=states,
        opened=st.sampled_from([0, 64, 150]),
        room=st.sampled_from([0, 9, 90]),
        cut=st.integers(3, 100),
        forked=st.booleans(),
        told=st.sampled_from(["never", "after each", "after all"]),
    )
    def restore(self, state: State, opened: int, room: int, cut: int, forked: bool, told: str) -> State:
        """A new state filled from the other's captures, in pieces, as a restore does."""
        naive = state.naive.copy()
        length = naive.length
        parts = (*(state.kv.capture(Span(0, length)) if length else ()), *state.kv.window_snapshot())
        kv = self._opened(opened)
        twin = kv.fork() if forked else None
        placement, free = state.kv.placement, min(room, state.room)
        most = max(opened, placement.tokens + free)
        needed = self.layout.bytes_needed(
            None, most, LIMIT, Evictions(most, turned_of(placement), rebases=bool(placement.bases))
        )
        kv.place(placement, free)
        pieces = [(piece, part) for part in parts for piece in part.span.split(cut)]
        if told == "after each":  # as chunks come: all groups of some tokens, then the next ones
            pieces.sort(key=lambda found: found[0])
        for piece, part in pieces:
            into = kv.target(part.group, piece)
            lo, hi = piece.start - part.span.start, piece.stop - part.span.start
            for name in ("keys", "values"):
                for a, b in zip(getattr(part.block, name), getattr(into, name), strict=True):
                    b.copy_(a[:, lo:hi])
            if told == "after each":
                kv.filled(part.group, piece)
        for piece, part in reversed(pieces) if told == "after all" else ():
            kv.filled(part.group, piece)
        kv.restored(naive.ids)
        assert kv.nbytes <= needed, "a restored state takes more than was foretold"
        if twin is not None and length:  # the twin's memory is its own by now: what it is filled with must not show
            twin.place(Placement.whole(min(length, LIMIT)))
            target = twin.target(0, Span(0, min(length, LIMIT)))
            for tensor in (*target.keys, *target.values):
                tensor.fill_(float("nan"))
        if twin is not None:
            twin.close()
        naive.reached = length
        naive.lossy.clear()  # what was read is what is restored; how it is held is the new state's
        naive.adopt(kv)
        if naive.lineage:
            naive.evicted_at = length  # a placement does not say when its last eviction was
        return self._add(State(kv, naive))

    # -- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def states_equal_their_naive_ones(self) -> None:
        for state in self.live:
            kv, naive = state.kv, state.naive
            kv.check_integrity()
            assert {i for span in kv.lossy for i in range(*span)} <= naive.lossy, "lossy without a step"
            assert list(kv.ids) == naive.ids
            assert (kv.length, kv.tokens, kv.next_position) == (naive.length, len(naive.held), naive.next_position)
            assert naive.agrees(kv.placement), (kv.placement, naive)
            for index, group in enumerate(GEOMETRY.groups):
                runs = naive.runs(group)
                assert list(kv.visible(index)) == runs, group.name
                for run in runs:
                    part = Span(run.start + len(run) // 3, run.stop)
                    for span in (run, part):
                        assert same_block(kv.read(index, span), naive.block(group, span)), (group.name, span)

    @invariant()
    def captures_stay_as_they_were(self) -> None:
        for part, expected in self.captures:
            assert same_block(part.block, expected), f"a capture of {part.span} changed"

    def teardown(self) -> None:
        for state in self.live:
            state.kv.close()
            state.forget()
