"""A turn's answer by beam search: the beams are forks of the session's state, which is given the winner at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from agentkv.engine.beams import BeamSearch, Search
from agentkv.engine.job import Generation, Job, JobResult, TokenSink, Verdict
from agentkv.engine.loading import LoadedModel
from agentkv.engine.sampling import Sampler, TokenLogprob
from agentkv.kv.contract import SequenceKV
from agentkv.schemas.sampling import SamplingParams
from agentkv.sessions.waiting import outlast
from agentkv.types import FinishReason

__all__ = ["searched"]


class _Likeliest(Sampler):
    """Takes the likeliest token, which nobody uses, and tells the log-probabilities of the ``many`` likeliest."""

    def __init__(self, params: SamplingParams, device: torch.device, many: int) -> None:
        super().__init__(params, device)
        self._many = many

    def logprob(self, logits: Tensor, token: int) -> TokenLogprob:
        scores = torch.log_softmax(logits.float(), dim=-1)
        best = torch.topk(scores, min(self._many, len(scores)))
        return TokenLogprob(float(scores[token]), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))


class _Deaf(TokenSink):
    def push(self, token: int, logprob: TokenLogprob | None) -> Verdict:
        return "stop"


async def searched(
    kv: SequenceKV,
    feed: Sequence[int],
    points: Sequence[int],
    search: Search,
    sampling: SamplingParams,
    model: LoadedModel,
) -> tuple[JobResult, Job]:
    """Compute ``feed`` into ``kv``, search, and compute the winner into it, all but its last token.

    Returns the winner as a job's result, and the job that rolls ``kv`` back. Where it fails or is cancelled ``kv`` is
    what it was. A beam copies its KV when it first writes to what it shares (with the layout ``paged``: the page).
    """
    generation = Generation(_Likeliest(sampling, model.adapter.device, search.candidates), 1, _Deaf())
    job = Job(kv, feed, model.piece, points, generation)
    beams: list[SequenceKV] = []
    try:
        first = await _run(job, model)
        found = BeamSearch(search)
        parents = found.advance([first.logprobs[0].top])
        states = [kv]
        while not found.done:
            grown = [states[parent].fork() for parent in parents]
            beams.extend(grown)
            _close(states, kv)
            states = grown
            steps = [
                _run(Job(state, beam.tokens[-1:], model.piece, generation=generation), model)
                for state, beam in zip(states, found.running, strict=True)
            ]
            results = await _together(steps)
            parents = found.advance([result.logprobs[0].top for result in results])
        _close(states, kv)
        winner = found.best.tokens
        if winner[:-1]:
            await _run(Job(kv, winner[:-1], model.piece), model)
    except BaseException:
        _close(beams, kv)
        job.roll_back()
        raise
    reason: FinishReason = "stop" if winner[-1] in search.end_ids else "length"
    return replace(first, tokens=winner, logprobs=(), finish_reason=reason), job


async def _run(job: Job, model: LoadedModel) -> JobResult:
    handle = model.engine.submit(job)
    try:
        result = await handle.finished()
    except asyncio.CancelledError:
        handle.cancel()
        await outlast(handle.finished())  # the model thread may still be writing
        raise
    assert result is not None
    return result


async def _together(steps: Sequence[object]) -> list[JobResult]:
    """All of them, also where one fails: none may be writing when the states are given up."""
    results = await asyncio.gather(*steps, return_exceptions=True)  # type: ignore[call-overload]
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)


def _close(states: Sequence[SequenceKV], but: SequenceKV) -> None:
    for state in states:
        if state is not but:
            state.close()
