"""From generated tokens to text, on the model thread: detokenising, end tokens and stop strings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

from agentkv.engine.detokenize import TextStream
from agentkv.engine.job import TokenSink, Verdict
from agentkv.engine.sampling import TokenLogprob
from agentkv.schemas.messages import ToolCall

__all__ = ["ReplySink", "TextSink"]


class ReplySink(TokenSink):
    """A sink that knows what its tokens say."""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tool calls so far, in order."""
        return ()

    @abstractmethod
    def finish(self) -> str:
        """Emit what was held back; the whole text, without the calls. Call once, after the last token."""


class TextSink(ReplySink):
    """Emits text as it becomes certain. ``emit`` is called on the model thread, with non-empty text.

    ``tokenizer=None`` serves token-level sessions: no text, no stop strings.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        end_ids: Collection[int],
        emit: Callable[[str], None],
        *,
        stop: Sequence[str] = (),
        context: Sequence[int] = (),
    ) -> None:
        self._stream = None if tokenizer is None else TextStream(tokenizer, stop, context=context)
        self._end_ids = frozenset(end_ids)
        self._emit = emit

    def push(self, token: int, logprob: TokenLogprob | None) -> Verdict:
        ended = token in self._end_ids
        if self._stream is None:
            return "stop" if ended else "go on"
        delta = self._stream.push(token)
        if delta.text:
            self._emit(delta.text)
        return "stop" if ended or delta.stopped else "go on"

    def finish(self) -> str:
        """See ``ReplySink``."""
        if self._stream is None:
            return ""
        rest = self._stream.flush()
        if rest:
            self._emit(rest)
        return self._stream.text
