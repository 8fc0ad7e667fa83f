"""Chat templates without rendering history: a session's head once, then each turn by itself.

A template is a function from a whole conversation to a text. Applying it to the real history would rewrite the past
(Qwen3 drops earlier reasoning, generated ids do not survive decoding), so it is applied to a *skeleton*: the frozen
system and tools, one user message and an assistant message whose content is a sentinel. What the template writes after
the sentinel when the new messages follow is the turn's text. It begins with the terminator, the text that ends an
assistant message; of it the ledger already holds what the model generated, and that much is dropped.

::

    skeleton + new + prompt: …assistant\\nSENTINEL<|im_end|>\\n<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant
    the turn's text:                             [terminator ][ items                      ][ prompt          ]
    the ledger ends with:           …Hello there![<|im_end|>]   → dropped; only the newline is added
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any, Literal

from agentkv.engine.encode import BREAK, Encoded, Encoder
from agentkv.engine.rendering import OPENING, PROBE, SENTINEL, Dicts, Renderer, assistant, probe_tool, user
from agentkv.engine.toolblocks import with_definitions
from agentkv.errors import InvalidRequest, TemplateError, Unsupported
from agentkv.schemas.messages import Message, ToolCall
from agentkv.schemas.tools import check_tool
from agentkv.types import Span

__all__ = ["ChatTemplate", "HeadRender", "LastRole", "TurnRender"]

# First characters of a user message that a tokenizer may join with what stands before it.
_STARTS = ("Hello", " a", "\n1")
_CUT_CANDIDATES = 32

LastRole = Literal["user", "assistant", "tool", "system", "developer"]


@dataclass(frozen=True, slots=True)
class HeadRender:
    """The system span: all that precedes the first user message."""

    ids: list[int]
    text: str


@dataclass(frozen=True, slots=True)
class TurnRender:
    """Tokens to append to the ledger.

    ``items``: (index of the new message, its span relative to the start of ``ids``); together with ``prompt_span``,
    the generation prompt at the end, they tile ``ids``. What remained of the terminator belongs to the first of them.
    A span is empty where a template interleaves messages so that they cannot be told apart: its neighbour holds it.
    """

    ids: list[int]
    items: list[tuple[int, Span]]
    prompt_span: Span


@dataclass(frozen=True, slots=True)
class _Text:
    """A turn's text. ``bounds[i]``: where new message ``i`` ends; it begins with ``known`` characters of terminator."""

    text: str
    bounds: list[int]
    known: int


