"""Grammars of outputs that are calls and nothing else, in llguidance's dialect of Lark.

Each format writes its own frame; the arguments are JSON that follows the tool's schema, as ``Constraint`` has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from agentkv.engine.encode import special_tokens
from agentkv.engine.toolcalls.contract import Schemas
from agentkv.errors import InvalidRequest, Unsupported
from agentkv.schemas.constraints import Constraint

__all__ = ["arguments_rule", "call_rules", "literal_of", "marker_of", "schema_rule"]


_NAMING = ("properties", "additionalProperties", "patternProperties", "$ref", "anyOf", "oneOf", "allOf")
"""Keywords by which an object gets keys."""


def literal_of(text: str) -> str:
    """``text`` itself, in a grammar."""
    return json.dumps(text)


def marker_of(tokenizer: Any, text: str) -> str:
    """A marker in a grammar: the special token, where the tokenizer has one for it."""
    index = special_tokens(tokenizer).get(text)
    return literal_of(text) if index is None else f"<[{index}]>"


def call_rules(tools: Schemas, write: Callable[[str, str, str], tuple[str, str]]) -> str:
    """The rule ``call``, one of ``tools``. ``write(name, prefix, args)`` gives the right-hand side of one tool's call,
    in which ``args`` is the rule of its arguments, and further rules, whose names begin with ``prefix``."""
    calls = [f"call_{index}" for index in range(len(tools))]
    lines = [f"call: {' | '.join(calls)}"]
    for call, name in zip(calls, tools, strict=True):
        body, further = write(name, f"{call}_", f"{call}_args")
        lines += [f"{call}: {body}", further]
    return "\n".join(line for line in lines if line)


def arguments_rule(rule: str, name: str, tools: Schemas) -> str:
    """The rule of a tool's arguments as a JSON object; an empty one where the schema names none."""
    schema = tools[name]
    named = any(schema.get(keyword) for keyword in _NAMING)
    return f"{rule}: {schema_rule(name, {'type': 'object', **schema}) if named else literal_of('{}')}"


def schema_rule(name: str, schema: Mapping[str, Any]) -> str:
    """The right-hand side of a rule for JSON that follows a part of the schema of the tool ``name``."""
    try:
        return Constraint.rule(schema)
    except Unsupported as error:
        raise Unsupported(f"tool_choice for {name!r}", str(error), param="tool_choice") from error
    except InvalidRequest as error:
        raise InvalidRequest(f"tool_choice for {name!r}: {error}", param="tool_choice") from error
