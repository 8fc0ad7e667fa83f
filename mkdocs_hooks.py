"""What is made when the site is built: the REST reference from the table of routes, settings from their types."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

__all__ = ["on_page_markdown", "reference", "settings"]

_CALLS, _SETTINGS = "<!-- calls -->", "<!-- settings -->"


def on_page_markdown(markdown: str, **_given: Any) -> str:
    """The page with what is made in its place."""
    if _CALLS in markdown:
        from agentkv.api.openapi import document
        from agentkv.api.routes import ROUTES

        markdown = markdown.replace(_CALLS, reference(document(ROUTES, keys=True)))
    return markdown.replace(_SETTINGS, settings()) if _SETTINGS in markdown else markdown


def settings() -> str:
    """Every setting of the runtime and of the server, as Markdown."""
    from agentkv.api.settings import ServerSettings
    from agentkv.settings import Settings

    parts = []
    for title, kind in (
        ("### Of the runtime: `AGENTKV_…`", Settings),
        ("### Of the server: `AGENTKV_SERVER_…`", ServerSettings),
    ):
        rows = [
            (f"`{name}`", f"`{field.default}`" if not field.default_factory else "", _text(field.description or ""))
            for name, field in kind.model_fields.items()
        ]
        parts += [title, _table(("setting", "default", ""), rows)]
    return "\n\n".join(parts)


def reference(document: dict[str, Any]) -> str:
    """An OpenAPI document as Markdown: calls by tag, then types."""
    calls = [
        (operation["tags"][0], method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    parts: list[str] = []
    for tag, group in groupby(calls, key=lambda call: call[0]):
        parts.append(f"## {tag}")
        parts += [_call(*call[1:]) for call in group]
    parts.append("## Types")
    parts += [_type(name, schema) for name, schema in document["components"]["schemas"].items()]
    return "\n\n".join(parts)


def _call(method: str, path: str, operation: dict[str, Any]) -> str:
    lines = [f"### `{method} {path}` {{ #{operation['operationId']} }}", _text(operation["summary"])]
    if "description" in operation:
        lines.append(_text(operation["description"]))
    if operation["parameters"]:
        rows = [
            (f"`{one['name']}`", one["in"], _kind(one["schema"]), _text(one["schema"].get("description", "")))
            for one in operation["parameters"]
        ]
        lines.append(_table(("parameter", "in", "type", ""), rows))
    for media, body in operation.get("requestBody", {}).get("content", {}).items():
        needed = "" if operation["requestBody"]["required"] else ", may be left out"
        lines.append(f"Body: {_kind(body['schema']) or 'bytes'} as `{media}`{needed}.")
    rows = []
    for status, answer in operation["responses"].items():
        kinds = [
            f"{_kind(content['schema'])} as `{media}`".strip() for media, content in answer.get("content", {}).items()
        ]
        rows.append((status, _text(answer["description"]), "<br>".join(kinds)))
    lines.append(_table(("status", "", "answer"), rows))
    return "\n\n".join(lines)


def _type(name: str, schema: dict[str, Any]) -> str:
    lines = [f"### {name} {{ #type-{name} }}"]
    if "description" in schema:
        lines.append(_text(schema["description"]))
    if "properties" not in schema:
        lines.append(_kind(schema))
        return "\n\n".join(lines)
    required = schema.get("required", [])
    rows = [
        (
            f"`{field}`",
            _kind(one),
            "required" if field in required else _default(one),
            _text(one.get("description", "")),
        )
        for field, one in schema["properties"].items()
    ]
    lines.append(_table(("field", "type", "", ""), rows))
    return "\n\n".join(lines)


def _kind(schema: dict[str, Any]) -> str:
    """A type in a few words, with links to those that have a name."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#type-{name})"
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(_kind(one) for one in schema[several])
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {})) or 'values'}"
    if "contentSchema" in schema:
        return _kind(schema["contentSchema"])
    if "data" in schema.get("properties", {}):
        return f"events of {_kind(schema['properties']['data'])}"
    return str(schema.get("type", ""))


def _default(schema: dict[str, Any]) -> str:
    return f"`{json.dumps(schema['default'])}`" if "default" in schema else ""


def _text(text: str) -> str:
    """A docstring's words: nothing in them is a mark-up but code."""
    pieces = " ".join(text.replace("``", "`").split()).split("`")
    plain = [piece if number % 2 else _plain(piece) for number, piece in enumerate(pieces)]
    return "`".join(plain)


def _plain(text: str) -> str:
    for mark in "\\*_[]<>":
        text = text.replace(mark, f"&#{ord(mark)};")
    return text


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)