class ChatTemplate:
    """One session's template: system, tools, arguments and clock are frozen. Thread-safe.

    Text in messages, system and tools that looks like a control token is tokenised as plain text (``encode``).
    Where the template does not know tools, ``toolblocks`` writes them; a default system prompt that the template
    injects then gives way to the definitions. A tokenizer without a chat template serves token-level sessions only:
    ``head`` is the beginning-of-sequence token, ``turn`` raises ``Unsupported``.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_args: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        system: str | None = None,
        *,
        now: datetime,
    ) -> None:
        """``now`` is what templates that print the date see, for the session's whole life.

        Raises ``InvalidRequest`` for malformed tools and for arguments that the template does not read,
        ``TemplateError`` for a system prompt that it refuses or drops, ``Unsupported`` for any of them without a
        template.
        """
        self._encoder = Encoder(tokenizer)
        self.source: str | None = _source(tokenizer, bool(tools))
        """The Jinja text; ``None`` without a template. Part of the session fingerprint."""
        self.native_tools = False
        """Whether the template itself renders tool definitions; else ``toolblocks`` does."""
        arguments = dict(template_args or {})
        _check_tools(tools)
        if self.source is None:
            if arguments or tools or system is not None:
                raise _no_template()
            return
        self._renderer = Renderer(
            self.source,
            self._encoder,
            special_tokens=getattr(tokenizer, "special_tokens_map", {}),
            arguments=arguments,
            now=now,
        )
        self.native_tools = self._renderer.shows_tools
        if tools and not self.native_tools:
            system, tools = with_definitions(system, tools), None
        self._tools: Dicts | None = self._encoder.guard(list(tools)) if tools else None
        self._system: Dicts = [] if system is None else [{"role": "system", "content": self._encoder.guard(system)}]

    @property
    def available(self) -> bool:
        """Whether there is a template, so that messages can be sent."""
        return self.source is not None

    def written_call(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """How the template writes a reply that makes this call; ``None`` where ``toolblocks`` write calls."""
        return None if self.source is None else self._renderer.written_call(name, arguments)

    def head(self) -> HeadRender:
        """The system span, including a system prompt that the template injects and the beginning-of-sequence token.

        Where a template writes the system text inside the first user message (Gemma, Mistral), the head ends inside
        that message. The cut is a token boundary whatever the first user message says.
        """
        if self.source is None:
            return HeadRender(self._encoder.bos(), "")
        text, ids = self._head
        return HeadRender(list(ids), text.replace(BREAK, ""))

    def turn(
        self,
        new_messages: Sequence[Message],
        ledger_tail_ids: Sequence[int],
        *,
        first: bool,
        last_tool_calls: Sequence[ToolCall] | None = None,
        after_generated: bool,
        generation_prompt: bool,
        last_role: LastRole | None = None,
    ) -> TurnRender:
        """Tokens that new messages, and with ``generation_prompt`` the opening of a reply, add to the ledger.

        ``first``: the ledger holds the head and nothing else. Otherwise ``ledger_tail_ids`` are its last ids (some
        hundred suffice), ``after_generated`` says that a generated reply is the last item, ``last_role`` which role
        the last item has (default: assistant, but user when an assistant message is added), and ``last_tool_calls``
        the calls of that last assistant message when the new messages answer them.

        Raises ``TemplateError`` with the template's words, ``Unsupported`` without a template.
        """
        if self.source is None:
            raise _no_template()
        if not new_messages and not generation_prompt:
            raise InvalidRequest("there is nothing to add: no message and no reply to open", param="messages")
        new = _named(new_messages, last_tool_calls or ())
        for message in new:
            self._check_shown(message)
        if first:
            text = self._first(new, generation_prompt)
            encoded = self._encoder.encode(text.text, inside=bool(self._head[0]))
            return _spread(encoded, text.bounds)
        role = last_role or _inferred_role(new, after_generated)
        text = self._following(new, role, last_tool_calls, generation_prompt)
        return _spread(self._unsaid(text, ledger_tail_ids, after_generated), text.bounds)

    @cached_property
    def _head(self) -> tuple[str, list[int]]:
        opened = self._opening([user(SENTINEL)])
        until = opened.find(SENTINEL)
        if until < 0:
            raise TemplateError("the chat template does not show user messages", param="model")
        if self._system and self._system[0]["content"].strip() not in opened:
            raise TemplateError("the chat template drops the system prompt", param="system")
        header = self._user_header()
        cut = until - len(header) if opened[:until].endswith(header) else until
        texts = [self._opening([user(start)]) for start in _STARTS]
        cut = self._stable_cut(texts, cut)
        return texts[0][:cut], self._encoder.encode(texts[0][:cut]).ids

    def _user_header(self) -> str:
        """What opens a later user message; empty where that cannot be told."""
        try:
            followed = _after(self._later([OPENING, assistant(SENTINEL), user(PROBE)]))
            between = followed[: followed.find(PROBE)]
            return between.removeprefix(self._plain_terminator) if between.startswith(self._plain_terminator) else ""
        except TemplateError:
            return ""

    def _stable_cut(self, texts: list[str], cut: int) -> int:
        """The last place up to ``cut`` where head and rest, tokenised apart, give the ids of the whole."""
        wholes = [self._encoder.encode(text) for text in texts]
        earlier = sorted({end for end in wholes[0].ends if end < cut}, reverse=True)[:_CUT_CANDIDATES]
        for place in (cut, *earlier):
            if all(
                text[:place] == texts[0][:place]
                and [*self._encoder.encode(text[:place]).ids, *self._encoder.encode(text[place:], inside=place > 0).ids]
                == whole.ids
                for text, whole in zip(texts, wholes, strict=True)
            ):
                return place
        return cut

    @cached_property
    def _recurring(self) -> tuple[bool, bool]:
        """Whether the template repeats (system, tools) in later turns, as Mistral's does in the last user message."""
        turns = [OPENING, assistant(SENTINEL), OPENING]

        def recurs(system: Dicts, tools: Dicts | None) -> bool:
            try:
                return PROBE in _after(self._renderer.render([*system, *turns], tools))
            except TemplateError:
                return False

        return (
            bool(self._system) and recurs([{"role": "system", "content": PROBE}], self._tools),
            bool(self._tools) and recurs(self._system, [probe_tool(PROBE)]),
        )

    @cached_property
    def _plain_terminator(self) -> str:
        return _after(self._later([OPENING, assistant(SENTINEL)]))

    def _skeleton(self, last_role: str, calls: Sequence[ToolCall]) -> Dicts:
        """A shortest conversation that ends with the given role, the sentinel in its last message."""
        form = self._renderer.tool_form
        if last_role == "user" or (last_role == "tool" and form is None):
            return [user(SENTINEL)]
        if last_role in ("system", "developer"):
            return [OPENING, {"role": "system", "content": SENTINEL}]
        if form is None or not calls:
            return [OPENING, assistant(SENTINEL)]
        # Models that call several tools at once may have a template that shows one: any of them.
        earlier = calls[:-1] if self._renderer.shows_several_calls else ()
        # The last call's arguments carry the sentinel too: some templates show calls and not the text before them.
        last = calls[-1].model_copy(update={"arguments": {"value": SENTINEL}})
        calling = {**assistant(SENTINEL), "tool_calls": [form.call(call) for call in (*earlier, last)]}
        if last_role == "assistant":
            return [OPENING, self._encoder.guard(calling)]
        result = {"role": "tool", "content": SENTINEL, "name": last.name, "tool_call_id": form.identifier(last.id)}
        return [OPENING, *self._encoder.guard([calling, result])]

    def _following(
        self, new: list[Message], last_role: str, last_calls: Sequence[ToolCall] | None, prompt: bool
    ) -> _Text:
        """Text after the last item of the ledger, its terminator included."""
        answers = list(takewhile(lambda message: message.role == "tool", new))
        calls: Sequence[ToolCall] = ()
        if answers or last_role == "tool":
            calls = last_calls or _calls_for(answers)
        skeleton = self._skeleton(last_role, calls)
        alone = _after(self._later(skeleton))
        terminator = self._call_terminator(alone) if "tool_calls" in skeleton[-1] else alone
        said = alone.removesuffix(terminator)
        full = _after(self._later([*skeleton, *self._renderer.dicts(new)], prompt=prompt))
        if not full.startswith(said):
            raise TemplateError("the chat template rewrites the last message when another follows", param="messages")
        text = full[len(said) :]
        if not text.startswith(terminator) and last_role in ("tool", "user"):
            # Qwen puts consecutive tool results in one block, and the one in the ledger is closed. Open another.
            return self._following(new, "assistant", last_calls, prompt)

        def prefix(count: int) -> str:
            return _after(self._later([*skeleton, *self._renderer.dicts(new[:count])]))[len(said) :]

        return _Text(text, self._bounds(text, new, prefix, prompt), _common(text, terminator))

    def _call_terminator(self, alone: str) -> str:
        """The part of the text after a call's arguments that ends the message rather than the call."""
        if self._plain_terminator and alone.endswith(self._plain_terminator):
            return self._plain_terminator
        start = self._encoder.first_special(alone)
        return "" if start is None else alone[start:]

    def _first(self, new: list[Message], prompt: bool) -> _Text:
        """Text after the head."""
        head = self._head[0]
        if new and new[0].template_role == "system" and not self._system:
            raise TemplateError("the first message is a system message; give it as the session's system prompt")
        full = self._opening(self._renderer.dicts(new), prompt=prompt)
        if full.startswith(head):
            text = full[len(head) :]

            def prefix(count: int) -> str:
                part = self._opening(self._renderer.dicts(new[:count]))
                return part[len(head) :] if part.startswith(head) else ""

            return _Text(text, self._bounds(text, new, prefix, prompt), 0)
        # The template moves the system text to the last user message: begin with the first message alone.
        if len(new) < 2:
            raise TemplateError("the chat template renders this message without the system prompt", param="messages")
        opening = self._first(new[:1], False)
        rest = self._following(new[1:], new[0].role, new[0].tool_calls, prompt)
        known = rest.known if opening.text.endswith(rest.text[: rest.known]) else 0
        shift = len(opening.text) - known
        bounds = [len(opening.text), *(max(bound + shift, len(opening.text)) for bound in rest.bounds)]
        return _Text(opening.text + rest.text[known:], bounds, 0)

    def _bounds(self, text: str, new: list[Message], prefix: Callable[[int], str], prompt: bool) -> list[int]:
        """Where each new message ends in ``text``. ``prefix(n)`` is the text of the first ``n`` alone."""
        bounds: list[int] = []
        for count in range(1, len(new) + 1):
            if count == len(new) and not prompt:
                bounds.append(len(text))
                break
            try:
                part = prefix(count)
                bound = _common(part, text)
                exact = bound == len(part)
            except TemplateError:
                bound, exact = 0, False
            if not exact and count < len(new):
                bound = self._bound_from_end(text, new, count, prompt) or bound
            bounds.append(max(bound, bounds[-1] if bounds else 0))
        return bounds

    def _bound_from_end(self, text: str, new: list[Message], count: int, prompt: bool) -> int | None:
        """Where the messages from ``count`` on begin, when rendering them apart gives the end of ``text``."""
        before = new[count - 1]
        if before.role == "tool" and new[count].role == "tool":
            return None
        skeleton = self._skeleton(before.role, before.tool_calls if new[count].role == "tool" else ())
        try:
            alone = _after(self._later(skeleton))
            rest = _after(self._later([*skeleton, *self._renderer.dicts(new[count:])], prompt=prompt))
        except TemplateError:
            return None
        tail = rest.removeprefix(alone)
        return len(text) - len(tail) if rest.startswith(alone) and text.endswith(tail) else None

    def _unsaid(self, text: _Text, ledger: Sequence[int], after_generated: bool) -> Encoded:
        """The tokens of ``text`` without the longest beginning of the terminator that the ledger ends with."""
        joint = self._encoder.encode(text.text, inside=True)
        alone = self._encoder.encode(text.text[: text.known], inside=True)
        inside = bisect_right(joint.ends, text.known)
        said = _ends_with(ledger, joint.ids[:inside])
        said_alone = _ends_with(ledger, alone.ids)
        if said_alone and alone.ends[said_alone - 1] > (joint.ends[said - 1] if said else 0):
            # The terminator's last token joins with what follows, and stands in the ledger alone.
            return self._from(text.text, alone.ends[said_alone - 1])
        if not said and after_generated and ledger and ledger[-1] in self._encoder.special_ids:
            # The model ended without the space that the template writes before its end token.
            if ledger[-1] in alone.ids:
                return self._from(text.text, alone.ends[alone.ids.index(ledger[-1])])
            # The template ends only messages that another follows.
            if joint.ids and joint.ids[0] == ledger[-1]:
                said = 1
        return Encoded(joint.ids[said:], joint.ends[said:])

    def _from(self, text: str, start: int) -> Encoded:
        rest = self._encoder.encode(text[start:], inside=True)
        return Encoded(rest.ids, [start + end for end in rest.ends])

    def _check_shown(self, message: Message) -> None:
        if SENTINEL in message.text or PROBE in message.text:
            raise TemplateError("a message contains a string that this process uses as a marker", param="messages")
        if message.template_role == "system" and not self._shows_later_system:
            raise TemplateError("the chat template drops system messages after the first", param="messages")

    @cached_property
    def _shows_later_system(self) -> bool:
        later = {"role": "system", "content": SENTINEL}
        return SENTINEL in self._later([OPENING, assistant("Hi"), later, OPENING])

    def _opening(self, messages: Dicts, *, prompt: bool = False) -> str:
        """The whole conversation, head included."""
        return self._renderer.render([*self._system, *messages], self._tools, prompt=prompt)

    def _later(self, messages: Dicts, *, prompt: bool = False) -> str:
        """A conversation of which only the end counts: without what the template would repeat there."""
        system, tools = self._recurring
        return self._renderer.render(
            [*([] if system else self._system), *messages], None if tools else self._tools, prompt=prompt
        )


