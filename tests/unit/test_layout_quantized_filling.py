"""A quantised state comes back piece by piece: in any order, from several threads, and never whole before that."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.codecs import KVBlock
from agentkv.kv.contiguous import copied
from agentkv.kv.contract import LAYOUTS
from agentkv.kv.quantized import QuantizedKV, QuantizedLayout
from agentkv.kv.quantized_segments import Codes
from agentkv.types import KVGeometry, LayerGroup, Placement, Span

CPU = torch.device("cpu")
GROUPS = KVGeometry((LayerGroup((0, 2), None, 2, 16, 16), LayerGroup((1,), None, 1, 8, 24)), "float32", (None,) * 3)
"""Two groups of layers that attend to everything, of different shapes."""


def made(name: str) -> QuantizedLayout:
    layout = LAYOUTS.get(name)(GROUPS, CPU)
    assert isinstance(layout, QuantizedLayout)
    layout.expect_pieces(128)
    return layout


def content(tokens: int, seed: int = 3) -> list[KVBlock]:
    """KV of each group."""
    generator = torch.Generator().manual_seed(seed)

    def some(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(heads, tokens, dim, generator=generator)

    def layers(group: LayerGroup, dim: int) -> tuple[torch.Tensor, ...]:
        return tuple(some(group.kv_heads, dim) for _ in group.layers)

    return [KVBlock(layers(g, g.key_dim), layers(g, g.value_dim)) for g in GROUPS.groups]


def write(kv: QuantizedKV, blocks: Sequence[KVBlock], group: int, span: Span, *, told: bool) -> int:
    """Restore ``span`` of a group; the state's bytes afterwards."""
    copied(blocks[group].cut(*span), kv.target(group, span))
    most = kv.nbytes
    if told:
        kv.filled(group, span)
    return most


def restored(layout: QuantizedLayout, blocks: Sequence[KVBlock], placement: Placement) -> QuantizedKV:
    """Without a word before all is written."""
    kv = layout.open()
    kv.place(placement)
    for span in placement.kept:
        for group in range(len(GROUPS.groups)):
            write(kv, blocks, group, span, told=False)
    kv.restored(range(placement.length))
    return kv


def same(a: QuantizedKV, b: QuantizedKV) -> bool:
    """Bit for bit, in codes and in what is read."""
    parts = [
        [t for s in kv.segments for p in s.parts for t in (p.tensors if isinstance(p, Codes) else (*p.keys, *p.values))]
        for kv in (a, b)
    ]
    for group in range(len(GROUPS.groups)):
        for run in a.visible(group):
            parts += [[*block.keys, *block.values] for block in (a.read(group, run), b.read(group, run))]
    pairs = [(x, y) for one, two in zip(parts[::2], parts[1::2], strict=True) for x, y in zip(one, two, strict=True)]
    return bool(pairs) and all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("name", ["quantized:int8", "quantized:int4:paged", "quantized:int8:static"])
@settings(deadline=None)
@given(
    length=st.integers(1, 900),
    size=st.integers(5, 300),
    gap=st.integers(0, 90),
    seed=st.integers(0, 99),
    threads=st.sampled_from([1, 3]),
)
def test_pieces_in_any_order_and_from_any_thread_make_the_same_state(
    name: str, length: int, size: int, gap: int, seed: int, threads: int
) -> None:
    layout, blocks = made(name), content(length)
    kept = (Span(0, length),)
    if gap and length > gap + 200:  # a session that evicts: sinks, then a window
        kept = (Span(0, 40), Span(40 + gap, length))
    placement = Placement(length, kept, lineage="some" if len(kept) > 1 else "")
    kv = layout.open()
    kv.place(placement)
    pieces = [(group, piece) for span in kept for piece in span.split(size) for group in range(len(GROUPS.groups))]
    random.Random(seed).shuffle(pieces)
    told = [(group, piece, random.Random(seed + at).random() < 0.8) for at, (group, piece) in enumerate(pieces)]
    with ThreadPoolExecutor(threads) as workers:
        for done in [workers.submit(partial(write, kv, blocks, g, piece, told=t)) for g, piece, t in told]:
            done.result()
    kv.restored(range(length))
    kv.check_integrity()
    other = restored(layout, blocks, placement)
    assert kv.lossy == other.lossy
    assert same(kv, other)
    assert kv.nbytes == other.nbytes
    whole = [s for s in kv.segments if s.lossy and s.run == layout.format.group_tokens]
    within = {s.span.start // layout.format.segment_tokens for s in whole}
    assert len(kept) > 1 or len(whole) == len(within), "as few segments as there are blocks"


@pytest.mark.parametrize("name", ["quantized:int8", "quantized:int4", "quantized:int4:paged"])
@pytest.mark.parametrize("told", [True, False], ids=["told", "control-not-told"])
def test_the_whole_history_is_never_held_exactly(name: str, told: bool) -> None:
    layout, length = made(name), 6000
    blocks = content(length)
    exact = sum(block.nbytes for block in blocks)
    kv = layout.open()
    kv.place(Placement.whole(length), 500)
    most = max(
        write(kv, blocks, group, piece, told=told)
        for piece in Span(0, length).split(250)  # no whole groups at either end
        for group in range(len(GROUPS.groups))
    )
    kv.restored(range(length))
    foretold = layout.bytes_needed(None, length + 500)
    assert kv.nbytes <= foretold < exact
    assert (most <= foretold) == told, (most, foretold, exact)
    kv.close()
    assert kv.nbytes == 0


@pytest.mark.parametrize("name", ["quantized:int8", "quantized:int4:paged"])
@pytest.mark.parametrize("usable", [0, 10, 64, 200, 700, 800, 870, 999])
def test_fewer_tokens_than_were_placed_are_a_state(name: str, usable: int) -> None:
    """A fault in a chunk: what comes before it is kept, and what was written behind it shows nowhere."""
    layout, length = made(name), 1000
    blocks = content(length)
    kv = layout.open()
    kv.place(Placement.whole(length))
    for piece in Span(0, length).split(200):
        for group in range(len(GROUPS.groups)):
            if piece.stop <= usable:
                write(kv, blocks, group, piece, told=True)
            elif piece.start < usable:
                write(kv, blocks, group, Span(piece.start, usable), told=True)
            else:
                for tensor in (*(found := kv.target(group, piece)).keys, *found.values):
                    tensor.fill_(1e6)
    kv.restored(range(usable))
    kv.check_integrity()
    assert (kv.length, list(kv.ids)) == (usable, list(range(usable)))
    for group, block in enumerate(blocks):
        for run in kv.visible(group):
            read, bound = kv.read(group, run), kv.bound(group, run)
            for name_ in ("keys", "values"):
                for a, b, off in zip(*(getattr(x, name_) for x in (read, block.cut(*run), bound)), strict=True):
                    assert bool(((a.double() - b.double()).abs() <= off + 1e-6).all())
                    assert off.max() < 1, "its grid is that of what was written behind it"
    kv.reserve(3)
    kv.advance([1, 2, 3])
    kv.check_integrity()
