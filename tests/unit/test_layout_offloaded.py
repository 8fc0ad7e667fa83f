"""What `offloaded` promises beside the contract: two layers on the device, fetched ahead by a thread of their own."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from agentkv.errors import InvalidRequest
from agentkv.kv.contract import LAYOUTS, AttentionTraits, Layout, Slot
from agentkv.kv.offloaded import OffloadedLayout, OffloadedPagedLayout
from agentkv.kv.paged import PagedLayout
from agentkv.testing.layouts import GEOMETRY, QUERY_HEADS
from agentkv.testing.machine import State, packed_step

CPU = torch.device("cpu")
LAYERS = {layer: group for group in GEOMETRY.groups for layer in group.layers}


def opened(tokens: int) -> tuple[OffloadedLayout, State]:
    layout = OffloadedLayout(GEOMETRY, CPU)
    state = State(layout.open())
    packed_step(layout, [state], [tokens], 1)
    return layout, state


def layer_step(layout: Layout[Any], meta: Any, layer: int) -> None:
    group = LAYERS[layer]
    keys, values = torch.zeros(group.kv_heads, 2, group.key_dim), torch.zeros(group.kv_heads, 2, group.value_dim)
    layout.write(layer, keys, values, meta)
    layout.attend(layer, torch.zeros(QUERY_HEADS, 2, group.key_dim), meta, AttentionTraits(1.0))


def test_it_can_be_chosen_by_name() -> None:
    assert LAYOUTS.get("offloaded") is OffloadedLayout
    assert LAYOUTS.get("offloaded:paged") is OffloadedPagedLayout
    assert isinstance(OffloadedPagedLayout(GEOMETRY, CPU).inner, PagedLayout)


def test_the_device_holds_two_layers_and_the_host_the_rest() -> None:
    layout, state = opened(200)
    largest = 2 * (6 + 4) * 4  # bytes of one token in one layer of the full group
    assert 2 * 200 * largest <= layout.staging_nbytes <= 3 * 200 * largest
    assert state.kv.nbytes == 2 * 200 * largest == layout.bytes_needed(state.kv, 200)
    assert state.kv.host_nbytes == state.kv.inner.nbytes > GEOMETRY.nbytes(200)
    assert layout.host_bytes_needed(None, 200) >= GEOMETRY.nbytes(200)


def test_a_layer_is_fetched_by_another_thread_while_the_one_before_computes() -> None:
    layout, state = opened(20)
    fetched: dict[int, threading.Event] = {layer: threading.Event() for layer in LAYERS}
    threads = set()
    gather = layout.inner.gather

    def watched(layer: int, *rest: Any) -> None:
        gather(layer, *rest)
        threads.add(threading.current_thread())
        fetched[layer].set()

    layout.inner.gather = watched
    state.kv.reserve(2)
    meta = layout.plan([Slot(state.kv, 0, 2)])
    for layer in sorted(LAYERS):
        assert fetched[layer].wait(10)
        if layer + 1 in LAYERS:
            assert fetched[layer + 1].wait(10), "the next layer came before this one was attended"
        if layer + 2 in LAYERS:
            assert not fetched[layer + 2].is_set(), "there are two buffers"
        layer_step(layout, meta, layer)
    assert threading.current_thread() not in threads and len(threads) == 1


def test_a_step_that_was_given_up_leaves_nothing_behind() -> None:
    layout, state = opened(20)
    other = State(layout.open())
    packed_step(layout, [other], [60], 2)
    for layers in (0, 1, 3):
        other.kv.reserve(2)
        meta = layout.plan([Slot(other.kv, 0, 2)])
        for layer in range(layers):
            layer_step(layout, meta, layer)
        packed_step(layout, [state], [3], layers)
    other.kv.close()
    packed_step(layout, [state], [3], 9)


def test_a_fetch_that_fails_fails_the_step() -> None:
    layout, state = opened(20)
    gather = layout.inner.gather

    def failing(*args: Any) -> None:
        raise MemoryError("no more")

    layout.inner.gather = failing
    state.kv.reserve(2)
    meta = layout.plan([Slot(state.kv, 0, 2)])
    with pytest.raises(MemoryError):
        layer_step(layout, meta, 0)
    layout.inner.gather = gather
    packed_step(layout, [state], [3], 9)


def test_layers_out_of_order_are_told() -> None:
    layout, state = opened(20)
    state.kv.reserve(2)
    meta = layout.plan([Slot(state.kv, 0, 2)])
    with pytest.raises(RuntimeError, match="layer 4 was not fetched"):
        layer_step(layout, meta, 4)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_the_model_may_run_in_inference_mode(name: str) -> None:
    layout = LAYOUTS.get(name)(GEOMETRY, CPU)
    kv = layout.open(0, 100)
    for _ in range(3):
        kv.reserve(2)
        meta = layout.plan([Slot(kv, 0, 2)])
        with torch.inference_mode():
            for layer in sorted(LAYERS):
                layer_step(layout, meta, layer)
        kv.advance([1, 2])
    for index in range(3):
        for run in kv.visible(index):
            assert not any(torch.is_inference(t) for t in kv.target(index, run).keys)


def test_staging_shrinks_with_the_sessions() -> None:
    layout, state = opened(280)
    most = layout.staging_nbytes
    state.kv.close()
    other = State(layout.open())
    packed_step(layout, [other], [4], 2)
    assert layout.staging_nbytes < most / 4


def test_what_cannot_be_offloaded_is_refused_by_name() -> None:
    class Foreign(PagedLayout):
        name = "foreign"
        gather: Any = property()

    with pytest.raises(InvalidRequest, match=r"'foreign' cannot be offloaded"):
        OffloadedLayout(GEOMETRY, CPU, Foreign)


def test_offloading_does_not_change_bits() -> None:
    outputs: dict[str, list[torch.Tensor]] = {}
    for name in ("dynamic", "offloaded"):
        layout = LAYOUTS.get(name)(GEOMETRY, CPU)
        state, attend, seen = State(layout.open()), layout.attend, outputs.setdefault(name, [])
        layout.attend = lambda *a, seen=seen, attend=attend: seen.append(attend(*a)) or seen[-1]
        for seed in range(8, 40, 4):
            packed_step(layout, [state], [1 + seed], seed)
    for a, b in zip(*outputs.values(), strict=True):
        assert torch.equal(a, b)
