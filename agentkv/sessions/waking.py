"""A session's KV on the device when its turn begins: restored, or computed from the ledger where little is left."""

from __future__ import annotations

from array import array
from dataclasses import replace

from agentkv.engine.loading import LoadedModel
from agentkv.kv.contract import SequenceKV
from agentkv.sessions.core import SessionCore
from agentkv.sessions.recompute import recompute_retained, replay_is_cheap
from agentkv.sessions.tiers import Tiers
from agentkv.types import RestoreReport, SessionState

__all__ = ["woken"]


async def woken(
    core: SessionCore, model: LoadedModel, tiers: Tiers, ledger: array[int], room: int
) -> tuple[RestoreReport, int]:
    """Make ``core`` live, with room for ``room`` tokens, and say how many of the tokens that it held at the last commit
    were there. Call with the gate held and memory reserved.

    Where its policy evicts and much is lost, it is rebuilt here.
    """

    async def fill(kv: SequenceKV) -> None:
        """Compute into ``kv`` what the last commit held. Closes it where that fails or is cancelled."""
        rates = tiers.residency.rates
        core.early.update(await recompute_retained(kv, ledger, core.record.held, core.record.pinned, model, rates))

    async def rebuild(kv: SequenceKV) -> None:
        """The session's KV is what ``kv`` becomes, or on disk where this fails."""
        core.kv, core.state = None, SessionState.DISK
        await fill(kv)
        core.kv, core.state = kv, SessionState.LIVE

    restore = await tiers.make_live(core, room, fill)
    assert core.kv is not None
    held, window = core.record.held, core.policy.window
    cached = sum(len(old.intersect(have)) for old in held.kept for have in core.kv.placement.kept)
    if restore.source == "recompute":
        cached = 0  # all of it was computed just now, or is not there
    if not restore.recomputed_tokens or not core.evicts:
        return restore, cached
    if core.record.placement is None or replay_is_cheap(core, core.kv.length, restore.reason):
        if core.record.placement is None and window is not None and held.tokens > window:
            # Nothing was evicted until the window was made smaller, and nothing may be on the way back there.
            await rebuild(core.kv)
        return replace(restore, recompute="replay"), cached
    await tiers.forget(core)
    await rebuild(tiers.open(core, held.tokens + room))
    gone = replace(restore, source="recompute", tokens=0, codec=None)
    return replace(gone, recomputed_tokens=held.tokens, recompute="retained"), 0
