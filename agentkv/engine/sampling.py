"""Choosing the next token: greedy, or transformers' logits processors with a generator of the request's own."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from agentkv.schemas.sampling import SamplingParams

__all__ = ["Sampler", "TokenLogprob", "choose", "likeliest"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of the token under the raw distribution, and the ``top`` likeliest (id, logprob)."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """One request's way of choosing tokens. Same seed, same session, same output; the neighbours do not matter.

    Processors run in the order of transformers' ``generate``: repetition penalty, temperature, top-k, top-p, min-p.
    """

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        self.greedy = not params.temperature
        self.top_logprobs = params.logprobs
        self.seed: int | None = None
        self._generator: torch.Generator | None = None
        processors = LogitsProcessorList()
        if params.repetition_penalty is not None and params.repetition_penalty != 1.0:
            processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
        self.needs_history = len(processors) > 0
        if not self.greedy:
            self.seed = secrets.randbits(63) if params.seed is None else params.seed
            self._generator = torch.Generator(device=device).manual_seed(self.seed)
            if params.temperature is not None and params.temperature != 1.0:
                processors.append(TemperatureLogitsWarper(params.temperature))
            if params.top_k:
                processors.append(TopKLogitsWarper(params.top_k))
            if params.top_p is not None and params.top_p < 1.0:
                processors.append(TopPLogitsWarper(params.top_p))
            if params.min_p:
                processors.append(MinPLogitsWarper(params.min_p))
        self._processors = processors
        self.plain = self.greedy and not processors
        """Whether the argmax of the raw logits is the answer."""

    def sample(self, logits: Tensor, history: Sequence[int]) -> int:
        """The next token from ``logits [V]`` (any dtype; ``-inf`` is never chosen), given all ids of the session."""
        scores = logits.float()[None]
        if self._processors:
            ids = torch.tensor([list(history)] if self.needs_history else [[0]], device=logits.device)
            scores = self._processors(cast(torch.LongTensor, ids), cast(torch.FloatTensor, scores))
        if self.greedy:
            return int(scores.argmax())
        weights = torch.softmax(scores[0], dim=-1)
        return int(torch.multinomial(weights, 1, generator=self._generator))

    def logprob(self, logits: Tensor, token: int) -> TokenLogprob | None:
        """Log-probabilities of ``logits [V]``, where the request asked for them."""
        if self.top_logprobs is None:
            return None
        scores = torch.log_softmax(logits.float(), dim=-1)
        best = torch.topk(scores, self.top_logprobs) if self.top_logprobs else None
        top = () if best is None else tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return TokenLogprob(float(scores[token]), top)


def likeliest(logits: Tensor) -> list[int]:
    """The likeliest token of each row of ``logits [n, V]``, in one transfer from the device."""
    found: list[int] = logits.argmax(dim=-1).tolist()
    return found


def choose(
    logits: Tensor, likely: int, sampler: Sampler, history: Sequence[int], allowed: Tensor | None = None
) -> tuple[int, TokenLogprob | None]:
    """The next token from ``logits [V]``, of which ``likely`` is the likeliest.

    ``allowed``: the tokens that may be chosen, ``[V] bool``; ``None`` for all. The others are out before the processors
    run: after top-k, top-p or min-p there might be none left. Log-probabilities are those without it.
    """
    if allowed is not None:
        token = sampler.sample(logits.masked_fill(~allowed.to(logits.device), -torch.inf), history)
    else:
        token = likely if sampler.plain else sampler.sample(logits, history)
    return token, sampler.logprob(logits, token)
