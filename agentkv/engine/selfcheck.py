"""Does a row's result depend on how many rows share its step? Asked of the real model on this machine.

A matrix product may choose another kernel, and so another order of additions, for another number of rows. Where that
shows in a row's bits, a conversation's tokens could depend on who else is talking (DESIGN §5, "Bits"). The engine keeps
off the counts known to differ, a single row and steps of more than 32 shared rows (see ``Scheduler``); this finds out
whether those that it uses agree here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentkv.engine.adapter import ModelAdapter, StepInput
from agentkv.kv.contract import Layout, SequenceKV, Slot

__all__ = ["ROW_COUNTS", "RowReport", "rows_do_not_matter"]

ROW_COUNTS = (1, 2, 5, 9, 17, 32)
"""Rows of a step that sessions may share."""

_CONTEXT, _STEPS = 24, 2
_MOST_DECODES = 32


@dataclass(frozen=True, slots=True)
class RowReport:
    """What was seen. A row count differs if the logits are not bit for bit those of a sequence that is alone.

    ``beside_decodes``: differing row counts where the other rows are other sequences' single tokens (the head then has
    as many rows). ``beside_prefill``: where they are one sequence's prefill piece (the head then has two).
    ``max_difference``: the largest absolute difference of a logit, 0.0 where all agree.
    """

    row_counts: tuple[int, ...]
    beside_decodes: tuple[int, ...]
    beside_prefill: tuple[int, ...]
    max_difference: float
    device: str
    dtype: str

    @property
    def ok(self) -> bool:
        """Whether all agree."""
        return not self.differing

    @property
    def differing(self) -> tuple[int, ...]:
        """Row counts that differ in either way."""
        return tuple(sorted({*self.beside_decodes, *self.beside_prefill}))


def rows_do_not_matter(adapter: ModelAdapter, layout: Layout[Any], row_counts: Sequence[int] = ROW_COUNTS) -> RowReport:
    """Decode the same tokens of one sequence in steps of each row count, and compare its logits' bits.

    Mutates nothing that outlives the call. Runs the model: call it from the model's thread, or before there is one.
    """
    room = (adapter.context_limit or 2**31) // _STEPS
    counts = tuple(rows for rows in row_counts if rows <= room)
    alone = _decode(adapter, layout, ())
    largest = 0.0

    def differs(neighbours: Sequence[int]) -> bool:
        nonlocal largest
        logits = _decode(adapter, layout, neighbours)
        if torch.equal(logits.view(torch.uint8), alone.view(torch.uint8)):
            return False
        largest = max(largest, (logits.float() - alone.float()).abs().max().item())
        return True

    return RowReport(
        row_counts=counts,
        beside_decodes=tuple(n for n in counts if n <= _MOST_DECODES and differs((1,) * (n - 1))),
        beside_prefill=tuple(n for n in counts if n > 2 and differs((n - 1,))),
        max_difference=largest,
        device=str(adapter.device),
        dtype=adapter.geometry.dtype,
    )


def _decode(adapter: ModelAdapter, layout: Layout[Any], neighbours: Sequence[int]) -> Tensor:
    """Logits ``[steps, vocab]`` of the watched sequence, in the midst of ``neighbours`` (tokens a step of each)."""
    vocabulary = adapter.vocab_size
    watched = layout.open()
    others = [layout.open() for _ in neighbours]
    try:
        _step(adapter, layout, [(watched, [(7919 * i + 11) % vocabulary for i in range(_CONTEXT)])])
        rows = []
        for step in range(_STEPS):
            parts = [
                (kv, [(104_729 * (step * 131 + number * 17 + i) + 3) % vocabulary for i in range(tokens)])
                for number, (kv, tokens) in enumerate(zip(others, neighbours, strict=True))
            ]
            middle = len(parts) // 2
            parts.insert(middle, (watched, [(6007 * step + 5) % vocabulary]))
            rows.append(_step(adapter, layout, parts)[middle].clone())
        return torch.stack(rows).cpu()
    finally:
        for kv in (watched, *others):
            kv.close()


def _step(adapter: ModelAdapter, layout: Layout[Any], parts: Sequence[tuple[SequenceKV, list[int]]]) -> Tensor:
    """One packed step over ``parts``, as the engine does it: logits ``[len(parts), vocab]`` of each one's last row."""
    ids: list[int] = []
    positions: list[int] = []
    slots = []
    for kv, new in parts:
        kv.reserve(len(new))
        slots.append(Slot(kv, len(ids), len(ids) + len(new)))
        positions.extend(range(kv.length, kv.length + len(new)))
        ids.extend(new)
    with torch.inference_mode():
        meta = layout.plan(slots)
        logits = adapter.run(StepInput(ids, positions, [slot.stop - 1 for slot in slots]), layout, meta)
        for slot in slots:
            slot.kv.advance(ids[slot.start : slot.stop])
    return logits
