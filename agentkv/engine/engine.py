"""The model thread: takes jobs, runs packed steps, hands tokens out."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from agentkv.engine.adapter import ModelAdapter, StepInput
from agentkv.engine.job import Job, JobResult
from agentkv.engine.sampling import choose, likeliest
from agentkv.engine.scheduler import Scheduler
from agentkv.errors import AgentKVError, Closed, EngineFailed, InvalidRequest
from agentkv.kv.contract import Layout, Slot
from agentkv.logs import Log, fault
from agentkv.memory import OutOfDeviceMemory, is_out_of_memory, out_of_memory
from agentkv.types import FinishReason

__all__ = ["Engine", "JobHandle"]

log = Log(__name__)

T = TypeVar("T")


class JobHandle:
    """The event loop's side of a job."""

    def __init__(self, job: Job, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self.job = job
        self._loop = loop
        self._wake = wake
        self._done: asyncio.Future[JobResult | None] = loop.create_future()

    def cancel(self) -> None:
        """Ask the model thread to drop the job before its next step. ``finished`` says when it has."""
        self.job.cancelled = True
        self._wake()

    async def finished(self) -> JobResult | None:
        """The result, or ``None`` for a cancelled job, whose KV state is rolled back by then.

        Raises what the model thread raised. Cancelling the waiter does not cancel the job: call :meth:`cancel`.
        """
        return await asyncio.shield(self._done)

    def deliver(self, outcome: JobResult | BaseException | None) -> Callable[[], None]:
        """From the model thread: the callback that resolves this handle on its loop."""

        def resolve() -> None:
            if self._done.done():
                return
            if isinstance(outcome, BaseException):
                self._done.set_exception(outcome)
                self._done.exception()  # the waiter may be gone; that is no warning's business
            else:
                self._done.set_result(outcome)

        return resolve

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that awaits this job."""
        return self._loop


class _Call:
    """A function to be run on the model thread."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.future: Future[Any] = Future()

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._work())
        except Exception as error:
            self.future.set_exception(error)

    def fail(self, error: BaseException) -> None:
        """It will not be run. A waiter that has gone already is no trouble."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Engine:
    """Owns the model from one named thread. ``submit`` is the only way in."""

    def __init__(self, adapter: ModelAdapter, layout: Layout[Any], *, joint_rows: int) -> None:
        self.adapter = adapter
        self.layout = layout
        self.steps = 0
        self.computed_tokens = 0
        self._scheduler = Scheduler(joint_rows)
        self._handles: dict[Job, JobHandle] = {}
        self._inbox: queue.SimpleQueue[JobHandle | _Call | None] = queue.SimpleQueue()
        self._stopping = False
        self._gate = threading.Lock()
        """Held to look at the two flags around it and put into the inbox: no job arrives after the last look."""
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="agentkv-model", daemon=True)

    def start(self) -> None:
        """Start the model thread."""
        self._thread.start()

    async def stop(self) -> None:
        """Cancel what runs, end the thread. Idempotent."""
        with self._gate:
            self._stopping = True
            self._inbox.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        """Whether jobs are being served."""
        return self._thread.is_alive() and not self._stopping

    def submit(self, job: Job) -> JobHandle:
        """Queue a job, from a loop's thread. ``Closed`` after ``stop``, ``EngineFailed`` once the thread died."""
        handle = JobHandle(job, asyncio.get_running_loop(), lambda: self._inbox.put(None))
        self._put(handle)
        return handle

    async def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the model thread, between two steps, and return what it returns. Raises as ``submit`` does.

        For whatever computes in parallel regions: a second thread that does so makes every region of both slower.
        """
        call = _Call(work)
        self._put(call)
        result: T = await asyncio.wrap_future(call.future)
        return result

    async def give_back(self) -> None:
        """What torch's allocator keeps of the device and nothing uses goes back to it. Raises as ``submit`` does."""
        if self.layout.device.type == "cuda":
            await self.call(torch.cuda.empty_cache)

    def _put(self, item: JobHandle | _Call) -> None:
        with self._gate:
            if self._stopping:
                raise Closed("the engine is stopped")
            if self._failure is not None:
                raise EngineFailed("the model thread died; restart the process") from self._failure
            self._inbox.put(item)

    # -- the model thread ---------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._take_waiting()
                if len(self._scheduler):
                    self.step()
        except BaseException as error:
            with self._gate:
                self._failure = error
            log.error("model_thread_died", **fault(error))
        finally:
            outcome = EngineFailed("the model thread died") if self._failure else None
            for job in list(self._handles):
                self._drop(job, outcome)
            while True:
                try:
                    late = self._inbox.get_nowait()
                except queue.Empty:
                    break
                ended = outcome or Closed("the engine stopped")
                if isinstance(late, _Call):
                    late.fail(ended)
                elif late is not None:
                    self._post(late, ended)

    def _take_waiting(self) -> None:
        """Move new jobs to the scheduler, let cancelled ones go; waits when there is nothing to do."""
        block = not len(self._scheduler)
        while True:
            try:
                handle = self._inbox.get(block=block)
            except queue.Empty:
                break
            block = False
            if isinstance(handle, _Call):
                handle.run()
            elif handle is not None:
                self._handles[handle.job] = handle
                if self._begin(handle.job):
                    self._scheduler.add(handle.job)
            elif self._stopping:
                return
        for job in self._scheduler.jobs():
            if job.cancelled:
                self._drop(job, None)

    def _begin(self, job: Job) -> bool:
        try:
            limit = self.adapter.vocab_size
            if wrong := [token for token in job.feed if not 0 <= token < limit]:
                # In a step it would fail the whole batch, and on CUDA the process.
                raise InvalidRequest(f"token id {wrong[0]} is outside the model's vocabulary of {limit}")
            job.begin()
        except Exception as error:
            self._drop(job, _as_ours(error))
            return False
        return True

    def step(self) -> None:
        """Plan one packed batch, run the model once, sample, hand tokens to their streams."""
        batch = self._each(self._scheduler.plan(), Job.make_room, "room_not_made")
        if batch:
            self._pass(batch)

    def _pass(self, batch: Sequence[Job]) -> None:
        """The model once over ``batch``. Where its memory does not suffice for all, once over each."""
        try:
            computed = self._run(batch)
        except Exception as error:
            cause, failed = error, _as_ours(error)
            _note("step_failed", failed, error, jobs=len(batch))
        else:
            self._deliver(batch, *computed)
            return
        # Out here the traceback, and with it what the pass had allocated, is gone.
        if isinstance(failed, OutOfDeviceMemory) and len(batch) > 1:
            for job in batch:
                self._pass([job])
            return
        for job in batch:
            self._drop(job, _as_ours(cause))

    def _each(self, jobs: Sequence[Job], work: Callable[[Job], None], event: str) -> list[Job]:
        """Those for which ``work`` went well. A fault is its own job's: that one is dropped, ``event`` says so."""
        well = []
        for job in jobs:
            try:
                work(job)
            except Exception as error:
                failed = _as_ours(error)
                _note(event, failed, error)
                self._drop(job, failed)
            else:
                well.append(job)
        return well

    def _run(self, batch: Sequence[Job]) -> tuple[Tensor, list[int]]:
        """The model's pass: logits of the jobs that want some, in order, and their likeliest tokens.

        No job has advanced after it, nor where it raises: it can be run again, together or apart.
        """
        ids: list[int] = []
        positions: list[int] = []
        slots: list[Slot] = []
        logit_rows: list[int] = []
        for job in batch:
            new = job.next_ids()
            slots.append(Slot(job.kv, len(ids), len(ids) + len(new)))
            positions.extend(range(job.kv.next_position, job.kv.next_position + len(new)))
            ids.extend(new)
            if job.wants_logits():
                logit_rows.append(len(ids) - 1)
        meta = self.layout.plan(slots)
        logits = self.adapter.run(StepInput(ids, positions, logit_rows), self.layout, meta)
        with torch.inference_mode():
            found = logits, likeliest(logits) if logit_rows else []
        self.steps += 1
        self.computed_tokens += len(ids)
        return found

    def _deliver(self, batch: Sequence[Job], logits: Tensor, likely: Sequence[int]) -> None:
        """What the pass computed becomes part of each job."""
        now, tokens = time.perf_counter(), {}
        rows = {job: row for row, job in enumerate(job for job in batch if job.wants_logits())}

        def sample(job: Job) -> None:
            if job in rows and job.generation is not None:
                row, sampler = rows[job], job.generation.sampler
                with torch.inference_mode():
                    tokens[job], logprob = choose(logits[row], likely[row], sampler, job.kv.ids, job.allowed())
                if logprob is not None:
                    job.logprobs.append(logprob)

        def hand_out(job: Job) -> None:
            verdict = self._advance(job, tokens.get(job), now)
            if verdict != "go on":
                first_token = job.prefilled - job.submitted if job.tokens and job.prefilled else None
                self._finish(job, job.result(verdict, first_token))

        advanced = self._each(batch, lambda job: job.kv.advance(job.next_ids()), "kv_not_advanced")
        self._each(self._each(advanced, sample, "token_not_chosen"), hand_out, "token_not_handed_out")

    def _advance(self, job: Job, token: int | None, now: float) -> FinishReason | Literal["go on"] | None:
        """The job's own bookkeeping after a step: whether it goes on, or why it is done (``None``: only prefilled)."""
        if job.pieces:
            reached = job.pieces.pop(0).stop
            if reached in job.resume_points:
                job.windows[reached] = job.kv.window_snapshot()
            if not job.pieces:
                job.prefilled = now
                if job.generation is None:
                    return None
                self._scheduler.prefilled(job)
        if token is None or job.generation is None:
            return "go on"
        return job.take(token)

    def _finish(self, job: Job, outcome: JobResult | BaseException | None) -> None:
        self._scheduler.remove(job)
        handle = self._handles.pop(job)
        self._post(handle, outcome)

    def _drop(self, job: Job, outcome: BaseException | None) -> None:
        """Roll the job's KV back, then report: an error, or ``None`` for a cancellation."""
        job.roll_back()
        self._finish(job, outcome)

    @staticmethod
    def _post(handle: JobHandle, outcome: JobResult | BaseException | None) -> None:
        try:
            handle.loop.call_soon_threadsafe(handle.deliver(outcome))
        except RuntimeError:  # the loop is closed: nobody waits any more
            log.warning("job_outlived_its_loop")


def _as_ours(error: Exception) -> AgentKVError:
    """What a failed step looks like to the caller."""
    if isinstance(error, AgentKVError):
        return error
    if is_out_of_memory(error):
        return out_of_memory(error)
    ours = EngineFailed(f"the model thread raised {type(error).__name__}: {error}; the turn was rolled back")
    ours.__cause__ = error
    return ours


def _note(event: str, failed: AgentKVError, error: Exception, **fields: int) -> None:
    """In the log. What was for want of memory is tried again before anybody hears of it."""
    if isinstance(failed, OutOfDeviceMemory):
        log.warning(event, **fields, **fault(failed))
    else:
        log.error(event, **fields, **fault(error))
