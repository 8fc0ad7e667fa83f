"""From generated tokens to text and tool calls, on the model thread."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Any

from agentkv.engine.detokenize import TextStream
from agentkv.engine.job import Verdict
from agentkv.engine.sampling import TokenLogprob
from agentkv.engine.sink import ReplySink
from agentkv.engine.toolcalls.contract import CallPart, Part, TextPart, ToolParser
from agentkv.schemas.messages import ToolCall

__all__ = ["ToolSink"]

_ID = re.compile("[A-Za-z0-9_-]{1,64}")


class ToolSink(ReplySink):
    """Emits text and calls as they become certain. ``emit`` is called on the model thread, never with empty text.

    ``hidden``: ids that have no text, as the format has it. ``taken``: ids of earlier calls, which no new one may have.
    """

    def __init__(
        self,
        tokenizer: Any,
        parser: ToolParser,
        end_ids: Collection[int],
        emit: Callable[[str | ToolCall], None],
        *,
        hidden: Collection[int],
        stop: Sequence[str] = (),
        context: Sequence[int] = (),
        taken: Collection[str] = (),
    ) -> None:
        self._stream = TextStream(tokenizer, stop, hidden=hidden, context=context)
        self._parser = parser
        self._end_ids = frozenset(end_ids)
        self._emit = emit
        self._taken = set(taken)
        self._text: list[str] = []
        self._calls: list[ToolCall] = []

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """See ``ReplySink``."""
        return tuple(self._calls)

    def push(self, token: int, logprob: TokenLogprob | None) -> Verdict:
        """See ``TokenSink``."""
        delta = self._stream.push(token)
        if delta.text:
            self._take(self._parser.feed(delta.text))
        return "stop" if token in self._end_ids or delta.stopped else "go on"

    def finish(self) -> str:
        """See ``ReplySink``."""
        rest = self._stream.flush()
        if rest:
            self._take(self._parser.feed(rest))
        self._take(self._parser.finish())
        return "".join(self._text)

    def _take(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if isinstance(part, TextPart):
                self._text.append(part.raw)
                self._emit(part.raw)
            elif isinstance(part, CallPart):
                call = ToolCall(id=self._identifier(part), name=part.name, arguments=part.arguments)
                self._calls.append(call)
                self._emit(call)

    def _identifier(self, part: CallPart) -> str:
        """The model's own id where it gave one: its template writes that again with the result."""
        given = part.id if part.id is not None and _ID.fullmatch(part.id) else None
        name = given if given is not None and given not in self._taken else f"call_{secrets.token_hex(12)}"
        self._taken.add(name)
        return name
