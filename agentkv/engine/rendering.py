"""Messages in the form one chat template takes, with what it can show found by trying it.

Whether a template knows tools, and how it wants their calls, is not written anywhere: probes with unique strings are
rendered, and what appears in the output is known. What does not appear is written by ``toolblocks`` instead.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import takewhile
from typing import Any
from uuid import uuid4

from agentkv.engine.encode import Encoder
from agentkv.engine.jinja import CompiledTemplate
from agentkv.engine.toolblocks import calls_text, result_text
from agentkv.errors import InvalidRequest, TemplateError
from agentkv.schemas.messages import Message, ToolCall

__all__ = ["OPENING", "PROBE", "SENTINEL", "Dicts", "Renderer", "ToolForm", "assistant", "probe_tool", "user"]

SENTINEL = f"agentkv{uuid4().hex}"
PROBE = f"agentkv{uuid4().hex}"
"""Two strings that no message contains."""

Dicts = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    """A user message for a template."""
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    """An assistant message for a template."""
    return {"role": "assistant", "content": text}


def probe_tool(name: str) -> dict[str, Any]:
    """A tool definition with all that templates look for."""
    schema = {"type": "object", "properties": {"value": {"type": "string", "description": "A value."}}}
    function = {"name": name, "description": "A function.", "parameters": {**schema, "required": ["value"]}}
    return {"type": "function", "function": function}


OPENING = user("Hello")


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a template wants calls: ``short_ids`` of nine characters (Mistral), ``text_arguments`` as JSON text."""

    short_ids: bool
    text_arguments: bool

    def identifier(self, call_id: str) -> str:
        """The call id, shortened where it must be; results are linked to calls by it."""
        if not self.short_ids or re.fullmatch("[A-Za-z0-9]{9}", call_id):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]

    def call(self, call: ToolCall) -> dict[str, Any]:
        """One entry of ``tool_calls``."""
        arguments: Any = call.arguments
        if self.text_arguments and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": call.name, "arguments": arguments}
        return {"id": self.identifier(call.id), "type": "function", "function": function}


class Renderer:
    """One template with its arguments and clock. Thread-safe: what is cached does not change."""

    def __init__(
        self,
        source: str,
        encoder: Encoder,
        *,
        special_tokens: Mapping[str, Any],
        arguments: Mapping[str, Any],
        now: datetime,
    ) -> None:
        """Raises ``InvalidRequest`` for an argument that the template does not read."""
        self._encoder = encoder
        self._template = CompiledTemplate(source, fixed={**special_tokens, **encoder.guard(dict(arguments))}, now=now)
        for name in arguments:
            if name not in self._template.arguments:
                known = ", ".join(sorted(self._template.arguments - special_tokens.keys())) or "none"
                raise InvalidRequest(
                    f"the chat template has no argument {name!r}; it reads: {known}", param="template_args"
                )

    def render(self, messages: Dicts, tools: Dicts | None = None, *, prompt: bool = False) -> str:
        """The text; ``prompt`` opens a reply. Raises ``TemplateError``."""
        return self._template.render(messages, tools, generation_prompt=prompt)

    def dicts(self, messages: Sequence[Message]) -> Dicts:
        """Guarded messages. Tool results that the template would not show become user messages, a run of them one."""
        dicts: Dicts = []
        previous: Message | None = None
        for message in messages:
            follows_result = previous is not None and previous.role == "tool" and self.tool_form is None
            if message.role == "tool" and self.tool_form is None:
                text = self._encoder.guard(result_text(message.text))
                if follows_result:
                    dicts[-1] = user(f"{dicts[-1]['content']}\n{text}")
                else:
                    dicts.append(user(text))
            elif message.role == "user" and follows_result and self._alternates:
                dicts[-1] = user(f"{dicts[-1]['content']}\n\n{self._encoder.guard(message.text)}")
            else:
                dicts.append(self._encoder.guard(self._dict(message)))
            previous = message
        return dicts

    @cached_property
    def shows_tools(self) -> bool:
        """Whether tool definitions appear in the output."""
        try:
            return PROBE in self.render([OPENING], [probe_tool(PROBE)])
        except TemplateError:
            return False

    @cached_property
    def tool_form(self) -> ToolForm | None:
        """How the template takes calls and results; ``None`` when it does not show definitions, calls and results."""
        if not self.shows_tools:
            return None
        name, value, answer = (f"{PROBE}{letter}" for letter in "abc")
        call = ToolCall(id="call_0123456789abcdef", name=name, arguments={"value": value})
        for form in (ToolForm(short, text) for text in (False, True) for short in (False, True)):
            calling = {**assistant(""), "tool_calls": [form.call(call)]}
            result = {"role": "tool", "name": name, "content": answer, "tool_call_id": form.identifier(call.id)}
            try:
                # Without the definition: the name must come from the call.
                shown = self.render([OPENING, calling, result], prompt=True)
            except TemplateError:
                continue
            if all(text in shown for text in (name, value, answer)):
                return form
        return None

    def written_call(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """How the template writes a reply that makes this call; ``None`` where ``toolblocks`` write calls.

        Raises ``TemplateError``.
        """
        if self.tool_form is None:
            return None
        call = ToolCall(id="call_0123456789abcdef", name=name, arguments=dict(arguments))
        calling = {**assistant(""), "tool_calls": [self.tool_form.call(call)]}
        tools = [probe_tool(name)]
        opened = self.render([OPENING], tools, prompt=True)
        try:
            written = self.render([OPENING, calling], tools)
        except TemplateError:  # it wants calls to be answered
            result = {"role": "tool", "name": name, "content": "", "tool_call_id": self.tool_form.identifier(call.id)}
            written = self.render([OPENING, calling, result], tools)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(opened, written, strict=False)))
        return written[common:]

    @cached_property
    def shows_several_calls(self) -> bool:
        """Whether an assistant message may have more than one call."""
        if self.tool_form is None:
            return True
        calls = [ToolCall(id=f"call_{i:016}", name=PROBE, arguments={}) for i in range(2)]
        try:
            self.render([OPENING, {**assistant(""), "tool_calls": [self.tool_form.call(call) for call in calls]}])
        except TemplateError:
            return False
        return True

    @cached_property
    def _alternates(self) -> bool:
        """Whether two user messages in a row are refused."""
        try:
            self.render([OPENING, assistant("Hi"), OPENING, OPENING])
        except TemplateError:
            return True
        return False

    def _dict(self, message: Message) -> dict[str, Any]:
        result: dict[str, Any] = {"role": message.template_role, "content": message.text}
        if message.name is not None:
            result["name"] = message.name
        if message.reasoning_content is not None:
            result |= {"reasoning_content": message.reasoning_content, "thinking": message.reasoning_content}
        if message.tool_calls and self.tool_form is None:
            calls = [(call.name, call.arguments) for call in message.tool_calls]
            result["content"] = calls_text(message.text, calls)
        elif message.tool_calls and self.tool_form is not None:
            result["tool_calls"] = [self.tool_form.call(call) for call in message.tool_calls]
        if message.tool_call_id is not None and self.tool_form is not None:
            result["tool_call_id"] = self.tool_form.identifier(message.tool_call_id)
        return result
