"""Two states of the same tokens: how far their keys and values lie apart, and what they say next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from agentkv.engine.calibration import divergence
from agentkv.engine.direct import step
from agentkv.engine.loading import LoadedModel
from agentkv.kv.contract import SequenceKV
from agentkv.kv.packed_states import unpacked
from agentkv.types import Span

__all__ = ["Deviation", "deviation", "distances"]


@dataclass(frozen=True, slots=True)
class Deviation:
    """Of all keys and values of some tokens, and of what recurrent layers carry behind them: the largest and the mean
    absolute difference, and the root of the summed squares relative to that of the values themselves."""

    largest: float
    mean: float
    relative: float


def deviation(stored: SequenceKV, computed: SequenceKV) -> Deviation:
    """Of what both hold, float32 on the device they are on. Call on the model thread."""
    largest = total = squares = norm = 0.0
    count = 0
    for mine, other in _pairs(stored, computed):
        apart = (mine - other).abs()
        largest = max(largest, float(apart.max()))
        total += float(apart.sum(dtype=torch.float64))
        squares += float(apart.square().sum(dtype=torch.float64))
        norm += float(other.square().sum(dtype=torch.float64))
        count += apart.numel()
    return Deviation(largest, total / max(1, count), (squares / norm) ** 0.5 if norm else 0.0)


def _pairs(stored: SequenceKV, computed: SequenceKV) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for group, of in enumerate(stored.geometry.groups):
        for mine in stored.visible(group):
            for other in computed.visible(group):
                both: Span = mine.intersect(other)
                if not len(both):
                    continue
                blocks = [kv.read(group, both) for kv in (stored, computed)]
                if of.states:
                    yield from ((a.float(), b.float()) for a, b in zip(*(unpacked(of, b) for b in blocks), strict=True))
                    continue
                for sides in ("keys", "values"):
                    for a, b in zip(*(getattr(block, sides) for block in blocks), strict=True):
                        yield a.float(), b.float()


def distances(model: LoadedModel, stored: SequenceKV, computed: SequenceKV, ids: Sequence[int]) -> tuple[float, float]:
    """KL divergence in nats of the distributions after each of ``ids`` (computed state against stored one): mean and
    largest. Both states go on by them. Call on the model thread.
    """
    logits = [step(model.adapter, model.layout, [(kv, ids)], rows="all") for kv in (computed, stored)]
    kl, _ = divergence(logits[0], logits[1])
    return float(kl.mean().clamp(min=0)), float(kl.max().clamp(min=0))
