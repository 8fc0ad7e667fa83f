"""One turn: restore, render, compute, generate, commit, store. Whole or not at all.

check ─▶ render ─▶ reserve memory ─▶ make live ─▶ model thread ─▶ commit in SQL ─▶ reply ─▶ write behind
          any failure or cancellation up to the commit: KV rolled back, nothing in SQL
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial

from agentkv.engine.job import JobResult
from agentkv.engine.loading import LoadedModel
from agentkv.errors import Closed, ContextTooLong, SessionBusy
from agentkv.logs import Log, fault
from agentkv.schemas.messages import Message
from agentkv.schemas.replies import Begun, Done, Event, Item, Reply
from agentkv.schemas.sampling import SamplingParams
from agentkv.sessions.adapting import adapting, what_would_help
from agentkv.sessions.answering import Answering, logprobs_of
from agentkv.sessions.attaching import Lead
from agentkv.sessions.core import SessionCore
from agentkv.sessions.db.records import Cut, TurnRecord
from agentkv.sessions.entering import (
    TAIL_TOKENS,
    Rendered,
    TurnInput,
    item_records,
    items_ahead,
    public_item,
    rendered,
    retention_ahead,
)
from agentkv.sessions.leading import lead
from agentkv.sessions.relief import relieved
from agentkv.sessions.tiers import Tiers
from agentkv.sessions.waiting import finished, outlast
from agentkv.sessions.waking import woken
from agentkv.storage.faultpoints import fault_point
from agentkv.types import FinishReason, RestoreReport, Span, Usage

__all__ = ["Appended", "Turn", "events_of"]

log = Log(__name__)


@dataclass(frozen=True, slots=True)
class Appended:
    """The end of a turn that generated nothing."""

    items: tuple[Item, ...]
    text: str = ""


class Turn:
    """Runs once. ``run`` posts events; its consumer is :func:`events_of`."""

    def __init__(
        self,
        core: SessionCore,
        model: LoadedModel,
        tiers: Tiers,
        request: TurnInput,
        *,
        default_max_tokens: int,
        tool_format: str = "auto",
    ) -> None:
        self._core = core
        self._model = model
        self._tiers = tiers
        self._request = request
        self._default_max_tokens = default_max_tokens
        self._tool_format = tool_format
        self._begun = False
        self._started = time.perf_counter()
        self._live: tuple[RestoreReport, int] | None = None
        self._cut: Cut | None = None
        self.events: asyncio.Queue[Event | Appended | BaseException] = asyncio.Queue()
        self._answering = Answering(core, model, tiers, request, self.events.put_nowait)
        self.committed = False

    async def run(self, wait_seconds: float | None) -> None:
        """The whole turn. Every outcome is posted; cancellation is raised as well."""
        try:
            async with self._core.turn(wait_seconds) as answered:
                last = await self._committed_turn()
                # The reply is out before the KV is stored: the next turn waits for the gate, not for the disk.
                answered()
                self.events.put_nowait(last)
                await self._tiers.behind.add(self._core)
        except asyncio.CancelledError:
            # Where the consumer asked for it nobody reads this; where the runtime is closing the consumer waits.
            how = "after it was committed" if self.committed else "and rolled it back"
            self.events.put_nowait(Closed(f"the runtime closed during this turn, {how}"))
            raise
        except Exception as error:
            if self.committed:
                log.error("kv_not_written", session=self._core.id, **fault(error))
            self.events.put_nowait(error)
        finally:
            self._tiers.residency.admission.freed()  # it is idle now: its memory may be had

    async def _committed_turn(self) -> Done | Appended:
        core = self._core
        if self._request.behind not in (None, core.record.ledger_length):
            raise SessionBusy(core.id)
        await core.load(self._tiers.repository)
        async with self._tiers.branching.without_answer(core) if self._request.again else nullcontext() as self._cut:
            ledger = await core.load(self._tiers.repository)
            entered = await asyncio.to_thread(rendered, core, self._model, self._request, self._tool_format)
            await self._answering.begin(entered.calling)
            # A search by beams evicts nothing: it takes what the context leaves.
            searching = self._request.sampling is not None and self._request.sampling.beams > 1
            more = len(entered.ids) + (1 if searching else self._wanted)
            async with (
                adapting(core, self._tiers, items_ahead(core, self._request, entered), more),
                self._tiers.attaching.attached(core, ledger) as leading,
            ):
                prompt = core.held_tokens + len(entered.ids)
                tokens = prompt + self._allowed(prompt, self._request.sampling)
                attempt = partial(self._attached_turn, ledger, entered, leading)
                return await relieved(core, self._tiers, self._model.engine, tokens, attempt)

    async def _attached_turn(self, ledger: array[int], entered: Rendered, leading: Lead | None) -> Done | Appended:
        core, request = self._core, self._request
        prompt_tokens = core.held_tokens + len(entered.ids)
        generate = request.sampling is not None
        max_tokens = self._allowed(prompt_tokens, request.sampling)
        try:
            await self._tiers.residency.reserve(core, prompt_tokens + max_tokens)
            room = len(ledger) - core.record.kv_length + len(entered.ids) + max_tokens
            if core.kv is None or self._live is None:  # else a first attempt brought it here, and was rolled back
                self._live = await woken(core, self._model, self._tiers, ledger, room)
            restore, cached = self._live
            assert core.kv is not None
            if (
                leading is not None
                and not core.kv.length
                and len(ledger) + len(entered.ids) > core.record.pinned + (not generate)
            ):
                await lead(core, core.kv, ledger, self._model, self._tiers, leading)
            self._tell_begun(prompt_tokens, cached, restore)
            # The last token's KV is always left to the next step: generation needs that step's logits.
            feed = [*ledger[core.kv.length :], *entered.ids]
            if not generate:
                feed = feed[:-1]
            history = [*ledger[-TAIL_TOKENS:], *entered.ids]
            retention = retention_ahead(core, request, entered)
            sink, result, job = await self._answering.compute(feed, max_tokens, history, retention)
            try:
                text, calls = ("", ()) if sink is None else (sink.finish(), sink.calls)
                answer = Message(role="assistant", content=text, tool_calls=calls)
                fault_point("turn.before_commit")
                done = await self._commit(entered, result, answer, restore, prompt_tokens, cached)
            except BaseException:
                if not self.committed and job is not None:
                    job.roll_back()
                raise
            fault_point("turn.after_commit")
            return done
        finally:
            self._tiers.residency.settle(core)

    def _tell_begun(self, prompt_tokens: int, cached: int, restore: RestoreReport) -> None:
        if not self._begun and self._request.sampling is not None:
            self._begun = True
            self.events.put_nowait(Begun(self._core.id, prompt_tokens, cached, restore))

    @property
    def _wanted(self) -> int:
        """Tokens to generate, if the context reaches."""
        sampling = self._request.sampling
        return 0 if sampling is None else sampling.max_tokens or self._default_max_tokens

    def _allowed(self, prompt_tokens: int, sampling: SamplingParams | None) -> int:
        """Tokens that may be generated: what was asked for, as far as the context reaches."""
        limit = self._model.context_limit
        if self._core.policy.window is not None:
            return self._wanted
        room = limit - prompt_tokens
        if room < (0 if sampling is None else 1):
            raise ContextTooLong(
                tokens=prompt_tokens + (0 if sampling is None else 1),
                limit=limit,
                advice=what_would_help(self._model, Span(0, self._core.record.pinned)),
            )
        return min(room, self._wanted)

    async def _commit(
        self,
        entered: Rendered,
        result: JobResult | None,
        answer: Message,
        restore: RestoreReport,
        prompt_tokens: int,
        cached: int,
    ) -> Done | Appended:
        """Ledger, items and turn in one transaction; then this process's view of them. Cancellation waits for it."""
        core, request = self._core, self._request
        assert core.kv is not None and core.ledger is not None
        generated = list(result.tokens) if result is not None else []
        finish = _finish_reason(result, answer)
        items = item_records(core, request, entered, answer, len(generated))
        seed = self._answering.seed
        start = core.record.ledger_length
        ids = [*entered.ids, *generated]
        turn = TurnRecord(
            seq=core.record.turns,
            span=Span(start, start + len(ids)),
            kind=request.kind,
            finish_reason=finish,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(generated),
            cached_tokens=cached,
            seed=seed,
            restore=asdict(restore),
            created_at=time.time(),
        )
        known, evicted_before = core.record.held.tokens, core.record.kv_length - core.record.held.tokens
        kv_length = core.kv.length
        placement = None if core.kv.placement.trivial else core.kv.placement
        write = asyncio.ensure_future(
            self._tiers.repository.commit_turn(
                core.id,
                turn,
                items,
                ids,
                expect_length=start,
                kv_length=kv_length,
                state="live",
                placement=placement,
                policy=core.record.policy,
                policy_since=core.record.policy_since,
                instead_of=self._cut,
            )
        )
        cancelled = await finished(write)
        self.committed = True
        if self._cut is not None:
            self._tiers.branching.shorten_stored(core, self._cut)
        core.kv.settle()
        core.ledger.extend(ids)
        core.note_items(items)
        core.last_finish = turn.finish_reason
        core.record = replace(
            core.record,
            ledger_length=start + len(ids),
            kv_length=kv_length,
            placement=placement,
            turns=turn.seq + 1,
            updated_at=turn.created_at,
        )
        usage = Usage(prompt_tokens, len(generated), cached)
        self._tiers.observer.turn(core, usage, known, kv_length - core.record.held.tokens - evicted_before)
        if cancelled is not None:
            raise cancelled
        public = tuple(public_item(item) for item in items)
        if request.sampling is None:
            return Appended(public)
        assert result is not None and finish is not None
        parsed, unparsed = (None, None) if self._answering.output is None else self._answering.output.read(result)
        now = time.perf_counter()
        return Done(
            Reply(
                session_id=core.id,
                item_id=items[-1].id,
                text=answer.text,
                finish_reason=finish,
                usage=usage,
                restore=restore,
                ttft_seconds=(self._answering.first_token or now) - self._started,
                seconds=now - self._started,
                ids=result.tokens,
                logprobs=logprobs_of(result.tokens, result.logprobs) if request.sampling.logprobs is not None else None,
                seed=seed,
                tool_calls=answer.tool_calls,
                parsed=parsed,
                unparsed=unparsed,
            )
        )


def _finish_reason(result: JobResult | None, answer: Message) -> FinishReason | None:
    """What a reply with calls ended for: to have them answered, unless it was cut."""
    if result is None or result.finish_reason != "stop" or not answer.tool_calls:
        return None if result is None else result.finish_reason
    return "tool_calls"


async def events_of(
    turn: Turn, tasks: set[asyncio.Task[None]], wait_seconds: float | None
) -> AsyncGenerator[Event | Appended]:
    """Run ``turn`` in a task of its own and yield its events. Closing the iterator early, or cancelling its consumer,
    rolls the turn back, unless it is committed already."""
    task = asyncio.create_task(turn.run(wait_seconds), name="agentkv-turn")
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    try:
        while True:
            event = await turn.events.get()
            if isinstance(event, BaseException):
                raise event
            yield event
            if isinstance(event, Done | Appended):
                return
    finally:
        if not turn.committed:
            task.cancel()
            await outlast(asyncio.wait([task]))
