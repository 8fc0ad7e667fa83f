"""The first of several sessions with the same head computes it for all of them."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace

from agentkv.engine.job import Job
from agentkv.engine.loading import LoadedModel
from agentkv.kv.contract import SequenceKV
from agentkv.sessions.attaching import Lead
from agentkv.sessions.core import SessionCore
from agentkv.sessions.recompute import computed
from agentkv.sessions.tiers import Tiers
from agentkv.sessions.waiting import finished

__all__ = ["lead"]


async def lead(
    core: SessionCore,
    kv: SequenceKV,
    ledger: array[int],
    model: LoadedModel,
    tiers: Tiers,
    others: Lead,
) -> None:
    """Compute the head into the empty ``kv`` and have it stored in the background; ``others`` are told then.

    It is the session's from here on, whatever becomes of the turn; its bits are those of a prefill that stops there.
    Call with the gate held.
    """
    pinned = core.record.pinned
    job = Job(kv, ledger[:pinned], model.piece, [pinned])
    try:
        windows = await computed(job, model, tiers.residency.rates)
        update = tiers.repository.update_session(core.id, core.record.tenant, kv_length=pinned, state="live")
        cancelled = await finished(asyncio.ensure_future(update))
    except BaseException:
        if kv.length:
            job.roll_back()
        raise
    core.record = replace(core.record, kv_length=pinned, state="live")
    kv.settle()
    core.early.update(windows)
    if cancelled is not None:
        raise cancelled
    await tiers.behind.add(core)
    if core.writing is not None:
        others.stored_by(core.writing)
