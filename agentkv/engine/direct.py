"""Running the model without its thread, for measurements: whoever calls is the only one who does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from agentkv.engine.adapter import ModelAdapter, StepInput
from agentkv.kv.contract import Layout, SequenceKV, Slot

__all__ = ["prefill", "step"]


def step(
    adapter: ModelAdapter,
    layout: Layout[Any],
    parts: Sequence[tuple[SequenceKV, Sequence[int]]],
    rows: Literal["last", "all"] = "last",
) -> Tensor:
    """One packed step over ``parts``, states and their new ids: logits ``[parts or tokens, vocab]``, model dtype."""
    ids: list[int] = []
    positions: list[int] = []
    slots = []
    for kv, new in parts:
        kv.reserve(len(new))
        slots.append(Slot(kv, len(ids), len(ids) + len(new)))
        positions.extend(range(kv.next_position, kv.next_position + len(new)))
        ids.extend(new)
    wanted = [slot.stop - 1 for slot in slots] if rows == "last" else list(range(len(ids)))
    with torch.inference_mode():
        logits = adapter.run(StepInput(ids, positions, wanted), layout, layout.plan(slots))
        for slot in slots:
            slot.kv.advance(ids[slot.start : slot.stop])
    return logits


def prefill(adapter: ModelAdapter, layout: Layout[Any], kv: SequenceKV, ids: Sequence[int], piece: int) -> None:
    """Compute ``ids`` into ``kv``, ``piece`` tokens a step as the engine does."""
    for start in range(0, len(ids), piece):
        step(adapter, layout, [(kv, ids[start : start + piece])])
