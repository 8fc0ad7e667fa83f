"""One turn: restore, render, compute, generate, commit, store. Whole or not at all.

check ─▶ render ─▶ reserve memory ─▶ make live ─▶ model thread ─▶ commit in SQL ─▶ reply ─▶ write behind
          any failure or cancellation up to the commit: KV rolled back, nothing in SQL
"""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from agentkv.engine.beams import Search
from agentkv.engine.job import Generation, Job, JobResult
from agentkv.engine.loading import LoadedModel
from agentkv.engine.repeating import OnceSink
from agentkv.engine.retention import Retention
from agentkv.engine.sampling import Sampler, TokenLogprob
from agentkv.engine.sink import ReplySink, TextSink
from agentkv.errors import Closed, ContextTooLong, InvalidRequest, SessionBusy, Unsupported
from agentkv.kv.contract import SequenceKV
from agentkv.logs import Log, fault
from agentkv.policies.retention import ItemView
from agentkv.schemas.messages import Message, ToolCall
from agentkv.schemas.replies import Begun, Done, Event, Item, Logprob, Reply, TextDelta, ToolCallEvent
from agentkv.schemas.sampling import SamplingParams
from agentkv.sessions.adapting import adapting, what_would_help
from agentkv.sessions.attaching import Lead
from agentkv.sessions.beams import searched
from agentkv.sessions.calling import Calling, check_results, prepared
from agentkv.sessions.core import SessionCore
from agentkv.sessions.db.records import Cut, ItemRecord, TurnRecord
from agentkv.sessions.leading import lead
from agentkv.sessions.outputs import Output, said_before
from agentkv.sessions.recompute import recompute_retained, replay_is_cheap
from agentkv.sessions.relief import relieved
from agentkv.sessions.tiers import Tiers
from agentkv.sessions.waiting import finished, outlast
from agentkv.storage.faultpoints import fault_point
from agentkv.types import FinishReason, RestoreReport, SessionState, Span, Usage

__all__ = ["Appended", "Turn", "TurnInput", "events_of", "public_item"]

log = Log(__name__)

_TAIL = 512
"""Ids at the end of the ledger that rendering and detokenising look at."""


@dataclass(frozen=True, slots=True)
class TurnInput:
    """What a turn adds before it generates: messages, or raw ``ids``; and whether it generates at all."""

    kind: Literal["send", "append", "continue"]
    messages: tuple[Message, ...] = ()
    ids: tuple[int, ...] | None = None
    sampling: SamplingParams | None = None
    """``None``: commit the input, generate nothing."""
    again: bool = False
    """The answer takes the place of the session's last one."""
    behind: int | None = None
    """Length of the ledger that it goes on from. ``SessionBusy`` where another turn was faster; ``None``: any."""
    answer_id: str | None = None
    """Of the answer's item; ``None``: a new one."""

    @property
    def raw(self) -> bool:
        """A token-level turn: no template, no text."""
        return self.ids is not None


