"""What a session must have said: a recompute that shares nothing with the runtime under test.

Without evictions transformers' own model computes the whole ledger in one pass: every greedy token must be the
likeliest there, up to rounding. Under a policy that evicts, a twin in an undisturbed runtime gets the same turns, and
says the same.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from homes import opened
from transformers import AutoModelForCausalLM

from agentkv import AgentKV
from agentkv.sessions.db.records import ItemRecord, TurnRecord
from agentkv.sessions.session import Session
from agentkv.types import Span

__all__ = ["Oracle", "Violation"]

TIE = 2e-3
"""Logits (natural-log units) closer than this may change places where a prefill is split elsewhere, in float32."""


class Violation(AssertionError):
    """Something that must never happen has happened."""


class Oracle:
    """Answers for one model. ``counts``: tokens by how they were checked."""

    def __init__(self, model: Path, home: Path) -> None:
        self._folder = model
        self._home = home
        self.counts: Counter[str] = Counter()

    async def __aenter__(self) -> Oracle:
        self._model = AutoModelForCausalLM.from_pretrained(
            self._folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._kv: AgentKV = await opened(self._home, self._folder, blobs_url="memory:")
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._kv.close()

    async def twin(self, system: str | None, policy: str) -> Session:
        """A session that nothing ever happens to."""
        return await self._kv.sessions.create(system, policy=policy)

    async def check_full(self, ledger: Sequence[int], spans: Sequence[Span]) -> None:
        """Every token of ``spans`` is the greedy choice after all that is before it."""
        spans = [span for span in spans if len(span)]
        if not spans:
            return
        logits = await asyncio.to_thread(self._logits, list(ledger[: spans[-1].stop]))
        for span in spans:
            for at in range(*span):
                row = logits[at - 1]
                short = float(row.max() - row[ledger[at]])
                if short > TIE:
                    raise Violation(
                        f"wrong token {ledger[at]} at {at}: recomputed, {int(row.argmax())} is ahead by {short:.4f}"
                    )
                self.counts["recomputed_ties" if short else "recomputed"] += 1

    def _logits(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self._model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()

    async def replay(self, twin: Session, turn: TurnRecord, items: Sequence[ItemRecord], ids: Sequence[int]) -> bool:
        """The twin takes the turn, whose token ids are ``ids``. ``False``: it cannot be compared from here on."""
        given = ids[: len(ids) - turn.completion_tokens]
        said = ids[len(given) :]
        texts = [str(item.content["content"]) for item in items if not item.generated and item.kind == "message"]
        raw = all(item.kind == "tokens" for item in items)
        if turn.kind == "append":
            await (twin.append_tokens(given) if raw else twin.append([{"role": "user", "content": t} for t in texts]))
            return True
        sampling = {"max_tokens": turn.completion_tokens, "logprobs": 2}
        if raw:
            reply = await twin.generate_tokens(given, **sampling)
        elif turn.kind == "continue":
            reply = await twin.continue_(**sampling)
        else:
            reply = await twin.send([{"role": "user", "content": t} for t in texts], **sampling)
        for at, (token, wanted) in enumerate(zip(said, reply.ids, strict=False)):
            if token != wanted:
                assert reply.logprobs is not None
                best, second = reply.logprobs[at].top[:2]
                if token in (best[0], second[0]) and best[1] - second[1] < TIE:
                    self.counts["twin_ties"] += 1
                    return False
                raise Violation(f"wrong token {token} at {turn.span.start + len(given) + at}: its twin said {wanted}")
        if len(said) != len(reply.ids):
            raise Violation(f"turn {turn.seq} ended after {len(said)} tokens, its twin's after {len(reply.ids)}")
        self.counts["twin"] += len(said)
        return True
