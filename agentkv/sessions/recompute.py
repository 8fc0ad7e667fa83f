"""Rebuilding a KV state that is lost, for a session whose policy has evicted.

The ledger is the truth, and there are two ways from it. *Replay* computes all of it again through the policy: the same
evictions at the same places, the state that was lost. *Retained* computes only the tokens that were held, one span
directly behind the other: far fewer, but window keys had seen what is gone, so the state differs a little.
"""

from __future__ import annotations

import asyncio
from array import array

from agentkv.engine.job import Job
from agentkv.engine.loading import LoadedModel
from agentkv.kv.contract import CapturedPart, SequenceKV
from agentkv.sessions.core import SessionCore
from agentkv.sessions.rates import Rates
from agentkv.sessions.waiting import outlast
from agentkv.types import Placement

__all__ = ["computed", "recompute_retained", "replay_is_cheap"]

_REPLAY_FACTOR = 2
"""Replay computes at most so many times the retained tokens. A guess, until rates are measured."""


def replay_is_cheap(core: SessionCore, length: int, reason: str | None) -> bool:
    """Whether to compute the ledger from ``length`` on through the policy, rather than the retained tokens alone.

    Always where the tokens had not reached the disk (a killed process): they are those of its last turns, and the
    session goes on exactly. Never where the policy was changed on the way, or tokens were passed over: that would not
    happen again.
    """
    held = core.record.held
    lost = core.record.kv_length - length
    return max(core.record.policy_since, held.floor) <= length and (
        lost <= _REPLAY_FACTOR * held.tokens or (length > 0 and (reason or "").startswith("unstored"))
    )


async def recompute_retained(
    kv: SequenceKV, ledger: array[int], wanted: Placement, pinned: int, model: LoadedModel, rates: Rates
) -> dict[int, tuple[CapturedPart, ...]]:
    """Fill ``kv``, empty or with the first of them, with the tokens of ``wanted``; what lies between is passed over.

    Returns the sliding windows captured at the end of the pinned prefix. Closes ``kv`` where it fails or is cancelled.
    """
    windows: dict[int, tuple[CapturedPart, ...]] = {}
    try:
        for span in wanted.kept:
            if span.start > kv.length:
                kv.skip(ledger[kv.length : span.start])
            points = [pinned] if span.start < pinned <= span.stop else []
            feed = ledger[kv.length : span.stop]
            if feed:
                windows.update(await computed(Job(kv, feed, model.piece, points), model, rates))
                kv.settle()
        if kv.length < wanted.length:
            kv.skip(ledger[kv.length : wanted.length])
    except BaseException:
        kv.close()
        raise
    return windows


async def computed(job: Job, model: LoadedModel, rates: Rates) -> dict[int, tuple[CapturedPart, ...]]:
    """Run and measure a job that generates nothing; the sliding windows at its resume points.

    A cancelled one may have ended.
    """
    handle = model.engine.submit(job)
    try:
        result = await handle.finished()
    except asyncio.CancelledError:
        handle.cancel()
        await outlast(handle.finished())  # the model thread may still be writing
        raise
    assert result is not None
    rates.prefilled(len(job.feed), result.prefill_seconds)
    return dict(result.windows)
