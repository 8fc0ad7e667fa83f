"""The computing part of a turn: its input and its answer through the model thread, told as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from agentkv.engine.beams import Search
from agentkv.engine.job import Generation, Job, JobResult
from agentkv.engine.loading import LoadedModel
from agentkv.engine.repeating import OnceSink
from agentkv.engine.retention import Retention
from agentkv.engine.sampling import Sampler, TokenLogprob
from agentkv.engine.sink import ReplySink, TextSink
from agentkv.errors import InvalidRequest, Unsupported
from agentkv.schemas.messages import ToolCall
from agentkv.schemas.replies import Event, Logprob, TextDelta, ToolCallEvent
from agentkv.schemas.sampling import SamplingParams
from agentkv.sessions.beams import searched
from agentkv.sessions.calling import Calling
from agentkv.sessions.core import SessionCore
from agentkv.sessions.entering import TAIL_TOKENS, TurnInput
from agentkv.sessions.outputs import Output, said_before
from agentkv.sessions.tiers import Tiers
from agentkv.sessions.waiting import outlast

__all__ = ["Answering", "logprobs_of"]


class Answering:
    """One turn's answer. Made on the event loop; a turn that ran out of memory computes it again, and what was told
    once is not told again.

    ``output``: what the answer has to follow; ``seed``: what it was sampled with; ``first_token``: when it was there,
    in seconds of ``time.perf_counter``.
    """

    def __init__(
        self, core: SessionCore, model: LoadedModel, tiers: Tiers, request: TurnInput, post: Callable[[Event], None]
    ) -> None:
        self._core = core
        self._model = model
        self._tiers = tiers
        self._request = request
        self._post = post
        self._loop = asyncio.get_running_loop()
        self._calling: Calling | None = None
        self._sink: ReplySink | None = None
        self._handed: OnceSink | None = None
        self._job: Job | None = None
        self._called = 0
        self._told = 0
        self.output: Output | None = None
        self.seed: int | None = None
        self.first_token: float | None = None

    async def begin(self, calling: Calling | None) -> None:
        """Compile what the reply has to follow, if anything: a fault there is told before anything is touched."""
        self._calling = calling
        await self._compile()

    async def _compile(self) -> None:
        request = self._request
        asked = None if request.sampling is None else request.sampling.constraint
        forced = None if self._calling is None else self._calling.constraint
        if (wanted := asked or forced) is not None:
            said = await said_before(self._core, self._tiers.repository) if request.kind == "continue" else []
            self.output = await Output.begin(wanted, self._model.grammars, said, parse=asked is not None)

    async def compute(
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
                self._sink = read(tokenizer, end_ids, self._emit, stop=sampling.stop, context=history[-TAIL_TOKENS:])
                self._handed = OnceSink(self._sink)
            else:  # it begins anew
                self._handed.again()
                await self._compile()
                sampling = sampling.model_copy(update={"seed": self.seed})
            sink, sampler = self._sink, Sampler(sampling, model.adapter.device)
            self.seed = sampler.seed
            matcher = None if self.output is None else self.output.matcher
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
            if job.tokens and self.first_token is None:
                self.first_token = job.prefilled
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
        self._loop.call_soon_threadsafe(self._post, event)

    def _call_event(self, call: ToolCall) -> ToolCallEvent:
        self._called += 1
        return ToolCallEvent(call, self._called - 1)

    def _new_logprobs(self) -> tuple[Logprob, ...]:
        """Of the tokens that no event has had yet."""
        job, sampling = self._job, self._request.sampling
        if job is None or sampling is None or sampling.logprobs is None:
            return ()
        start, self._told = self._told, len(job.tokens)
        return logprobs_of(job.tokens[start:], job.logprobs[start : self._told])


def logprobs_of(tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> tuple[Logprob, ...]:
    """Token by token."""
    pairs = zip(tokens, logprobs, strict=True)
    return tuple(Logprob(token, found.logprob, found.top) for token, found in pairs)
