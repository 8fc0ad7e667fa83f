"""Whether a session said what it had to, and holds the KV that it must: against what shares nothing with it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence

import torch
from retaining import positions
from soaking.oracle import Oracle, Violation
from transformers import DynamicCache

from agentkv.codecs import KVBlock
from agentkv.kv.contract import SequenceKV
from agentkv.sessions.db.records import TurnRecord
from agentkv.types import Placement, Span
from managing.reference import Known

__all__ = ["Witness"]

_NOISE = 1e-3
"""Numbers of KV closer than this, absolutely and relatively, differ by how a prefill was split, in float32."""


class Witness:
    """Holds one model's oracle; see ``soaking.oracle``."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle

    async def hear(self, known: Known, turns: Sequence[TurnRecord], before: Placement, after: Placement) -> None:
        """``turns`` are new; the session's KV state held ``before``, and holds ``after``. ``Violation`` for a token
        that is not the greedy choice.

        While nothing is evicted transformers computes the ledger in one pass; else a twin hears the whole script. A
        state that was rebuilt from the tokens it held has seen no others: these are then computed in one pass. Not so
        where layers see a sliding window: it does not reach across what was passed over.
        """
        if not known.plan.compared or not turns:
            return
        anew = any((turn.restore or {}).get("recompute") == "retained" for turn in turns)
        if anew or known.approximate:
            base = positions(before.kept) if anew else None
            await self._hear_rebuilt(known, turns, base, before, after)
        elif after.trivial:
            await self._oracle.check_full(known.ledger, [_said(turn) for turn in turns])
        else:
            await self._hear_twin(known)

    async def compare(self, known: Known, kv: SequenceKV) -> None:
        """``kv`` is live and idle: its numbers are those of transformers' own cache, or of the twin's KV."""
        if not known.plan.compared or known.approximate or not kv.length:
            return
        if kv.placement.trivial:
            theirs = await asyncio.to_thread(self._computed, kv)
        else:
            twin = known.twin._core.kv if known.twin is not None and known.heard == len(known.script) else None
            if twin is None or twin.placement.kept != kv.placement.kept:
                return
            theirs = [[twin.read(group, run) for run in kv.visible(group)] for group in range(len(kv.geometry.groups))]
        for group, blocks in enumerate(theirs):
            for run, theirs_block in zip(kv.visible(group), blocks, strict=True):
                _check_same(known, run, kv.read(group, run), theirs_block)
        self._oracle.counts["KV compared"] += 1

    def _computed(self, kv: SequenceKV) -> list[list[KVBlock]]:
        """What of transformers' cache of the same ids ``kv`` holds, by layer group and run."""
        cache, model = DynamicCache(), self._oracle._model
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        with torch.inference_mode():
            model(torch.tensor([list(kv.ids)]), **{name: cache})
        return [
            [
                KVBlock(
                    tuple(cache.layers[layer].keys[0, :, run.start : run.stop] for layer in group.layers),
                    tuple(cache.layers[layer].values[0, :, run.start : run.stop] for layer in group.layers),
                )
                for run in kv.visible(index)
            ]
            for index, group in enumerate(kv.geometry.groups)
        ]

    async def _hear_rebuilt(
        self, known: Known, turns: Sequence[TurnRecord], base: list[int] | None, before: Placement, after: Placement
    ) -> None:
        known.approximate = True
        await self.forget(known)
        if base is not None and not self._oracle._kv.model.forgets:
            rest = range(before.length, turns[0].span.start)
            known.rebuilt = [known.ledger[at] for at in (*base, *rest)]
        evicted = set(positions(before.kept)) - set(positions(after.kept))
        if known.rebuilt is None or evicted or len(turns) > 1:
            known.rebuilt = None
            return
        (turn,) = turns
        shift = len(known.rebuilt) - turn.span.start
        known.rebuilt += known.ledger[turn.span.start : turn.span.stop]
        said = _said(turn)
        await self._oracle.check_full(known.rebuilt, [Span(said.start + shift, said.stop + shift)])
        self._oracle.counts["rebuilt"] += len(said)

    async def _hear_twin(self, known: Known) -> None:
        plan = known.plan
        if known.twin is None:
            if known.heard:
                return  # it stood at a tie once, and went another way
            known.twin = await self._oracle.twin(plan.system, plan.policy)
        for entry in known.script[known.heard :]:
            known.heard += 1
            if isinstance(entry, str):
                await known.twin.set_policy(entry)
                continue
            ids = known.ledger[entry.span.start : entry.span.stop]
            if not await self._oracle.replay(known.twin, entry, known.items_of(entry), ids):
                await self.forget(known)
                return

    async def forget(self, known: Known) -> None:
        """Its twin is of no use any more."""
        if known.twin is not None:
            await known.twin.delete()
        known.twin = None


def _check_same(known: Known, run: Span, mine: KVBlock, theirs: KVBlock) -> None:
    for one, other in zip((*mine.keys, *mine.values), (*theirs.keys, *theirs.values), strict=True):
        if not torch.allclose(one, other, atol=_NOISE, rtol=_NOISE):
            off = float((one - other).abs().max())
            raise Violation(f"{known.id} holds KV of {run} that is off by {off:.4f}")


def _said(turn: TurnRecord) -> Span:
    return Span(turn.span.stop - turn.completion_tokens, turn.span.stop)
