"""JSON Schemas, for the document, of what bodies hold that is checked elsewhere: messages, items, tools, formats.

All that is accepted is valid by them; what their words cannot say (which fields go together) is refused all the same.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import WithJsonSchema

from agentkv.schemas.messages import Role
from agentkv.schemas.tool_choice import ToolChoice

__all__ = [
    "Conversation",
    "InputItem",
    "MessageObject",
    "NullsOnly",
    "ResponseFormat",
    "ResponseTool",
    "ResponseToolChoice",
    "SessionTool",
    "TextFormatObject",
    "Tool",
    "ToolChoiceObject",
    "ToolChoiceOrNull",
]

_Schema = dict[str, Any]
_TEXT: _Schema = {"type": "string"}
_NAME: _Schema = {"type": "string", "minLength": 1}
_NULL: _Schema = {"type": "null"}
_TEXT_OR_NULL: _Schema = {"type": ["string", "null"]}
_EMPTY: _Schema = {"enum": [None, "", [], {}, False, 0], "description": "Empty only."}
_KINDS = ["text", "input_text", "output_text"]


def _object(properties: _Schema, *required: str, others: Any = False) -> _Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": others,
    }


_PART = _object(
    {"type": {"enum": _KINDS}, "text": _TEXT, "annotations": {}, "logprobs": {}}, "type", "text", others=_NULL
)
_CONTENT: _Schema = {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": [_TEXT, _PART]}}]}
_CONTENT_OR_NULL: _Schema = {"anyOf": [*_CONTENT["anyOf"], _NULL]}

_ARGUMENTS: _Schema = {"type": ["string", "object", "null"], "description": "A JSON text, or the object."}
_FUNCTION_TYPE: _Schema = {"const": "function"}
_CALLED = _object({"name": _NAME, "arguments": _ARGUMENTS}, "name")
_CALL: _Schema = {
    "anyOf": [
        _object({"id": _NAME, "type": _FUNCTION_TYPE, "index": {}, "function": _CALLED}, "id", "function"),
        _object(
            {
                "id": _NAME,
                "type": _FUNCTION_TYPE,
                "index": {},
                "function": _NULL,
                "name": _NAME,
                "arguments": _ARGUMENTS,
            },
            "id",
            "name",
        ),
    ]
}

_MESSAGE = _object(
    {
        "role": {"enum": list(get_args(Role))},
        "content": _CONTENT_OR_NULL,
        "name": _TEXT_OR_NULL,
        "tool_calls": {"anyOf": [{"type": "array", "items": _CALL}, _NULL]},
        "tool_call_id": _TEXT_OR_NULL,
        "reasoning_content": _TEXT_OR_NULL,
        **dict.fromkeys(("refusal", "audio", "annotations", "function_call"), _EMPTY),
    },
    "role",
)
MessageObject = Annotated[dict[str, Any], WithJsonSchema(_MESSAGE)]
"""A message in OpenAI's form."""

_FUNCTION = _object(
    {
        "name": _NAME,
        "description": _TEXT_OR_NULL,
        "parameters": {"type": ["object", "null"], "description": "A JSON Schema."},
        "strict": {"type": ["boolean", "null"]},
    },
    "name",
)
Tool = Annotated[dict[str, Any], WithJsonSchema(_object({"type": _FUNCTION_TYPE, "function": _FUNCTION}, "function"))]
"""A function's definition, as chat completions have it."""

SessionTool = Annotated[
    dict[str, Any],
    WithJsonSchema(
        _object(
            {"type": _FUNCTION_TYPE, "function": {**_FUNCTION, "additionalProperties": True}}, "function", others=True
        )
    ),
]
"""The same where a session is created: the model's template may read more of it."""

ResponseTool = Annotated[
    dict[str, Any],
    WithJsonSchema(_object({"type": _FUNCTION_TYPE, **_FUNCTION["properties"]}, "type", "name", others=_NULL)),
]
"""The same as responses have it."""

_MODES: _Schema = ToolChoice.SCHEMA["anyOf"][0]
_NAMED = [
    _object({"name": _TEXT}, "name"),
    _object({"type": _FUNCTION_TYPE, "function": _object({"name": _TEXT}, "name")}, "type", "function"),
]
ToolChoiceObject = Annotated[dict[str, Any], WithJsonSchema({"anyOf": _NAMED})]
ToolChoiceOrNull = Annotated[Any, WithJsonSchema({"anyOf": [_MODES, *_NAMED, _NULL]})]
"""``auto``, ``none``, ``required``, or a function by its name."""
ResponseToolChoice = Annotated[
    Any, WithJsonSchema({"anyOf": [_MODES, _object({"type": _FUNCTION_TYPE, "name": _TEXT}, "type", "name"), _NULL]})
]
"""The same as responses have it."""

_PLAIN = _object({"type": {"enum": ["text", "json_object"]}}, "type", others=_NULL)
_DESCRIBED: _Schema = {
    "name": _TEXT_OR_NULL,
    "description": _TEXT_OR_NULL,
    "schema": {"type": "object", "description": "A JSON Schema."},
    "strict": {"type": ["boolean", "null"]},
}
ResponseFormat = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "anyOf": [
                _PLAIN,
                _object(
                    {"type": {"const": "json_schema"}, "json_schema": _object(_DESCRIBED, "schema", others=_NULL)},
                    "type",
                    "json_schema",
                    others=_NULL,
                ),
            ]
        }
    ),
]
"""``text``, ``json_object`` or ``json_schema``."""
TextFormatObject = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {"anyOf": [_PLAIN, _object({"type": {"const": "json_schema"}, **_DESCRIBED}, "type", "schema", others=_NULL)]}
    ),
]
"""The same as responses have it."""

_SAID: _Schema = {"id": {}, "status": {}}
InputItem = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                _object(
                    {
                        **_SAID,
                        "type": {"enum": ["message", None, ""]},
                        "role": {"enum": [role for role in get_args(Role) if role != "tool"]},
                        "content": _CONTENT_OR_NULL,
                    },
                    "role",
                    others=_NULL,
                ),
                _object(
                    {
                        **_SAID,
                        "type": {"const": "function_call"},
                        "call_id": _NAME,
                        "name": _NAME,
                        "arguments": _ARGUMENTS,
                    },
                    "type",
                    "call_id",
                    "name",
                    others=_NULL,
                ),
                _object(
                    {**_SAID, "type": {"const": "function_call_output"}, "call_id": _NAME, "output": _CONTENT},
                    "type",
                    "call_id",
                    "output",
                    others=_NULL,
                ),
            ]
        }
    ),
]
"""A message, a function call, or a call's output."""

Conversation = Annotated[dict[str, Any], WithJsonSchema(_object({"id": _TEXT}, "id"))]
"""A conversation by its id."""

NullsOnly = WithJsonSchema({"type": ["object", "null"], "additionalProperties": _NULL})
"""An object in which nothing is said."""
