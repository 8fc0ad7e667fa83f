"""A conversation without end: perplexity, bytes and time while a policy keeps the KV state inside its window."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from agentkv.bench.setup import documentation_ids, machine, open_runtime
from agentkv.engine.adapter import StepInput
from agentkv.engine.loading import LoadedModel
from agentkv.engine.retention import Retention
from agentkv.errors import InvalidRequest
from agentkv.kv.contract import Layout, SequenceKV, Slot
from agentkv.policies.retention import SlidingWindow, parse_policy
from agentkv.types import Span

__all__ = ["bench_stream", "step"]

_SYSTEM = "You are a patient assistant who reads documentation."


@dataclass(slots=True)
class _Fed:
    """One run over the text. ``losses``: minus log-probability of each token after the first, in nats.

    ``pieces``: where each step began in the ledger, its tokens and its seconds, eviction included. ``bytes``: reserved
    on the device after each. ``kept``: what was held at each eviction.
    """

    losses: list[float] = field(default_factory=list)
    pieces: list[tuple[int, int, float]] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    kept: dict[int, tuple[Span, ...]] = field(default_factory=dict)

    def perplexity(self, tail: Span) -> float:
        """Over the ledger positions of ``tail``."""
        return math.exp(sum(self.losses[tail.start - 1 : tail.stop - 1]) / len(tail))

    def ms_per_token(self, within: Span) -> float:
        """Median over the steps that began in ``within``."""
        return 1000 * median(s / n for at, n, s in self.pieces if within.start <= at < within.stop)


def step(model: LoadedModel, layout: Layout[Any], kv: SequenceKV, ids: Sequence[int], after: int | None) -> list[float]:
    """Compute ``ids``; losses of the tokens that follow each of them, the last one being ``after``."""
    n = len(ids)
    kv.reserve(n)
    positions = range(kv.next_position, kv.next_position + n)
    meta = layout.plan([Slot(kv, 0, n)])
    logits = model.adapter.run(StepInput(ids, positions, range(n)), layout, meta)
    kv.advance(ids)
    following = [*ids[1:], after] if after is not None else list(ids[1:])
    wanted = torch.tensor(following, device=logits.device)
    found = torch.log_softmax(logits[: len(following)].float(), -1).gather(1, wanted[:, None])
    return [-loss for loss in found[:, 0].tolist()]


def _feed(model: LoadedModel, layout: Layout[Any], retention: Retention, ids: Sequence[int], piece: int) -> _Fed:
    fed, window = _Fed(), retention.policy.window
    assert window is not None
    kv = layout.open(0, window)
    at = 0
    while at < len(ids):
        started = time.perf_counter()
        if retention.full(kv.tokens):
            fed.kept[at] = retention.kept(kv.length, kv.placement.kept)
            kv.keep(fed.kept[at])
        n = min(piece, window - kv.tokens, len(ids) - at)
        after = ids[at + n] if at + n < len(ids) else None
        fed.losses += step(model, layout, kv, ids[at : at + n], after)
        fed.pieces.append((at, n, time.perf_counter() - started))
        fed.nbytes.append(kv.nbytes)
        at += n
    kv.close()
    return fed


def _from_scratch(model: LoadedModel, layout: Layout[Any], fed: _Fed, ids: Sequence[int], tail: Span) -> float:
    """Perplexity of ``tail`` where at each eviction the state is computed anew from the tokens it holds."""
    losses: list[float] = []
    at = sorted(fed.kept)
    for begin, end in zip(at, [*at[1:], len(ids)], strict=True):
        wanted = Span(begin, end).intersect(tail)
        if not len(wanted):
            continue
        kv = layout.open()
        held = [token for span in fed.kept[begin] for token in ids[span.start : span.stop]]
        first = step(model, layout, kv, held, ids[begin])
        after = ids[end] if end < len(ids) else None
        found = [first[-1], *step(model, layout, kv, ids[begin:end], after)]
        losses += found[wanted.start - begin : wanted.stop - begin]
        kv.close()
    return math.exp(sum(losses) / len(losses))


async def bench_stream(
    policy: str, tokens: int, model: str, home: Path | None, dtype: str, threads: int | None, quick: bool
) -> dict[str, Any]:
    """Real text (the documentation in Python's standard library) behind a short system prompt, fed in pieces.

    ``ppl_tail``: perplexity of the last 5,000 tokens under ``policy``. The same tokens with the state computed anew
    from its own tokens at each eviction (``ppl_reference``), without the system prompt (``ppl_sliding``), and with it
    kept but not moved up to the window (``ppl_unrotated``).
    """
    chosen = parse_policy(policy)
    if chosen.window is None:
        raise InvalidRequest("this benchmark needs a policy with a window, e.g. sink:1024", param="policy")
    window = chosen.window
    if quick:
        tokens = min(tokens, 5 * window)
    tail_tokens = min(5000, tokens // 4)
    async with open_runtime(model, home, dtype=dtype, threads=threads, idle_seconds=3600) as (kv, _):
        head = await (await kv.sessions.create(system=_SYSTEM)).token_ids()
        ids = [*head, *documentation_ids(kv, tokens - len(head))]
        tail = Span(len(ids) - tail_tokens, len(ids))
        loaded, layout = kv.model, kv.model.layout
        piece = chosen.slack

        def run(policy: Any, layout: Layout[Any]) -> _Fed:
            return _feed(loaded, layout, Retention(policy, Span(0, len(head))), ids, piece)

        engine = loaded.engine
        fed = await engine.call(lambda: run(chosen, layout))
        reference = await engine.call(lambda: _from_scratch(loaded, layout, fed, ids, tail))
        sliding = await engine.call(lambda: run(SlidingWindow(window, slack=chosen.slack), layout))
        still = type(layout)(replace(layout.geometry, rotations=()), layout.device)
        unrotated = await engine.call(lambda: run(chosen, still))
        filled = min(fed.kept)
        first, last = Span(filled, filled + 4 * window), Span(len(ids) - 4 * window, len(ids) - piece)
        return {
            "bench": "stream",
            "model": model,
            "policy": policy,
            "tokens": len(ids),
            "system_tokens": len(head),
            "tail_tokens": tail_tokens,
            "dtype": loaded.adapter.geometry.dtype,
            "ppl_tail": fed.perplexity(tail),
            "ppl_reference": reference,
            "ppl_sliding": sliding.perplexity(tail),
            "ppl_unrotated": unrotated.perplexity(tail),
            "device_bytes_first": next(b for (at, _, _), b in zip(fed.pieces, fed.nbytes, strict=True) if at >= filled),
            "device_bytes_last": fed.nbytes[-1],
            "ms_per_token_first": fed.ms_per_token(first),
            "ms_per_token_last": fed.ms_per_token(last),
            "evictions": len(fed.kept),
            **machine(kv),
        }
