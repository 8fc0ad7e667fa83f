"""Tool calls of one session: reading the model's out of its replies, forcing them, and what results may answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from agentkv.engine.encode import backend_of
from agentkv.engine.toolcalls.choosing import ToolUse
from agentkv.engine.toolcalls.sink import ToolSink
from agentkv.errors import InvalidRequest
from agentkv.schemas.constraints import Constraint
from agentkv.schemas.messages import Message, ToolCall
from agentkv.schemas.sampling import SamplingParams
from agentkv.sessions.core import SessionCore

__all__ = ["Calling", "check_results", "prepared"]

_SHOWN = 8
"""Ids that an error lists."""


@dataclass(frozen=True, slots=True)
class Calling:
    """How one reply is read. ``constraint``: what it has to be, where a call is forced. ``prompt``: the text that
    opened it. ``taken``: ids of the session's calls."""

    use: ToolUse
    constraint: Constraint | None
    prompt: str
    taken: frozenset[str]

    def sink(
        self,
        tokenizer: Any,
        end_ids: Collection[int],
        emit: Callable[[str | ToolCall], None],
        *,
        stop: Sequence[str],
        context: Sequence[int],
    ) -> ToolSink:
        """Where its tokens go."""
        parser = self.use.format.parser(self.use.tools, tokenizer, prompt=self.prompt)
        return ToolSink(
            tokenizer, parser, end_ids, emit, hidden=self.use.hidden, stop=stop, context=context, taken=self.taken
        )


def prepared(
    core: SessionCore,
    tokenizer: Any,
    tool_format: str,
    sampling: SamplingParams,
    prompt: Sequence[int],
    *,
    goes_on: bool,
) -> Calling | None:
    """How a reply that ``prompt`` opens is read; ``None`` where all of it is text. Blocking the first time.

    ``goes_on``: it continues a reply that was cut. ``InvalidRequest`` where a forced call cannot be.
    """
    choice = sampling.tool_choice
    use = core.tool_use(tokenizer, tool_format)
    choice.check(() if use is None else use.tools)
    if use is None or choice.mode == "none":
        return None
    if choice.mode == "auto":
        opened = backend_of(tokenizer).decode(list(prompt), skip_special_tokens=False)
        return Calling(use, None, opened, frozenset(core.calls))
    if goes_on:
        raise InvalidRequest(
            "tool_choice 'required': the last reply was cut, and what it goes on with is no call of its own; "
            "continue it with 'auto' or 'none', or make it again with session.regenerate",
            param="tool_choice",
        )
    # What is forced is a call whatever the prompt has opened.
    return Calling(use, use.forced(choice, tokenizer), "", frozenset(core.calls))


def check_results(core: SessionCore, messages: Sequence[Message]) -> None:
    """``InvalidRequest`` for a result of a call that nobody made. Where calls stay text any id is taken."""
    use = core.tools_used
    if use is None or use.format.name == "text":
        return
    known = dict.fromkeys(core.calls)
    for index, message in enumerate(messages):
        known |= dict.fromkeys(call.id for call in message.tool_calls)
        if message.tool_call_id is not None and message.tool_call_id not in known:
            calls = ", ".join(repr(name) for name in list(known)[-_SHOWN:]) or "none"
            raise InvalidRequest(
                f"messages[{index}].tool_call_id: there is no call {message.tool_call_id!r} in session {core.id}; "
                f"its last calls: {calls}",
                param=f"messages[{index}].tool_call_id",
            )