def _source(tokenizer: Any, tools: bool) -> str | None:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = (template.get("tool_use") if tools else None) or template.get("default")
    return template or None


def _no_template() -> Unsupported:
    return Unsupported(
        "chat",
        "this model has no chat template, so system prompts, tools and messages have no form; "
        "use append_tokens and generate_tokens",
        param="messages",
    )


def _check_tools(tools: Sequence[Mapping[str, Any]] | None) -> None:
    for index, tool in enumerate(tools or ()):
        check_tool(tool, f"tools[{index}]")


def _inferred_role(new: list[Message], after_generated: bool) -> str:
    if after_generated:
        return "assistant"
    return "user" if not new or new[0].role == "assistant" else "assistant"


def _named(messages: Sequence[Message], calls: Sequence[ToolCall]) -> list[Message]:
    """Tool results with the name of the function they come from, which some templates write."""
    names = {call.id: call.name for call in calls}
    named = []
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        known = names.get(message.tool_call_id or "")
        named.append(message if message.name or known is None else message.model_copy(update={"name": known}))
    return named


def _calls_for(answers: list[Message]) -> list[ToolCall]:
    """Calls that the given tool results could answer, for when the real ones are not known."""
    calls = [ToolCall(id=m.tool_call_id or "call", name=m.name or "tool", arguments={}) for m in answers]
    return calls or [ToolCall(id="call", name="tool", arguments={})]


def _common(left: str, right: str) -> int:
    """Length of the common beginning."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _spread(encoded: Encoded, bounds: list[int]) -> TurnRender:
    """Spans of tokens from ends of characters; a token across a bound belongs to what begins there."""
    cuts = [0, *(bisect_right(encoded.ends, bound) for bound in bounds)]
    items = [(index, Span(start, stop)) for index, (start, stop) in enumerate(pairwise(cuts))]
    return TurnRender(encoded.ids, items, Span(cuts[-1], len(encoded.ids)))


def _ends_with(ledger: Sequence[int], ids: list[int]) -> int:
    """The largest ``k`` such that the ledger ends with the first ``k`` ids."""
    tail = list(ledger[-len(ids) :]) if ids else []
    return next((k for k in range(len(tail), 0, -1) if tail[-k:] == ids[:k]), 0)


def _after(text: str) -> str:
    """What follows the sentinel."""
    _, found, rest = text.rpartition(SENTINEL)
    if not found:
        raise TemplateError("the chat template drops a message of this role", param="messages")
    return rest
