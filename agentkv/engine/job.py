"""A job: what one turn asks of the model thread, and what comes back."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from agentkv.engine.matching import Matcher
from agentkv.engine.retention import Retention
from agentkv.engine.sampling import Sampler, TokenLogprob
from agentkv.kv.contract import CapturedPart, SequenceKV, Undo
from agentkv.logs import Log, fault
from agentkv.types import FinishReason, Span

__all__ = ["Generation", "Job", "JobResult", "TokenSink", "Verdict", "longest_piece"]

log = Log(__name__)

Verdict = Literal["go on", "stop"]


class TokenSink(ABC):
    """Takes each generated token, on the model thread; must be quick and must not raise."""

    @abstractmethod
    def push(self, token: int, logprob: TokenLogprob | None) -> Verdict:
        """The next token. ``"stop"`` ends the generation after it (an end token, a stop string)."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What to do once the input is computed: at most ``max_tokens`` tokens, through ``sink``.

    ``matcher`` allows them, where the output follows a grammar; it is this generation's alone.
    """

    sampler: Sampler
    max_tokens: int
    sink: TokenSink
    matcher: Matcher | None = None


@dataclass(frozen=True, slots=True)
class JobResult:
    """``tokens``: the generated ids; the last one has no KV yet. Times in seconds, from submission.

    ``windows``: at each resume point the prefill passed, the sliding groups' keys and what recurrent layers carry.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    queued_seconds: float
    prefill_seconds: float
    first_token_seconds: float | None
    windows: dict[int, tuple[CapturedPart, ...]]


@dataclass(slots=True, eq=False)
class Job:
    """Tokens to compute behind ``kv.length``, then perhaps tokens to generate.

    At least one token is fed: sampling needs the logits of the last one. ``feed`` is cut into pieces of ``piece``
    tokens counted from its start, at each of ``resume_points`` (ledger positions), and where ``retention`` evicts: the
    cuts depend on the turn alone, never on the load, since they show in the bits of bf16.
    """

    kv: SequenceKV
    feed: Sequence[int]
    piece: int
    resume_points: Sequence[int] = ()
    generation: Generation | None = None
    retention: Retention | None = None

    cancelled: bool = False
    undo: Undo | None = None
    pieces: list[Span] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    windows: dict[int, tuple[CapturedPart, ...]] = field(default_factory=dict)
    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None
    prefilled: float | None = None
    stuck: Exception | None = None

    def __post_init__(self) -> None:
        if not self.feed:
            raise ValueError("a job computes at least one token: feed is empty")
        if self.piece < 1:
            raise ValueError(f"pieces hold at least one token, got {self.piece}")

    def begin(self) -> None:
        """On the model thread, when the job is taken up: the way back, and the cuts."""
        self.started = time.perf_counter()
        self.undo = self.kv.undo_record()
        start = self.kv.length
        stop = start + len(self.feed)
        points = {p for p in self.resume_points if start < p < stop}
        if self.retention is not None:
            evictions = self.retention.cuts(start, self.kv.placement.kept, len(self.feed))
            points.update(p for p in evictions if p > start)
        cuts = [start, *sorted(points)]
        for a, b in zip(cuts, [*cuts[1:], stop], strict=True):
            self.pieces.extend(_cut(Span(a, b), self.piece))

    def make_room(self) -> None:
        """Before each step, on the model thread: evict, where the next token would overflow the window, and reserve."""
        if self.retention is not None and self.retention.full(self.kv.tokens):
            self.kv.keep(self.retention.kept(self.kv.length, self.kv.placement.kept))
        self.kv.reserve(len(self.next_ids()))

    def roll_back(self) -> None:
        """KV back to where the job began. Where even that fails it is closed: what is stored, or the ledger, has it."""
        if self.undo is None:
            return
        try:
            self.kv.rollback(self.undo)
        except Exception as error:
            log.error("kv_not_rolled_back", **fault(error))
            self.kv.close()

    @property
    def decoding(self) -> bool:
        """Whether the input is computed and a generated token waits to be fed."""
        return not self.pieces

    def next_ids(self) -> Sequence[int]:
        """What the next step computes: the next piece, or the last generated token."""
        if self.pieces:
            start = self.pieces[-1].stop - len(self.feed)
            piece = self.pieces[0]
            return self.feed[piece.start - start : piece.stop - start]
        return self.tokens[-1:]

    def wants_logits(self) -> bool:
        """Whether the next step's last row is sampled."""
        return self.generation is not None and len(self.pieces) <= 1

    def allowed(self) -> Tensor | None:
        """``[V] bool``: the tokens that may come next; ``None`` for any. Where none can be named, the job is stuck."""
        if self.generation is None or self.generation.matcher is None:
            return None
        try:
            return self.generation.matcher.allowed()
        except Exception as error:
            self.stuck = error
            return None

    def take(self, token: int) -> FinishReason | Literal["go on"]:
        """The next token. Whether to go on, or why it was the last; raises what keeps this job alone from going on."""
        assert self.generation is not None
        if self.stuck is not None:
            raise self.stuck
        matcher = self.generation.matcher
        if matcher is not None:
            matcher.advance(token)
        self.tokens.append(token)
        verdict = self.generation.sink.push(token, self.logprobs[-1] if self.logprobs else None)
        if verdict == "stop" or (matcher is not None and matcher.finished):
            return "stop"
        return "length" if len(self.tokens) >= self.generation.max_tokens else "go on"

    def result(self, finish_reason: FinishReason | None, first_token: float | None) -> JobResult:
        """What the owner gets."""
        started = self.started or self.submitted
        return JobResult(
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            finish_reason=finish_reason,
            queued_seconds=started - self.submitted,
            prefill_seconds=(self.prefilled or started) - started,
            first_token_seconds=first_token,
            windows=self.windows,
        )


def longest_piece(piece: int) -> int:
    """Most tokens of a step of a job whose pieces have ``piece`` tokens."""
    return piece + (piece - 1) // 4


def _cut(span: Span, piece: int) -> list[Span]:
    """Pieces of ``piece`` tokens. A rest of less than a quarter would cost nearly a piece's time for its few tokens."""
    pieces = list(span.split(piece))
    if len(pieces) > 1 and 4 * len(pieces[-1]) < piece:
        *pieces, before, rest = pieces
        pieces.append(Span(before.start, rest.stop))
    return pieces
