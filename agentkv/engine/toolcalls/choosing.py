"""Which format a model writes its calls in: found by reading back a call that its chat template wrote.

A template that shows calls shows them the way the model was taught, so the format whose parser reads a call out of that
is the one. A template that does not gets ``toolblocks``, which are Hermes'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentkv.engine.encode import special_tokens
from agentkv.engine.rendering import PROBE
from agentkv.engine.templates import ChatTemplate
from agentkv.engine.toolcalls import TOOL_FORMATS, CallPart, Schemas, ToolFormat, has_response_template
from agentkv.errors import Unsupported
from agentkv.schemas.constraints import Constraint
from agentkv.schemas.tool_choice import ToolChoice

__all__ = ["ToolUse", "check_format", "choose_format", "schemas_of"]

_BY_CALL = ("hermes", "qwen-coder", "mistral", "llama3")
_VALUE = {"value": f"{PROBE}v"}


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Name and parameters of each definition."""
    functions = [tool["function"] for tool in tools]
    given = {function["name"]: function.get("parameters") for function in functions}
    return {name: schema if isinstance(schema, Mapping) else {} for name, schema in given.items()}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one session's tools are called. ``hidden``: ids of special tokens that are no text to the format's parser.

    ``writer``: the format that forces calls, such that ``format`` reads them; ``None`` where there is none.
    """

    format: ToolFormat
    tools: Schemas
    hidden: frozenset[int]
    writer: ToolFormat | None

    @classmethod
    def of(
        cls, template: ChatTemplate, tokenizer: Any, tools: Sequence[Mapping[str, Any]], wanted: str = "auto"
    ) -> ToolUse:
        """As ``choose_format``, and with its errors. Blocking: it renders, and looks at all special tokens."""
        form = choose_format(template, tokenizer, wanted)
        markers = form.markers(tokenizer)
        special = special_tokens(tokenizer).items()
        hidden = frozenset(index for token, index in special if token not in markers)
        return cls(form, schemas_of(tools), hidden, _writer(form, template, tokenizer))

    def forced(self, choice: ToolChoice, tokenizer: Any) -> Constraint:
        """What an output under ``required`` looks like: one call of the tool that is named, or of any, one or more.

        ``Unsupported`` for a format that cannot be forced, or a schema that no grammar can follow.
        """
        if self.writer is None:
            raise Unsupported(
                f"tool_choice 'required' with the tool format {self.format.name!r}",
                "no grammar is known for its calls; use 'auto', or open the runtime with another tool_format",
                param="tool_choice",
            )
        tools = self.tools if choice.name is None else {choice.name: self.tools[choice.name]}
        grammar = self.writer.forced(tools, tokenizer, many=choice.name is None)
        assert grammar is not None
        return Constraint.grammar(grammar)


def check_format(name: str) -> None:
    """``InvalidRequest`` for a name that ``choose_format`` does not know."""
    if name != "auto":
        TOOL_FORMATS.get(name)


def choose_format(template: ChatTemplate, tokenizer: Any, wanted: str = "auto") -> ToolFormat:
    """The format by its name; ``auto``: the tokenizer's ``response_template`` if it has one, else that of the chat
    template's own calls.

    ``InvalidRequest`` for an unknown name, ``Unsupported`` where no format reads what the template writes.
    """
    if wanted != "auto":
        return TOOL_FORMATS.get(wanted)
    if has_response_template(tokenizer):
        return TOOL_FORMATS.get("transformers")
    written = template.written_call(PROBE, _VALUE)
    if written is None:
        return TOOL_FORMATS.get("hermes")
    for name in (*_BY_CALL, *(name for name in TOOL_FORMATS if name not in _BY_CALL)):
        if name != "transformers" and _reads(TOOL_FORMATS.get(name), written, tokenizer):
            return TOOL_FORMATS.get(name)
    raise Unsupported(
        "tools with this chat template",
        f"no tool format reads the calls that it writes ({written.strip()[:200]!r}); open the runtime with "
        f"tool_format={'text'!r} to get calls as text, or name one of: {', '.join(TOOL_FORMATS)}",
        param="tools",
    )


def _writer(form: ToolFormat, template: ChatTemplate, tokenizer: Any) -> ToolFormat | None:
    """Itself, or for what a tokenizer describes the known format that its chat template writes, if both agree."""
    if form.forces:
        return form
    written = template.written_call(PROBE, _VALUE)
    if form.name != "transformers" or written is None or not _reads(form, written, tokenizer):
        return None
    known = (TOOL_FORMATS.get(name) for name in _BY_CALL)
    return next((each for each in known if _reads(each, written, tokenizer)), None)


def _reads(form: ToolFormat, written: str, tokenizer: Any) -> bool:
    parser = form.parser({PROBE: {}}, tokenizer)
    calls = [part for part in (*parser.feed(written), *parser.finish()) if isinstance(part, CallPart)]
    return [(call.name, call.arguments) for call in calls] == [(PROBE, _VALUE)]
