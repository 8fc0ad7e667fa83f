"""A server without sessions, for comparison: every request computes its whole conversation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from agentkv.bench.serving import Answer
from agentkv.bench.traffic import Conversation, Turn
from agentkv.engine.job import Generation, Job
from agentkv.engine.loading import LoadedModel
from agentkv.engine.sampling import Sampler
from agentkv.engine.sink import TextSink
from agentkv.engine.templates import ChatTemplate
from agentkv.kv.contract import SequenceKV
from agentkv.schemas.messages import normalise
from agentkv.schemas.sampling import SamplingParams

__all__ = ["Rendered", "Stateless", "ledger_lengths"]

_TAIL = 512
"""Ids at the end of a conversation that rendering looks at."""


class Rendered:
    """A conversation as tokens, the way a session's ledger comes about: the head, then turn after turn. Blocking."""

    def __init__(self, tokenizer: Any, conversation: Conversation) -> None:
        tools = conversation.tools or None
        self._template = ChatTemplate(tokenizer, None, tools, conversation.system, now=datetime.now(UTC))
        self._fresh = True
        self.ids = self._template.head().ids

    def ask(self, turn: Turn) -> None:
        """The turn's messages, and the opening of the answer."""
        messages, tail = normalise(list(turn.messages)), self.ids[-_TAIL:]
        rendered = self._template.turn(
            messages, tail, first=self._fresh, after_generated=not self._fresh, generation_prompt=True
        )
        self.ids += rendered.ids
        self._fresh = False

    def answer(self, ids: Sequence[int]) -> None:
        """What was generated."""
        self.ids += ids


def ledger_lengths(tokenizer: Any, conversation: Conversation) -> list[int]:
    """Tokens of its ledger after each turn, about: what is generated may end in a way that saves some."""
    rendered, lengths = Rendered(tokenizer, conversation), []
    filler = tokenizer.encode(" a", add_special_tokens=False)[-1:]
    for turn in conversation.turns:
        rendered.ask(turn)
        rendered.answer(filler * turn.answer_tokens)
        lengths.append(len(rendered.ids))
    return lengths


class Stateless:
    """The best that a server can do which keeps nothing: this engine and its scheduler, without a database, without
    files, and without rendering or tokenising again what was said before."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.states: set[SequenceKV] = set()

    def agent(self, conversation: Conversation) -> _Agent:
        """Somebody who holds this conversation."""
        return _Agent(self, conversation)

    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes now."""
        return {"device": sum(kv.nbytes for kv in self.states)}


class _Agent:
    def __init__(self, server: Stateless, conversation: Conversation) -> None:
        self._server = server
        self._conversation = conversation
        self._rendered: Rendered | None = None

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def turn(self, turn: Turn) -> Answer:
        started = time.perf_counter()
        model = self._server.model
        if self._rendered is None:
            self._rendered = await asyncio.to_thread(Rendered, model.tokenizer, self._conversation)
        rendered = self._rendered
        known = len(rendered.ids)
        await asyncio.to_thread(rendered.ask, turn)
        prompt = list(rendered.ids)
        sampling = SamplingParams.build(max_tokens=turn.answer_tokens, ignore_eos=True)
        sink = TextSink(model.tokenizer, (), lambda text: None, context=prompt[-_TAIL:])
        generation = Generation(Sampler(sampling, model.adapter.device), turn.answer_tokens, sink)
        room = len(prompt) + turn.answer_tokens
        kv = model.layout.open(room, model.context_limit)
        self._server.states.add(kv)
        try:
            job = Job(kv, prompt, model.piece, generation=generation)
            result = await model.engine.submit(job).finished()
        finally:
            self._server.states.discard(kv)
            kv.close()
        assert result is not None and result.first_token_seconds is not None
        rendered.answer(result.tokens)
        ttft = job.submitted - started + result.first_token_seconds
        return Answer(ttft, known, 0, len(prompt), len(result.tokens), "scratch")