@dataclass(frozen=True, slots=True)
class Appended:
    """The end of a turn that generated nothing."""

    items: tuple[Item, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A turn's input as tokens: ``spans[i]`` is input item ``i``; ``prompt``: the generation prompt. In the ledger."""

    ids: list[int]
    spans: list[Span]
    prompt: Span


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
        self._calling: Calling | None = None
        self._output: Output | None = None
        self._called = 0
        self._job: Job | None = None
        self._told = 0
        self._begun = False
        self._loop = asyncio.get_running_loop()
        self._started = time.perf_counter()
        self._first_token: float | None = None
        self._seed: int | None = None
        self._sink: ReplySink | None = None
        self._handed: OnceSink | None = None
        self._live: tuple[RestoreReport, int] | None = None
        self._cut: Cut | None = None
        self.events: asyncio.Queue[Event | Appended | BaseException] = asyncio.Queue()
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

    async def rendered(self) -> tuple[list[ItemRecord], list[int]]:
        """The items and token ids of its input, for who commits them without computing. Call with the gate held."""
        await self._core.load(self._tiers.repository)
        found = await asyncio.to_thread(self._render)
        return self._items(found, Message(role="assistant", content=""), 0), found.ids

    async def _committed_turn(self) -> Done | Appended:
        core = self._core
        if self._request.behind not in (None, core.record.ledger_length):
            raise SessionBusy(core.id)
        await core.load(self._tiers.repository)
        async with self._tiers.branching.without_answer(core) if self._request.again else nullcontext() as self._cut:
            ledger = await core.load(self._tiers.repository)
            rendered = await asyncio.to_thread(self._render)
            await self._begin_output()
            # A search by beams evicts nothing: it takes what the context leaves.
            searching = self._request.sampling is not None and self._request.sampling.beams > 1
            more = len(rendered.ids) + (1 if searching else self._wanted)
            async with (
                adapting(core, self._tiers, self._items_ahead(rendered), more),
                self._tiers.attaching.attached(core, ledger) as leading,
            ):
                prompt = core.held_tokens + len(rendered.ids)
                tokens = prompt + self._allowed(prompt, self._request.sampling)
                attempt = partial(self._attached_turn, ledger, rendered, leading)
                return await relieved(core, self._tiers, self._model.engine, tokens, attempt)

    async def _attached_turn(self, ledger: array[int], rendered: _Rendered, leading: Lead | None) -> Done | Appended:
        core, request = self._core, self._request
        prompt_tokens = core.held_tokens + len(rendered.ids)
        generate = request.sampling is not None
        max_tokens = self._allowed(prompt_tokens, request.sampling)
        try:
            await self._tiers.residency.reserve(core, prompt_tokens + max_tokens)
            room = len(ledger) - core.record.kv_length + len(rendered.ids) + max_tokens
            if core.kv is None or self._live is None:  # else a first attempt brought it here, and was rolled back
                self._live = await self._made_live(room, ledger)
            restore, cached = self._live
            assert core.kv is not None
            if (
                leading is not None
                and not core.kv.length
                and len(ledger) + len(rendered.ids) > core.record.pinned + (not generate)
            ):
                await lead(core, core.kv, ledger, self._model, self._tiers, leading)
            self._tell_begun(prompt_tokens, cached, restore)
            # The last token's KV is always left to the next step: generation needs that step's logits.
            feed = [*ledger[core.kv.length :], *rendered.ids]
            if not generate:
                feed = feed[:-1]
            history = [*ledger[-_TAIL:], *rendered.ids]
            sink, result, job = await self._compute(feed, max_tokens, history, self._retention(rendered))
            try:
                text, calls = ("", ()) if sink is None else (sink.finish(), sink.calls)
                answer = Message(role="assistant", content=text, tool_calls=calls)
                fault_point("turn.before_commit")
                done = await self._commit(rendered, result, answer, restore, prompt_tokens, cached)
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

    async def _made_live(self, room: int, ledger: array[int]) -> tuple[RestoreReport, int]:
        """The session's KV on the device, and how many of the tokens that it held at the last commit were there.

        Where its policy evicts and much is lost, it is rebuilt here.
        """
        core, tiers = self._core, self._tiers
        restore = await tiers.make_live(core, room, lambda kv: self._fill(kv, ledger))
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
                await self._rebuild(core.kv, ledger)
            return replace(restore, recompute="replay"), cached
        await tiers.forget(core)
        await self._rebuild(tiers.open(core, held.tokens + room), ledger)
        gone = replace(restore, source="recompute", tokens=0, codec=None)
        return replace(gone, recomputed_tokens=held.tokens, recompute="retained"), 0

    async def _rebuild(self, kv: SequenceKV, ledger: array[int]) -> None:
        """The session's KV is what ``kv`` becomes, or on disk where this fails."""
        core = self._core
        core.kv, core.state = None, SessionState.DISK
        await self._fill(kv, ledger)
        core.kv, core.state = kv, SessionState.LIVE

    async def _fill(self, kv: SequenceKV, ledger: array[int]) -> None:
        """Compute into ``kv`` what the last commit held. Closes it where that fails or is cancelled."""
        core, rates = self._core, self._tiers.residency.rates
        held, pinned = core.record.held, core.record.pinned
        core.early.update(await recompute_retained(kv, ledger, held, pinned, self._model, rates))

    def _retention(self, rendered: _Rendered) -> Retention | None:
        """The session's policy, looking at its items and this turn's."""
        core, request = self._core, self._request
        if core.policy.window is None:
            return None
        views = self._items_ahead(rendered)
        if request.sampling is not None:
            kind = "tokens" if request.raw else "message"
            views.append(ItemView(Span(rendered.prompt.start, 2**62), "assistant", kind, core.record.turns))
        return Retention(core.policy, Span(0, core.record.pinned), tuple(views))

    def _items_ahead(self, rendered: _Rendered) -> list[ItemView]:
        """The session's items and this turn's input."""
        turn = self._core.record.turns
        if self._request.raw:
            views = [ItemView(span, "user", "tokens", turn) for span in rendered.spans]
        else:
            pairs = zip(self._request.messages, rendered.spans, strict=False)
            views = [ItemView(span, message.role, message.kind, turn) for message, span in pairs]
        return [*self._core.views, *views]

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

    def _render(self) -> _Rendered:
        """The turn's input as tokens, with spans in the ledger. Blocking: tokenising long texts takes a while."""
        core, request = self._core, self._request
        start = core.record.ledger_length
        if request.ids is not None:
            vocabulary = self._model.adapter.vocab_size
            wrong = next((i for i in request.ids if not 0 <= i < vocabulary), None)
            if wrong is not None:
                raise InvalidRequest(f"token id {wrong} is not in the vocabulary of {vocabulary:,} ids", param="ids")
            if not request.ids and start == 0:
                raise InvalidRequest("the session is empty: pass at least one token id", param="ids")
            if request.sampling is not None and request.sampling.tool_choice.mode == "required":
                raise InvalidRequest(
                    "tool_choice 'required' needs text: this is a token-level turn", param="tool_choice"
                )
            end = start + len(request.ids)
            spans = [Span(start, end)] if request.ids else []
            return _Rendered(list(request.ids), spans, Span(end, end))
        core.tool_use(self._model.tokenizer, self._tool_format)
        if request.kind == "continue" and core.last_finish == "length":
            self._prepare_calling((), goes_on=True)
            return _Rendered([], [], Span(start, start))
        if core.last_item is not None and core.last_item.kind == "tokens":
            raise InvalidRequest("this session holds raw tokens: go on with append_tokens and generate_tokens")
        assert core.ledger is not None
        check_results(core, request.messages)
        calls = core.last_calls if any(m.kind == "tool_result" for m in request.messages) else None
        turn = core.chat(self._model.tokenizer).turn(
            request.messages,
            core.ledger[-_TAIL:],
            first=core.fresh,
            last_tool_calls=calls,
            after_generated=core.last_item is not None and core.last_item.generated,
            generation_prompt=request.sampling is not None,
            last_role=core.last_role,
        )
        spans = [Span(start + span.start, start + span.stop) for _, span in turn.items]
        prompt = Span(start + turn.prompt_span.start, start + turn.prompt_span.stop)
        self._prepare_calling(turn.ids[turn.prompt_span.start :], goes_on=False)
        return _Rendered(turn.ids, spans, prompt)

    def _prepare_calling(self, prompt: Sequence[int], *, goes_on: bool) -> None:
        sampling = self._request.sampling
        if sampling is not None and sampling.constraint is None:
            self._calling = prepared(
                self._core, self._model.tokenizer, self._tool_format, sampling, prompt, goes_on=goes_on
            )

    async def _begin_output(self) -> None:
        """Compile what the reply has to follow, if anything: a fault there is told before anything is touched."""
        core, request = self._core, self._request
        asked = None if request.sampling is None else request.sampling.constraint
        forced = None if self._calling is None else self._calling.constraint
        if (wanted := asked or forced) is not None:
            said = await said_before(core, self._tiers.repository) if request.kind == "continue" else []
            self._output = await Output.begin(wanted, self._model.grammars, said, parse=asked is not None)

    async def _compute(
        self, feed: Sequence[int], max_tokens: int, history: Sequence[int], retention: Retention | None
    ) -> tuple[ReplySink | None, JobResult | None, Job | None]:
        """Through the model thread; ``None`` where there is nothing to compute."""
        core, model, sampling = self._core, self._model, self._request.sampling
        assert core.kv is not None
        sink = None
        generation = None
        if sampling is not None:
            end_ids = frozenset() if sampling.ignore_eos else model.end_ids
            tokenizer = None if self._request.raw else model.tokenizer
            if sampling.stop and tokenizer is None:
                raise InvalidRequest("stop strings need text: this is a token-level turn", param="stop")
            if self._sink is None or self._handed is None:
                read = TextSink if self._calling is None else self._calling.sink
                self._sink = read(tokenizer, end_ids, self._emit, stop=sampling.stop, context=history[-_TAIL:])
                self._handed = OnceSink(self._sink)
            else:  # it begins anew
                self._handed.again()
                await self._begin_output()
                sampling = sampling.model_copy(update={"seed": self._seed})
            sink, sampler = self._sink, Sampler(sampling, model.adapter.device)
            self._seed = sampler.seed
            matcher = None if self._output is None else self._output.matcher
            generation = Generation(sampler, max_tokens, self._handed, matcher)
        if not feed:
            return None, None, None
        if sampling is not None and sampling.beams > 1:
            assert sink is not None
            return await self._searched(feed, max_tokens, sink, sampling, retention)
        self._job = job = Job(core.kv, feed, model.piece, self._resume_points(), generation, retention)
        handle = model.engine.submit(job)
        try:
            result = await handle.finished()
        except asyncio.CancelledError:
            handle.cancel()
            finished = await outlast(handle.finished())
            if finished is not None:
                job.roll_back()  # it was done before it could be dropped
            raise
        finally:
            if job.tokens and self._first_token is None:
                self._first_token = job.prefilled
        assert result is not None
        self._tiers.residency.rates.prefilled(len(feed), result.prefill_seconds)
        core.early.update(result.windows)
        return sink, result, job

    async def _searched(
        self,
        feed: Sequence[int],
        max_tokens: int,
        sink: ReplySink,
        sampling: SamplingParams,
        retention: Retention | None,
    ) -> tuple[ReplySink, JobResult, Job]:
        """The answer by beam search; its text comes all at once."""
        core, model, residency = self._core, self._model, self._tiers.residency
        assert core.kv is not None
        if retention is not None:
            raise Unsupported(f"beams={sampling.beams} under policy {core.policy.name!r}", "use 'full'", param="beams")
        ends = frozenset[int]() if sampling.ignore_eos else model.end_ids
        residency.reserve_copies(core, core.kv.length + len(feed) + max_tokens, sampling.beams)
        search = Search(sampling.beams, max_tokens, ends, sampling.length_penalty, sampling.early_stopping)
        points = self._resume_points()
        result, job = await searched(core.kv, feed, points, search, sampling, model)
        residency.rates.prefilled(len(feed), result.prefill_seconds)
        core.early.update(result.windows)
        for token in result.tokens:
            sink.push(token, None)
        return sink, result, job

    def _resume_points(self) -> list[int]:
        """Where the prefill must stop: the pinned prefix's end.

        Sliding windows there are gone soon after. And how a prefill is split shows in its bits: so every session with
        the same head has the same KV of it, computed or attached.
        """
        pinned = self._core.record.pinned
        return [pinned] if pinned else []

    def _emit(self, part: str | ToolCall) -> None:
        """From the model thread, or at the end from the loop's own."""
        event: Event = TextDelta(part, self._new_logprobs()) if isinstance(part, str) else self._call_event(part)
        self._loop.call_soon_threadsafe(self.events.put_nowait, event)

    def _call_event(self, call: ToolCall) -> ToolCallEvent:
        self._called += 1
        return ToolCallEvent(call, self._called - 1)

    def _new_logprobs(self) -> tuple[Logprob, ...]:
        """Of the tokens that no event has had yet."""
        job, sampling = self._job, self._request.sampling
        if job is None or sampling is None or sampling.logprobs is None:
            return ()
        start, self._told = self._told, len(job.tokens)
        return _logprobs(job.tokens[start:], job.logprobs[start : self._told])

    async def _commit(
        self,
        rendered: _Rendered,
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
        items = self._items(rendered, answer, len(generated))
        seed = self._seed
        start = core.record.ledger_length
        ids = [*rendered.ids, *generated]
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
        parsed, unparsed = (None, None) if self._output is None else self._output.read(result)
        now = time.perf_counter()
        return Done(
            Reply(
                session_id=core.id,
                item_id=items[-1].id,
                text=answer.text,
                finish_reason=finish,
                usage=usage,
                restore=restore,
                ttft_seconds=(self._first_token or now) - self._started,
                seconds=now - self._started,
                ids=result.tokens,
                logprobs=_logprobs(result.tokens, result.logprobs) if request.sampling.logprobs is not None else None,
                seed=seed,
                tool_calls=answer.tool_calls,
                parsed=parsed,
                unparsed=unparsed,
            )
        )

    def _items(self, rendered: _Rendered, answer: Message, generated: int) -> list[ItemRecord]:
        core, request = self._core, self._request
        items: list[ItemRecord] = []
        assert core.chain is not None
        chain = core.chain.copy()

        def add(role: str, kind: Any, content: Any, span: Span, made: bool) -> None:
            name = (made and request.answer_id) or f"item_{secrets.token_hex(12)}"
            seq = core.items + len(items)
            item = ItemRecord(name, seq, core.record.turns, role, kind, content, span, made)
            items.append(replace(item, chain=chain.then_item(item, core.record)))

        if request.raw:
            for span in rendered.spans:
                add("user", "tokens", {"role": "user", "content": ""}, span, False)
        for message, span in zip(request.messages, rendered.spans, strict=False):
            add(message.role, message.kind, message.canonical(), span, False)
        if request.sampling is not None:
            span = Span(rendered.prompt.start, rendered.prompt.stop + generated)
            add("assistant", "tokens" if request.raw else answer.kind, answer.canonical(), span, True)
        return items


def public_item(record: ItemRecord) -> Item:
    """What users see of an item."""
    return Item(
        id=record.id,
        turn=record.turn,
        role=record.role,
        kind=record.kind,
        content=record.content,
        span=record.span,
        generated=record.generated,
    )


def _finish_reason(result: JobResult | None, answer: Message) -> FinishReason | None:
    """What a reply with calls ended for: to have them answered, unless it was cut."""
    if result is None or result.finish_reason != "stop" or not answer.tool_calls:
        return None if result is None else result.finish_reason
    return "tool_calls"


def _logprobs(tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> tuple[Logprob, ...]:
    pairs = zip(tokens, logprobs, strict=True)
    return tuple(Logprob(token, found.logprob, found.top) for token, found in pairs)


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
