"""transformers' own response parser, where the tokenizer brings a ``response_template``.

The template names regions of a reply by how they open and close. Which text is a call's is found here, one character
at a time, so that how the text was cut can change nothing; what the call says is read by transformers, from the whole
of it. What transformers refuses is text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from agentkv.engine.encode import special_tokens
from agentkv.engine.toolcalls.calls import call_of
from agentkv.engine.toolcalls.contract import (
    TOOL_FORMATS,
    CallPart,
    Markup,
    Part,
    Schemas,
    TextPart,
    ToolFormat,
    ToolParser,
)
from agentkv.engine.toolcalls.cursor import SPACE, lead_of
from agentkv.errors import Unsupported

__all__ = ["ResponseTemplateFormat", "has_response_template"]

_CALLS = "tool_calls"
_LONGEST = 512
"""Characters of a marker: patterns such as ``\\s*`` would hold back any number, and look at all of them each time."""


def has_response_template(tokenizer: Any) -> bool:
    """Whether the tokenizer says how its model writes calls."""
    spec = getattr(tokenizer, "response_template", None)
    return isinstance(spec, Mapping) and _CALLS in (spec.get("fields") or {})


class _Parser(ToolParser):
    """Text outside regions, and in regions other than calls (reasoning), is text, their markers included."""

    def __init__(self, template: Any, reader: _Reader, prompt: str) -> None:
        self._template = template
        self._reader = reader
        self._region: Any = None
        self._window = ""  # not decided yet: it may begin a marker
        self._call: list[str] = []
        self._behind_call = False
        self._parts: list[Part] = []
        self._begin(prompt)

    def feed(self, text: str) -> list[Part]:
        """See ``ToolParser``."""
        for letter in text:
            self._window += letter
            while self._advance(ended=False):
                pass
        return self._said()

    def finish(self) -> list[Part]:
        """See ``ToolParser``."""
        while self._advance(ended=True):
            pass
        if self._region is not None and self._region.name == _CALLS:
            self._close(cut_off=self._region.close_re is not None)
        return self._said()

    def _begin(self, prompt: str) -> None:
        """Templates open regions that the model goes on in: ``<think>`` stands in the prompt."""
        ends = [found.end() for found in self._template.start_anchor_re.finditer(prompt)]
        if ends:
            self.feed(prompt[ends[-1] :])
            self._window, self._call, self._behind_call = "", [], False
            if self._region is not None and self._region.name == _CALLS:
                self._region = None

    def _said(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _advance(self, *, ended: bool) -> bool:
        """Decide what can be decided; whether a marker was found, so that there may be more."""
        window = self._window
        marker, hold = self._marker(ended)
        if marker is None:
            if self._region is None and not ended:
                hold = lead_of(window, hold)
            hold = max(hold, len(window) - _LONGEST)
            self._pass(window[:hold])
            self._window = window[hold:]
            return False
        field, start, stop = marker
        if self._region is None and field.name == _CALLS:
            start = lead_of(window, start)
        self._pass(window[:start])
        self._window = window[stop:]
        if self._region is None:
            self._region = field
            self._pass(window[start:stop])
        else:
            self._pass(window[start:stop])
            if field.name == _CALLS:
                self._close(cut_off=False)
            self._region = None
        return True

    def _marker(self, ended: bool) -> tuple[tuple[Any, int, int] | None, int]:
        """The first marker that is certain, as (field, start, stop); and up to where no other can begin."""
        opening = self._region is None
        fields = self._template.fields.values() if opening else [self._region]
        found: list[tuple[int, int, Any]] = []
        hold = len(self._window)
        for field in fields:
            pattern = field.open_re if opening else field.close_re
            match = None if pattern is None else pattern.search(self._window, partial=not ended)
            if match is None:
                continue
            literals = field.open_literals if opening else field.close_literals
            if literals is None:
                # A pattern that touches the end may yet match more, or less.
                open_ended = match.end() == len(self._window)
            else:
                begun = self._window[match.start() :]
                open_ended = any(len(each) > len(match.group()) and each.startswith(begun) for each in literals)
            if match.partial or (open_ended and not ended):
                hold = min(hold, match.start())
            elif match.end() > match.start() or (ended and not opening):
                found.append((match.start(), -match.end(), field))
        first = min(found, key=lambda each: each[:2], default=None)
        if first is None or first[0] >= hold:
            return None, hold
        return (first[2], first[0], -first[1]), hold

    def _pass(self, raw: str) -> None:
        """Text that has found its place."""
        if self._region is not None and self._region.name == _CALLS:
            self._call.append(raw)
            return
        space = len(raw) - len(raw.lstrip(SPACE)) if self._behind_call else 0
        self._say(Markup(raw[:space]))
        self._say(TextPart(raw[space:]))

    def _close(self, *, cut_off: bool) -> None:
        raw, self._call, self._region = "".join(self._call), [], None
        calls = [] if cut_off else self._reader.calls(raw)
        for index, call in enumerate(calls):
            self._parts.append(replace(call, raw=raw if not index else ""))
        self._behind_call = bool(calls)
        if not calls:
            self._say(TextPart(raw))

    def _say(self, part: Part) -> None:
        if part.raw:
            self._behind_call = self._behind_call and not isinstance(part, TextPart)
            self._parts.append(part)


class _Reader:
    """What a whole call says, by transformers."""

    def __init__(self, spec: Mapping[str, Any], tools: Schemas) -> None:
        self._tools = tools
        self._definitions: list[dict[Any, Any] | Callable[..., Any]] = [
            {"type": "function", "function": {"name": name, "parameters": dict(schema)}}
            for name, schema in tools.items()
        ]
        # The one field: others may be required.
        self._spec = _loaded({"start_anchor": "\0", "fields": {_CALLS: spec["fields"][_CALLS]}})

    def calls(self, raw: str) -> list[CallPart]:
        """The calls of known tools that ``raw`` consists of; none where any part of it is no such call."""
        from transformers.utils.chat_parsing import parse_response

        try:
            found = parse_response(raw, self._spec, prefix="", tools=self._definitions).get(_CALLS) or []
        except Exception:
            # A parser of another house reads what a model made up: whatever it raises means that it is no call.
            return []
        calls = [call_of(value.get("function", value), self._tools) for value in _flat(found)]
        return [call for call in calls if call is not None] if all(calls) else []


def _flat(found: Any) -> Iterator[Mapping[str, Any]]:
    for value in found if isinstance(found, list) else [found]:
        if isinstance(value, list):
            yield from _flat(value)
        else:
            yield value if isinstance(value, Mapping) else {}


def _loaded(spec: Mapping[str, Any]) -> Any:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(dict(spec))


class ResponseTemplateFormat(ToolFormat):
    """What the tokenizer's ``response_template`` describes."""

    name = "transformers"

    def markers(self, tokenizer: Any) -> Collection[str]:
        """Special tokens that the template's description of calls mentions."""
        described = "\n".join(_strings(self._spec(tokenizer)["fields"][_CALLS]))
        texts = (described, described.replace("\\", ""))
        return [token for token in special_tokens(tokenizer) if any(token in text for text in texts)]

    def parser(self, tools: Schemas, tokenizer: Any, *, prompt: str = "") -> _Parser:
        """See ``ToolFormat``."""
        spec = self._spec(tokenizer)
        return _Parser(_loaded(spec), _Reader(spec, tools), prompt)

    def _spec(self, tokenizer: Any) -> Mapping[str, Any]:
        spec: Mapping[str, Any] = getattr(tokenizer, "response_template", None) or {}
        if not has_response_template(tokenizer):
            raise Unsupported(
                "tool_format 'transformers'",
                "this model's tokenizer has no response_template with tool_calls: use 'auto' or another format",
                param="tool_format",
            )
        try:
            _loaded(spec)
        except ImportError as error:
            raise Unsupported(
                "tool_format 'transformers'", f"this transformers has no response parser: {error}", param="tool_format"
            ) from error
        except Exception as error:
            raise Unsupported(
                "tool_format 'transformers'",
                f"the tokenizer's response_template is not one ({error}): use another format",
                param="tool_format",
            ) from error
        return spec


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(each)


TOOL_FORMATS.register(ResponseTemplateFormat.name)(ResponseTemplateFormat())
